"""Figures of a version's model: norms of its updates and layers, distances to other versions."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fedstream.core.layout import OF_INTEGERS, Floats, Layout
from fedstream.history.models import JournalModels
from fedstream.journal import Standing, Taken
from fedstream.journal.contributions import DeviceContribution, cosine, direction, sampled
from fedstream.journal.inspection import Move
from fedstream.journal.records import is_used
from fedstream.strategies.mixing import distance, norm

AHEAD = 10  # versions that the cosine looks ahead, as in `fedstream journal stats`
_BLOCK = 32  # versions that are looked at together, ...
_BLOCK_BYTES = 64 << 20  # ... as long as their models have no more bytes than this
_KEPT = 4096  # version_stats


@dataclass(frozen=True, slots=True)
class Push:
    """An update as a vector. Norms are Euclidean."""

    offset: int  # of its record
    norm: float  # of what was sent, x_new or a delta
    distance: float  # of its direction: x_new - x, or the delta
    cosine: float | None = None  # of its direction and the model's movement over AHEAD versions


@dataclass(frozen=True, slots=True)
class Layer:
    """A tensor of a version, as Euclidean norms."""

    name: str
    shape: tuple[int, ...]
    norm: float
    moved: float | None  # since the version before; None: there is none
    drift: float  # since the oldest version that was kept


@dataclass(frozen=True, slots=True)
class LayerGap:
    """A tensor's distance between two versions: Euclidean, and relative to the first's norm."""

    name: str
    distance: float
    relative: float | None


@dataclass(frozen=True, slots=True)
class VersionStats:
    """Figures of one version's model."""

    version: int
    pushes: tuple[Push, ...]
    layers: tuple[Layer, ...]
    ahead: int  # versions that the cosines look ahead: fewer than AHEAD at the end of the run


@dataclass(frozen=True)
class MeasuredShares:
    """Each device's figures over all models of a run."""

    by_device: Mapping[int, DeviceContribution]
    until: int  # the last version that counted


@dataclass
class _Open:
    """A version whose cosines wait for later versions."""

    stats: VersionStats
    model: Floats  # sampled
    directions: list[Floats] = field(default_factory=list)


