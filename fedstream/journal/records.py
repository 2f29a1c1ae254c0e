"""The messages of a journal's records, with the bounds that reading checks."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeGuard

from pydantic import Field

from fedstream.core.messages import (
    Contribution,
    Count,
    Goal,
    Message,
    Name,
    Outcome,
    Quarantine,
    Sum,
    Upload,
)

SUFFIX = ".journal"
VECTORS = "device vectors"  # needed to read a segment that has any
QUARANTINES = "quarantines"  # needed to read a segment that may have any
WIRE_FORMATS = "wire formats"  # needed to read a segment that may have encoded updates
DROPPED_ROUNDS = "dropped rounds"  # needed to read a segment that may have any
UNSHARED = "unshared tensors"  # needed to read a segment whose layout has any
EVALUATIONS = "evaluations on devices"  # needed to read a segment that may have any
PRIVATE_SUMS = "private sums"  # needed to read a segment of a private run
STEP_SCALES = "step scales"  # needed to read a segment whose rule adapts its step
# The needs that this release can meet.
KNOWN = frozenset(
    {
        VECTORS,
        QUARANTINES,
        WIRE_FORMATS,
        DROPPED_ROUNDS,
        UNSHARED,
        EVALUATIONS,
        PRIVATE_SUMS,
        STEP_SCALES,
    }
)

_YEAR_9999 = 253_402_300_799.0

# Later values are not times: no calendar has them.
Time = Annotated[float, Field(ge=0, le=_YEAR_9999)]  # seconds since 1970; in a simulation, since 0
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Average = Annotated[float, Field(ge=0, allow_inf_nan=False)]
StepScale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Epoch = Annotated[int, Field(ge=0, lt=10**8)]  # eight digits: names sort by it
Number = Annotated[int, Field(ge=0, lt=10**6)]
DeviceCount = Annotated[int, Field(ge=0, lt=2**31)]  # most devices
SegmentName = Annotated[str, Field(pattern=r"^[0-9]{8}-[0-9]{6}\.journal$")]
Chain = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # SHA-256, in hexadecimal
Counts: TypeAlias = dict[str, Count]


Size = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sizes: TypeAlias = tuple[Size, Size, Size]
"""How far an update alone would move parameters, buffers and controls."""
Counted: TypeAlias = Sizes | tuple[()]  # (): not counted towards what is usual


class SegmentHead(Message):
    """The first record of a segment: run, predecessor and rule."""

    kind: ClassVar[str] = "segment"
    needs: tuple[Name, ...] = ()  # features that a reader must support
    epoch: Epoch
    number: Number  # within the epoch
    predecessor: SegmentName | None = None
    cut: Count | None = None  # bytes of the predecessor that count
    follows: Chain | None = None  # the chain's value there
    lineage: Name  # drawn when the run began, and the same ever since
    run: Name
    task: Name
    devices: DeviceCount
    versions: Count  # the run ends with this one
    seed: Count
    created: Time  # of the run
    strategy: dict[str, Any]  # name and parameters
    layout: bytes
    release: str  # of numpy, and the machine: they may explain a different bit
    time: Time  # of the segment
    start: str = ""  # source and digest of version 0; '': drawn from the seed
    # The files that define the strategy's parts, where these aren't built in: by key of `strategy`
    # (name, staleness.kind), the SHA-256.
    sources: dict[Name, Chain] = Field(default_factory=dict)
    # The same for parts that no replay needs (solvers, partition, policy), by configuration key.
    parts: dict[Name, Chain] = Field(default_factory=dict)
    format: Name = "f32"  # format of published versions
    # Of metrics, as the task declares them; None: by a release that doesn't say, or none.
    goal: dict[Name, Goal] | None = None
    stop_metric: Name | None = None  # that may end the run

    @property
    def masked(self) -> bool:
        """Whether updates are masked, as in a private run."""
        return PRIVATE_SUMS in self.needs


class Standing(Message):
    """The state of the run, second record of a segment. Payload: the model, then the memory."""

    kind: ClassVar[str] = "standing"
    why: Literal["begun", "continued", "adopted"]
    version: Count
    digest: Name
    time: Time  # of the version
    arrivals: Count = 0  # in the strategy's memory
    weight: Weight = 0.0  # summed there
    memory: Name | None = None  # digest of its model
    held: tuple[Contribution, ...] = ()
    mean_staleness: Average = 0.0
    scale: StepScale = 1.0  # of the rule's step
    scaled_at: Count = 0  # the version up to which updates decided on it
    sizes: tuple[Sizes, ...] = ()  # of the newest updates, oldest first
    samples: tuple[Count, ...] = ()  # that the newest updates counted with, oldest first
    journalled: Counts = Field(default_factory=dict)  # ends of the journal's tasks, up to here
    counts: Counts = Field(default_factory=dict)  # the run's other counts, as Redis last had them
    done: tuple[tuple[Any, ...], ...] = ()  # the fields of recent `End`s, oldest first
    forgotten: Count = 0  # the ends of tasks before this version may be forgotten
    rounds: tuple[str, ...] = ()  # recent control entries, oldest first
    made: tuple[Contribution, ...] = ()  # the updates in the version
    finished: str | None = None  # why the run is over
    here: tuple[Count, ...] = ()  # devices whose vectors are the records that follow
    again: tuple[Count, ...] = ()  # those that did not change, but whose segment was deleted
    elsewhere: tuple[tuple[Count, SegmentName], ...] = ()  # where the others' vectors are
    numbers: tuple[tuple[Count, Count], ...] = ()  # of devices, in the strategy's order
    quarantines: Count = 0  # control entries that changed a quarantine, up to here
    quarantined: tuple[Quarantine, ...] = ()
    evaluation: str = ""  # the newest evaluation on the devices that has a record
    # Of a private run: the sealed updates of the batch that is not opened, the last ones of `held`;
    # whether it is closed; the buckets opened before it; for each device the numbers of its
    # `PrivacyAccount`; the sums opened in all, the batches that were dropped, and the devices that
    # sit out after the last sums.
    sealed: tuple[bytes, ...] = ()
    closed: bool = False
    opened: Count = 0
    accounts: tuple[tuple[Count, Count, Count, Count], ...] = ()
    sums: Count = 0
    dropped: Count = 0
    recent: tuple[tuple[Count, ...], ...] = ()


class DeviceVector(Message):
    """A strategy's vector for a device. Payload: as many values as parameters."""

    kind: ClassVar[str] = "device_vector"
    device: Count
    digest: Name


