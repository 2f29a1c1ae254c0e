"""Records of a run in Redis, and values read from and written to the ledger. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, Self, TypedDict

import msgpack

from fedstream.core.errors import BrokerError
from fedstream.core.layout import Layout, Unshared
from fedstream.core.messages import (
    OUTCOMES,
    Encoded,
    Event,
    Goal,
    Outcome,
    Quarantine,
    Sends,
    SetQuarantine,
    Trigger,
    Version,
)

RunStatus = Literal["running", "finished"]

_KEYS = b"2"  # version of the keys' names and contents; 1: release 0.1
# That of a private run: without it, trainers and gateways of releases that know no privacy would
# join, and write updates into Redis that are not masked.
_PRIVATE_KEYS = b"3"


def flattened(values: Mapping[str, object]) -> list[str | bytes]:
    """A mapping as the flat list that HSET takes, without values that are None."""
    flat: list[str | bytes] = []
    for name, value in values.items():
        if value is not None:
            flat += (name, value if isinstance(value, bytes) else str(value))
    return flat


def mapping(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}


@lru_cache(1024)  # every view contains all open tasks, mostly the same ones as before
def trigger_of(data: bytes) -> Trigger:
    return Trigger.decode(data)


@dataclass(frozen=True)
class Run:
    """The record of a run: the choices made at its creation, and whether it is over."""

    layout: Layout
    strategy: str
    task: str
    devices: int
    versions: int  # the run ends with this one
    seed: int
    created: float  # seconds since 1970
    max_staleness: int | None = None
    cancel_stale: bool = False  # whether tasks are given up once their updates would be staler
    sends: Sends = "model"  # the content of updates
    by_steps: bool = False  # whether updates are divided by their local steps and learning rate
    lineage: str = ""  # the journal's id for this line of versions
    state: RunStatus = "running"
    why: str | None = None  # reason for finishing
    finished: float | None = None  # seconds since 1970
    start: str = ""  # where version 0 was taken from, and its digest; '': drawn from the seed
    goal: Mapping[str, Goal] = field(default_factory=dict)  # of metrics, declared by the task
    stop_metric: str | None = None  # that may end the run
    policy: str = ""  # of a private run: the text of its fedstream.private.policy.PrivacyPolicy

    def difference(self, layout: str | None, devices: int | None) -> str:
        """The difference between a device's task and the run's, for people; '' if there is none.

        ``layout``: signature of the device's layout. ``devices``: number of devices that its data
        is split over. None: unknown.
        """
        ours, found = self.layout, []
        if layout is not None and layout != ours.signature:
            found.append(
                f"its model's layout is {layout[:12]}, the run's is {ours.signature[:12]} "
                f"({ours.summary})"
            )
        if devices is not None and devices != self.devices:
            found.append(f"its data is split over {devices} devices, the run has {self.devices}")
        return "; ".join(found)

    def record(self) -> list[str | bytes]:
        return flattened(
            {name: value for name, value in self.__dict__.items() if name != "layout"}
            | {
                "goal": msgpack.packb(self.goal),
                "keys": _PRIVATE_KEYS if self.policy else _KEYS,
                "layout": self.layout.signature,
                "size": self.layout.nbytes,
                "tensors": self.layout.encode(),
            }
        )

    @classmethod
    @lru_cache(16)  # part of every view, but changes only when the run ends
    def parsed(cls, flat: tuple[bytes, ...]) -> Run:
        record = mapping(flat)
        if (keys := record.get("keys", b"1")) not in (_KEYS, _PRIVATE_KEYS):
            raise BrokerError(
                f"the run in Redis was made by another release of fedstream (its keys are of kind "
                f"{keys.decode()}, ours of {_KEYS.decode()}): finish it with that release, or use "
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
            cancel_stale=record.get("cancel_stale") == b"True",
            sends="delta" if record.get("sends") == b"delta" else "model",
            by_steps=record.get("by_steps") == b"True",
            lineage=record["lineage"].decode(),
            state="finished" if record["state"] == b"finished" else "running",
            why=record["why"].decode() if "why" in record else None,
            finished=None if finished is None else float(finished),
            start=record.get("start", b"").decode(),
            goal=msgpack.unpackb(record.get("goal", b"\x80")),
            stop_metric=record["stop_metric"].decode() if "stop_metric" in record else None,
            policy=record.get("policy", b"").decode(),
        )


@dataclass(frozen=True)
class Quarantines:
    """The devices whose updates are refused, by the processed control entries."""

    taken: int = 0  # effective control entries since the run began
    groups: tuple[Quarantine, ...] = ()  # disjoint; oldest first

    @cached_property
    def by_device(self) -> Mapping[int, Quarantine]:
        """The quarantine of each quarantined device."""
        return {device: one for one in self.groups for device in one.devices}

    def changed(self, wanted: SetQuarantine) -> tuple[int, ...]:
        """The devices that a control entry would change, in order."""
        return tuple(sorted({d for d in wanted.devices if (d in self.by_device) == wanted.release}))

    def quarantined(self, devices: Sequence[int], why: str, since: float, version: int) -> Self:
        """Add a group with these devices, which were not in quarantine."""
        group = Quarantine(devices=tuple(devices), why=why, since=since, version=version)
        return replace(self, taken=self.taken + 1, groups=(*self.groups, group))

    def released(self, devices: Collection[int]) -> Self:
        """Remove these devices."""
        left = (
            one.model_copy(update={"devices": tuple(d for d in one.devices if d not in devices)})
            for one in self.groups
        )
        return replace(self, taken=self.taken + 1, groups=tuple(one for one in left if one.devices))

    def packed(self) -> bytes:
        """The form in Redis's head, in which scripts read the devices."""
        groups = [one.model_dump() for one in self.groups]
        data = msgpack.packb({"taken": self.taken, "groups": groups})
        assert isinstance(data, bytes)  # noqa: S101  (packb's type is Any)
        return data

    @classmethod
    @lru_cache(4)  # part of every view, but an operator changes them rarely
    def parsed(cls, data: bytes) -> Self:
        fields = msgpack.unpackb(data, use_list=False)
        return cls(fields["taken"], tuple(Quarantine.model_validate(g) for g in fields["groups"]))


