"""What must hold after a run: pure functions of what is known about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

from tests.chaos.account import USED, Account
from tests.chaos.effects import OUTCOMES, Life
from tests.chaos.faults import UPDATERS

LOST = "given_up:lost with Redis"
ASTRAY = "given_up:entry lost"
DAMAGED = ("digest", "size", "wire length")  # why an update was refused
_ROUNDING = 1e-4  # of float32 sums of some hundred numbers below 1


@dataclass(frozen=True)
class Production:
    """What the project's own code makes of the journal. A version and its digest are a pair."""

    replayed: tuple[int, str] = (-1, "")
    diverged: str = ""  # why the replay came no further; '': it came to the end
    recovered: Mapping[int, str] = field(default_factory=dict)  # digests of vectors by device


@dataclass(frozen=True)
class Facts:
    """What journal, trainers and Redis say of a run that is over."""

    account: Account
    production: Production
    lives: tuple[Life, ...]  # of Redis, each with what it kept of those before; (): nobody knows
    forged: frozenset[tuple[str, str]]  # task and attempt of answers that came second
    counts: Mapping[str, int]
    open: int
    queued: frozenset[str]  # tasks whose uploads are in the queue
    admitted: frozenset[str]  # open tasks whose upload was admitted
    head: tuple[int, str]
    model: str  # digest of the bytes that Redis has as the newest model
    # How often quarantines changed, and the devices in one, as Redis has it.
    quarantines: tuple[int, frozenset[int]] = (0, frozenset())
    scale: float | None = None  # of the rule's step, as Redis has it; None: it does not adapt
    told: frozenset[tuple[int, str]] = frozenset()  # versions and digests, as a watcher saw them
    handed_out: Mapping[int, str] | None = None  # digests of the c_i in Redis; None: no SCAFFOLD
    unsent: tuple[str, ...] = ()  # what is wrong with error feedback
    findings: tuple[str, ...] = field(default=())  # what went wrong while it ran

    @cached_property
    def journalled(self) -> frozenset[str]:
        """Tasks that have a record."""
        return frozenset(record["upload"]["task"] for record in self.account.taken)

    @cached_property
    def opened(self) -> frozenset[str]:
        """Tasks that were ever open."""
        return frozenset(task for life in self.lives for task in life.opened)

    @cached_property
    def lost_with_redis(self) -> int:
        """Admitted updates that went with Redis's data before they were journalled."""
        seen = {task for life in self.lives for task in life.admitted}
        return len(seen - self.journalled - self.queued)


Check: TypeAlias = Callable[[Facts], Iterator[str]]


def balanced(facts: Facts) -> Iterator[str]:
    """Every task that was issued is open or has one outcome, of which the reasons are parts."""
    counts = facts.counts
    ended = {name: counts.get(name, 0) for name in OUTCOMES}
    if counts.get("issued", 0) != sum(ended.values()) + facts.open:
        yield f"issued {counts.get('issued', 0)}, but {ended} and open {facts.open}"
    for outcome in ("refused", "given_up"):
        reasons = sum(n for name, n in counts.items() if name.startswith(f"{outcome}:"))
        if reasons != ended[outcome]:
            yield f"{outcome} {ended[outcome]}, but {reasons} by reason"


def at_any_moment(facts: Facts) -> Iterator[str]:
    """Whatever Redis did, sums held behind it, and who published was the updater."""
    yield from dict.fromkeys(what for life in facts.lives for what in life.wrong)


