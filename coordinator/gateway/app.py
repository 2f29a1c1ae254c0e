"""A gateway's routes for devices, except for those of enrolment and uploads.

Whatever a device sends, it gets an answer that says what was wrong with it, and costs no more than
the limits allow. Nothing of it ends the service.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from aiohttp import ClientPayloadError, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from fedstream.broker.errors import FedstreamError
from fedstream.coordinator.gateway import offers, openapi, upload_requests
from fedstream.coordinator.gateway.bodies import body_of
from fedstream.coordinator.gateway.desk import NotHeld
from fedstream.coordinator.gateway.quotas import Quota
from fedstream.coordinator.gateway.refusals import RETRY_S, Refusal
from fedstream.protocol import headers
from fedstream.protocol.headers import BadHeader
from fedstream.protocol.messages import (
    Advice,
    BadBody,
    Beat,
    Body,
    CheckIn,
    Nothing,
    Surrender,
)
from fedstream.runtime.crowd import network_of

if TYPE_CHECKING:
    from fedstream.coordinator.access import Handler
    from fedstream.coordinator.gateway.current import Current
    from fedstream.coordinator.gateway.desk import Desk, Woken
    from fedstream.coordinator.gateway.metrics import GatewayMetrics
    from fedstream.coordinator.gateway.models import ModelCopies
    from fedstream.coordinator.gateway.moves import Moves
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.coordinator.gateway.uploads import Uploads
    from fedstream.runtime.service import Context
    from fedstream.wire import Format

# Who makes a request: raises Refusal (401) unless it proves to be a device of this run.
DeviceOf: TypeAlias = Callable[[web.Request], Awaitable[int]]
B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class Opened:
    """What the routes need of a gateway that runs."""

    context: Context
    tasks: Tasks
    moves: Moves
    uploads: Uploads
    metrics: GatewayMetrics


class GatewayApp:
    """The routes. Until :meth:`open` they are answered 503."""

    def __init__(
        self,
        settings: GatewaySettings,
        desk: Desk,
        current: Current,
        models: ModelCopies,
        *,
        update: Format,
        device_of: DeviceOf,
    ) -> None:
        """``update``: the format that devices send updates in, if they can."""
        self._settings = settings
        self._desk = desk
        self._current = current
        self._models = models
        self._update = update
        self._identify = device_of
        self._of_device = Quota("device", settings.device_rate)
        self._of_address = Quota("address", settings.address_rate)
        self._rng = random.Random()
        self._opened: Opened | None = None
        self._openapi = json.dumps(openapi.document()).encode()

    def open(self, opened: Opened) -> None:
        """Begin to serve devices."""
        self._opened = opened

    def routes(self, *others: web.RouteDef) -> Sequence[web.RouteDef]:
        """All routes under /v1, each within the limits; ``others``: of enrolment and uploads."""
        own = (
            web.post("/v1/check-in", self._check_in),
            web.get("/v1/models/{digest}", self._model),
            web.get("/v1/models/{digest}/changes/{has}", self._changes),
            web.post("/v1/tasks/{task}/heartbeat", self._heartbeat),
            web.post("/v1/tasks/{task}/give-up", self._give_up),
            *(
                web.route(
                    method,
                    upload_requests.PATH,
                    self._upload,
                    expect_handler=upload_requests.wait_for_checks,
                )
                for method in upload_requests.METHODS
            ),
            web.get("/v1/openapi.json", self._document),
            *others,
            web.route("*", "/{path:.*}", self._no_route),
        )
        return [
            web.RouteDef(route.method, route.path, self.answering(route.handler), route.kwargs)
            for route in own
        ]

    async def device_of(self, request: web.Request) -> int:
        """The device that makes a request, within its quota. Raises Refusal."""
        if self._opened is None:
            raise self._not_yet()
        device = await self._identify(request)
        await self._of_device.take(device)
        return device

    async def said(self, request: web.Request, kind: type[B]) -> B:
        """A request's JSON body. Raises Refusal, BadBody."""
        return kind.decode(await body_of(request, within_s=self._settings.body_s))

    # tasks

    async def _check_in(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, CheckIn)
        was_answered, offer = self._desk.answered(device, said.nonce)
        if was_answered:
            self._desk.heard(device, time.monotonic())
            return self._offered(offer)
        run, head = self._current.run, self._current.head
        self._check_run()
        if device >= run.devices:
            raise Refusal(
                403, "unknown device", f"the run has {run.devices} devices, numbered from 0"
            )
        if not said.eligible or device in head.quarantines.by_device:
            self._desk.leave(device)
            return self._offered(None)
        if offers.model_format(head) not in said.formats:
            raise Refusal(
                406, "format", f"the run's models are published in {offers.model_format(head)}"
            )
        self._desk.arrive(device, time.monotonic())
        if self._desk.first(device) is not None:
            await self._current.look()  # the task may have come a while ago
        is_answer, offer = await self._waited(request, device, said)
        if is_answer:
            self._desk.answer(device, said.nonce, offer)
        return self._offered(offer)

    async def _waited(
        self, request: web.Request, device: int, said: CheckIn
    ) -> tuple[bool, bytes | None]:
        """The offer for a check-in, or None if there is none for as long as it waits.

        First, whether that is its answer: not if the device said something newer meanwhile, hung
        up, or may not take part any more.
        """
        loop = asyncio.get_running_loop()
        until = _end_of_wait(loop.time(), min(said.wait_s, self._settings.poll_s))
        while (offer := await self._offer(device, said)) is None:
            left_s = until - loop.time()
            if left_s <= 0 or self._is_stopping():
                break
            poll: asyncio.Future[Woken] = loop.create_future()
            self._desk.park(device, poll, time.monotonic())
            timer = loop.call_at(until, _end, poll)
            # Else aiohttp's timer for connections without a request would run out while it waits.
            request.protocol.keep_alive(True)
            try:
                woken = await poll
            finally:
                timer.cancel()
                self._desk.unpark(device, poll)
            # A device that hung up was not there till now, and no task is offered to it.
            if woken == "replaced" or request.transport is None:
                return False, None
            self._desk.heard(device, time.monotonic())
            self._check_run()
        return True, offer

    async def _offer(self, device: int, said: CheckIn) -> bytes | None:
        """The offer of the device's oldest task, giving up those that came to nothing meanwhile."""
        held = await self._running().tasks.due(device)
        if held is None:
            return None
        run, head = self._current.run, self._current.head
        update = offers.format_for(said.formats, self._update)
        held.tau = head.version
        self._running().metrics.offered.inc()
        if said.has != head.given:
            self._models.prepare(head)
        return offers.offer(
            held,
            run,
            head,
            update,
            changes=self._models.changes_url(head, said.has),
            heartbeat_s=self._settings.heartbeat_s,
        ).encode()

    def _offered(self, offer: bytes | None) -> web.Response:
        if offer is not None:
            return web.Response(body=offer, content_type=headers.CONTENT_TYPE)
        wait_s = math.ceil(self._rng.uniform(*self._settings.retry_s))
        return web.Response(status=204, headers={hdrs.RETRY_AFTER: str(wait_s)})

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, Beat)
        task = request.match_info["task"]
        self._desk.heard(device, time.monotonic())
        try:
            held = await self._running().moves.find(task, device)
        except NotHeld:
            if task in self._desk:
                raise  # another device's
            why: Literal["run over", "given up"]
            why = "run over" if self._current.is_over else "given up"
            return _json(Advice(go_on=False, why=why))
        why_not = await self._running().tasks.overdue(held)
        run, head = self._current.run, self._current.head
        advice = offers.advice(held, said.attempt, run, head, time.time())
        if why_not is not None:
            await self._running().tasks.give_up(held, why_not)
        return _json(advice)

    async def _give_up(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, Surrender)
        task = request.match_info["task"]
        self._desk.heard(device, time.monotonic())
        try:
            held = await self._running().moves.find(task, device)
        except NotHeld:
            if task in self._desk:
                raise  # another device's
        else:
            if said.attempt == held.attempt:
                await self._running().tasks.give_up(held, said.reason)
        return _json(Nothing())

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._desk.heard(device, time.monotonic())
        if self._is_stopping() and request.method in ("POST", "PATCH"):
            raise self._not_yet()
        return await self._running().uploads.answer(request, device)

    # the rest

    async def _model(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._desk.heard(device, time.monotonic())
        response = await self._models.get(request, device)
        self._desk.heard(device, time.monotonic())
        return response

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._desk.heard(device, time.monotonic())
        response, saved = await self._models.get_changes(request, device)
        self._desk.heard(device, time.monotonic())
        self._running().metrics.saved_bytes.inc(saved)
        return response

    async def _document(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._openapi, content_type="application/json", charset="utf-8")

    async def _no_route(self, request: web.Request) -> web.StreamResponse:
        path = request.path[:80]
        allowed: set[str] = set()
        for resource in request.app.router.resources():
            if resource.canonical != "/{path}":
                allowed |= (await resource.resolve(request))[1]
        if allowed:
            methods = ", ".join(sorted(allowed))
            raise Refusal(
                405, "method", f"{request.method[:20]} is not allowed on {path!r}: {methods} is",
                headers={hdrs.ALLOW: methods},
            )  # fmt: skip
        raise Refusal(404, "no such route", f"no route {path!r}: see /v1/openapi.json")

    # limits and errors

    def answering(self, handler: Handler) -> Handler:
        """Wrap a handler: whatever goes wrong becomes an answer, counted by its reason."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                await self._of_address.take(network_of(self._address(request)))
                return await handler(request)
            except Refusal as refusal:
                return self._refused(refusal)
            except (BadBody, BadHeader, HttpProcessingError, ClientPayloadError) as error:
                text = " ".join(str(error).split())[:300]
                return self._refused(Refusal(400, "malformed", text or "malformed request"))
            except FedstreamError as error:
                if error.retriable:
                    return self._refused(self._not_yet())
                if self._opened is not None:
                    self._opened.context.log.exception("request failed", path=request.path)
                text = "internal error: the gateway's log says which"
                return self._refused(Refusal(500, "internal", text))

        return answer

    def _refused(self, refusal: Refusal) -> web.Response:
        if self._opened is not None:
            self._opened.metrics.refused(refusal.reason)
        about = dict(refusal.headers)
        if refusal.retry_after_s is not None:
            # Not all at once: whoever was refused together would come together again.
            wait_s = refusal.retry_after_s * self._rng.uniform(1.0, 2.0)
            about[hdrs.RETRY_AFTER] = str(math.ceil(wait_s))
        body, kind = refusal.document()
        response = web.Response(body=body, status=refusal.status, headers=about, content_type=kind)
        if refusal.status in _UNREAD:
            response.force_close()  # the rest of the body is not read
        return response

    def _address(self, request: web.Request) -> str:
        """Whose request it is: the peer, or what the first of our own proxies says."""
        if self._settings.proxies:
            chain = ",".join(request.headers.getall(hdrs.X_FORWARDED_FOR, ())).split(",")
            return chain[-self._settings.proxies :][0].strip()
        return request.remote or ""

    def _check_run(self) -> None:
        if self._current.is_over:
            raise Refusal(410, "run over", "the run is finished: there are no more tasks")

    def _running(self) -> Opened:
        if self._opened is None:
            raise self._not_yet()
        return self._opened

    def _is_stopping(self) -> bool:
        return self._opened is None or self._opened.context.stop.is_set()

    def _not_yet(self) -> Refusal:
        return Refusal(
            503, "unavailable", "not available for now: try again later", retry_after_s=RETRY_S
        )


_UNREAD = (408, 413)
# Check-ins end their waits together, a quarter of a second apart: one wake-up answers them all.
_TOGETHER_S = 0.25
_LONG_S = 10.0  # a wait of which that much does not matter


def _end_of_wait(now: float, wait_s: float) -> float:
    """When a check-in's wait ends, by the loop's clock."""
    end = now + wait_s
    return end if wait_s < _LONG_S else end - end % _TOGETHER_S


def _end(poll: asyncio.Future[Woken]) -> None:
    if not poll.done():
        poll.set_result("nothing")


def _json(message: Body) -> web.Response:
    return web.Response(body=message.encode(), content_type=headers.CONTENT_TYPE)
