"""Inspecting a journal, record by record, without writing to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

from fedstream.core.digest import algorithm_of
from fedstream.core.layout import Model
from fedstream.journal import unshared
from fedstream.journal.chain import check_joint, cuts, entries, newest_version, since
from fedstream.journal.errors import Diverged, JournalError, NotRecorded
from fedstream.journal.rebuild import Rebuild
from fedstream.journal.records import EntryRecord, Standing, Taken, dropped_by, is_used
from fedstream.journal.segment import Cut, Record, Segment
from fedstream.journal.updates import update_of

_LATER = 100  # later versions searched for an update of the other run


Read: TypeAlias = Callable[[int], object]  # called with the number of read bytes


def _unheard(_bytes: int) -> None:
    """Ignore the number of read bytes."""


# models


@dataclass(frozen=True, slots=True)
class Move:
    """A record and the models around it, which are valid until the next move."""

    record: Record
    message: Standing | EntryRecord
    before: Model | None  # that the update was mixed into; None: unknown without weights
    update: Model | None  # None also if it is masked
    after: Model | None  # of the message's version
    reweighed: bool = False  # this machine computes a minimally different weight

    @property
    def is_made(self) -> bool:
        """Whether this record makes a version."""
        return self.message.digest is not None


def moves(
    segment: Segment,
    cut: Cut | None,
    *,
    models: bool = True,
    read: Read = _unheard,
    rebuild: Rebuild | None = None,
    after: Record | None = None,
) -> Iterator[Move]:
    """A segment's standing and its records, each with its models rebuilt and checked.

    ``models=False`` only checks the payloads against their digests, and rebuilds nothing. After the
    first update without weights, nothing can be rebuilt. ``read``: called with the bytes of each
    read record. ``rebuild``: the state to advance, which the caller may copy between two moves;
    with ``after``, it has followed the segment up to this record, and only later moves are yielded.
    Raises JournalError.
    """
    rebuild = rebuild or Rebuild(segment)
    room = Model(segment.layout)  # for one update at a time
    model: Model | None = rebuild.progress.state.model
    end = segment.standing_record.end if after is None else after.end
    if after is None:
        read(end)
        yield Move(segment.standing_record, segment.standing, None, None, model)
    for record, entry in entries(segment, cut, after):
        before, update = model, None
        if record.payload_bytes:
            update = update_of(segment, record, room)
        if not models or (update is None and is_used(entry)):
            model = None
        reweighed = rebuild.reweighed
        if model is not None:
            step = rebuild.take(record, update)
            rebuild.check(record, step)
            model = step.after.state.model
        read(record.end - end)
        end = record.end
        shown = None if rebuild.strategy.masked else update
        yield Move(record, entry, before, shown, model, rebuild.reweighed > reweighed)


def history(chain: Sequence[Segment], read: Read = _unheard) -> Iterator[Move]:
    """All moves, except standings that continue their predecessor, which are only checked."""
    ended: tuple[int, str] | None = None
    for segment, cut in cuts(chain):
        check_joint(segment, ended)
        for move in moves(segment, cut, read=read):
            message = move.message
            if isinstance(message, Standing) and message.why == "continued" and ended is not None:
                continue
            if message.digest is not None:
                ended = (message.version, message.digest)
            yield move


def model_at(chain: Sequence[Segment], version: int, read: Read = _unheard) -> tuple[Model, str]:
    """A version's model and digest, rebuilt from the nearest checkpoint. Raises JournalError."""
    first = since(chain, version)[0]
    limits = {segment.path: cut for segment, cut in cuts(chain)}
    for move in moves(first, limits[first.path], read=read):
        if move.message.version != version:
            continue
        if move.after is None:
            raise NotRecorded(
                f"{move.record.place.where}: version {version} cannot be rebuilt: updates were "
                "recorded without their weights (journal.weights = false); the nearest checkpoint "
                f"is version {first.standing.version}"
            )
        return move.after, str(move.message.digest)
    raise JournalError(
        f"{first.path.parent}: version {version} is not in the journal: the newest is "
        f"{newest_version(chain)}"
    )


# verifying


