"""The messages of the protocol: JSON bodies, and the report of an update in a header.

Messages are frozen and strict: numbers are finite and never text. Unknown fields are ignored and
new fields need a default, so that devices and gateways of different releases understand each other.
A field with a default may also be dropped. Any other change needs a new version of the protocol,
with new routes.
"""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedstream.core.digest import DIGEST_PATTERN
from fedstream.core.errors import FedstreamError
from fedstream.core.messages import LARGEST, METRICS, Name, Sends, first_wrong

BODY: Final = 1 << 16  # most bytes of a JSON body
ATTESTATION: Final = 32 << 10  # most bytes of an attestation
WAIT_S: Final = 50.0  # longest that a check-in may wait for a task
KEY_CHARS: Final = 400  # of a public key in PEM; one of P-256 takes 178
AUTHORITY: Final = r"[a-z0-9._:\[\]-]{1,260}"  # a host, perhaps with a port
ATTEMPT_DIGITS: Final = 12  # hexadecimal
# Ids are parts of URLs; fedstream's task ids are UUIDs.
TASK_ID: Final = r"[A-Za-z0-9_-]{1,64}"
ATTEMPT_ID: Final = rf"[0-9a-f]{{{ATTEMPT_DIGITS}}}"

# Routes, relative to the gateway's URL.
ENROL_ROUTE: Final = "/v1/devices"
TOKEN_ROUTE: Final = "/v1/token"  # noqa: S105  (a path)
CHECK_IN_ROUTE: Final = "/v1/check-in"
MODEL_ROUTE: Final = "/v1/models/{digest}"
CHANGES_ROUTE: Final = "/v1/models/{digest}/changes/{has}"
HEARTBEAT_ROUTE: Final = "/v1/tasks/{task}/heartbeat"
GIVE_UP_ROUTE: Final = "/v1/tasks/{task}/give-up"
UPDATE_ROUTE: Final = "/v1/tasks/{task}/updates/{attempt}"
MEASUREMENT_ROUTE: Final = "/v1/tasks/{task}/measurements/{attempt}"
OPENAPI_ROUTE: Final = "/v1/openapi.json"