def counted(facts: Facts) -> Iterator[str]:
    """Redis's counts, the journal's records and the events tell of the same outcomes."""
    if not facts.lives:
        return
    records = Counter(record["outcome"] for record in facts.account.taken)
    beside: dict[str, set[str]] = {outcome: set() for outcome in OUTCOMES}  # of coordinators
    for life in facts.lives:
        for event in life.ended:
            if event["task"] not in facts.journalled:
                beside[event["outcome"]].add(event["task"])
    for outcome in OUTCOMES:
        n, least = facts.counts.get(outcome, 0), records[outcome]
        most = least + len(beside[outcome])
        if outcome == "given_up":
            most += facts.counts.get(LOST, 0)
        if len(facts.lives) == 1:
            least = most
        if not least <= n <= most:
            yield f"{outcome} {n}, but {records[outcome]} records and at most {most} in all"
    issued = facts.counts.get("issued", 0)
    if issued > len(facts.opened):
        yield f"issued {issued}, but only {len(facts.opened)} tasks were ever open"


def told_as_counted(facts: Facts) -> Iterator[str]:
    """What a life of Redis counted one by one it told of, once a task, as the journal has it.

    A Redis that falls back may forget how a coordinator or the scheduler has ended a task, which is
    open there again. Where it fell back, they may end a task otherwise than the journal, until the
    updater takes that back.
    """
    records = {record["upload"]["task"]: record for record in facts.account.taken}
    for number, life in enumerate(facts.lives, 1):
        is_forgotten = number < len(facts.lives)  # the next life fell back
        if life.taken_back and not life.fell_back:
            yield f"life {number}: {life.taken_back[0]} was taken back, but Redis forgot nothing"
        events = Counter(event["outcome"] for event in life.ended)
        for outcome in OUTCOMES:
            n = life.counted[outcome] - (life.counted[LOST] if outcome == "given_up" else 0)
            if n != events[outcome]:
                yield f"life {number}: {outcome} counted {n} times, told {events[outcome]} times"
        for task, times in Counter(event["task"] for event in life.ended).items():
            if times > 1:
                yield f"life {number}: task {task} ended {times} times"
        for event in life.ended:
            record = records.get(event["task"])
            if event["outcome"] in USED and record is None:
                yield f"task {event['task']} was told as {event['outcome']}, and has no record"
            elif (
                record is not None
                and record["outcome"] != event["outcome"]
                and not (is_forgotten and event.get("service") not in UPDATERS)
            ):
                yield (
                    f"task {event['task']} was told as {event['outcome']}, journalled as "
                    f"{record['outcome']}"
                )


def lost_once(facts: Facts) -> Iterator[str]:
    """As many are given up as lost as can have been, at most."""
    if not facts.lives:
        return
    known = facts.journalled | {event["task"] for event in facts.lives[-1].ended}
    most = len(facts.opened - known - facts.lives[-1].open)
    if facts.counts.get(LOST, 0) > most:
        yield f"{facts.counts.get(LOST, 0)} tasks are counted as lost, at most {most} can be"


def once(facts: Facts) -> Iterator[str]:
    """Every task has at most one record, and one answer in the queue."""
    times = Counter(record["upload"]["task"] for record in facts.account.taken)
    for task, n in times.items():
        if n > 1:
            ends = [r["outcome"] for r in facts.account.taken if r["upload"]["task"] == task]
            yield f"task {task} is {n} times in the journal: {', '.join(ends)}"
    for number, life in enumerate(facts.lives, 1):
        for task, attempts in life.admitted.items():
            if len(attempts) > 1:
                yield f"life {number}: {len(attempts)} answers to task {task} were admitted"
            if any((task, attempt) in facts.forged for attempt in attempts):
                yield f"life {number}: the second answer to task {task} was admitted"


def none_lost(facts: Facts) -> Iterator[str]:
    """What left the queue is in the journal; what was admitted last is there, or waits."""
    for number, life in enumerate(facts.lives, 1):
        for entry, message in life.settled.items():
            if message["k"] == "upload" and message["task"] not in facts.journalled:
                yield f"life {number}: task {message['task']} left the queue ({entry}) and is gone"
    for last in facts.lives[-1:]:
        for task in sorted(last.admitted.keys() - facts.journalled - facts.queued):
            yield f"task {task} was in the queue and is gone"
    for task in sorted(facts.admitted - facts.queued):
        yield f"task {task} is open and admitted, but not in the queue"


