"""The messages between services: small, frozen and versioned, in msgpack.

A stream entry has one field ``m``: a msgpack map with the schema version ``v``, the kind ``k`` and
the message's fields. A message never contains weights; it names a blob.

Services one release apart understand each other. A reader ignores unknown fields, in nested maps
too, and fills in defaults for missing ones; scripts pick the fields they need. So a release may add
a field that has a default, and stop reading a field that it still writes. Any other change (a field
that is required, renamed, removed or redefined; a new value of a closed set, such as an outcome)
needs a new schema and two releases: the first release reads the new schema (``READS``) but still
writes the old one, the next release writes the new schema (``SCHEMA``) and reads both. A new kind
must be readable one release before it is written; otherwise older readers bury it as unreadable,
which does no harm. Triggers and tasks, which scripts unpack, never have a bytes field: Redis's
cmsgpack does not support one. Sample bytes of every kind are in ``tests/data/messages``: a test
decodes them and compares the encoding.
"""

from __future__ import annotations

import os
import re
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, overload

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstream.core.errors import BadMessage
from fedstream.core.reasons import MEASURED, METRICS_NOT_FINITE, Overdue, of_evaluation

POOL = "pool"  # the operator's own site: its trainers serve all unowned devices
SCHEMA = 1  # the schema that this release writes
READS = (1,)  # the schemas that it reads: also those of the releases before and after it

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# Ids of tasks and attempts, without the separators used in blob names and in the ledger.
Id = Annotated[str, Field(pattern=r"^[^|.]{1,200}$")]
Outcome = Literal["applied", "buffered", "refused", "given_up", "dead"]
Goal = Literal["min", "max"]  # whether lower or higher values of a metric are better
Sends = Literal["model", "delta"]  # x_new, or x_new - x_tau in place of its parameters
# Most devices that a trainer may own: a longer list might exceed the coordinators' size limit.
OWNED = 50_000
# Most metrics in a device's answer to an evaluation, and the largest sum, weight and mean that
# count: their squares stay finite.
METRICS = 100
LARGEST = 1e30
METRIC_CHARS = 200  # of a metric's name, as of any name
# Most quarantined devices, and characters of a reason, as the scheduler reads them at every look.
QUARANTINED = 1000
WHY_QUARANTINED = 100
A = TypeVar("A", bound="Message")
B = TypeVar("B", bound="Message")
C = TypeVar("C", bound="Message")
D = TypeVar("D", bound="Message")
E = TypeVar("E", bound="Message")
F = TypeVar("F", bound="Message")
OUTCOMES: tuple[Outcome, ...] = ("applied", "buffered", "refused", "given_up", "dead")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A model in one of the formats of :mod:`fedstream.core.formats`.

    ``digest``: of the encoded model before compression, so that the digest doesn't depend on the
    compressor's release. Devices report it as the digest of x_tau.
    """

    format: str
    size: int  # bytes of the blob
    digest: str

    @property
    def text(self) -> str:
        """The text form in blobs and in the head."""
        return f"{self.format} {self.size} {self.digest}"

    @classmethod
    def parsed(cls, text: bytes) -> Encoded:
        """Parse :attr:`text`."""
        format_, size, digest = text.decode().split(" ")
        return cls(format_, int(size), digest)


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kind: ClassVar[str]

    def encode(self, **instead: object) -> bytes:
        """The message as the bytes of a stream entry; ``instead``: other values for some fields."""
        return _encoded(self.kind, {**self.__dict__, **instead} if instead else self.__dict__)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode a message of this kind. Raises BadMessage."""
        return decode(data, cls)


def _encoded(kind: str, fields: Mapping[str, object]) -> bytes:
    packed = msgpack.packb(
        {
            "v": SCHEMA,
            "k": kind,
            **{name: value for name, value in fields.items() if value is not None},
        },
        default=_plain,
        unicode_errors="replace",  # a user's file name may not be valid text
    )
    assert isinstance(packed, bytes)  # noqa: S101  (packb's type is Any)
    return packed


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return dict(value.__dict__)
    raise TypeError(f"{type(value).__name__} can't be part of a message")


class Assignment(Message):
    """A task for a trainer: device, length and seed, and in rounds the version."""

    kind: ClassVar[str] = "task"
    task: Id
    device: Count
    seed: Count
    steps: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    version: Count | None = None  # rounds: train from this version
    # Rounds: seconds since 1970 by Redis's clock, after which no answer counts.
    deadline: float | None = None


_ASSIGNED = tuple(Assignment.model_fields)


