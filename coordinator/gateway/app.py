"""A gateway's routes for devices, except enrolment and uploads.

Each invalid request gets an answer that names the mistake, costs no more than the limits allow, and
can't end the service.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from aiohttp import ClientPayloadError, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from fedstream.coordinator.gateway import openapi, upload_messages
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.refusals import RETRY_S, Quota, Refusal, body_of, json_answer
from fedstream.core.errors import FedstreamError
from fedstream.protocol import headers
from fedstream.protocol.headers import BadHeader
from fedstream.protocol.messages import (
    CHANGES_ROUTE,
    CHECK_IN_ROUTE,
    GIVE_UP_ROUTE,
    HEARTBEAT_ROUTE,
    MEASUREMENT_ROUTE,
    MODEL_ROUTE,
    OPENAPI_ROUTE,
    UPDATE_ROUTE,
    Advice,
    BadBody,
    Beat,
    Body,
    CheckIn,
    MetricsReport,
    Nothing,
    Surrender,
)
from fedstream.runtime.limits import network_of

if TYPE_CHECKING:
    from fedstream.coordinator.access import Handler
    from fedstream.coordinator.gateway.check_ins import CheckIns
    from fedstream.coordinator.gateway.handover import HandOvers
    from fedstream.coordinator.gateway.measurements import Measurements
    from fedstream.coordinator.gateway.metrics import GatewayMetrics
    from fedstream.coordinator.gateway.models import ModelCopies
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.coordinator.gateway.uploads import Uploads
    from fedstream.runtime.service import Context

B = TypeVar("B", bound=Body)


class Recognition(Protocol):
    """Identifies the device that makes a request."""

    async def device_of(self, request: web.Request) -> int:
        """The authenticated device of a request. Raises Refusal (401), Unavailable."""


@dataclass(frozen=True)
class Opened:
    """The parts of a running gateway that the routes use."""

    context: Context
    check_ins: CheckIns
    tasks: Tasks
    moves: HandOvers
    uploads: Uploads
    measurements: Measurements
    metrics: GatewayMetrics


class GatewayApp:
    """The routes for devices. Before :meth:`open` they answer 503."""

    def __init__(self, replica: Replica, models: ModelCopies, identity: Recognition) -> None:
        self._settings = settings = replica.settings
        self._sessions = replica.sessions
        self._run_cache = replica.run_cache
        self._models = models
        self._identity = identity
        self._of_device = Quota("device", settings.device_rate)
        self._of_address = Quota("address", settings.address_rate)
        self._rng = random.Random()
        self._opened: Opened | None = None
        self._openapi = json.dumps(openapi.document()).encode()

    def open(self, opened: Opened) -> None:
        """Start serving devices."""
        self._opened = opened

    def routes(self, *others: web.RouteDef) -> Sequence[web.RouteDef]:
        """All routes under /v1, with limits applied. ``others``: those of enrolment and uploads."""
        own = (
            web.post(CHECK_IN_ROUTE, self._check_in),
            web.get(MODEL_ROUTE, self._model),
            web.get(CHANGES_ROUTE, self._changes),
            web.post(HEARTBEAT_ROUTE, self._heartbeat),
            web.post(GIVE_UP_ROUTE, self._give_up),
            web.post(MEASUREMENT_ROUTE, self._measurement),
            *(
                web.route(
                    method,
                    UPDATE_ROUTE,
                    self._upload,
                    expect_handler=upload_messages.wait_for_checks,
                )
                for method in upload_messages.METHODS
            ),
            web.get(OPENAPI_ROUTE, self._document),
            *others,
            web.route("*", "/{path:.*}", self._no_route),
        )
        return [
            web.RouteDef(route.method, route.path, self.answering(route.handler), route.kwargs)
            for route in own
        ]

    async def device_of(self, request: web.Request) -> int:
        """The device of a request, which is charged to the device's quota. Raises Refusal."""
        if self._opened is None:
            raise self._not_yet()
        device = await self._identity.device_of(request)
        self.charge(device)
        return device

    def charge(self, device: int) -> None:
        """Charge a request to its device. Raises Refusal above the quota."""
        self._of_device.take(device)

    async def said(self, request: web.Request, kind: type[B]) -> B:
        """Read and parse a request's JSON body. Raises Refusal, BadBody."""
        return kind.decode(await body_of(request, within_s=self._settings.body_s))

    # tasks

    async def _check_in(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, CheckIn)
        request.protocol.keep_alive(True)  # ends aiohttp's timer for connections without a request
        offer = await self.running.check_ins.answer(
            device, said, lambda: request.transport is not None
        )
        if offer is not None:
            return web.Response(body=offer, content_type=headers.CONTENT_TYPE)
        wait_s = math.ceil(self._rng.uniform(*self._settings.retry_s))
        return web.Response(status=204, headers={hdrs.RETRY_AFTER: str(wait_s)})

    async def _heartbeat(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, Beat)
        task = request.match_info["task"]
        self._heard(device)
        try:
            held = await self.running.moves.find(task, device)
        except NotHeld:
            if task in self._sessions:
                raise  # another device's
            why: Literal["run over", "given up"]
            why = "run over" if self._run_cache.is_over else "given up"
            return json_answer(Advice(go_on=False, why=why))
        advice, why_over = await self.running.tasks.advise(held, said.attempt)
        if why_over is not None:
            await self.running.tasks.give_up(held, why_over)
        return json_answer(advice)

    async def _give_up(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, Surrender)
        task = request.match_info["task"]
        self._heard(device)
        try:
            held = await self.running.moves.find(task, device)
        except NotHeld:
            if task in self._sessions:
                raise  # another device's
        else:
            if said.attempt == held.attempt:
                await self.running.tasks.give_up(held, said.reason)
        return json_answer(Nothing())

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._heard(device)
        if self.is_stopping and request.method in ("POST", "PATCH"):
            raise self._not_yet()
        return await self.running.uploads.answer(request, device)

    async def _measurement(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        said = await self.said(request, MetricsReport)
        self._heard(device)
        if self.is_stopping:
            raise self._not_yet()
        task, attempt = request.match_info["task"], request.match_info["attempt"]
        await self.running.measurements.take(task, attempt, device, said)
        return json_answer(Nothing())

    # the rest

    def _heard(self, device: int) -> None:
        self._sessions.heard(device, time.monotonic())

    async def _model(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._heard(device)
        response = await self._models.get(request, device)
        self._heard(device)
        return response

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        device = await self.device_of(request)
        self._heard(device)
        response, saved = await self._models.get_changes(request, device)
        self._heard(device)
        self.running.metrics.saved_bytes.inc(saved)
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
                405,
                "method",
                f"{request.method[:20]} is not allowed on {path!r}: {methods} is",
                headers={hdrs.ALLOW: methods},
            )
        raise Refusal(404, "no such route", f"no route {path!r}: see {OPENAPI_ROUTE}")

    # limits and errors

    def answering(self, handler: Handler) -> Handler:
        """Wrap a handler: every error becomes an answer, counted by its reason."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                chain = request.headers.getall(hdrs.X_FORWARDED_FOR, ())
                network = self._network(request.remote or "", ",".join(chain))
                self._of_address.take(network)
                return await handler(request)
            except Exception as error:
                refusal = self._refusal(error, request.path)
                if refusal is None:
                    raise
            return self._refused(refusal)

        return answer

    def _refusal(self, error: Exception, path: str) -> Refusal | None:
        """The refusal for a known error; None for an unknown one."""
        match error:
            case Refusal():
                return error
            case BadBody() | BadHeader() | HttpProcessingError() | ClientPayloadError():
                text = " ".join(str(error).split())[:300]
                return Refusal(400, "malformed", text or "malformed request")
            case FedstreamError(retriable=True):
                return self._not_yet()
            case FedstreamError():
                self.log_failure(path, error)
                return Refusal(500, "internal", "internal error: see the gateway's log")
            case _:
                return None

    def _refused(self, refusal: Refusal) -> web.Response:
        """Count a refusal, and make its answer."""
        if self._opened is not None:
            self._opened.metrics.refused(refusal.reason)
        about = dict(refusal.headers)
        if refusal.retry_after_s is not None:
            # Jitter: devices that were refused together must not retry together.
            wait_s = refusal.retry_after_s * self._rng.uniform(1.0, 2.0)
            about[hdrs.RETRY_AFTER] = str(math.ceil(wait_s))
        body, about[hdrs.CONTENT_TYPE] = refusal.document()
        response = web.Response(status=refusal.status, headers=about, body=body)
        if refusal.status in _UNREAD:
            response.force_close()  # the rest of the body is not read
        return response

    def _network(self, peer: str, forwarded: str) -> str:
        """The network to charge: the peer's, or the client's as our first proxy states it."""
        if self._settings.proxies:
            peer = forwarded.split(",")[-self._settings.proxies :][0].strip()
        return network_of(peer)

    def log_failure(self, path: str, error: Exception) -> None:
        """Log an unexpected error of a request."""
        if self._opened is not None:
            self._opened.context.log.error("request failed", path=path, exc_info=error)

    @property
    def running(self) -> Opened:
        """The parts of the running gateway. Raises Refusal (503) before :meth:`open`."""
        if self._opened is None:
            raise self._not_yet()
        return self._opened

    @property
    def is_stopping(self) -> bool:
        """Whether the gateway takes no new work: it is starting or stopping."""
        return self._opened is None or self._opened.context.stop.is_set()

    def _not_yet(self) -> Refusal:
        return Refusal(
            503, "unavailable", "not available for now: try again later", retry_after_s=RETRY_S
        )


_UNREAD = (408, 413)
