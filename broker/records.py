"""What a run is and where it stands, as its records in Redis say: values, and no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal

import msgpack

from fedstream.broker.errors import BrokerError
from fedstream.broker.layout import Layout
from fedstream.broker.messages import OUTCOMES, Outcome, Sends, Trigger, Version

State = Literal["running", "finished"]

_KEYS = b"2"  # what the keys of a run are called and hold; 1: that of release 0.1


def flattened(values: Mapping[str, object]) -> list[str | bytes]:
    """A mapping as the flat list that HSET takes, without what is None."""
    flat: list[str | bytes] = []
    for name, value in values.items():
        if value is not None:
            flat += (name, value if isinstance(value, bytes) else str(value))
    return flat


def mapping(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


@lru_cache(1024)  # an open task is looked at again with every other task that ends
def trigger_of(data: bytes) -> Trigger:
    return Trigger.decode(data)


@dataclass(frozen=True)
class Run:
    """The record of a run: what was decided when it was created, and whether it is over."""

    layout: Layout
    strategy: str
    task: str
    devices: int
    versions: int  # the run ends with this one
    seed: int
    created: float  # seconds since 1970
    max_staleness: int | None = None
    sends: Sends = "model"  # what the devices answer with
    lineage: str = ""  # the journal's: which versions these are
    state: State = "running"
    why: str | None = None  # it finished
    finished: float | None = None  # seconds since 1970

    def record(self) -> list[str | bytes]:
        return flattened(
            {name: value for name, value in self.__dict__.items() if name != "layout"}
            | {
                "keys": _KEYS,
                "layout": self.layout.signature,
                "size": self.layout.nbytes,
                "tensors": self.layout.encode(),
            }
        )

    @classmethod
    @lru_cache(16)  # it is in every view, and changes once: when the run ends
    def parsed(cls, flat: tuple[bytes, ...]) -> Run:
        record = mapping(flat)
        if (keys := record.get("keys", b"1")) != _KEYS:
            raise BrokerError(
                f"the run in Redis was made by another release of fedstream (its keys are of kind "
                f"{keys.decode()}, ours of {_KEYS.decode()}): finish it with that release, or take "
                "another run.name or Redis"
            )
        number = record.get("max_staleness")
        finished = record.get("finished")
        return cls(
            layout=Layout.decode(record["tensors"]),
            strategy=record["strategy"].decode(),
            task=record["task"].decode(),
            devices=int(record["devices"]),
            versions=int(record["versions"]),
            seed=int(record["seed"]),
            created=float(record["created"]),
            max_staleness=None if number is None else int(number),
            sends="delta" if record.get("sends") == b"delta" else "model",
            lineage=record["lineage"].decode(),
            state="finished" if record["state"] == b"finished" else "running",
            why=record["why"].decode() if "why" in record else None,
            finished=None if finished is None else float(finished),
        )


@dataclass(frozen=True)
class Head:
    """The newest version, and what the updater holds beside it."""

    version: int
    digest: str
    blob: str
    time: float  # seconds since 1970, the updater's clock
    epoch: int
    held: tuple[int, ...] = ()  # devices whose updates are buffered: they wait for more
    retained: int = 0  # entries of the queue that are done, but not yet safe in the journal
    mean_staleness: float = 0.0  # moving average over what was applied or buffered
    journalled: Mapping[str, int] = field(default_factory=dict)  # counts of the updater's ends

    @property
    def buffered(self) -> int:
        """Updates that wait for more."""
        return len(self.held)

    @classmethod
    def parsed(cls, record: Mapping[str, bytes]) -> Head:
        return cls(
            version=int(record["version"]),
            digest=record["digest"].decode(),
            blob=record["blob"].decode(),
            time=float(record["time"]),
            epoch=int(record["epoch"]),
            held=tuple(int(device) for device in record.get("held", b"").split()),
            retained=int(record.get("retained", 0)),
            mean_staleness=float(record.get("mean_staleness", 0.0)),
            journalled=msgpack.unpackb(record.get("journalled", b"\x80")),
        )


@dataclass(frozen=True)
class View:
    """Everything countable about a run, read in one step."""

    run: Run
    head: Head
    counts: Mapping[str, int]
    open: tuple[Trigger, ...]
    admitted: int  # of the open ones: in the updater's queue
    queue: int  # entries, admitted updates and control entries
    triggers: int
    inbox: int | None  # entries of the sites' inboxes; None: not counted
    trainers: int  # alive
    kept: int  # versions whose model can be read
    dead: int
    owned: tuple[int, ...]  # devices that a trainer owns
    pool: bool  # where there are any: whether a trainer is there that serves the others
    now: float  # seconds since 1970, Redis's clock
    told: Mapping[str, str] = field(default_factory=dict)  # newest ids of `events` and `models`

    @property
    def backlog(self) -> int:
        """Entries of the queue that the updater has not done."""
        return max(0, self.queue - self.head.retained)

    @property
    def served(self) -> tuple[int, ...]:
        """Devices that somebody trains for: the owned ones, and the pool all that nobody owns."""
        return self.owned if self.owned and not self.pool else tuple(range(self.run.devices))

    @property
    def issued(self) -> int:
        """Tasks ever triggered."""
        return self.counts.get("issued", 0)

    @cached_property
    def outcomes(self) -> dict[Outcome, int]:
        """Ended tasks by outcome. With the open ones they add up to ``issued``."""
        return {outcome: self.counts.get(outcome, 0) for outcome in OUTCOMES}

    def reasons(self, outcome: str) -> dict[str, int]:
        """The counts of an outcome (or of ``stray``: uploads that ended no task) by reason."""
        prefix = f"{outcome}:"
        return {
            name.removeprefix(prefix): n
            for name, n in sorted(self.counts.items())
            if name.startswith(prefix)
        }


@dataclass(frozen=True)
class End:
    """One task ends."""

    task: str
    attempt: str
    outcome: Outcome
    reason: str = ""
    device: int | None = None
    version: int | None = None
    staleness: int | None = None
    weight: float | None = None


def counted(counts: Mapping[str, int], end: End) -> dict[str, int]:
    """A run's counts with one more end, as the scripts count it."""
    names = [end.outcome, f"{end.outcome}:{end.reason}"] if end.reason else [end.outcome]
    return {**counts, **{name: counts.get(name, 0) + 1 for name in names}}