class Evaluation(Message):
    """A task to measure a version on a device's test data; it travels as an Assignment does.

    The version's model can be read until the deadline, under ``blob``.
    """

    kind: ClassVar[str] = "evaluation"
    task: Id
    device: Count
    version: Count
    deadline: float  # seconds since 1970 by Redis's clock, after which no answer counts
    digest: Name  # of the model in float32
    blob: Name  # the model's name
    size: Count  # bytes of its blob
    chunks: Count | None = None  # of its blob
    # The blob's format, and the digest by which devices request the model if it isn't `digest`.
    format: Name = "f32"
    given: Name | None = None

    @property
    def encoded(self) -> Encoded | None:
        """The description of an encoded blob; None: the model's own bytes."""
        return None if self.format == "f32" else Encoded(self.format, self.size, self.base)

    @property
    def base(self) -> str:
        """The digest by which devices request the model, and which their answers name."""
        return self.given or self.digest


class Trigger(Assignment):
    """A request for a task, by the scheduler or by an anarchic device itself."""

    kind: ClassVar[str] = "trigger"
    why: str = ""
    origin: Name = "scheduler"  # or the trainer that asked for it

    def assignment(self) -> bytes:
        """The requested task, as the bytes of a stream entry."""
        mine = self.__dict__
        return _encoded(Assignment.kind, {name: mine[name] for name in _ASSIGNED})


class CloseRound(Message):
    """A request to end a version's round, and to give up the round's unanswered tasks."""

    kind: ClassVar[str] = "close_round"
    version: Count
    tasks: tuple[Id, ...]
    why: str
    drops: tuple[Count, ...] = ()  # see RoundEnd


class Withdraw(Message):
    """A request to give up tasks that are still unanswered."""

    kind: ClassVar[str] = "withdraw"
    tasks: tuple[Id, ...]
    why: Overdue


class Upload(Message):
    """An update: a device trained x_tau into x_new, which lies in a blob."""

    kind: ClassVar[str] = "upload"
    task: Id
    attempt: Id
    device: Count
    trainer: Name
    tau: Count
    base: Name  # digest of x_tau
    layout: Name  # signature
    digest: Name
    size: Count  # bytes sent, which the digest covers
    samples: Count  # in the device's data
    steps: Count  # H, as performed
    lr: float  # gamma
    loss: float | None = None  # mean training loss over the steps
    seconds: float = 0.0  # the device's time
    seed: int | None = None  # of the training, from the task
    sends: Sends = "model"
    # Admission overwrites the next two: a trainer's values are ignored.
    site: Name = POOL  # of the inbox that the update came through
    handed: Count | None = None  # the newest version when the task was handed out; None: trusted
    # Chunks of its blob; None: an earlier release sent it: assume this release's chunk size.
    chunks: Count | None = None
    format: Annotated[str, Field(max_length=40)] = "f32"  # a wire format's name
    # Claimed samples if the updater counts fewer; a trainer's value is ignored.
    claimed: Count | None = None
    # In a private run, a fedstream.private.sealing.SealedUpdate: the mask's seed, for the helper.
    sealed: Annotated[bytes, Field(max_length=4096)] | None = None

    @property
    def blob(self) -> str:
        """The blob's name, derived so that no site can name another site's blob."""
        return f"{self.site}/{self.task}.{self.attempt}"

    @property
    def since(self) -> int:
        """The version from which staleness counts: tau, or for untrusted sites at most ``handed``.

        So a lying device can't appear fresher than its task.
        """
        return self.tau if self.handed is None else min(self.tau, self.handed)


class GiveUp(Message):
    """Notice that a device will not finish a task."""

    kind: ClassVar[str] = "give_up"
    task: Id
    attempt: Id
    device: Count
    trainer: Name
    reason: Name
    failing: Count = 0  # as in :class:`Presence`


Sum = tuple[float, Annotated[float, Field(gt=0)]]
"""A metric's sum over a device's test data, and the sum of the weights: its mean is the ratio."""


def are_usable(sums: Mapping[str, Sum]) -> bool:
    """Whether there are metrics, all of them finite and of a usable size."""
    return bool(sums) and all(  # False for NaN
        abs(total) <= LARGEST
        and 1 / LARGEST <= weight <= LARGEST
        and abs(total / weight) <= LARGEST
        for total, weight in sums.values()
    )


class Measured(Message):
    """A device's answer to an evaluation: its metrics' sums, or why there are none."""

    kind: ClassVar[str] = "measured"
    task: Id
    attempt: Id
    device: Count
    trainer: Name
    version: Count
    base: Name  # digest of the version's model, as given
    samples: Count = 0  # in the device's test data
    sums: Annotated[dict[Name, Sum], Field(max_length=METRICS)] = Field(default_factory=dict)
    reason: Name | None = None  # why the device was not measured; None: it was
    seconds: float = 0.0  # the device's time
    # Admission overwrites the next two: a trainer's values are ignored.
    site: Name = POOL  # of the inbox that the answer came through
    trusted: bool = False  # whether the site is

    @property
    def outcome(self) -> str:
        """The outcome under which the device's evaluation counts, by the answer's content."""
        outcome = of_evaluation(self.reason)
        is_of_use = outcome != MEASURED or are_usable(self.sums)
        return outcome if is_of_use else METRICS_NOT_FINITE


