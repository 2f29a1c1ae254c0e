"""Each device's contribution to a run: statistics of its updates, and their directions."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedstream.core.layout import Floats, Model
from fedstream.core.messages import Upload
from fedstream.journal.inspection import Move, Read, history
from fedstream.journal.records import Standing, Taken, is_used
from fedstream.journal.segment import Segment
from fedstream.strategies.mixing import norm

_SAMPLE = 1 << 16  # sampled parameters that represent a direction


@dataclass
class Spread:
    """Numbers and their statistics, which are None if there are no numbers."""

    values: array[float] = field(default_factory=lambda: array("d"))
    total: float = 0.0

    def add(self, value: float) -> None:
        """Add a number."""
        self.values.append(value)
        self.total += value

    @property
    def count(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def mean(self) -> float | None:
        """The mean."""
        return self.total / self.count if self.count else None

    @property
    def most(self) -> float | None:
        """The largest value."""
        return max(self.values, default=None)

    def percentile(self, share: float) -> float | None:
        """The smallest value that at least ``share`` percent of the values do not exceed."""
        if not self.count:
            return None
        return float(np.percentile(self.values, share, method="inverted_cdf"))


@dataclass
class DeviceContribution:
    """A device's part in a run: its updates by outcome, and statistics of the used ones."""

    outcomes: Counter[str] = field(default_factory=Counter)
    staleness: Spread = field(default_factory=Spread)
    weight: Spread = field(default_factory=Spread)
    loss: Spread = field(default_factory=Spread)
    norm: Spread = field(default_factory=Spread)  # of the sent model or delta
    distance: Spread = field(default_factory=Spread)  # the norm of its direction
    cosine: Spread = field(default_factory=Spread)  # with the model's later movement
    compared: array[int] = field(default_factory=lambda: array("q"))  # their versions, in order


@dataclass(frozen=True, slots=True)
class _Direction:
    """A version's model, and by device the directions of the updates in it."""

    version: int
    model: Floats
    directions: list[tuple[int, Floats]]


def direction(upload: Upload, sent: Model, x: Model) -> Floats:
    """The direction in which an update moves the parameters.

    x_new - x, where x is the model that it was mixed into; for a delta, x_new - x_tau as sent."""
    if upload.sends == "delta":
        return sent.parameters
    return np.subtract(sent.parameters, x.parameters)


def stats(
    chain: Sequence[Segment],
    ahead: int,
    read: Read = lambda _bytes: None,
    until: int | None = None,
) -> dict[int, DeviceContribution]:
    """Each device's contribution, by device. ``until``: the last version that counts.

    ``cosine`` compares an update's direction with the model's movement over the ``ahead`` versions
    after the update's version, and leaves out updates that fewer versions follow. At most 65,536
    evenly spaced parameters represent a large model, which bounds the memory for the directions of
    ``ahead`` versions; in addition, there are seven numbers per update.
    """
    shares: dict[int, DeviceContribution] = {}
    courses: deque[_Direction] = deque()
    arriving: list[tuple[int, Floats]] = []
    for move in history(chain, read):
        message = move.message
        if isinstance(message, Taken):
            share = shares.setdefault(message.upload.device, DeviceContribution())
            wanted = _count(share, message, move)
            if wanted is not None:
                arriving.append((message.upload.device, wanted))
        if isinstance(message, Standing) or move.after is None:  # no later movement to compare with
            courses.clear()
            arriving.clear()
        elif move.is_made:
            model = sampled(move.after.parameters).copy()
            courses.append(_Direction(message.version, model, arriving))
            arriving = []
            if len(courses) > ahead:
                _compare(courses.popleft(), courses[-1].model, shares)
        if move.is_made and until is not None and message.version >= until:
            break
    return dict(sorted(shares.items()))


def _count(share: DeviceContribution, message: Taken, move: Move) -> Floats | None:
    """Count an update; return its direction if its weights are recorded."""
    share.outcomes[message.outcome] += 1
    if not is_used(message):
        return None
    share.staleness.add(message.staleness)
    share.weight.add(message.weight)
    if message.upload.loss is not None:
        share.loss.add(message.upload.loss)
    if move.update is None:
        return None
    share.norm.add(norm(move.update.floats))
    if move.before is None:
        return None
    wanted = direction(message.upload, move.update, move.before)
    share.distance.add(norm(wanted))
    return sampled(wanted).copy()


def sampled(parameters: Floats) -> Floats:
    """At most 65,536 evenly spaced values of a vector, which represent its direction."""
    return parameters[:: -(-parameters.size // _SAMPLE) or 1]


def _compare(course: _Direction, later: Floats, shares: Mapping[int, DeviceContribution]) -> None:
    way = later - course.model
    for device, wanted in course.directions:
        if (found := cosine(way, wanted)) is not None:
            shares[device].cosine.add(found)
            shares[device].compared.append(course.version)


def cosine(one: Floats, other: Floats) -> float | None:
    """The cosine of the angle between two vectors; None if either is zero."""
    both = norm(one) * norm(other)
    return float(np.dot(one, other)) / both if both > 0 else None
