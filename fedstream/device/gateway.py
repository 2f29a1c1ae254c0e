"""A device's requests to its gateway, except for models and uploads.

Requests carry a token, which is requested with a signature and renewed before it expires.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.device.connection import Connection, NotNow, Reply, date_of, retry_after
from fedstream.protocol.headers import as_bearer
from fedstream.protocol.messages import (
    CHECK_IN_ROUTE,
    ENROL_ROUTE,
    GIVE_UP_ROUTE,
    HEARTBEAT_ROUTE,
    TOKEN_ROUTE,
    Access,
    Advice,
    Beat,
    CheckIn,
    Enrolled,
    Enrolment,
    EvaluationOffer,
    MetricsReport,
    Nothing,
    Offer,
    Surrender,
    offered,
)
from fedstream.protocol.signatures import NEW, sign

if TYPE_CHECKING:
    from fedstream.protocol.signatures import PrivateKey

CLOCK = "clock"  # reasons of refusals
TOKEN = "token"  # noqa: S105  (no secret)
RUN_OVER = "run over"
UNKNOWN = "unknown device"
UNSAID = ""  # no reason, as an answer to HEAD has no body
NONCE = "nonce"
_RENEWED = 0.2  # remaining part of a token's life at its renewal
_PAUSE_S = 5.0  # default time between check-ins
# Refusals that may be temporary faults of the gateway, such as a replica whose clock jumped or a
# Redis that fell back: an enrolled device retries for a while.
_DOUBTFUL = {CLOCK, TOKEN, UNKNOWN, UNSAID}
_PATIENCE_S = 300.0


class RunOver(FedstreamError):
    """The run is over."""


class OwnGateway:
    """The gateway as one device sees it.

    Methods retry until they are answered, except :meth:`once`. All raise TurnedAway for a refusal;
    the refusal of an enrolled device becomes final after five minutes.
    """

    def __init__(self, connection: Connection, key: PrivateKey, device: int | None) -> None:
        """``device``: its number; None: it must enrol first."""
        self.connection = connection
        self._key = key
        self.device = device
        self._access: tuple[str, float] | None = None  # the token, and the time of its renewal
        self._behind_s = 0.0  # of this device's clock, learned from a refusal
        self._doubted_since: float | None = None  # begin of the gateway's refusals

    async def enrol(self, asks: Enrolment) -> Enrolled:
        """Exchange an invite for a device's number."""
        reply = await self._signed(ENROL_ROUTE, asks.encode(), NEW, "the invite", {200, 201})
        enrolled = reply.read(Enrolled.decode, "the invite")
        self.device = enrolled.device
        return enrolled

    async def check_in(self, asks: CheckIn) -> Offer | EvaluationOffer | float:
        """Check in; return a task, or the seconds until the next check-in.

        Raises RunOver, and ConfigError if the device's task is not the run's.
        """
        reply = await self._asked(
            "POST",
            CHECK_IN_ROUTE,
            asks.encode(),
            what="the check-in",
            expected={200, 204, 409, 410},
            wait_s=asks.wait_s,
        )
        if reply.status == 409:
            raise ConfigError(
                f"{reply.refusal('this task')}: name the task that the run was made with (--task), "
                "with as many devices (--set task.devices=N)"
            )
        if reply.status == 204:
            after_s = retry_after(reply.headers)
            return _PAUSE_S if after_s is None else after_s
        if reply.status == 410:
            refusal = reply.refusal("the check-in")
            raise RunOver("the run is over") if refusal.reason == RUN_OVER else refusal
        return reply.read(offered, "the check-in")

    async def beat(self, task: str, attempt: str) -> Advice:
        """Send a heartbeat; return the gateway's advice whether to continue."""
        reply = await self._asked(
            "POST",
            HEARTBEAT_ROUTE.format(task=task),
            Beat(attempt=attempt).encode(),
            what="a heartbeat",
            expected={200},
        )
        return reply.read(Advice.decode, "a heartbeat")

    async def give_up(self, task: str, surrender: Surrender) -> None:
        """Tell the gateway that the device will not finish the task."""
        path = GIVE_UP_ROUTE.format(task=task)
        await self._asked("POST", path, surrender.encode(), what="giving up", expected={200})

    async def measure(self, path: str, measurement: MetricsReport) -> bool:
        """Send the answer to an evaluation; False if the evaluation is over."""
        reply = await self._asked(
            "POST", path, measurement.encode(), what="the measurement", expected={200, 404}
        )
        return reply.status == 200

    async def once(
        self,
        method: str,
        path: str,
        *,
        body: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
    ) -> Reply:
        """Send one request with a token, which is requested first if necessary. Raises NotNow."""
        for fresh in (False, True):
            token = await self.token(fresh=fresh)
            reply = await self.connection.once(
                method,
                path,
                body=body,
                wait_s=wait_s,
                headers={**(headers or {}), "Authorization": as_bearer(token)},
            )
            if reply.status != 401 or reply.refusal("").reason not in (TOKEN, UNSAID):
                break
        if reply.status == 401:
            raise self._refused(reply, "this device")
        self._doubted_since = None
        self.connection.settled()
        return reply

    async def token(self, *, fresh: bool = False) -> str:
        """A token that stays valid for a while. ``fresh``: request a new one. Raises NotNow."""
        if self._access is None or fresh or time.monotonic() > self._access[1]:
            asked = time.monotonic()
            reply = await self._signed_once(TOKEN_ROUTE, Nothing().encode(), str(self.device))
            if reply.status != 200:
                raise self._refused(reply, "this device's key")
            access = reply.read(Access.decode, "the request for a token")
            self._access = access.token, asked + (1 - _RENEWED) * access.expires_in
        return self._access[0]

    def _refused(self, reply: Reply, what: str) -> FedstreamError:
        """The error for a refusal of the device: NotNow while the refusal may be temporary."""
        told = reply.refusal(what)
        if self._access is None or told.reason not in _DOUBTFUL:
            return told
        now = time.monotonic()
        if self._doubted_since is None:
            self._doubted_since = now
        return told if now - self._doubted_since > _PATIENCE_S else NotNow(str(told))

    async def _asked(
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        what: str,
        expected: set[int],
        wait_s: float = 0.0,
    ) -> Reply:
        reply = await self.connection.answered(
            lambda: self.once(method, path, body=body, wait_s=wait_s)
        )
        if reply.status not in expected:
            raise reply.refusal(what)
        return reply

    async def _signed(
        self, path: str, body: bytes, keyid: str, what: str, expected: set[int]
    ) -> Reply:
        # Signed anew for each try: a nonce is accepted once.
        reply = await self.connection.answered(lambda: self._signed_once(path, body, keyid))
        self.connection.settled()
        if reply.status not in expected:
            raise reply.refusal(what)
        return reply

    async def _signed_once(self, path: str, body: bytes, keyid: str) -> Reply:
        for is_told in (False, True):
            headers = sign(
                self._key,
                method="POST",
                authority=self.connection.base.host_port_subcomponent or "",
                path=path,
                body=body,
                keyid=keyid,
                created=int(time.time() + self._behind_s),
            )
            reply = await self.connection.once("POST", path, body=body, headers=headers)
            if reply.status != 401:
                break
            refusal = reply.refusal("a signature")
            if refusal.reason == NONCE:
                # A proxy sent the request twice, and the other copy came first.
                raise NotNow(str(refusal))
            gateways = date_of(reply.headers.get("date", ""))
            if refusal.reason != CLOCK or gateways is None or is_told:
                break
            self._behind_s = gateways.timestamp() - time.time()
        return reply