@dataclass
class Verdict:
    """The result of verifying a segment."""

    segment: str
    first: int  # version
    last: int
    records: int = 0
    versions: int = 0  # versions in no earlier segment
    bytes: int = 0  # counted bytes
    behind: int = 0  # bytes of a fenced writer after the cut
    torn: int = 0  # bytes from a torn record to the end of the file
    reweighed: int = 0  # updates whose weight this machine computes minimally differently
    unweighted: bool = False  # updates without weights: models were not rebuilt
    damage: str | None = None


def verify(
    chain: Sequence[Segment], *, models: bool = True, read: Read = _unheard
) -> Iterator[Verdict]:
    """Verify the counted part of each segment, continuing with the next after damage."""
    ended: tuple[int, str] | None = None
    for segment, cut in cuts(chain):
        said = segment.standing
        verdict = Verdict(segment.path.name, said.version, said.version)
        verdict.versions = int(segment is chain[0] or said.why != "continued")
        try:
            check_joint(segment, ended)
            ended = None  # unknown if this segment is damaged
            digest = _verified(segment, cut, verdict, models, read)
            ended = (verdict.last, digest)
        except JournalError as error:
            verdict.damage = str(error)
        if cut is not None:
            verdict.behind = max(0, segment.size - cut.at)
        if segment.torn is not None:
            verdict.torn = segment.size - segment.torn.place.offset
            if segment.torn.behind and verdict.damage is None:
                verdict.damage = f"torn record: {segment.torn.place.where}{segment.torn.lost}"
        yield verdict


def _verified(segment: Segment, cut: Cut | None, verdict: Verdict, models: bool, read: Read) -> str:
    """Fill in the verdict; return the digest at the segment's end. Raises JournalError."""
    digest = segment.standing.digest
    if (frozen := segment.layout.unshared) is not None:
        unshared.read(segment.path.parent, frozen.digest, frozen.layout)
    for move in moves(segment, cut, models=models, read=read):
        message = move.message
        verdict.bytes = move.record.end
        if isinstance(message, Standing):
            continue
        expected = verdict.last + (message.digest is not None)
        if message.version != expected:
            raise Diverged(
                f"{move.record.place.where}: version {message.version} where version {expected} "
                "should be"
            )
        verdict.last, verdict.records = message.version, verdict.records + 1
        verdict.versions += message.digest is not None
        verdict.reweighed += move.reweighed
        verdict.unweighted = verdict.unweighted or (models and move.after is None)
        digest = message.digest or digest
    return digest


# comparing


@dataclass(frozen=True, slots=True)
class RecordedVersion:
    """A version, its updates, and its rule."""

    version: int
    digest: str
    updates: tuple[Taken, ...]
    strategy: Mapping[str, Any]
    time: float  # seconds since 1970
    adopted: bool = False  # from Redis, not made of updates


@dataclass(frozen=True, slots=True)
class Divergence:
    """The divergence of two runs: the first different version, and the reason."""

    why: Literal["same", "prefix", "start", "adopted", "update", "order", "weight", "rule"]
    text: str
    version: int | None  # None: they don't diverge
    first: int  # the first version that both have
    a: RecordedVersion | None = None
    b: RecordedVersion | None = None


def recorded_versions(chain: Sequence[Segment]) -> Iterator[RecordedVersion]:
    """A journal's versions, from its first checkpoint on; no payload is read."""
    updates: list[Taken] = []
    for segment, cut in cuts(chain):
        said, rule = segment.standing, segment.head.strategy
        if segment is chain[0] or said.why != "continued":
            updates.clear()
            yield RecordedVersion(
                said.version, said.digest, (), rule, said.time, said.why == "adopted"
            )
        for _, entry in entries(segment, cut):
            if isinstance(entry, Taken) and is_used(entry):
                updates.append(entry)
            del updates[max(0, len(updates) - dropped_by(entry)) :]
            if entry.digest is not None:
                yield RecordedVersion(entry.version, entry.digest, tuple(updates), rule, entry.time)
                updates.clear()


