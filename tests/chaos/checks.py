"""What must hold after a run: pure functions of what is known about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from updater.journal import RoundClosed, Taken

USED = ("applied", "buffered")
_OUTCOMES = (*USED, "refused", "given_up")
_ROUNDING = 1e-4  # of float32 sums of some hundred numbers below 1


@dataclass(frozen=True)
class Journalled:
    """What the journal says. A version and its digest are a pair."""

    begun: tuple[int, str]
    records: tuple[Taken | RoundClosed, ...]  # those that count, in order
    replayed: tuple[int, str]  # what they give, computed anew
    diverged: str  # why the replay came no further; '': it came to the end
    vectors: Mapping[int, str] = field(default_factory=dict)  # digests by device, computed anew,
    recovered: Mapping[int, str] = field(default_factory=dict)  # and from the newest checkpoint on
    drift: float = 0.0  # how far SCAFFOLD's c is from the mean of all c_i, at most


@dataclass(frozen=True)
class Facts:
    """What journal, Redis and whoever watched say of a run that is over."""

    journal: Journalled
    published: frozenset[tuple[int, str]]  # version and digest, as they were told
    seen: Mapping[str, int]  # task of an upload in the queue -> Redis's life when it was last seen
    life: int  # of Redis: how often it restarted
    queued: frozenset[str]  # tasks whose uploads are in the queue
    admitted: frozenset[str]  # open tasks whose upload was admitted
    counts: Mapping[str, int]
    open: int
    head: tuple[int, str]
    model: str  # digest of the bytes that Redis has as the newest model
    handed_out: Mapping[int, str] | None = None  # digests of the c_i in Redis; None: no SCAFFOLD
    findings: tuple[str, ...] = field(default=())  # what went wrong while it ran

    @cached_property
    def taken(self) -> tuple[Taken, ...]:
        """The records of updates."""
        return tuple(record for record in self.journal.records if isinstance(record, Taken))

    @cached_property
    def unjournalled(self) -> frozenset[str]:
        """Tasks that were in the queue and are neither there nor in the journal."""
        known = {record.upload.task for record in self.taken}
        return frozenset(self.seen.keys() - known - self.queued)

    @property
    def lost_with_redis(self) -> int:
        """Admitted updates that went with Redis's data before they were journalled."""
        return sum(self.seen[task] < self.life for task in self.unjournalled)


Check: TypeAlias = Callable[[Facts], Iterator[str]]


def balanced(facts: Facts) -> Iterator[str]:
    """Every task that was issued is open or has one outcome."""
    ended = {name: facts.counts.get(name, 0) for name in (*_OUTCOMES, "dead")}
    if facts.counts.get("issued", 0) != sum(ended.values()) + facts.open:
        yield f"issued {facts.counts.get('issued', 0)}, but {ended} and open {facts.open}"


def once(facts: Facts) -> Iterator[str]:
    """Every task has at most one record."""
    times = Counter(record.upload.task for record in facts.taken)
    for task, n in times.items():
        if n > 1:
            ends = [r.outcome for r in facts.taken if r.upload.task == task]
            yield f"task {task} is {n} times in the journal: {', '.join(ends)}"
    for record in facts.taken:
        if record.outcome not in _OUTCOMES:
            yield f"task {record.upload.task} ended as {record.outcome}"


def forward(facts: Facts) -> Iterator[str]:
    """Versions grow by one with every record that made one, by nothing else, until the last."""
    version, over = facts.journal.begun[0], None
    for record in facts.journal.records:
        if over and record.digest:
            yield f"version {record.version} was made behind: {over}"
        over = over or record.finished
        expected = version + (record.digest is not None)
        if record.version != expected:
            yield f"entry {record.entry}: version {record.version} behind version {version}"
        version = record.version


def none_lost(facts: Facts) -> Iterator[str]:
    """What was admitted is journalled, or waits, or went with Redis's data."""
    for task in sorted(facts.unjournalled):
        if facts.seen[task] == facts.life:
            yield f"task {task} was in the queue and is gone"
    for task in sorted(facts.admitted - facts.queued):
        yield f"task {task} is open and admitted, but not in the queue"


def same_bits(facts: Facts) -> Iterator[str]:
    """Redis's newest model is the one that the journal gives."""
    if facts.journal.diverged:
        yield f"replay: {facts.journal.diverged}"
    if facts.head != facts.journal.replayed:
        yield f"Redis's head is {facts.head}, the journal gives {facts.journal.replayed}"
    if facts.model != facts.head[1]:
        yield f"Redis's model has digest {facts.model}, its head says {facts.head[1]}"


def same_vectors(facts: Facts) -> Iterator[str]:
    """A device's vector is the same by all ways; and of SCAFFOLD's, c is the mean."""
    wanted = facts.journal.vectors
    ways = {"a restart recovers": facts.journal.recovered}
    if facts.handed_out is not None:
        ways["Redis has"] = facts.handed_out
    for way, found in ways.items():
        for device in sorted(wanted.keys() | found.keys()):
            if wanted.get(device) != found.get(device):
                yield f"device {device}: {way} {found.get(device)}, not {wanted.get(device)}"
    if facts.journal.drift > _ROUNDING:
        yield f"c is {facts.journal.drift} from the mean of c_i"


def one_digest(facts: Facts) -> Iterator[str]:
    """A version that was ever told is the journal's version of that number."""
    made = dict([facts.journal.begun]) | {
        r.version: r.digest for r in facts.journal.records if r.digest
    }
    for version, digest in sorted(facts.published):
        if made.get(version) != digest:
            yield f"version {version} was published as {digest}, journalled as {made.get(version)}"


def as_expected(facts: Facts) -> Iterator[str]:
    """Nothing was found while it ran."""
    yield from facts.findings


CHECKS: tuple[Check, ...] = (
    balanced, once, forward, none_lost, same_bits, same_vectors, one_digest, as_expected,
)  # fmt: skip


def complaints(facts: Facts) -> list[str]:
    """All that does not hold."""
    return [f"{check.__name__}: {what}" for check in CHECKS for what in check(facts)]