def none_astray(facts: Facts) -> Iterator[str]:
    """As long as Redis forgets nothing, no task is lost on its way to a device."""
    if len(facts.lives) == 1 and (n := facts.counts.get(ASTRAY, 0)):
        yield f"{n} tasks lost their entries"


def undamaged(facts: Facts) -> Iterator[str]:
    """What a trainer sent arrived as it was sent."""
    for why in DAMAGED:
        if n := facts.counts.get(f"refused:{why}", 0):
            yield f"{n} updates were refused: {why}"


def same_arithmetic(facts: Facts) -> Iterator[str]:
    """The journal is what the rule's formulas make of what the trainers sent."""
    yield from facts.account.wrong


def same_bits(facts: Facts) -> Iterator[str]:
    """Redis's newest model is the one that the journal gives, and so is what a replay gives."""
    account, production = facts.account, facts.production
    if production.diverged:
        yield f"replay: {production.diverged}"
    elif production.replayed != (account.version, account.model):
        yield f"a replay gives {production.replayed}, not {(account.version, account.model)}"
    if facts.head != (account.version, account.model):
        yield f"Redis's head is {facts.head}, the journal gives {(account.version, account.model)}"
    given = account.given or facts.head[1]
    if facts.model != given:
        yield f"Redis's model has digest {facts.model}, devices are given {given}"


def same_vectors(facts: Facts) -> Iterator[str]:
    """A device's vector is the same by all ways; and of SCAFFOLD's, c is the mean."""
    wanted = facts.account.devices
    ways = {"a restart recovers": facts.production.recovered}
    if facts.handed_out is not None:
        ways["Redis has"] = facts.handed_out
    for way, found in ways.items():
        for device in sorted(wanted.keys() | found.keys()):
            if wanted.get(device) != found.get(device):
                yield f"device {device}: {way} {found.get(device)}, not {wanted.get(device)}"
    if facts.account.drift > _ROUNDING:
        yield f"c is {facts.account.drift} from the mean of c_i"


def same_feedback(facts: Facts) -> Iterator[str]:
    """What an update left unsent is in its device's next one: once, and all of it."""
    yield from facts.unsent


def same_quarantines(facts: Facts) -> Iterator[str]:
    """Redis has the devices in quarantine that the journal's records give."""
    wanted = (facts.account.quarantines, frozenset(facts.account.barred))
    if facts.quarantines != wanted:
        yield f"Redis's quarantines are {facts.quarantines}, the journal's {wanted}"


def same_step(facts: Facts) -> Iterator[str]:
    """Redis has the scale of the step that the journal's records give."""
    if facts.scale != facts.account.scale:
        yield f"Redis's step has scale {facts.scale}, the journal's {facts.account.scale}"


def one_digest(facts: Facts) -> Iterator[str]:
    """A version that was ever told, in whichever life, is the journal's version of that number."""
    told = facts.told | {(one.version, one.digest) for life in facts.lives for one in life.told}
    for version, digest in sorted(told):
        if facts.account.made.get(version) != digest:
            made = facts.account.made.get(version)
            yield f"version {version} was published as {digest}, journalled as {made}"


def understood(facts: Facts) -> Iterator[str]:
    """Nothing that a service said was buried: of another release as well."""
    if n := facts.counts.get("dead_letters", 0):
        yield f"{n} entries were buried"


def as_expected(facts: Facts) -> Iterator[str]:
    """Nothing was found while it ran."""
    yield from facts.findings


CHECKS: tuple[Check, ...] = (
    balanced,
    at_any_moment,
    counted,
    told_as_counted,
    lost_once,
    once,
    none_lost,
    none_astray,
    undamaged,
    same_arithmetic,
    same_bits,
    same_vectors,
    same_feedback,
    same_quarantines,
    same_step,
    one_digest,
    understood,
    as_expected,
)


def complaints(facts: Facts) -> list[str]:
    """All that does not hold."""
    return [f"{check.__name__}: {what}" for check in CHECKS for what in check(facts)]
