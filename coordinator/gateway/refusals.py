"""What a gateway refuses, and why: the closed set by which refusals are counted and answered."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from fedstream.core.errors import FedstreamError
from fedstream.protocol.headers import CONTENT_TYPE
from fedstream.protocol.messages import Problem

RefusalReason: TypeAlias = Literal[
    # who asks
    "signature",  # missing, of another form, or not by this key
    "clock",  # the device's differs by more than a minute
    "nonce",  # used before
    "invite",  # unknown, expired or used
    "attestation missing",  # what the verifier said, if there is one
    "attestation format",
    "attestation forged",
    "attestation key",  # about another key
    "attestation expired",
    "attestation denied",
    "key",  # no public key that we take, or another one than enrolled
    "unknown device",
    "revoked",  # by an operator
    "token",  # missing, expired, forged, of another run or of a revoked device
    # what is asked
    "malformed",  # the request, its headers or its body
    "no such route",
    "method",  # not allowed on this route
    "unknown task",  # not this device's, or over
    "superseded",  # the model is not kept any more
    "no changes",  # that are smaller than the model
    "range",  # beyond the model's end
    "no upload",  # it has not begun, or it expired
    "offset",  # of an upload: not where the last part ended
    "length",  # of an upload: unknown, or not what was announced
    "taken over",  # by a newer request for the same upload
    "complete",  # so the upload can't be cancelled any more
    "another task",  # than the run's: of another layout, or number of devices
    "format",  # none that the device can read, or not the one that was asked for
    "run over",
    # how much, and how fast
    "too large",
    "too slow",
    "too many requests",
    "busy",  # as many devices, downloads or uploads as this replica takes
    "unavailable",  # Redis, or the run, for now
    "internal",  # our mistake
]
RETRY_S: Final = 2.0  # after which what is busy or away may be there again
REFUSALS: Final[tuple[RefusalReason, ...]] = get_args(RefusalReason)


class Refusal(FedstreamError):
    """A request that is answered with an error.

    ``status``: of HTTP. ``retry_after_s``: when to try again; None: not with the same request.
    """

    def __init__(
        self,
        status: int,
        reason: RefusalReason,
        text: str,
        *,
        retry_after_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        """``headers``: of the answer, besides Retry-After."""
        super().__init__(text)
        self.status = status
        self.reason: RefusalReason = reason
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def document(self) -> tuple[bytes, str]:
        """The answer's body, and its content type."""
        return Problem(error=str(self)[:1000], reason=self.reason).encode(), CONTENT_TYPE