NO_QUARANTINES = Quarantines()


@dataclass(frozen=True)
class PrivacyLoss:
    """What the sums of a private run have told of its devices so far."""

    opened: int  # sums, whether or not they were of use
    dropped: int  # batches that were of no use
    epsilon: float  # of the most exposed device; infinite without noise
    delta: float  # at which epsilon is stated
    spent: frozenset[int] = frozenset()  # devices that can take part no more
    recent: frozenset[int] = frozenset()  # devices that sit out, as their last sums are recent

    @property
    def about(self) -> dict[str, Any]:
        """As plain data. ``epsilon`` is None without noise."""
        return {
            "epsilon": self.epsilon if self.epsilon < math.inf else None,
            "delta": self.delta,
            "sums_opened": self.opened,
            "sums_dropped": self.dropped,
            "devices_spent": len(self.spent),
        }

    def packed(self) -> bytes:
        """The form in Redis's head, in which scripts read the devices.

        For each device a bit of ``spent``, the lowest four in the first hexadecimal digit.
        """
        bits = sum(1 << device for device in self.spent)
        devices = {"spent": f"{bits:x}"[::-1], "recent": sorted(self.recent)}
        data = msgpack.packb({**self.__dict__, **devices})
        assert isinstance(data, bytes)  # noqa: S101  (packb's type is Any)
        return data

    @classmethod
    @lru_cache(4)  # part of every view, but changes only with a sum
    def parsed(cls, data: bytes) -> Self:
        fields = msgpack.unpackb(data)
        bits = int(fields.pop("spent")[::-1], 16)
        spent = frozenset(n for n, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")
        recent = frozenset(fields.pop("recent"))
        return cls(**fields, spent=spent, recent=recent)


@dataclass(frozen=True)
class StepSize:
    """The length of the rule's steps, which adapts."""

    key: str  # of the rate in the strategy
    rate: float  # as it is now
    scale: float  # of the configured rate

    def __str__(self) -> str:
        return f"{self.rate:.4g}, {self.scale:.4g} times the configured"

    @classmethod
    def parsed(cls, data: bytes) -> Self:
        return cls(**msgpack.unpackb(data))


@dataclass(frozen=True)
class Head:
    """The newest version, and further state of the updater."""

    version: int
    digest: str
    blob: str
    time: float  # seconds since 1970, the updater's clock
    epoch: int
    held: tuple[int, ...] = ()  # devices whose updates are buffered
    retained: int = 0  # processed queue entries whose records are not on disk yet
    mean_staleness: float = 0.0  # moving average over applied and buffered updates
    journalled: Mapping[str, int] = field(default_factory=dict)  # counts of ends in the journal
    chunks: int | None = None  # of its blob; None: unstated by an earlier release
    quarantines: Quarantines = field(default_factory=lambda: NO_QUARANTINES)
    encoded: Encoded | None = None  # description of an encoded blob; None: the model's own bytes
    privacy: PrivacyLoss | None = None  # None: no private batch has ended
    step: StepSize | None = None  # None: the rule does not adapt

    @property
    def spent(self) -> frozenset[int]:
        """The devices without a privacy budget."""
        return self.privacy.spent if self.privacy is not None else frozenset()

    @property
    def recent(self) -> frozenset[int]:
        """The devices that sit out, as their last sums are recent."""
        return self.privacy.recent if self.privacy is not None else frozenset()

    def bars(self, device: int) -> bool:
        """Whether a device's updates are refused."""
        return device in self.quarantines.by_device or device in self.spent

    @property
    def given(self) -> str:
        """The digest of the published model, by which devices request it."""
        return self.encoded.digest if self.encoded else self.digest

    @property
    def buffered(self) -> int:
        """Number of buffered updates."""
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
            chunks=int(record["chunks"]) if "chunks" in record else None,
            quarantines=Quarantines.parsed(record["quarantines"])
            if "quarantines" in record
            else NO_QUARANTINES,
            encoded=_encoded(record),
            privacy=PrivacyLoss.parsed(record["privacy"]) if "privacy" in record else None,
            step=StepSize.parsed(record["step"]) if "step" in record else None,
        )