def without(counts: Mapping[str, int], part: Mapping[str, int]) -> dict[str, int]:
    """A run's counts less those that are part of them."""
    return {name: n - part.get(name, 0) for name, n in counts.items() if n > part.get(name, 0)}


def ended(counts: Mapping[str, int]) -> int:
    """Tasks that ended, by counts of outcomes."""
    return sum(counts.get(outcome, 0) for outcome in OUTCOMES)


LOST = "lost with Redis"


@dataclass(frozen=True)
class Commit:
    """What one step of the updater changes, all at once."""

    version: Version | None  # None: no new version, only ends
    held: Sequence[int]  # devices whose updates are buffered
    mean_staleness: float
    at: int = 0  # the newest version then: without one to publish, Redis must have it
    retained: int = 0  # entries that are done and stay in the queue for now
    ends: Sequence[End] = ()
    journalled: Mapping[str, int] = field(default_factory=dict)  # ends of the journal, with these
    before: int = 0  # and how many there were: what Redis must have been told
    entries: Sequence[str] = ()  # of the queue, done
    updates: Sequence[str] = ()  # blobs of updates, done
    retired: Sequence[str] = ()  # blobs of models
    finish: str | None = None  # why the run is over with this


@dataclass(frozen=True)
class Committed:
    """What a commit came to."""

    what: str  # 'done', or why nothing was done
    counts: dict[str, int] = field(default_factory=dict)  # of the run, now
    finished: bool = False  # the run