class Presence(Message):
    """A trainer's announcement: it is alive and owns exactly these devices, or it leaves."""

    kind: ClassVar[str] = "presence"
    trainer: Name
    owns: Annotated[tuple[Count, ...], Field(max_length=OWNED)] = ()
    leaves: bool = False
    host: Annotated[str, Field(max_length=255)] = ""
    pid: Count = 0
    device: Count | None = None  # the device in training
    answers: Count = 0  # answers so far
    # Tasks given up in a row if the trainer, not the devices, is the likely cause; else 0.
    failing: Count = 0
    # Digest of the list of devices, if the trainer wants to send heartbeats instead of the list.
    digest: Name | None = None
    concurrent: bool = False  # whether the devices work at the same time, as at a gateway


class Heartbeat(Message):
    """A trainer is alive and owns its last announced devices; see :class:`Presence`.

    A trainer sends heartbeats only while a coordinator has noted the digest of its devices, as that
    coordinator's release then reads heartbeats.
    """

    kind: ClassVar[str] = "heartbeat"
    trainer: Name
    owns: Name  # the digest of the list
    device: Count | None = None
    answers: Count = 0
    failing: Count = 0


class ArrivedDevices(Message):
    """Devices have come to a replica of a gateway.

    Without devices, the message is a greeting: the replica is alive.
    """

    kind: ClassVar[str] = "seating"
    gateway: Name
    devices: Annotated[tuple[Count, ...], Field(max_length=1000)]


class HandOver(Message):
    """A replica of a gateway hands tasks over to the replica that their devices came to."""

    kind: ClassVar[str] = "hand_over"
    gateway: Name  # the replica that gets the tasks
    stream: Name  # of their entries
    entries: Annotated[tuple[Name, ...], Field(min_length=1)]


class RoundEnd(Message):
    """A control entry in the queue: no more updates will arrive for this version."""

    kind: ClassVar[str] = "round_end"
    version: Count
    why: str = ""
    # (): make a version. Otherwise drop all buffered answers, provided that the first of them are
    # from these devices in this order; if not, the entry does nothing. So a repeated entry drops
    # later answers only if the same devices gave the first of them, in the same order.
    drops: tuple[Count, ...] = ()


class SetQuarantine(Message):
    """A control entry in the queue: refuse these devices' later updates, or stop refusing them."""

    kind: ClassVar[str] = "set_quarantine"
    devices: Annotated[tuple[Count, ...], Field(min_length=1, max_length=QUARANTINED)]
    release: bool = False
    why: Annotated[str, Field(max_length=WHY_QUARANTINED)] = ""


class DevicesEvaluated(Message):
    """A control entry in the queue: an evaluation on the devices has ended."""

    kind: ClassVar[str] = "devices_evaluated"
    evaluation: Id  # ordered by time: an earlier one has ended before
    version: Count  # the version that was evaluated
    base: Name  # digest of its model, as given
    devices: Count  # that were chosen
    outcomes: dict[Name, Count]  # of the devices, by outcome; they add up to `devices`
    # The sums over all measured devices, and the metrics that follow from them, with their spread.
    # Both are empty if fewer devices than `evaluator.on_devices.min_devices` were measured.
    sums: Annotated[dict[Name, Sum], Field(max_length=METRICS)] = Field(default_factory=dict)
    metrics: dict[Name, float] = Field(default_factory=dict)

    @property
    def summary(self) -> str:
        """What became of the devices, for people."""
        found = f"{self.outcomes.get(MEASURED, 0)} of {self.devices} devices measured"
        others = [f"{n} {name}" for name, n in self.outcomes.items() if name != MEASURED]
        if others:
            found += f" ({', '.join(others)})"
        return found if self.metrics else f"{found}: too few for metrics"


class StepProposed(Message):
    """A control entry in the queue: scale the rule's step, as held-out data say.

    ``scores`` are pairs of a scale and its model's value of ``metric``.
    """

    kind: ClassVar[str] = "step_proposed"
    at: Count  # the last of the versions that were made again at other scales
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]  # of the configured rate
    metric: Name
    scores: Annotated[tuple[tuple[float, float], ...], Field(max_length=100)] = ()


