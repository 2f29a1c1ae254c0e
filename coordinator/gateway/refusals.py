"""What a gateway refuses, and why: the closed set by which refusals are counted and answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Final, Literal, TypeAlias, get_args

from aiohttp import web

from fedstream.core.errors import FedstreamError
from fedstream.protocol.headers import CONTENT_TYPE
from fedstream.protocol.messages import BODY, Problem
from fedstream.runtime.limits import TokenBuckets

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


async def body_of(request: web.Request, *, within_s: float, most: int = BODY) -> bytes:
    """Read a body of at most ``most`` bytes, whatever its headers say. Raises Refusal."""
    if (request.content_length or 0) > most:
        raise _too_large(most)
    if request.content.is_eof():  # it came with the headers, as most do
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


_REMEMBERED = 100_000  # of each kind


class Quota:
    """So many requests a second for each device, or for each address; twice as many at once."""

    def __init__(
        self, what: str, per_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: monotonic seconds."""
        self._what = what
        self._buckets = TokenBuckets(per_s, at_once=max(2.0, 2 * per_s), remembered=_REMEMBERED)
        self._clock = clock

    def take(self, who: Hashable) -> None:
        """Charge one request. Raises Refusal if there were too many."""
        now = self._clock()
        if self._buckets.wait_s(who, now):
            raise Refusal(
                429,
                "too many requests",
                f"too many requests of this {self._what}: slow down",
                retry_after_s=1.0,
            )
        self._buckets.charge(who, now)


class Quotas:
    """What a request is charged to: its address first, then its device, once that is known."""

    def __init__(self, device_rate: float, address_rate: float) -> None:
        """Both in requests per second."""
        self._device = Quota("device", device_rate)
        self._address = Quota("address", address_rate)

    def take_address(self, network: str) -> None:
        """Charge a request to where it comes from. Raises Refusal if there were too many."""
        self._address.take(network)

    def take_device(self, device: int) -> None:
        """Charge it to its device, too. Raises Refusal likewise."""
        self._device.take(device)
