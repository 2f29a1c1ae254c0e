"""What the coordinator answers over HTTP: the run's status, and models as safetensors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from aiohttp import web
from safetensors.numpy import save

from broker import blobs
from broker.client import Client
from broker.errors import BlobMissing, BrokerError, FedstreamError, NoRun
from broker.keys import Keys
from broker.layout import Model
from broker.ledger import Ledger
from broker.records import View

_DIGITS = 18  # no version has as many

Handler = Callable[[web.Request], Awaitable[web.Response]]


def status(name: str, view: View) -> dict[str, Any]:
    """A run's status as plain data: for HTTP, for `fedstream status`, for summaries."""
    run, head = view.run, view.head
    return {
        "run": name,
        "state": run.state,
        "why": run.why,
        "task": run.task,
        "strategy": run.strategy,
        "devices": run.devices,
        "parameters": run.layout.parameters,
        "model_bytes": run.layout.nbytes,
        "created": run.created,
        "finished": run.finished,
        "version": head.version,
        "versions": run.versions,
        "published": head.time,
        "epoch": head.epoch,
        "digest": head.digest,
        "mean_staleness": head.mean_staleness,
        "buffered_now": head.buffered,
        "tasks": {"issued": view.issued, **view.outcomes, "open": len(view.open)},
        "refused": view.reasons("refused"),
        "given_up": view.reasons("given_up"),
        "dead": view.reasons("dead"),
        "strays": view.reasons("stray"),
        "admitted": view.admitted,
        "queue": view.backlog,
        "retained": view.head.retained,
        "triggers": view.triggers,
        "uploads": view.uploads,
        "trainers": view.trainers,
        "kept_versions": view.kept,
        "dead_letters": view.dead,
    }


class App:
    """The routes of the coordinator.

    While ``is_stopping`` every answer ends its connection: else it would be cut at the end, perhaps
    under a request that is on its way. Whoever connects anew is served by another replica.
    """

    def __init__(self, client: Client, ledger: Ledger, keys: Keys) -> None:
        self._client = client
        self._ledger = ledger
        self._keys = keys
        self.is_stopping: Callable[[], bool] = lambda: False

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """GET routes under /v1."""
        return (
            web.get("/v1/runs/{run}", self._answering(self._status)),
            web.get("/v1/runs/{run}/scaling", self._answering(self._scaling)),
            web.get("/v1/models/{version}", self._answering(self._model)),
        )

    def _answering(self, handler: Handler) -> Handler:
        """The handler, with trouble as an answer: 503 if it may pass, 404 where nothing is."""

        async def answer(request: web.Request) -> web.Response:
            try:
                response = await handler(request)
            except (NoRun, BlobMissing) as error:
                response = _problem(404, str(error))
            except BrokerError as error:
                response = _problem(503 if error.retriable else 500, str(error))
            except FedstreamError as error:
                response = _problem(500, str(error))
            if self.is_stopping():
                response.force_close()
            return response

        return answer

    async def _status(self, request: web.Request) -> web.Response:
        if problem := self._another(request):
            return problem
        about = status(self._keys.name, await self._ledger.look())
        return web.json_response(about | {"register": await self._ledger.trainers()})

    async def _scaling(self, request: web.Request) -> web.Response:
        """How much there is to do for trainers, for whoever sets their number (KEDA).

        Nothing before the run is there and after it is finished, rather than an error: an
        autoscaler that gets none keeps the trainers that it has.
        """
        if problem := self._another(request):
            return problem
        try:
            view = await self._ledger.look()
        except NoRun:
            return web.json_response({"open": 0, "trainers": 0, "state": "absent"})
        state = view.run.state
        tasks = len(view.open) if state == "running" else 0
        return web.json_response({"open": tasks, "trainers": view.trainers, "state": state})

    def _another(self, request: web.Request) -> web.Response | None:
        """The answer to who asks for a run that is not served here; None if it is."""
        name = request.match_info["run"]
        if name == self._keys.name:
            return None
        return _problem(404, f"this deployment serves run {self._keys.name!r}, not {name!r}")

    async def _model(self, request: web.Request) -> web.Response:
        """A model as safetensors. Its digest is the ETag: a copy that is current costs nothing."""
        wanted = request.match_info["version"]
        if wanted != "latest" and not (wanted.isdecimal() and len(wanted) < _DIGITS):
            return _problem(400, f"{wanted!r} is no version: a number, or 'latest'")
        while True:
            head = await self._ledger.head()
            if head is None:
                return _problem(404, "there is no model yet")
            version = head.version if wanted == "latest" else int(wanted)
            try:
                return await self._copy(request, version)
            except BlobMissing:
                now = await self._ledger.head()
                if now is None or now.version == head.version or wanted != "latest":
                    break  # else what was the latest is no more: take what is
        kept = (await self._ledger.kept()).values()
        return _problem(404, f"version {wanted} is not kept; kept are {_ranges(kept)}")

    async def _copy(self, request: web.Request, version: int) -> web.Response:
        """A version's model, unless the client has it. Raises BlobMissing."""
        kept = {number: blob for blob, number in (await self._ledger.kept()).items()}
        digest = await self._ledger.digest(version)
        if version not in kept or digest is None:
            raise BlobMissing(str(version))
        headers = {"ETag": f'"{digest}"', "X-Fedstream-Version": str(version)}
        if f'"{digest}"' in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        model = Model((await self._ledger.run()).layout)
        await blobs.read(self._client, self._keys.model(kept[version]), model, digest=digest)
        body = await asyncio.to_thread(save, model.tensors(), {"version": str(version)})
        return web.Response(body=body, content_type="application/octet-stream", headers=headers)


def _problem(status_code: int, text: str) -> web.Response:
    return web.json_response({"error": text}, status=status_code)


def _ranges(versions: Iterable[int]) -> str:
    """Versions in few words: 3, 5-20."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][1] + 1:
            parts[-1][1] = version
        else:
            parts.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"
