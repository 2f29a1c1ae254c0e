"""One device of the laboratory: it keeps the protocol, trains nothing, and behaves as drawn."""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from fedstream.broker import reasons
from fedstream.broker.digest import algorithm_of
from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.device.connection import Reply, date_of, retry_after
from fedstream.load.invites import key_of
from fedstream.load.line import Break, DeviceLine, LoadReply, Lost
from fedstream.protocol import headers as names
from fedstream.protocol.headers import BadHeader, as_bearer, as_boolean, integer
from fedstream.protocol.messages import (
    Access,
    Advice,
    BadBody,
    Beat,
    CheckIn,
    Enrolled,
    Enrolment,
    Nothing,
    Offer,
    Receipt,
    Surrender,
    UpdateReport,
    WrongOffset,
)
from fedstream.protocol.signatures import NEW, new_nonce, pem_of, sign
from fedstream.runtime.backoff import Backoff

if TYPE_CHECKING:
    from fedstream.load.connection import Pieces
    from fedstream.load.habits import Conduct, Habits
    from fedstream.load.stand_ins import StandIns
    from fedstream.load.tally import LoadTally

FORMATS: Final = ("f32", "bf16")  # in which an update can be made up without knowing the model

_MOST_WAIT_S = 60.0  # between two tries, unless the gateway asks for more
_PAUSE_S = 5.0  # between check-ins, if the gateway doesn't say
_RENEWED = 0.2  # of a token's life that is left when the next one is asked for
_DECIDES_S = 10.0  # more than a gateway waits for the coordinator's decision
_GOODBYE_S = 5.0  # for giving a task up at the end
_PART = 4 * ((1 << 20) - 64)  # bytes of a request: four of the gateway's chunks
_NOT_NOW = {408, 425, 429, 500, 502, 503, 504}
_GONE = {404, 410}


class TurnedOff(Exception):
    """The device has nothing more to do here; the text says why, as it is counted."""


