"""What the services say to each other: small, frozen, versioned messages in msgpack.

A stream entry has one field ``m``: a msgpack map with the schema version ``v``, the kind ``k`` and
the message's fields. Weights never ride in a message; it names a blob.

Services one release apart understand each other. A reader ignores fields that it does not know, in
nested maps as well, and fills in defaults for those that are missing; scripts pick the fields they
need. So a release may add a field that has a default, and stop reading one that it still writes.
Whatever else changes (a field that is required, renamed, gone, or means something else; a new value
of a closed set, such as an outcome) takes a new schema in two releases: the first one reads it
(``READS``) and goes on writing the old one, the next one writes it (``SCHEMA``) and reads both. A
new kind is read one release before it is written, or is buried as unreadable without harm. Triggers
and tasks, which scripts unpack, never have a field of bytes: Redis's cmsgpack knows none. Bytes of
every kind are kept in ``tests/data/messages``: a test reads them, and compares what is written.
"""

from __future__ import annotations

import re
import reprlib
import secrets
import struct
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, overload

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedstream.broker.errors import BadMessage
from fedstream.broker.keys import POOL

SCHEMA = 1  # what this release writes
READS = (1,)  # and what it reads: also what the releases before and after it write

Count = Annotated[int, Field(ge=0)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
# Of tasks and attempts: without the signs that join them in blobs' names and in the ledger.
Id = Annotated[str, Field(pattern=r"^[^|.]{1,200}$")]
Outcome = Literal["applied", "buffered", "refused", "given_up", "dead"]
Overdue = Literal["timed out", "deadline passed"]  # of tasks: of its own, and of a round's
Sends = Literal["model", "delta"]  # x_new, or x_new - x_tau in place of its parameters
# Devices that a trainer owns at most: what names more may be longer than coordinators take in.
OWNED = 50_000
A = TypeVar("A", bound="Message")
B = TypeVar("B", bound="Message")
C = TypeVar("C", bound="Message")
OUTCOMES: tuple[Outcome, ...] = ("applied", "buffered", "refused", "given_up", "dead")


class Message(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    kind: ClassVar[str]

    def encode(self) -> bytes:
        """The message as the bytes of a stream entry."""
        fields = {name: value for name, value in self.__dict__.items() if value is not None}
        packed = msgpack.packb(
            {"v": SCHEMA, "k": self.kind, **fields},
            default=_plain,
            unicode_errors="replace",  # a user's file name may hold what is no text
        )
        assert isinstance(packed, bytes)  # noqa: S101  (packb's type is Any)
        return packed

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The message of this kind in ``data``. Raises BadMessage."""
        return decode(data, cls)


def _plain(value: object) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return dict(value.__dict__)
    raise TypeError(f"{type(value).__name__} can't ride in a message")


class Task(Message):
    """Train: which device, how long, from which seed (and, in rounds, from which version)."""

    kind: ClassVar[str] = "task"
    task: Id
    device: Count
    seed: Count
    steps: Annotated[int, Field(ge=1)] | None = None
    epochs: Annotated[int, Field(ge=1)] | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    version: Count | None = None  # rounds: train from this version
    deadline: float | None = None  # rounds: seconds since 1970 after which no answer counts

    @classmethod
    def of(cls, trigger: Trigger) -> Task:
        """The task that a trigger asks for."""
        return cls(**{name: getattr(trigger, name) for name in cls.model_fields})


class Trigger(Task):
    """A task is wanted: by the scheduler, or by an anarchic device itself."""

    kind: ClassVar[str] = "trigger"
    why: str = ""
    origin: Name = "scheduler"  # else the trainer that asked for it


class CloseRound(Message):
    """The round on top of a version ends now; its unanswered tasks are given up."""

    kind: ClassVar[str] = "close_round"
    version: Count
    tasks: tuple[Id, ...]
    why: str


class Withdraw(Message):
    """Nobody waits for these tasks any more: those that were not answered are given up."""

    kind: ClassVar[str] = "withdraw"
    tasks: tuple[Id, ...]
    why: Overdue


class Upload(Message):
    """A device has trained x_tau into x_new, which lies in a blob."""

    kind: ClassVar[str] = "upload"
    task: Id
    attempt: Id
    device: Count
    trainer: Name
    tau: Count
    base: Name  # digest of x_tau
    layout: Name  # signature
    digest: Name
    size: Count  # bytes
    samples: Count  # in the device's data
    steps: Count  # H, as done
    lr: float  # gamma
    loss: float | None = None  # mean training loss over the steps
    seconds: float = 0.0  # that the device took
    seed: int | None = None  # of its training, which the task drew
    sends: Sends = "model"
    # What a trainer says here counts for nothing: admission writes what it knows.
    site: Name = POOL  # by the inbox that it came through
    handed: Count | None = None  # the newest version when the task was handed out; None: trusted

    @property
    def blob(self) -> str:
        """The blob's name. It follows from site, task and attempt: nobody can name another's."""
        return f"{self.site}/{self.task}.{self.attempt}"

    @property
    def since(self) -> int:
        """The version from which its staleness counts: of a site that is not trusted, not tau.

        A device that does not tell the truth could not be fresher than its task.
        """
        return self.tau if self.handed is None else min(self.tau, self.handed)


class GiveUp(Message):
    """A device will not finish this task."""

    kind: ClassVar[str] = "give_up"
    task: Id
    attempt: Id
    device: Count
    trainer: Name
    reason: Name


class Presence(Message):
    """A trainer is there, owns these devices and no others; or it leaves."""

    kind: ClassVar[str] = "presence"
    trainer: Name
    owns: Annotated[tuple[Count, ...], Field(max_length=OWNED)] = ()
    leaves: bool = False
    host: Annotated[str, Field(max_length=255)] = ""
    pid: Count = 0
    device: Count | None = None  # that it trains for now
    answers: Count = 0  # that it has given


class RoundEnd(Message):
    """A control entry of the queue: what arrived for this version is all there will be."""

    kind: ClassVar[str] = "round_end"
    version: Count
    why: str = ""


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
    """A version of the global model was published."""

    kind: ClassVar[str] = "version"
    version: Count
    time: float  # seconds since 1970, the updater's clock
    epoch: Count
    parent: Count | None = None  # of version 0, and of one that was published again
    digest: Name
    blob: Name
    size: Count
    updates: tuple[Contribution, ...] = ()


class Event(Message):
    """Something that an observer may want to know. ``what`` says which fields are there."""

    kind: ClassVar[str] = "event"
    what: Name  # outcome, stray, evaluation, trainer, run, error
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
    site: str | None = None  # of an error, whose trainer said it; of what is refused or dead, whose


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
def decode(data: bytes, /, *kinds: type[Message]) -> Message: ...
def decode(data: bytes, /, *kinds: type[Message]) -> Message:
    """The message in ``data``, which must be one of ``kinds``. Raises BadMessage."""
    try:
        fields = msgpack.unpackb(data, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise BadMessage(f"not msgpack: {str(error) or type(error).__name__}") from error
    if not isinstance(fields, dict) or type(fields.get("v")) is not int:
        raise BadMessage("not a message: a map with the schema version 'v' was expected")
    if fields["v"] not in READS:
        raise BadMessage(f"schema {fields['v']}, but this release reads {_listed(READS)}")
    cls = next((kind for kind in kinds if kind.kind == fields.get("k")), None)
    if cls is None:
        expected = " or ".join(kind.kind for kind in kinds)
        # Not its repr: what a stranger wrote may be deeper than that goes, or very long.
        raise BadMessage(f"a message of kind {reprlib.repr(fields.get('k'))}, expected {expected}")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise BadMessage(f"{cls.kind}: {first_wrong(error)}") from error


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def first_wrong(error: ValidationError) -> str:
    """The first field that is wrong, and why."""
    first = error.errors()[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def task_id(time_ms: int, entropy: bytes | None = None) -> str:
    """A UUIDv7 (RFC 9562): ordered by time, unique by 74 random bits."""
    noise = int.from_bytes(entropy or secrets.token_bytes(10), "big") & ((1 << 74) - 1)
    number = (time_ms & ((1 << 48) - 1)) << 80
    number |= 0x7 << 76 | (noise >> 62) << 64 | 0b10 << 62 | noise & ((1 << 62) - 1)
    text = struct.pack(">QQ", number >> 64, number & ((1 << 64) - 1)).hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


_TASK_ID = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def time_of(task: str) -> float | None:
    """When a task's id was made, in seconds since 1970; None if it is no UUIDv7."""
    found = _TASK_ID.fullmatch(task)
    return int(found[1] + found[2], 16) / 1000 if found else None