class Taken(Message):
    """One update and its outcome. Payload: its received bytes, if recorded."""

    kind: ClassVar[str] = "taken"
    entry: Name  # of the queue
    upload: Upload
    outcome: Outcome
    reason: str = ""
    staleness: Count
    weight: Weight = 0.0  # exactly as it was used
    version: Count  # after it
    digest: Name | None = None  # of the version, if this made one
    given: Name | None = None  # digest of the published model, if encoded
    time: Time  # when
    received: Time  # when it was admitted, by the queue's clock
    finished: str | None = None  # why this ended the run, if it did
    counts: Counts = Field(default_factory=dict)  # the run's other counts, before this
    sizes: Counted = ()  # as counted towards what is usual (journal/norms.py)


class RoundClosed(Message):
    """A queue entry that ended a round."""

    kind: ClassVar[str] = "round_closed"
    entry: Name
    round: Count  # the version that it was for
    late: bool = False  # the run, or a round to be dropped, was already over: it ends nothing
    dropped: Count = 0  # updates in the round, if it was to end without using them
    why: str = ""
    version: Count  # after it
    digest: Name | None = None  # of the version, if this made one
    given: Name | None = None  # digest of the published model, if encoded
    time: Time
    received: Time
    finished: str | None = None
    counts: Counts = Field(default_factory=dict)