def divergence(a: Sequence[Segment], b: Sequence[Segment]) -> Divergence:
    """Compare two journals from the first version that both have.

    Raises JournalError, also if their digests are made by different algorithms.
    """
    made = [algorithm_of(chain[0].standing.digest) for chain in (a, b)]
    if made[0] != made[1]:
        raise JournalError(
            f"{a[0].path.parent} has digests by {made[0]} and {b[0].path.parent} by {made[1]}, "
            "so they can't be compared: record one of them again with the other's wire.digest"
        )
    ours, theirs = recorded_versions(a), recorded_versions(b)
    x, y = next(ours), next(theirs)
    while x.version != y.version:
        behind = ours if x.version < y.version else theirs
        following = next(behind, None)
        if following is None:
            raise JournalError(
                f"{a[0].path.parent} and {b[0].path.parent} have no version in common: "
                f"{a[0].standing.version}..{newest_version(a)} and "
                f"{b[0].standing.version}..{newest_version(b)}"
            )
        x, y = (following, y) if behind is ours else (x, following)
    first = x.version
    if x.digest != y.digest:
        return Divergence("start", _at_the_start(a[0], b[0], first), first, first, x, y)
    while True:
        last = x.version
        one, other = next(ours, None), next(theirs, None)
        if one is None and other is None:
            return Divergence("same", f"identical, versions {first} to {last}", None, first)
        if one is None or other is None:
            shorter = "A" if one is None else "B"
            text = f"identical up to version {last}, where {shorter} ends"
            return Divergence("prefix", text, last + 1, first, one, other)
        if (one.version, one.digest) != (other.version, other.digest):
            return _explained(
                one, other, list(islice(ours, _LATER)), list(islice(theirs, _LATER)), first
            )
        x = one


def _at_the_start(a: Segment, b: Segment, version: int) -> str:
    what = f"version {version}, the first that both have, differs"
    if version == 0:
        what = "the initial models differ"
    if a.layout != b.layout:
        return f"{what}: the layouts differ"
    if version == 0 and a.head.seed != b.head.seed:
        return f"{what}: seeds {a.head.seed} and {b.head.seed}"
    return what


def _explained(
    x: RecordedVersion,
    y: RecordedVersion,
    after_x: Sequence[RecordedVersion],
    after_y: Sequence[RecordedVersion],
    first: int,
) -> Divergence:
    """Explain why two versions differ although their predecessors are the same."""
    version = min(x.version, y.version)
    if x.adopted or y.adopted:
        who = "both" if x.adopted and y.adopted else "A" if x.adopted else "B"
        return Divergence("adopted", f"{who} continued from a model in Redis", version, first, x, y)
    mine, others = [_content(one) for one in x.updates], [_content(one) for one in y.updates]
    if mine == others:
        rules = _different(x.strategy, y.strategy)
        for one, other in zip(x.updates, y.updates, strict=True):
            if one.weight != other.weight:
                text = (
                    f"the same update of device {one.upload.device} weighs {one.weight:.6g} in A "
                    f"(staleness {one.staleness}) and {other.weight:.6g} in B (staleness "
                    f"{other.staleness}){rules}"
                )
                return Divergence("weight", text, version, first, x, y)
        text = f"the same updates with the same weights gave a different model{rules}"
        return Divergence("rule", text, version, first, x, y)
    soon_mine = {_content(one) for later in (x, *after_x) for one in later.updates}
    soon_others = {_content(one) for later in (y, *after_y) for one in later.updates}
    if set(mine) <= soon_others and set(others) <= soon_mine:
        text = f"the same updates in a different order: {_named(x)} in A, {_named(y)} in B"
        return Divergence("order", text, version, first, x, y)
    text = f"different updates: {_named(x)} in A, {_named(y)} in B"
    return Divergence("update", text, version, first, x, y)


def _content(update: Taken) -> tuple[int, str]:
    """A key that identifies an update across runs, which have different task ids."""
    return update.upload.device, update.upload.digest


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The different parameters of two strategies, for people; '' if there are none."""
    keys = [key for key in {**a, **b} if a.get(key) != b.get(key)]
    return "".join(f"; strategy.{key} is {a.get(key)} in A, {b.get(key)} in B" for key in keys)


def _named(version: RecordedVersion) -> str:
    """The updates of a version, for people: the first three, and the number of others."""
    names = [
        f"device {one.upload.device} (task {one.upload.task}, {one.upload.digest[:8]})"
        for one in version.updates[:3]
    ]
    more = len(version.updates) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "") if names else "no update"