def head_of(unshared: Unshared) -> Head:
    """The values of unshared tensors, which are published like a version's model."""
    encoded = Encoded("f32", unshared.layout.nbytes, unshared.digest)
    blob = f"unshared-{unshared.digest}"
    return Head(0, unshared.digest, blob, time=0.0, epoch=0, encoded=encoded)


def _encoded(record: Mapping[str, bytes]) -> Encoded | None:
    """The description of the head's blob; None if the field describes another blob.

    A release that knows no formats doesn't update the field.
    """
    blob, _, text = record.get("encoded", b"").partition(b" ")
    return Encoded.parsed(text) if blob == record["blob"] else None


@dataclass(frozen=True)
class Failing:
    """A device whose last task failed."""

    tasks: int  # failures in a row; the first brings no rest
    until: float  # end of the rest, seconds since 1970, Redis's clock
    reason: str  # of the last failure

    @classmethod
    def parsed(cls, data: bytes) -> Failing | None:
        """Parse the scripts' note; None for a foreign value."""
        try:
            tasks, until_ms, reason = data.decode().split(" ", 2)
            return cls(int(tasks), int(until_ms) / 1000, reason)
        except ValueError:
            return None


@dataclass(frozen=True)
class Best:
    """The version with the best measurement of the run's main metric."""

    metric: str
    value: float
    version: int
    digest: str  # as given to devices
    blob: str | None  # None: deleted, as Redis was full

    @classmethod
    def parsed(cls, flat: Sequence[bytes]) -> Best | None:
        """Parse the key's fields; None if no version was the best yet."""
        record = mapping(flat)
        if "version" not in record:
            return None
        return cls(
            metric=record["metric"].decode(),
            value=float(record["value"]),
            version=int(record["version"]),
            digest=record["digest"].decode(),
            blob=record["blob"].decode() if "blob" in record else None,
        )


class EncodedUpdates(TypedDict):
    """Redis's counts of updates in wire formats."""

    updates: int
    bytes: int  # in total
    smaller_by: float | None  # factor by which float32 would be larger; None: no updates


@dataclass(frozen=True, kw_only=True)
class Tally:
    """The counts of a run, read in one step."""

    run: Run
    head: Head
    counts: Mapping[str, int]
    tasks: int  # open tasks
    admitted: int  # open tasks whose update is in the updater's queue
    queue: int  # entries: admitted updates and control entries
    triggers: int
    inbox: int | None  # entries in all sites' inboxes; None: not counted
    trainers: int  # live trainers
    workers: int  # concurrent work: live trainers, counting for a gateway its devices
    kept: int  # versions whose model can be read
    dead: int
    owners: int  # fields of the register of owners: the owned devices, and foreign ones
    pool: bool  # whether a live trainer serves the unowned devices
    now: float  # seconds since 1970, Redis's clock
    # Devices that failed more than once in a row; only some if there are many.
    failing: Mapping[int, Failing] = field(default_factory=dict)
    best: Best | None = None  # None: no version was the best yet
    told: Mapping[str, str] = field(default_factory=dict)  # newest ids of `events` and `models`

    @property
    def backlog(self) -> int:
        """Number of entries in the queue that the updater has not processed."""
        return max(0, self.queue - self.head.retained)

    @property
    def askable(self) -> int:
        """An upper bound on the number of devices that a trainer serves and nothing bars.

        Exact unless owned devices are in quarantine, as a tally doesn't list the owned devices.
        """
        devices = self.run.devices
        barred = sum(device < devices for device in self.head.quarantines.by_device)
        served = self.owners if self.owners and not self.pool else devices
        return min(served, devices - barred)

    @property
    def issued(self) -> int:
        """Number of tasks ever issued."""
        return self.counts.get("issued", 0)

    @cached_property
    def outcomes(self) -> dict[Outcome, int]:
        """The number of ended tasks by outcome; with the open tasks they add up to ``issued``."""
        return {outcome: self.counts.get(outcome, 0) for outcome in OUTCOMES}

    @property
    def kept_bytes(self) -> int:
        """Bytes of the kept models, if all were published like the newest, and unshared values."""
        layout = self.run.layout
        one = self.head.encoded.size if self.head.encoded else layout.nbytes
        return self.kept * one + layout.unshared_bytes

    @property
    def failing_devices(self) -> dict[str, dict[str, int | float | str]]:
        """``failing`` as plain data: failures in a row, reason, end of the rest."""
        return {str(device): one.__dict__ for device, one in self.failing.items()}

    @property
    def encoded(self) -> EncodedUpdates:
        """The updates admitted in a wire format other than ``f32``."""
        number, size = self.counts.get("encoded", 0), self.counts.get("encoded_bytes", 0)
        smaller_by = round(number * self.run.layout.nbytes / size, 2) if size else None
        return {"updates": number, "bytes": size, "smaller_by": smaller_by}

    def reasons(self, outcome: str) -> dict[str, int]:
        """Counts of an outcome, or of ``stray`` messages, by reason."""
        prefix = f"{outcome}:"
        return {
            name.removeprefix(prefix): n
            for name, n in sorted(self.counts.items())
            if name.startswith(prefix)
        }