class LoadDevice:
    """A device. What it does is drawn by :class:`~fedstream.load.habits.Habits`."""

    __slots__ = (
        "_access", "_backoff", "_changes", "_check_ins", "_habits", "_has", "_invite", "_line",
        "_models", "_number", "_rng", "_seed", "_skew_s", "_stand_ins", "_tally", "_tasks",
        "_wait_s",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        invite: str,
        line: DeviceLine,
        habits: Habits,
        tally: LoadTally,
        stand_ins: StandIns,
        rng: random.Random,
        *,
        seed: int,
        skew_s: float,
        wait_s: float,
        models: bool,
        changes: bool,
    ) -> None:
        """``rng``: of waits between tries, shared by all devices. ``skew_s``: by which its clock is
        ahead. ``wait_s``: of a check-in. ``models``: download each model that it doesn't have;
        ``changes``: or what changed since the one that it has.
        """
        self._number = number
        self._invite = invite
        self._line = line
        self._habits = habits
        self._tally = tally
        self._stand_ins = stand_ins
        self._rng = rng
        self._seed = seed
        self._skew_s = skew_s
        self._wait_s = wait_s
        self._models = models
        self._changes = changes
        self._backoff = Backoff(0.5, _MOST_WAIT_S, rng=rng)
        self._access: tuple[str, float] | None = None  # the token, and when to ask for the next
        self._has: str | None = None  # digest of the newest model
        self._tasks = 0
        self._check_ins = 0

    async def live(self, after_s: float) -> None:
        """Arrive after so many seconds, enrol, and work until cancelled or turned off.

        Raises ConfigError if no device can get through TLS.
        """
        await asyncio.sleep(after_s)
        try:
            await self._enrol()
            self._tally.events["devices arrived"] += 1
            while True:
                offer = await self._offered()
                self._tasks += 1
                await self._perform(offer, self._habits.task(self._seed, self._number, self._tasks))
        except TurnedOff as why:
            self._tally.ended[str(why)] += 1
        except ConfigError:
            raise
        except FedstreamError as error:  # an answer that isn't the protocol's
            self._tally.ended[f"answer not understood: {error}"[:200]] += 1
        finally:
            self._line.close()

    # who it is

    async def _enrol(self) -> None:
        key = key_of(self._invite).public_key()
        body = Enrolment(invite=self._invite, public_key=pem_of(key)).encode()
        reply = await self._signed("enrol", "/v1/devices", body, NEW)
        enrolled = reply.read(Enrolled, "the invite")
        if enrolled.device != self._number:
            raise TurnedOff(f"enrolled as another device than {self._number}")

    async def _token(self) -> str:
        if self._access is None or time.monotonic() > self._access[1]:
            asked = time.monotonic()
            reply = await self._signed("token", "/v1/token", Nothing().encode(), str(self._number))
            access = reply.read(Access, "the request for a token")
            self._access = access.token, asked + (1 - _RENEWED) * access.expires_in
        return self._access[0]

    async def _signed(self, route: str, path: str, body: bytes, keyid: str) -> Reply:
        """Send a signed request, anew for each try, since a nonce is accepted once."""
        while True:
            signed = sign(
                key_of(self._invite), method="POST", authority=self._line.authority, path=path,
                body=body, keyid=keyid, created=int(time.time() + self._skew_s),
            )  # fmt: skip
            reply = await self._try(route, "POST", path, body=(body,), headers=signed)
            if reply is None:
                continue
            if reply.status in (200, 201):
                return reply
            if not (self._skew_s and self._sets_clock(reply)):
                raise _turned_off(reply, route)

    def _sets_clock(self, reply: Reply) -> bool:
        """Set the clock by the gateway's; whether that was what it asked for."""
        at = date_of(reply.headers.get("date", ""))
        if reply.status != 401 or reply.refusal("").reason != "clock" or at is None:
            return False
        self._skew_s = (at - datetime.now(UTC)).total_seconds()
        self._tally.events["clocks set"] += 1
        return True

    # requests

    async def _ask(
        self,
        route: str,
        method: str,
        path: str,
        *,
        body: Pieces = (),
        headers: Mapping[str, str] | None = None,
        digested: str = "",
    ) -> LoadReply:
        """Send a request with the token until it is answered."""
        while True:
            reply = await self._once(
                route, method, path, body=body, headers=headers, digested=digested
            )
            if reply is not None:
                return reply

    async def _once(
        self,
        route: str,
        method: str,
        path: str,
        *,
        body: Pieces = (),
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        broken: Break | None = None,
        digested: str = "",
    ) -> LoadReply | None:
        """Send a request with the token; None, after a wait, if it has to be tried again."""
        about = {**(headers or {}), "Authorization": as_bearer(await self._token())}
        reply = await self._try(
            route, method, path, body=body, headers=about, wait_s=wait_s, broken=broken,
            digested=digested,
        )  # fmt: skip
        if reply is not None and reply.status == 401 and reply.refusal("").reason == "token":
            self._access = None  # expired, or this gateway's secret is another now
            await self._pause(None)  # it may know the device's older key for a moment
            return None
        return reply

    async def _try(
        self,
        route: str,
        method: str,
        path: str,
        *,
        body: Pieces = (),
        headers: Mapping[str, str],
        wait_s: float = 0.0,
        broken: Break | None = None,
        digested: str = "",
    ) -> LoadReply | None:
        try:
            reply = await self._line.ask(
                route, method, path, body=body, headers=headers, wait_s=wait_s,
                broken=broken or Break(), digested=digested,
            )  # fmt: skip
        except Lost:
            await asyncio.sleep(self._backoff.next())
            return None
        if reply.status in _NOT_NOW:
            await self._pause(retry_after(reply.headers))
            return None
        self._backoff.reset()
        return reply

    async def _pause(self, seconds: float | None) -> None:
        """Wait as long as the gateway asks, up to a tenth longer; None: with jittered back-off."""
        if seconds is None:
            await asyncio.sleep(self._backoff.next())
        else:
            await asyncio.sleep(seconds * self._rng.uniform(1.0, 1.1))

    # tasks

    async def _offered(self) -> Offer:
        """Check in until there is a task."""
        while True:
            self._check_ins += 1
            cut_at = self._habits.check_in(self._seed, self._number, self._check_ins)
            broken = Break(after_s=cut_at * self._wait_s) if cut_at is not None else None
            body = CheckIn(
                nonce=new_nonce(), wait_s=self._wait_s, formats=FORMATS,
                has=self._has if self._changes else None,
            ).encode()  # fmt: skip
            while True:  # the same nonce again if the answer was lost
                reply = await self._once(
                    "check-in", "POST", "/v1/check-in", body=(body,), wait_s=self._wait_s,
                    broken=broken,
                )  # fmt: skip
                broken = None
                if reply is not None:
                    break
            if reply.status == 200:
                offer = reply.read(Offer, "the check-in")
                if offer.update.format not in FORMATS:
                    raise TurnedOff(f"asked for an update in {offer.update.format}")
                return offer
            if reply.status != 204:
                raise _turned_off(reply, "check-in")
            after_s = retry_after(reply.headers)
            await self._pause(_PAUSE_S if after_s is None else after_s)

    async def _perform(self, offer: Offer, conduct: Conduct) -> None:
        """Do one task, as far as this device does it."""
        began = time.monotonic()
        try:
            if self._models and offer.model.digest != self._has and not await self._download(offer):
                return
            if conduct.away_s is not None:
                self._tally.events["tasks left without a word"] += 1
                self._line.close()
                await asyncio.sleep(conduct.away_s)
                return
            if not await self._think(offer, conduct.think_s):
                return
            if conduct.drops_out:
                await self._give_up(offer)
                return
            receipt = await self._upload(offer, conduct.cut_at)
        except asyncio.CancelledError:
            await self._leave(offer)
            raise
        if receipt is not None and conduct.cut_at is None:
            self._tally.turns.add(time.monotonic() - began - conduct.think_s)
        self._tally.receipts[_outcome(receipt)] += 1

    async def _download(self, offer: Offer) -> bool:
        """Download the model, or what changed in it, and throw it away; whether it was there."""
        model = offer.model
        if model.changes is not None and await self._changed(model.changes, model.digest):
            self._has = sys.intern(model.digest)
            return True
        reply = await self._ask("model", "GET", model.url, digested=model.digest)
        if reply.status == 404:
            self._tally.events["models superseded"] += 1
            return False
        if reply.status != 200:
            raise _turned_off(reply, "model")
        if reply.digest != model.digest:
            raise TurnedOff("a model that is not of its digest")
        self._has = sys.intern(model.digest)  # all devices have the same few
        return True

    async def _changed(self, url: str, digest: str) -> bool:
        """Download what changed since the model that the device has; whether that was there.

        ``digest``: of the newer model. If not, it has to download that, which says so itself if it
        is gone.
        """
        reply = await self._ask("changes", "GET", url, digested=digest)
        if reply.status == 404:
            return False
        if reply.status != 200:
            raise _turned_off(reply, "changes")
        if reply.headers.get("etag") != f'"{reply.digest}"':
            raise TurnedOff("changes that are not of their digest")
        return True

    async def _think(self, offer: Offer, seconds: float) -> bool:
        """Wait as if training, with heartbeats; whether to go on."""
        until = time.monotonic() + seconds
        while (left_s := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, offer.heartbeat_s))
            if left_s <= offer.heartbeat_s:
                break
            reply = await self._ask(
                "heartbeat", "POST", f"/v1/tasks/{offer.task.id}/heartbeat",
                body=(Beat(attempt=offer.attempt).encode(),),
            )  # fmt: skip
            if reply.status != 200:
                return False  # counted by its reason
            advice = reply.read(Advice, "a heartbeat")
            if not advice.go_on:
                self._tally.events[f"told to stop: {advice.why}"] += 1
                return False
        return True

    async def _give_up(self, offer: Offer) -> None:
        said = Surrender(attempt=offer.attempt, reason=reasons.DROPPED_OUT)
        path = f"/v1/tasks/{offer.task.id}/give-up"
        await self._ask("give-up", "POST", path, body=(said.encode(),))
        self._tally.events["tasks given up"] += 1

    async def _leave(self, offer: Offer) -> None:
        """Give the task in hand up, since the laboratory ends."""
        try:
            async with asyncio.timeout(_GOODBYE_S):
                await self._give_up(offer)
        except (TimeoutError, TurnedOff, FedstreamError):
            self._tally.events["tasks left without a word"] += 1

    # updates

    async def _upload(self, offer: Offer, cut_at: float | None) -> Receipt | None:
        """Send a made-up update; what became of it, or None if its task is not known any more."""
        size = offer.update.most
        update = self._stand_ins.next(size, algorithm_of(offer.model.digest))
        report = UpdateReport(
            digest=update.digest, samples=1, steps=1, lr=0.1, tau=offer.model.version,
            base=offer.model.digest, layout=offer.update.layout, format=offer.update.format,
        ).encode().decode()  # fmt: skip
        offset: int | None = None  # None: the gateway doesn't know of the upload
        while True:
            at = offset or 0
            end = min(size, at + _PART)
            complete = end == size
            about = {names.COMPLETE: as_boolean(complete), "Content-Type": names.PARTIAL}
            if offset is None:
                about |= {names.LENGTH: str(size), names.REPORT: report}
            else:
                about |= {names.OFFSET: str(at)}
            broken, cut_at = _cut(cut_at, size, at, end)
            reply = await self._once(
                "upload", "PATCH" if offset is not None else "POST", offer.update.url,
                body=update.part(at, end), headers=about, broken=broken,
                wait_s=_DECIDES_S if complete else 0.0,
            )  # fmt: skip
            if reply is None:
                offset = await self._found(offer, size)
                continue
            receipt = _receipt(reply)
            if receipt is not None and receipt.state != "received":
                return receipt
            if receipt is not None:  # ask again: the last request without its bytes
                offset = size
                await self._pause(retry_after(reply.headers) or 1.0)
            elif reply.status in (201, 204):
                offset = _offset(reply, size)
            elif reply.status == 409 and names.PROBLEM in reply.headers.get("content-type", ""):
                offset = min(size, reply.read(WrongOffset, "the update").expected)
            elif reply.status in _GONE and offset is None:
                return None
            elif reply.status in _GONE:
                offset = None  # it has expired: begin anew
            elif reply.status == 409:
                await self._pause(None)  # such as an earlier request, still read
            else:
                raise _turned_off(reply, "upload")

    async def _found(self, offer: Offer, size: int) -> int | None:
        """How much of the update the gateway has; None: nothing."""
        reply = await self._ask("upload's state", "HEAD", offer.update.url)
        if reply.status == 410:
            return size  # it is over: its end, sent again, is answered by what became of it
        if reply.status != 204:
            return None
        done = reply.headers.get(names.COMPLETE.lower()) == as_boolean(True)
        return size if done else _offset(reply, size)


def _cut(cut_at: float | None, size: int, at: int, end: int) -> tuple[Break | None, float | None]:
    """Where this request is cut, if the update's cut is in it; and what is left to be cut."""
    if cut_at is None or not at <= (where := math.floor(cut_at * size)) < end:
        return None, cut_at
    return Break(after=where - at), None


def _offset(reply: Reply, size: int) -> int:
    """How far an upload has got. Raises FedstreamError."""
    try:
        return min(size, integer(names.OFFSET, reply.headers.get(names.OFFSET.lower(), "")))
    except BadHeader as error:
        raise FedstreamError(f"the upload: {error}") from error


def _receipt(reply: Reply) -> Receipt | None:
    """The receipt in an answer; None: there is none, for example in a refusal of the request."""
    if reply.status not in (200, 202, 422):
        return None
    try:
        return Receipt.decode(reply.body)
    except BadBody:
        return None


def _outcome(receipt: Receipt | None) -> str:
    if receipt is None:
        return "task unknown"
    return f"{receipt.state}: {receipt.reason}" if receipt.reason else receipt.state


def _turned_off(reply: Reply, route: str) -> TurnedOff:
    refusal = reply.refusal(route)
    return TurnedOff(refusal.reason or f"{route}: status {reply.status}")
