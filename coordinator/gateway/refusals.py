"""Refusals of a gateway and their closed set of reasons; bodies and quotas of requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Final, Literal, TypeAlias, get_args

from aiohttp import web

from fedstream.core.errors import FedstreamError
from fedstream.protocol.headers import CONTENT_TYPE
from fedstream.protocol.messages import BODY, Body, Problem
from fedstream.runtime.limits import TokenBuckets

RefusalReason: TypeAlias = Literal[
    # authentication
    "signature",  # missing, malformed, or by another key
    "clock",  # the device's clock differs by more than a minute
    "nonce",  # used before
    "invite",  # unknown, expired or used
    "attestation missing",  # this and the next: by the verifier
    "attestation format",
    "attestation forged",
    "attestation key",  # about another key
    "attestation expired",
    "attestation denied",
    "key",  # not an acceptable public key, or not the enrolled one
    "unknown device",
    "revoked",  # by an operator
    "token",  # missing, expired, forged, of another run or of a revoked device
    # content
    "malformed",  # the request, its headers or its body
    "no such route",
    "method",  # not allowed on this route
    "unknown task",  # over, or another device's
    "superseded",  # the model is no longer kept
    "no changes",  # smaller than the model
    "range",  # beyond the model's end
    "no upload",  # not begun, or expired
    "offset",  # of an upload: not the end of the last part
    "length",  # of an upload: unknown, or not the announced one
    "taken over",  # by a newer request for the same upload
    "complete",  # the upload can no longer be cancelled
    "another task",  # the device's task has another layout or number of devices
    "format",  # unreadable for the device, or not the requested one
    "run over",
    # limits
    "too large",
    "too slow",
    "too many requests",
    "busy",  # too many devices, downloads or uploads at this replica
    "unavailable",  # Redis or the run, temporarily
    "internal",  # a bug
]
RETRY_S: Final = 2.0  # default Retry-After
REFUSALS: Final[tuple[RefusalReason, ...]] = get_args(RefusalReason)


class Refusal(FedstreamError):
    """The error answer to a request.

    ``status``: of HTTP. ``retry_after_s``: None if the same request can't succeed later.
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
        """``headers``: further headers of the answer, besides Retry-After."""
        super().__init__(text)
        self.status = status
        self.reason: RefusalReason = reason
        self.retry_after_s = retry_after_s
        self.headers = headers or {}

    def document(self) -> tuple[bytes, str]:
        """The answer's body, and its content type."""
        return Problem(error=str(self)[:1000], reason=self.reason).encode(), CONTENT_TYPE


async def body_of(request: web.Request, *, within_s: float, most: int = BODY) -> bytes:
    """Read a body of at most ``most`` bytes within ``within_s`` seconds. Raises Refusal."""
    if (request.content_length or 0) > most:
        raise _too_large(most)
    if request.content.is_eof():  # it came with the headers, the usual case
        whole = request.content.read_nowait()
        if len(whole) > most:
            raise _too_large(most)
        return whole
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.content.iter_any():
                found += chunk
                if len(found) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        raise Refusal(408, "too slow", f"the body did not arrive within {within_s:g} s") from error
    return bytes(found)


def _too_large(most: int) -> Refusal:
    return Refusal(413, "too large", f"a body may have {most} bytes here")


def json_answer(
    message: Body, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Answer with a message of the protocol."""
    return web.Response(
        body=message.encode(), status=status, content_type=CONTENT_TYPE, headers=headers
    )


_REMEMBERED = 100_000  # devices, or addresses


class Quota:
    """A rate limit per device or per address, with a burst of twice the rate."""

    def __init__(
        self, what: str, per_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: monotonic seconds."""
        self._what = what
        self._buckets = TokenBuckets(per_s, at_once=max(2.0, 2 * per_s), remembered=_REMEMBERED)
        self._clock = clock

    def take(self, who: Hashable) -> None:
        """Charge one request. Raises Refusal above the limit."""
        now = self._clock()
        if self._buckets.wait_s(who, now):
            raise Refusal(
                429,
                "too many requests",
                f"too many requests of this {self._what}: slow down",
                retry_after_s=1.0,
            )
        self._buckets.charge(who, now)
