"""`fedstream journal bisect`: finds the update with which a metric went bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from types import MappingProxyType

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.journal import NotRecorded, Segment, Standing, Taken, newest_version, since
from fedstream.journal.contributions import direction
from fedstream.journal.inspection import Move, history
from fedstream.journal.records import dropped_by, is_used
from fedstream.strategies.mixing import norm

_MEASUREMENTS = 50  # approximate number, unless `every` is given

MeasureOne = Callable[[int, Model], float]


@dataclass(frozen=True)
class Limit:
    """A metric is bad below this value, or above it; NaN is always bad."""

    value: float
    above: bool = False

    def is_good(self, value: float) -> bool:
        """Whether a metric's value is good."""
        return value <= self.value if self.above else value >= self.value

    def __str__(self) -> str:
        return f"{'above' if self.above else 'below'} {self.value:g}"


def limit_of(below: float | None, above: float | None) -> Limit:
    """The limit that ``--below`` or ``--above`` gives. Raises ConfigError."""
    bound = below if below is not None else above
    if bound is None or (below is not None and above is not None):
        raise ConfigError("give either --below X or --above X: when is the metric bad?")
    if not isfinite(bound):
        side = "below" if below is not None else "above"
        raise ConfigError(f"--{side} {bound:g}: must be a finite number")
    return Limit(bound, above=below is None)


@dataclass(frozen=True)
class Cause:
    """An update in the version with which the metric went bad."""

    device: int
    task: str
    tau: int
    staleness: int
    weight: float
    norm: float | None  # of x_new; None: masked
    distance: float | None  # of x_new from x, which it was mixed into
    loss: float | None


@dataclass(frozen=True)
class Crossing:
    """Two successive versions, of which the first is good and the second is not."""

    version: int  # the second
    before: float
    after: float
    causes: tuple[Cause, ...]  # none: the model was adopted from Redis


@dataclass
class Search:
    """Measurements by version, and the crossing found."""

    every: int
    measured: dict[int, float] = field(default_factory=dict)
    crossing: Crossing | None = None
    recovered: tuple[int, float] | None = None  # the run's own first good measurement after it
    ever_good: bool = False

    def in_words(self, metric: str, limit: Limit) -> str:
        """The result in words."""
        if self.crossing is not None:
            said = (
                f"{metric} went {limit} with version {self.crossing.version}: "
                f"{self.crossing.before:.4f} before, {self.crossing.after:.4f} after"
            )
            if self.recovered is None:
                return said
            return f"{said}; by version {self.recovered[0]} it was {self.recovered[1]:.4f} again"
        if self.ever_good:
            return (
                f"{metric} never went {limit} after a better value, in the "
                f"{len(self.measured)} versions measured"
            )
        return f"{metric} was {limit} in all {len(self.measured)} versions measured"


def search(
    chain: Sequence[Segment],
    measure: MeasureOne,
    is_good: Callable[[float], bool],
    every: int | None = None,
    until: int | None = None,
    recorded: Mapping[int, float] = MappingProxyType({}),
) -> Search:
    """Find a version whose metric is bad while the version before it is good.

    ``until``: the last version that counts; None: the newest when the search begins.
    ``recorded``: the metric as the run itself measured it, by version.

    The search goes forward. It measures the first version, every N-th (``every``; by default chosen
    for about 50 measurements), the newest, and those around which the run's own measurements went
    bad, until a version is bad after an earlier one was good. Then it measures each version after
    the last good one, up to the first bad one. So the crossing found is real and the first in its
    interval; an earlier dip that recovers between two measured versions goes unseen unless
    ``every`` is 1.
    Raises JournalError.
    """
    last = newest_version(chain) if until is None else until
    found = Search(every or max(1, (last - chain[0].standing.version) // _MEASUREMENTS))
    turns = _turns(recorded, is_good)
    good: int | None = None  # the last good version
    for move in history(chain):
        version = move.message.version
        if version > last:  # of a run that goes on
            break
        due = version == last or version % found.every == 0 or version in turns
        due = due or isinstance(move.message, Standing)
        if not (move.is_made and due):
            continue
        value = found.measured[version] = measure(version, _model(move))
        if is_good(value):
            good, found.ever_good = version, True
        elif good is not None:
            found.crossing = _first(since(chain, good), good, measure, is_good, found.measured)
            break
    if found.crossing is not None:
        at = found.crossing.version
        later = sorted(one for one in recorded.items() if at < one[0] <= last)
        found.recovered = next((one for one in later if is_good(one[1])), None)
    return found


def _turns(recorded: Mapping[int, float], is_good: Callable[[float], bool]) -> set[int]:
    """The versions between which recorded measurements went from good to bad."""
    pairs = pairwise(sorted(recorded.items()))
    return {
        version
        for (good, was), (bad, became) in pairs
        if is_good(was) and not is_good(became)
        for version in (good, bad)
    }


def _first(
    chain: Sequence[Segment],
    good: int,
    measure: MeasureOne,
    is_good: Callable[[float], bool],
    measured: dict[int, float],
) -> Crossing | None:
    """Find the first bad version after a good one, measuring any not yet measured."""
    before = measured[good]
    causes: list[Cause] = []
    for move in history(chain):
        version, model = move.message.version, _model(move)
        if is_used(move.message) and version >= good:
            causes.append(_cause(move.message, move))
        del causes[max(0, len(causes) - dropped_by(move.message)) :]
        if not move.is_made:
            continue
        if version > good:
            if version not in measured:
                measured[version] = measure(version, model)
            after = measured[version]
            if not is_good(after):
                return Crossing(version, before, after, tuple(causes))
            before = after
        causes.clear()
    return None


def _model(move: Move) -> Model:
    if move.after is None:
        raise NotRecorded(
            f"{move.record.place.where}: version {move.message.version} cannot be rebuilt: "
            "updates were recorded without their weights (journal.weights = false)"
        )
    return move.after


def _cause(message: Taken, move: Move) -> Cause:
    upload, sent, before = message.upload, move.update, move.before
    return Cause(
        device=upload.device,
        task=upload.task,
        tau=upload.tau,
        staleness=message.staleness,
        weight=message.weight,
        norm=None if sent is None else norm(sent.floats),
        distance=None if sent is None or before is None else norm(direction(upload, sent, before)),
        loss=upload.loss,
    )
