"""A gateway by the letter of the protocol, in memory, which can be told to fail.

The real one runs in tests/integration; this one loses replies and cuts connections on purpose.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from fedstream.core import changes, compressed
from fedstream.core.digest import DigestAlgorithm, digest_of
from fedstream.core.formats import F32, Format, format_of
from fedstream.core.given import GivenModel, given
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Sends
from fedstream.protocol import headers as names
from fedstream.protocol import signatures
from fedstream.protocol.headers import as_boolean, boolean, integer
from fedstream.protocol.messages import (
    Access,
    Advice,
    Beat,
    Body,
    CheckIn,
    Enrolled,
    Enrolment,
    EvaluationOffer,
    ExpectedMeasurement,
    ExpectedUpdate,
    MetricsReport,
    Nothing,
    Offer,
    OfferedEvaluation,
    OfferedModel,
    OfferedTask,
    Problem,
    Receipt,
    Surrender,
    UpdateReport,
    WrongOffset,
)
from tests.support import wait_until

CHUNK = 1000  # bytes that are kept of a part that was cut: so many, or none
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Fault:
    """What happens to the next request of this kind instead of an answer."""

    method: str
    path: str  # its beginning
    status: int = 0  # 0: the connection is cut
    reason: str = "unavailable"
    after: int | None = None  # bytes of a body, either way, before the cut; None: all of it
    until: Callable[[], bool] = lambda: True  # when these bytes have arrived
    headers: dict[str, str] = field(default_factory=dict)


FAULT = web.RequestKey("fault", Fault)


@dataclass
class Sent:
    """An upload as far as it has come."""

    report: UpdateReport
    length: int
    data: bytearray = field(default_factory=bytearray)
    complete: bool = False


def answer(body: Body, status: int = 200, **headers: str) -> web.Response:
    return web.Response(
        body=body.encode(), status=status, content_type=names.CONTENT_TYPE, headers=headers
    )


def refused(status: int, reason: str, **headers: str) -> web.Response:
    return answer(Problem(error=f"it is {reason}", reason=reason), status, **headers)


class FakeGateway:
    """One run's gateway. Tests put tasks into ``offers``, and look at what has come."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.asked: list[str] = []  # method and path of each request
        self.faults: list[Fault] = []
        self.invites: dict[str, int] = {}
        self.keys: dict[int, signatures.PublicKey] = {}
        self.nonces: set[str] = set()
        self.tokens: dict[str, int] = {}
        self.expires_in = 600
        self.clock_s = 0.0  # ahead of ours
        # The first is offered until it is answered.
        self.offers: list[Offer | EvaluationOffer] = []
        self.measured: dict[str, MetricsReport] = {}  # by task
        self.models: dict[str, bytes] = {}
        self.changes: dict[str, bytes] = {}  # by path
        self.ranges: list[str | None] = []  # of each download
        self.check_ins: list[CheckIn] = []
        self.beats = 0
        self.advice = Advice(go_on=True)
        self.sent: dict[str, Sent] = {}  # by attempt
        self.bytes_sent = 0  # of updates
        self.digests: DigestAlgorithm = "sha256"  # of models
        self.receipts: dict[str, list[Receipt]] = defaultdict(list)  # by task; else admitted
        self.given_up: list[tuple[str, str]] = []
        self.over = False

    # what tests say

    def fails(self, method: str, path: str, **how: object) -> None:
        """The next such request fails."""
        self.faults.append(Fault(method, path, **how))  # type: ignore[arg-type]

    def invite(self, device: int) -> str:
        token = secrets.token_urlsafe(16)
        self.invites[token] = device
        return token

    def publish(self, model: Model, version: int, how: Format, sends: Sends) -> GivenModel:
        found = given(model, how, version=version, sends=sends, digests=self.digests)
        self.models[found.digest] = found.payload.buffer.tobytes()
        return found

    def offer(
        self,
        model: Model,
        *,
        task: str = "task-1",
        version: int = 0,
        device: int = 7,
        published: str = "f32",
        format: str = "f32",  # noqa: A002
        sends: Sends = "model",
        heartbeat_s: float = 5.0,
        layout: str | None = None,
        since: Offer | None = None,
        **length: object,
    ) -> Offer:
        """Offers a task, which trains from this model; ``since``: the offer that came before."""
        found = self.publish(model, version, format_of(published), sends)
        url, changed = f"/v1/models/{found.digest}", None
        if since is not None:
            changed = f"{url}/changes/{since.model.digest}"
            self.changes[changed] = self._change(since.model, found.digest)
        attempt = secrets.token_hex(6)
        made = Offer(
            task=OfferedTask(id=task, device=device, seed=5, **(length or {"steps": 3})),  # type: ignore[arg-type]
            attempt=attempt,
            model=self._model_of(found, version, published, changed),
            unshared=self._unshared_of(model),
            update=ExpectedUpdate(
                url=f"/v1/tasks/{task}/updates/{attempt}",
                sends=sends,
                format=format,
                layout=layout or self.layout.signature,
                most=format_of(format).sizes(self.layout)[1],
            ),
            heartbeat_s=heartbeat_s,
        )
        self.offers.append(made)
        return made

    def evaluates(
        self, model: Model, *, task: str = "eval-1", version: int = 0, heartbeat_s: float = 5.0
    ) -> EvaluationOffer:
        """Offers an evaluation of this model."""
        found = self.publish(model, version, format_of("f32"), "model")
        attempt = secrets.token_hex(6)
        made = EvaluationOffer(
            task=OfferedEvaluation(id=task, device=7, left_s=60.0),
            attempt=attempt,
            model=self._model_of(found, version, "f32", None),
            unshared=self._unshared_of(model),
            measurement=ExpectedMeasurement(
                url=f"/v1/tasks/{task}/measurements/{attempt}", layout=self.layout.signature
            ),
            heartbeat_s=heartbeat_s,
        )
        self.offers.append(made)
        return made

    def _unshared_of(self, model: Model) -> OfferedModel | None:
        if model.layout.unshared is None:
            return None
        values = self.publish(model.layout.unshared.model(), 0, F32, "model")
        return self._model_of(values, 0, "f32", None)

    @staticmethod
    def _model_of(
        found: GivenModel, version: int, published: str, changes_url: str | None
    ) -> OfferedModel:
        return OfferedModel(
            version=version,
            digest=found.digest,
            size=found.payload.buffer.nbytes,
            format=published,
            url=f"/v1/models/{found.digest}",
            changes=changes_url,
        )

    def _change(self, old: OfferedModel, new: str) -> bytes:
        how = format_of(old.format)
        before, after = (np.frombuffer(self.models[one], np.uint8) for one in (old.digest, new))
        if how.zstd:
            before, after = (compressed.decode(one, 1 << 20) for one in (before, after))
        return changes.encode(before, after, changes.width_of(how.kind)).tobytes()

    def server(self) -> TestServer:
        app = web.Application(middlewares=[self._faulty])
        app.add_routes(
            [
                web.post("/v1/devices", self._enrol),
                web.post("/v1/token", self._token),
                web.post("/v1/check-in", self._check_in),
                web.get("/v1/models/{digest}", self._model),
                web.get("/v1/models/{digest}/changes/{has}", self._changes),
                web.post("/v1/tasks/{task}/heartbeat", self._beat),
                web.post("/v1/tasks/{task}/give-up", self._give_up),
                web.post("/v1/tasks/{task}/measurements/{attempt}", self._measurement),
                web.post("/v1/tasks/{task}/updates/{attempt}", self._create),
                web.head("/v1/tasks/{task}/updates/{attempt}", self._how_far),
                web.patch("/v1/tasks/{task}/updates/{attempt}", self._append),
            ]
        )
        return TestServer(app)

    # requests

    @web.middleware
    async def _faulty(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.asked.append(f"{request.method} {request.path}")
        method, path = request.method, request.path
        fitting = (one for one in self.faults if method == one.method and path.startswith(one.path))
        fault = next(fitting, None)
        if fault is None:
            return await handler(request)
        self.faults.remove(fault)
        if fault.status:
            await request.read()
            return refused(fault.status, fault.reason, **fault.headers)
        request[FAULT] = fault
        if fault.after is None:
            await handler(request)  # only the answer is lost
        elif request.method == "GET":
            return await handler(request)
        else:
            self._keep(request, await request.content.readexactly(fault.after), cut=True)
        self._cut(request)
        return web.Response()

    @staticmethod
    def _cut(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.abort()

    def _device(self, request: web.Request) -> int | None:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        return self.tokens.get(token) if scheme == "Bearer" else None

    async def _signer(self, request: web.Request) -> tuple[signatures.Signature, bytes]:
        body = await request.read()
        found = signatures.read(request.headers)
        assert found.nonce not in self.nonces, "a nonce is accepted once"
        self.nonces.add(found.nonce)
        return found, body

    async def _enrol(self, request: web.Request) -> web.Response:
        signature, body = await self._signer(request)
        asks = Enrolment.decode(body)
        key = signatures.public_key(asks.public_key)
        signature.verify(key, method="POST", authority=request.host, path=request.path, body=body)
        assert signature.keyid == signatures.NEW
        if asks.invite not in self.invites:
            return refused(401, "invite")
        device = self.invites[asks.invite]
        again = device in self.keys
        self.keys[device] = key
        return answer(Enrolled(device=device, run="demo"), 200 if again else 201)

    async def _token(self, request: web.Request) -> web.Response:
        signature, body = await self._signer(request)
        now = time.time() + self.clock_s
        if abs(signature.created - now) > signatures.WINDOW_S:
            date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now))
            return refused(401, "clock", Date=date)
        assert signature.device is not None
        if signature.device not in self.keys:
            return refused(401, "unknown device")
        key = self.keys[signature.device]
        signature.verify(key, method="POST", authority=request.host, path=request.path, body=body)
        Nothing.decode(body)
        token = ".".join(secrets.token_urlsafe(9) for _ in range(3))
        self.tokens[token] = signature.device
        return answer(Access(token=token, expires_in=self.expires_in))

    async def _check_in(self, request: web.Request) -> web.Response:
        asks = CheckIn.decode(await request.read())
        if self._device(request) is None:
            return refused(401, "token")
        self.check_ins.append(asks)
        if self.over:
            return refused(410, "run over")
        if not self.offers:
            return web.Response(status=204, headers={"Retry-After": "0"})
        return answer(self.offers[0])

    async def _model(self, request: web.Request) -> web.StreamResponse:
        if self._device(request) is None:
            return refused(401, "token")
        digest = request.match_info["digest"]
        data = self.models.get(digest)
        if data is None:
            return refused(404, "superseded")
        return await self._sent_from(request, data, f'"{digest}"')

    async def _changes(self, request: web.Request) -> web.StreamResponse:
        if self._device(request) is None:
            return refused(401, "token")
        data = self.changes.get(request.path)
        if data is None:
            return refused(404, "no changes")
        return await self._sent_from(request, data, f'"{digest_of(data)}"')

    async def _sent_from(self, request: web.Request, data: bytes, tag: str) -> web.StreamResponse:
        self.ranges.append(request.headers.get("Range"))
        response, begin = web.StreamResponse(headers={"ETag": tag}), 0
        if "Range" in request.headers and request.headers.get("If-Range") == tag:
            begin = request.http_range.start or 0
            if begin >= len(data):
                return refused(416, "range")
            response.set_status(206)
            response.headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response.content_length = len(data) - begin
        await response.prepare(request)
        fault: Fault | None = request.get(FAULT)
        end = len(data) if fault is None or fault.after is None else begin + fault.after
        await response.write(data[begin:end])
        if fault is not None:
            await wait_until(fault.until)
            self._cut(request)
        return response

    async def _beat(self, request: web.Request) -> web.Response:
        Beat.decode(await request.read())
        if self._device(request) is None:
            return refused(401, "token")
        self.beats += 1
        return answer(self.advice)

    async def _give_up(self, request: web.Request) -> web.Response:
        said = Surrender.decode(await request.read())
        self.given_up.append((request.match_info["task"], said.reason))
        self._over(request.match_info["task"])
        return answer(Nothing())

    async def _measurement(self, request: web.Request) -> web.Response:
        said, task = MetricsReport.decode(await request.read()), request.match_info["task"]
        if self._device(request) is None:
            return refused(401, "token")
        if task not in self.measured and all(one.task.id != task for one in self.offers):
            return refused(404, "unknown task")
        self.measured[task] = said
        self._over(task)
        return answer(Nothing())

    def _over(self, task: str) -> None:
        self.offers = [one for one in self.offers if one.task.id != task]

    # uploads

    def _keep(self, request: web.Request, data: bytes, *, cut: bool = False) -> None:
        """What has arrived; of a part that was cut, whole chunks."""
        self.bytes_sent += len(data)
        attempt = request.match_info["attempt"]
        if request.method == "POST":
            length = integer(names.LENGTH, request.headers[names.LENGTH])
            report = UpdateReport.decode(request.headers[names.REPORT])
            self.sent.setdefault(attempt, Sent(report, length))
        sent = self.sent[attempt]
        sent.data += data[: len(data) // CHUNK * CHUNK] if cut else data
        assert len(sent.data) <= sent.length

    async def _create(self, request: web.Request) -> web.StreamResponse:
        if self._device(request) is None:
            return refused(401, "token")
        task, attempt = request.match_info["task"], request.match_info["attempt"]
        known = self.sent.get(attempt)
        if known is None and all(one.attempt != attempt for one in self.offers):
            return refused(404, "unknown task")
        data = await request.read()
        if known is None or not known.complete:
            self.sent.pop(attempt, None)  # it begins anew
            self._keep(request, data)
        if boolean(names.COMPLETE, request.headers[names.COMPLETE]):
            return self._receipt(task, attempt)
        offset = str(len(self.sent[attempt].data))
        return web.Response(status=201, headers={"Location": request.path, names.OFFSET: offset})

    async def _how_far(self, request: web.Request) -> web.StreamResponse:
        sent = self.sent.get(request.match_info["attempt"])
        if sent is None:
            return web.Response(status=404)
        return web.Response(
            status=204,
            headers={
                names.OFFSET: str(len(sent.data)),
                names.COMPLETE: as_boolean(sent.complete),
                "Cache-Control": "no-store",
            },
        )

    async def _append(self, request: web.Request) -> web.StreamResponse:
        sent = self.sent.get(request.match_info["attempt"])
        if sent is None:
            return refused(404, "no upload")
        assert request.content_type == names.PARTIAL
        offset = integer(names.OFFSET, request.headers[names.OFFSET])
        if offset != len(sent.data):
            wrong = WrongOffset(expected=len(sent.data), provided=offset)
            return web.Response(body=wrong.encode(), status=409, content_type=names.PROBLEM)
        self._keep(request, await request.read())
        if boolean(names.COMPLETE, request.headers[names.COMPLETE]):
            return self._receipt(request.match_info["task"], request.match_info["attempt"])
        return web.Response(status=204, headers={names.OFFSET: str(len(sent.data))})

    def _receipt(self, task: str, attempt: str) -> web.Response:
        sent = self.sent[attempt]
        assert len(sent.data) == sent.length, "complete, but not whole"
        sent.complete = True
        said = self.receipts[task]
        receipt = said.pop(0) if said else Receipt(state="admitted")
        if receipt.state == "received":
            return answer(receipt, 202, **{"Retry-After": "0"})
        self._over(task)
        return answer(receipt, 200 if receipt.state == "admitted" else 422)