class QuarantineSet(Message):
    """A queue entry that quarantined or released devices."""

    kind: ClassVar[str] = "quarantine_set"
    digest: ClassVar[None] = None  # it never makes a version,
    given: ClassVar[None] = None
    finished: ClassVar[None] = None  # and never ends the run
    entry: Name
    devices: tuple[Count, ...]  # those for which it changed something
    release: bool = False
    why: str = ""
    version: Count  # the newest one
    time: Time  # when; from here on, their updates are refused
    received: Time
    counts: Counts = Field(default_factory=dict)


class EvaluationEnded(Message):
    """A queue entry that ended an evaluation on the devices; it changes no model."""

    kind: ClassVar[str] = "evaluation_ended"
    digest: ClassVar[None] = None  # it never makes a version,
    given: ClassVar[None] = None
    finished: ClassVar[None] = None  # and never ends the run
    entry: Name
    evaluation: Name
    measured: Count  # the version that was evaluated
    base: Name  # digest of its model, as given
    devices: Count  # that were chosen
    outcomes: Counts  # of the devices
    sums: dict[Name, Sum] = Field(default_factory=dict)  # over the measured devices
    metrics: dict[Name, float] = Field(default_factory=dict)
    version: Count  # the newest one
    time: Time
    received: Time
    counts: Counts = Field(default_factory=dict)


class StepScaled(Message):
    """A queue entry that scaled the rule's step; it changes no model itself."""

    kind: ClassVar[str] = "step_scaled"
    digest: ClassVar[None] = None  # it never makes a version,
    given: ClassVar[None] = None
    finished: ClassVar[None] = None  # and never ends the run
    entry: Name
    at: Count  # the last of the versions whose updates were tried at other scales
    scale: StepScale  # of the configured rate, for later updates
    key: Name  # of the rate in the strategy,
    rate: StepScale  # and the rate at this scale
    metric: Name
    scores: tuple[tuple[float, float], ...] = ()  # pairs of a scale and its value of the metric
    version: Count  # the newest one
    time: Time
    received: Time
    counts: Counts = Field(default_factory=dict)


class SumOpened(Message):
    """The sum of a private batch, as the helper opened or refused it. Payload: the helper's masks.

    The batch has the newest buffered updates before this record. It makes a version, or is the next
    bucket of one, or is dropped; the version is then that of the buckets before, if a round ended.
    """

    kind: ClassVar[str] = "sum_opened"
    entry: ClassVar[str] = ""  # of no entry of the queue
    intent: Chain  # identifies the batch to the helper
    updates: Count  # in the batch
    reason: str = ""  # why the batch was dropped
    format: Name  # of the masks
    masks: Name | None = None  # their digest; None: the helper opened nothing
    version: Count  # after it
    digest: Name | None = None  # of the version, if this made one
    given: Name | None = None  # digest of the published model, if encoded
    time: Time
    finished: str | None = None  # why this ended the run, if it did
    counts: Counts = Field(default_factory=dict)

    @property
    def received(self) -> float:
        """The time of the record: the sum waited in no queue."""
        return self.time


# Of an entry of the queue, or of the batch that entries completed.
EntryRecord: TypeAlias = (
    Taken | RoundClosed | QuarantineSet | EvaluationEnded | StepScaled | SumOpened
)
KINDS: tuple[type[Message], ...] = (
    SegmentHead,
    Standing,
    DeviceVector,
    Taken,
    RoundClosed,
    QuarantineSet,
    EvaluationEnded,
    StepScaled,
    SumOpened,
)


def name_of(epoch: int, number: int) -> str:
    """A segment's file name; these names sort by age."""
    return f"{epoch:08d}-{number:06d}{SUFFIX}"


def dropped_by(message: Message) -> int:
    """The number of the newest buffered updates that a record drops."""
    if isinstance(message, SumOpened):
        return message.updates if message.reason else 0
    return message.dropped if isinstance(message, RoundClosed) else 0


def is_used(message: Message) -> TypeGuard[Taken]:
    """Whether a record is of an update that went into a model."""
    return isinstance(message, Taken) and message.outcome in ("applied", "buffered")