class VersionStatsCache:
    """Computes figures of versions, and keeps the newest 4,096."""

    def __init__(self, models: JournalModels, versions: Sequence[int]) -> None:
        """``versions``: all that the journal has, ascending."""
        self._models = models
        self._versions = versions
        size = max(1, models.layout.nbytes)
        self._block = max(1, min(_BLOCK, _BLOCK_BYTES // size))
        self._known: OrderedDict[int, VersionStats] = OrderedDict()
        self._pair: tuple[tuple[int, int], tuple[LayerGap, ...]] | None = None

    def continued(self, models: JournalModels, versions: Sequence[int]) -> VersionStatsCache:
        """A cache for the run with more versions; figures that can't change are kept."""
        other = VersionStatsCache(models, versions)
        other._known.update(
            (version, one) for version, one in self._known.items() if one.ahead == AHEAD
        )
        return other

    def known(self, version: int) -> VersionStats | None:
        """A version's figures if they are in the cache."""
        return self._known.get(version)

    def of(self, version: int, is_wanted: Callable[[], bool] = lambda: True) -> VersionStats:
        """A version's figures, computed if need be. Raises JournalError, Unwanted."""
        if version not in self._known:
            self._look({version}, is_wanted)
        return self._known[version]

    def prepare_neighbours(self, version: int, step: int, is_wanted: Callable[[], bool]) -> None:
        """Compute figures of the versions that a reader is likely to ask for next.

        ``step``: the reader's last move, in versions. Raises JournalError, Unwanted.
        """
        here, half = bisect_left(self._versions, version), self._block // 2 or 1
        onward = half if step >= 0 else -half
        for place in (here, here + onward, here + step, here - onward):
            begin = max(0, min(place, len(self._versions) - 1)) // self._block * self._block
            block = self._versions[begin : begin + self._block]
            if unknown := {int(one) for one in block if int(one) not in self._known}:
                self._look(unknown, is_wanted)

    def _look(self, wanted: set[int], is_wanted: Callable[[], bool]) -> None:
        """Compute figures of versions in one walk. Raises JournalError, Unwanted."""
        begin = int(self._versions[max(0, bisect_left(self._versions, min(wanted)) - 1)])
        for stats in self._looked(self._models.walk(begin, is_wanted), wanted):
            self._known[stats.version] = stats
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)

    def gap(
        self, version: int, other: int, is_wanted: Callable[[], bool] = lambda: True
    ) -> tuple[LayerGap, ...]:
        """How far a version is from another, by tensor. Raises JournalError, Unwanted."""
        if self._pair is None or self._pair[0] != (version, other):
            a, b = (self._models.model(one, is_wanted) for one in (version, other))
            found = tuple(
                LayerGap(name, apart, apart / size if (size := norm(a.floats[at])) else None)
                for name, _, at in tensors(a.layout)
                for apart in [distance(a.floats[at], b.floats[at])]
            )
            self._pair = (version, other), found
        return self._pair[1]

    def _looked(self, walk: Iterator[Move], wanted: set[int]) -> Iterator[VersionStats]:
        waiting: deque[_Open] = deque()
        pushes: list[Push] = []
        directions: list[Floats] = []
        last = max(wanted)
        for move in walk:
            message = move.message
            if isinstance(message, Taken) and is_used(message) and move.update is not None:
                assert move.before is not None  # noqa: S101  (a walk rebuilds all models)
                wants = direction(message.upload, move.update, move.before)
                at = move.record.place.offset
                pushes.append(Push(at, norm(move.update.floats), norm(wants)))
                directions.append(sampled(wants).copy())
            if not move.is_made or move.after is None:
                continue
            if isinstance(message, Standing):  # the course breaks off here
                yield from (one.stats for one in waiting)
                waiting.clear()
            now = sampled(move.after.parameters)
            for one in waiting:
                if message.version - one.stats.version == AHEAD:
                    yield _closed(one, now, AHEAD)
            while waiting and message.version - waiting[0].stats.version >= AHEAD:
                waiting.popleft()
            if message.version in wanted:
                stats = VersionStats(message.version, tuple(pushes), self._layers(move), 0)
                waiting.append(_Open(stats, now.copy(), directions))
            pushes, directions = [], []
            if message.version >= last + AHEAD:
                return
        for one in waiting:
            yield _closed(one, now, message.version - one.stats.version)

    def _layers(self, move: Move) -> tuple[Layer, ...]:
        model, before, origin = move.after, move.before, self._models.origin
        assert model is not None  # noqa: S101  (a walk rebuilds all models)
        return tuple(
            Layer(
                name,
                shape,
                norm(model.floats[at]),
                None if before is None else distance(model.floats[at], before.floats[at]),
                distance(model.floats[at], origin.floats[at]),
            )
            for name, shape, at in tensors(model.layout)
        )


def _closed(one: _Open, later: Floats, ahead: int) -> VersionStats:
    """The figures with cosines, which need a later version's model."""
    if not ahead:  # the newest version: nobody knows yet where the model goes
        return one.stats
    way = later - one.model
    pushes = tuple(
        replace(push, cosine=cosine(wants, way))
        for push, wants in zip(one.stats.pushes, one.directions, strict=True)
    )
    return replace(one.stats, pushes=pushes, ahead=ahead)


def tensors(layout: Layout) -> list[tuple[str, tuple[int, ...], slice]]:
    """The floating-point tensors of a layout: name, shape, and place in ``Model.floats``."""
    floats = [one for one in layout.tensors if one.kind not in OF_INTEGERS]
    ends = [0]
    for one in floats:
        ends.append(ends[-1] + one.count)
    return [
        (one.name, one.shape, slice(begin, end))
        for one, (begin, end) in zip(floats, pairwise(ends), strict=True)
    ]