UrlHost = Annotated[str, Field(pattern=rf"^{AUTHORITY}$")]
TaskId = Annotated[str, Field(pattern=rf"^{TASK_ID}$")]
AttemptId = Annotated[str, Field(pattern=rf"^{ATTEMPT_ID}$")]
Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Digest = Annotated[str, Field(pattern=rf"^{DIGEST_PATTERN}$")]  # of a model or update
FormatName = Annotated[str, Field(pattern=r"^[a-z0-9.:+]{1,40}$")]  # a wire format's
Whole = Annotated[int, Field(ge=0, lt=1 << 53)]  # exact in any JSON reader
AtLeastOne = Annotated[int, Field(ge=1, lt=1 << 53)]
Seed = Annotated[int, Field(ge=0, lt=1 << 64)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UrlPath = Annotated[str, Field(pattern=r"^/[A-Za-z0-9._~/-]{1,400}$")]  # a path on the gateway
Text = Annotated[str, Field(max_length=1000)]
# A message of fedstream.private.sealing, at most 4,096 bytes, in base64.
Sealing = Annotated[
    str,
    Field(pattern=r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$", max_length=5464),
]


class BadBody(FedstreamError):
    """JSON that is not the expected message."""


class Body(BaseModel):
    """Base of all messages."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    def encode(self) -> bytes:
        """The message as JSON, ASCII only, so that it fits into a header too."""
        return self.model_dump_json(by_alias=True, ensure_ascii=True).encode()

    @classmethod
    def decode(cls, data: bytes | str) -> Self:
        """Parse a message. Raises BadBody, which names the field."""
        if len(data) > BODY:
            raise BadBody(f"{len(data)} bytes of JSON: at most {BODY} are read")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise BadBody(first_wrong(error).removeprefix(": ")[:300]) from None


class Nothing(Body):
    """A body without fields: ``{}``."""


class Problem(Body):
    """Why a request was refused."""

    error: Text  # a sentence for people
    reason: Annotated[str, Field(max_length=60)]  # for programs: one of a closed set


# enrolment and access


class Attestation(Body):
    """A third party's statement about a device, for the operator's verifier."""

    format: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,39}$")]
    data: Annotated[str, Field(max_length=4 * -(-ATTESTATION // 3))]  # base64

    @model_validator(mode="after")
    def _decodes(self) -> Attestation:
        _ = self.evidence
        return self

    @property
    def evidence(self) -> bytes:
        """The data's bytes."""
        return base64.b64decode(self.data, validate=True)


class Enrolment(Body):
    """``POST /v1/devices``: an invite, and the device's public key."""

    invite: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,64}$")]
    public_key: Annotated[str, Field(min_length=1, max_length=KEY_CHARS)]  # PEM
    attestation: Attestation | None = None


class Enrolled(Body):
    """The device's number."""

    device: Whole
    run: Annotated[str, Field(min_length=1, max_length=200)]


class Access(Body):
    """``POST /v1/token``: a token for all other requests."""

    token: Annotated[str, Field(max_length=1000)]
    expires_in: AtLeastOne  # seconds


# tasks


class CheckIn(Body):
    """``POST /v1/check-in``: a device asks for a task, and waits for one."""

    nonce: Nonce  # the same nonce gets the same answer
    eligible: bool = True
    wait_s: Annotated[float, Field(ge=0, le=WAIT_S, allow_inf_nan=False)] = WAIT_S
    # Formats of models that the device can read, the best first.
    formats: Annotated[tuple[FormatName, ...], Field(max_length=16)] = ("f32",)
    has: Digest | None = None  # digest of the device's model
    # Properties of the device's task, which must equal the run's; None: unstated, or any.
    layout: Sha256 | None = None  # signature of its model's layout
    devices: AtLeastOne | None = None  # number of devices that its data is split over
    evaluates: bool = False  # whether it can also measure models on its test data


class OfferedTask(Body):
    """The length and the seed of the training."""

    id: TaskId
    device: Whole
    seed: Seed
    steps: AtLeastOne | None = None
    epochs: AtLeastOne | None = None
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    # Seconds from the offer to the deadline. A duration and no time, as a device's clock may be
    # wrong.
    left_s: NotNegative | None = None


class OfferedModel(Body):
    """The model to train from."""

    version: Whole
    digest: Digest  # of its bytes
    size: Whole  # bytes
    format: FormatName
    url: UrlPath
    # URL of the changes since the device's model, usually fewer bytes.
    changes: UrlPath | None = None


class ExpectedUpdate(Body):
    """The requirements for the update."""

    url: UrlPath
    sends: Sends
    format: FormatName
    layout: Sha256  # signature of the run's layout
    most: AtLeastOne  # bytes


class OfferedPrivacy(Body):
    """The privacy of the run: a device answers with a masked and sealed update (docs/privacy.md).

    A device checks all of it against its own copy of the policy.
    """

    policy: Sha256  # digest of the policy
    run: Annotated[str, Field(min_length=1, max_length=200)]  # the run's lineage
    key: Sealing  # a fedstream.private.sealing.EpochKey, to which the device seals

    @classmethod
    def of(cls, policy: str, run: str, key: bytes) -> OfferedPrivacy:
        """``policy``: its text. ``key``: the EpochKey's bytes."""
        digest = hashlib.sha256(policy.encode()).hexdigest()
        return cls(policy=digest, run=run, key=base64.b64encode(key).decode())

    @property
    def epoch_key(self) -> bytes:
        """The EpochKey's bytes."""
        return base64.b64decode(self.key)


class Offer(Body):
    """A task for a device, and the id of the device's attempt."""

    task: OfferedTask
    attempt: AttemptId
    model: OfferedModel
    # The values in version 0 of frozen parameters and local tensors, which no version contains: the
    # same in all offers of a run, so that a device downloads them once. None: there are none.
    unshared: OfferedModel | None = None
    update: ExpectedUpdate
    private: OfferedPrivacy | None = None  # None: the run is not private
    heartbeat_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0


class OfferedEvaluation(Body):
    """A task to measure a model on the device's test data."""

    id: TaskId
    device: Whole
    left_s: NotNegative  # seconds from the offer to the deadline


class ExpectedMeasurement(Body):
    """The requirements for the measurement."""

    url: UrlPath
    layout: Sha256  # signature of the run's layout


class EvaluationOffer(Body):
    """An evaluation for a device that ``evaluates``, and the id of the device's attempt."""

    task: OfferedEvaluation
    attempt: AttemptId
    model: OfferedModel
    unshared: OfferedModel | None = None  # as in an Offer
    measurement: ExpectedMeasurement
    heartbeat_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5.0


class _AnyOffer(Body):
    measurement: Any = None  # only in an EvaluationOffer


def offered(data: bytes) -> Offer | EvaluationOffer:
    """Parse the offer of a task of either kind. Raises BadBody."""
    is_evaluation = _AnyOffer.decode(data).measurement is not None
    return EvaluationOffer.decode(data) if is_evaluation else Offer.decode(data)


class Beat(Body):
    """``POST /v1/tasks/{task}/heartbeat``: the device is still working."""

    attempt: AttemptId


class Advice(Body):
    """Whether to continue a task, and if not, why."""

    go_on: bool
    why: Literal["given up", "too stale", "run over"] | None = None

    @model_validator(mode="after")
    def _agree(self) -> Advice:
        if self.go_on == (self.why is not None):
            raise ValueError("why must give the reason to stop")
        return self


class Surrender(Body):
    """``POST /v1/tasks/{task}/give-up``: the device will not finish a task."""

    attempt: AttemptId
    reason: Annotated[
        str,
        Field(
            pattern=r"^(dropped out|deadline passed|round over|no test data|metrics not finite|"
            r"raised [A-Za-z0-9_.]{1,80})$"
        ),
    ]


# updates


class UpdateReport(Body):
    """The header ``Update-Report``: an update's properties and training."""

    digest: Digest  # of the sent bytes
    samples: Whole  # in the device's data
    steps: Whole  # as performed
    lr: Finite
    loss: Finite | None = None  # mean over the steps
    seconds: NotNegative = 0.0  # the device's time
    tau: Whole  # version of the trained model
    base: Digest  # digest of x_tau
    layout: Sha256  # signature of the layout
    format: FormatName = "f32"
    sealed: Sealing | None = None  # a fedstream.private.sealing.SealedUpdate

    @property
    def seal(self) -> bytes | None:
        """The SealedUpdate's bytes; None: the update is not private."""
        return None if self.sealed is None else base64.b64decode(self.sealed)


class Receipt(Body):
    """The state of an update: admitted, refused, given up, or not decided yet."""

    state: Literal["admitted", "received", "refused", "given up"]
    reason: Annotated[str, Field(max_length=200)] | None = None


class MetricsReport(Body):
    """``POST /v1/tasks/{task}/measurements/{attempt}``: a model's metrics on a device's test data.

    Each metric is its sum over the test data and the sum of the weights: its mean is their ratio.
    """

    samples: Whole  # in the test data
    sums: Annotated[
        dict[
            Name,
            tuple[
                Annotated[float, Field(ge=-LARGEST, le=LARGEST)],
                Annotated[float, Field(ge=1 / LARGEST, le=LARGEST)],
            ],
        ],
        Field(min_length=1, max_length=METRICS),
    ]
    seconds: NotNegative = 0.0  # the device's time


class WrongOffset(Body):
    """A part that does not begin at the upload's offset, as a problem of RFC 9457."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", strict=True, validate_by_name=True, serialize_by_alias=True
    )

    type: str = "https://iana.org/assignments/http-problem-types#mismatching-upload-offset"
    title: str = "offset from request does not match offset of resource"
    expected: Annotated[Whole, Field(alias="expected-offset")]
    provided: Annotated[Whole, Field(alias="provided-offset")]


BODIES: Final[tuple[type[Body], ...]] = (
    Nothing,
    Problem,
    Attestation,
    Enrolment,
    Enrolled,
    Access,
    CheckIn,
    Offer,
    EvaluationOffer,
    Beat,
    Advice,
    Surrender,
    UpdateReport,
    Receipt,
    MetricsReport,
    WrongOffset,
)


def schemas() -> dict[str, Any]:
    """The messages' JSON schemas by name, for OpenAPI; they refer to ``#/components/schemas``."""
    from pydantic.json_schema import models_json_schema

    _, found = models_json_schema(
        [(body, "validation") for body in BODIES],
        ref_template="#/components/schemas/{model}",
    )
    return dict(found["$defs"])