@dataclass(frozen=True, kw_only=True)
class View(Tally):
    """A tally with every open task and every owned device."""

    open: tuple[Trigger, ...]
    owned: tuple[int, ...]  # owned devices, in order


@dataclass(frozen=True)
class Bookmark:
    """A place in the log of changes, up to which changes are known."""

    id: bytes
    field: bytes
    value: bytes


@dataclass(frozen=True)
class Changes:
    """The present state of tasks and devices that changed since a place in the log."""

    tasks: Mapping[str, Trigger | None]  # by id; None: it has ended
    devices: Mapping[int, bool]  # whether a trainer owns them
    failing: Mapping[int, Failing | None]  # of the same devices; None: not failing
    all_tasks: bool  # `tasks` has all open tasks, as the place was unknown
    all_devices: bool  # `devices` has all owned, `failing` all failing devices
    place: Bookmark | None  # for the next look; None: the log is empty


@dataclass(frozen=True)
class End:
    """The end of one task."""

    task: str
    attempt: str
    outcome: Outcome
    reason: str = ""
    device: int | None = None
    version: int | None = None
    staleness: int | None = None
    weight: float | None = None


def counted(counts: Mapping[str, int], end: End) -> dict[str, int]:
    """A run's counts plus one end, which is counted as the scripts count it."""
    names = [end.outcome, f"{end.outcome}:{end.reason}"] if end.reason else [end.outcome]
    return {**counts, **{name: counts.get(name, 0) + 1 for name in names}}


def without(counts: Mapping[str, int], part: Mapping[str, int]) -> dict[str, int]:
    """A run's counts minus the counts in ``part``; counts that reach zero are left out."""
    return {name: n - part.get(name, 0) for name, n in counts.items() if n > part.get(name, 0)}


def ended(counts: Mapping[str, int]) -> int:
    """Number of ended tasks in a run's counts."""
    return sum(counts.get(outcome, 0) for outcome in OUTCOMES)


@dataclass(frozen=True)
class Commit:
    """The changes of one updater step, made atomically."""

    held: Sequence[int]  # devices whose updates are buffered
    mean_staleness: float
    versions: Sequence[Version] = ()  # to publish, in order
    at: int = 0  # the updater's newest version, which Redis must have if none is published
    retained: int = 0  # processed entries that stay in the queue for now
    ends: Sequence[End] = ()  # first those that were committed before
    journalled: Mapping[str, int] = field(default_factory=dict)  # present counts of journalled ends
    before: int = 0  # number of ends committed before, which Redis must equal
    entries: Sequence[str] = ()  # queue entries to delete
    updates: Sequence[str] = ()  # blobs of updates to delete
    retired: Sequence[str] = ()  # blobs of models to delete, unless they are still needed
    events: Sequence[Event] = ()  # for observers
    finish: str | None = None  # why the run ends with this commit
    quarantines: Quarantines | None = None  # None: unchanged
    quarantines_before: int = 0  # control entries committed before
    privacy: PrivacyLoss | None = None  # None: unchanged
    step: StepSize | None = None  # None: the rule does not adapt


@dataclass(frozen=True)
class Committed:
    """The result of a commit."""

    what: str  # 'done' or 'created', or why nothing was done
    counts: dict[str, int] = field(default_factory=dict)  # the run's counts afterwards
    finished: bool = False  # whether the run is finished
    spared: frozenset[str] = frozenset()  # blobs to retire that are still needed: retire them later