class Quarantine(BaseModel):
    """Devices whose updates are refused, by one control entry."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    devices: tuple[Count, ...]
    why: str = ""
    since: float  # seconds since 1970, when the updater processed the entry
    version: Count  # the newest version then


class Contribution(BaseModel):
    """One update in a version."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    task: Id
    device: Count
    tau: Count
    staleness: Count
    weight: float
    samples: Count
    steps: Count
    loss: float | None = None


class Version(Message):
    """A published version of the global model."""

    kind: ClassVar[str] = "version"
    version: Count
    time: float  # seconds since 1970, the updater's clock
    epoch: Count
    parent: Count | None = None  # None: version 0, or a version published again
    digest: Name
    blob: Name  # the model's name; unwritten if a later version was committed with it
    size: Count  # bytes of its blob
    updates: tuple[Contribution, ...] = ()
    chunks: Count | None = None  # of its blob, as in an upload
    # The blob's format, and the digest by which devices request the model if it isn't `digest`.
    format: Name = "f32"
    given: Name | None = None

    @property
    def encoded(self) -> Encoded | None:
        """The description of an encoded blob; None: the model's own bytes."""
        if self.format == "f32":
            return None
        return Encoded(self.format, self.size, self.given or self.digest)


class Event(Message):
    """An event for observers. ``what`` determines which fields are set."""

    kind: ClassVar[str] = "event"
    # outcome, stray, evaluation, devices_evaluated, step_scaled, suspect, trainer, run, error
    what: Name
    service: Name
    time: float
    task: str | None = None
    device: Count | None = None
    outcome: Outcome | None = None
    reason: str | None = None
    version: Count | None = None
    staleness: Count | None = None
    weight: float | None = None
    metrics: dict[str, float] | None = None
    text: str | None = None
    site: str | None = None  # site of the trainer or task concerned


class Dead(Message):
    """An entry that could not be processed, kept for an operator."""

    kind: ClassVar[str] = "dead"
    stream: Name
    entry: Name
    reason: str
    time: float
    deliveries: Count = 0
    data: bytes = b""


@overload
def decode(data: bytes, first: type[A], /) -> A: ...
@overload
def decode(data: bytes, first: type[A], second: type[B], /) -> A | B: ...
@overload
def decode(data: bytes, first: type[A], second: type[B], third: type[C], /) -> A | B | C: ...
@overload
def decode(
    data: bytes, first: type[A], second: type[B], third: type[C], fourth: type[D], /
) -> A | B | C | D: ...
@overload
def decode(
    data: bytes,
    first: type[A],
    second: type[B],
    third: type[C],
    fourth: type[D],
    fifth: type[E],
    /,
) -> A | B | C | D | E: ...
@overload
def decode(
    data: bytes,
    first: type[A],
    second: type[B],
    third: type[C],
    fourth: type[D],
    fifth: type[E],
    sixth: type[F],
    /,
) -> A | B | C | D | E | F: ...
@overload
def decode(data: bytes, /, *kinds: type[Message]) -> Message: ...
def decode(data: bytes, /, *kinds: type[Message]) -> Message:
    """Decode a message, which must be one of ``kinds``. Raises BadMessage."""
    try:
        fields = msgpack.unpackb(data, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadMessage(f"not msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(fields, dict) or type(fields.get("v")) is not int:
        raise BadMessage("not a message: expected a map with the schema version 'v'")
    if fields["v"] not in READS:
        raise BadMessage(f"schema {fields['v']}, but this release reads {_listed(READS)}")
    named = fields.get("k")
    for cls in kinds:
        if cls.kind == named:
            break
    else:
        expected = " or ".join(kind.kind for kind in kinds)
        # reprlib, since foreign data may be very long, or nested too deeply for repr().
        raise BadMessage(f"a message of kind {reprlib.repr(named)}, expected {expected}")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise BadMessage(f"{cls.kind}: {first_wrong(error)}") from error


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def first_wrong(error: ValidationError) -> str:
    """Describe the first invalid field."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def task_id(time_ms: int, entropy: bytes | None = None) -> str:
    """Make a UUIDv7 (RFC 9562): ordered by time, unique by 74 random bits."""
    noise = int.from_bytes(entropy or os.urandom(10), "big") & ((1 << 74) - 1)
    number = (time_ms & ((1 << 48) - 1)) << 80
    number |= 0x7 << 76 | (noise >> 62) << 64 | 0b10 << 62 | noise & ((1 << 62) - 1)
    text = struct.pack(">QQ", number >> 64, number & ((1 << 64) - 1)).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_TASK_ID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def time_of(task: str) -> float | None:
    """The creation time of a task id, in seconds since 1970; None if it is not a UUIDv7."""
    found = _TASK_ID.fullmatch(task)
    return int(found[1] + found[2], 16) / 1000 if found else None
