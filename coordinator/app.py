"""The coordinator's HTTP API: the run's status, and models as safetensors.

Memory does not grow with the run: the register is paged, and downloads share a copy of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.coordinator.access import Handler, Tokens, guarded
from fedstream.coordinator.downloads import Downloads, send
from fedstream.core.errors import BlobMissing, FedstreamError, NoRun
from fedstream.core.records import Best, Tally
from fedstream.runtime.http import problem

_DIGITS = 18  # more than any version has
_PAGE = 100  # trainers of the register in one response
_PAGE_BYTES = 1 << 16  # of their entries, whose length the trainers choose
_RETRY_S = 2


def status(name: str, view: Tally) -> dict[str, Any]:
    """A run's status as plain data, for HTTP and `fedstream status`.

    ``view``: a tally that also counts the inboxes' entries.
    """
    run, head = view.run, view.head
    return {
        "run": name,
        "state": run.state,
        "why": run.why,
        "task": run.task,
        "strategy": run.strategy,
        "devices": run.devices,
        "goal": dict(run.goal),
        "parameters": run.layout.parameters,
        "model_bytes": run.layout.nbytes,
        "created": run.created,
        "finished": run.finished,
        "version": head.version,
        "versions": run.versions,
        "published": head.time,
        "epoch": head.epoch,
        "digest": head.digest,
        "published_as": head.encoded.format if head.encoded else "f32",
        "mean_staleness": head.mean_staleness,
        "step": vars(head.step) if head.step is not None else None,
        "buffered_now": head.buffered,
        "encoded": view.encoded,
        "tasks": {"issued": view.issued, **view.outcomes, "open": view.tasks},
        "refused": view.reasons("refused"),
        "given_up": view.reasons("given_up"),
        "dead": view.reasons("dead"),
        "strays": view.reasons("stray"),
        "evaluated": view.reasons("evaluated"),
        "admitted": view.admitted,
        "queue": view.backlog,
        "retained": view.head.retained,
        "triggers": view.triggers,
        "inbox": view.inbox,
        "trainers": view.trainers,
        "quarantined": sorted(head.quarantines.by_device),
        "privacy": head.privacy.about if head.privacy is not None else None,
        "failing": view.failing_devices,
        "kept_versions": view.kept,
        "best": _about(view.best) if view.best else None,
        "dead_letters": view.dead,
    }


def _about(best: Best) -> dict[str, Any]:
    """The best version as plain data. ``kept``: whether Redis has its model."""
    about = {"metric": best.metric, "value": best.value, "version": best.version}
    return about | {"digest": best.digest, "kept": best.blob is not None}


def page(
    register: Mapping[str, Mapping[str, Any]], after: str = "", most: int = _PAGE
) -> tuple[dict[str, Mapping[str, Any]], int]:
    """A page of the register from the first name after ``after``, and how many names remain.

    Pages are also limited in bytes; an entry that alone is too long is replaced by its size.
    """
    names = sorted(name for name in register if name > after)
    found: dict[str, Mapping[str, Any]] = {}
    room = _PAGE_BYTES
    for name in names[:most]:
        about = register[name]
        size = len(json.dumps({name: about}))
        if size > _PAGE_BYTES:
            about, size = {"owns": [], "left_out": f"{size} bytes"}, len(json.dumps(name))
        if size > room:
            break
        room -= size
        found[name] = about
    return found, len(names) - len(found)


class App:
    """The routes of the coordinator. ``downloads``: the most concurrent downloads of models.

    Status and models require a token if one is configured.
    """

    def __init__(
        self,
        client: Client,
        ledger: CoordinatorLedger,
        keys: Keys,
        downloads: int,
        tokens: Tokens | None = None,
    ) -> None:
        self._ledger = ledger
        self._keys = keys
        self._downloads = Downloads(client, keys, downloads)
        self._tokens = tokens

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """GET routes under /v1."""
        return (
            web.get("/v1/runs/{run}", guarded(self._answering(self._status), self._tokens)),
            # Autoscalers have no token, so this route tells only open tasks, trainers and state.
            web.get("/v1/runs/{run}/scaling", self._answering(self._scaling)),
            web.get("/v1/models/{version}", guarded(self._answering(self._model), self._tokens)),
        )

    def _answering(self, handler: Handler) -> Handler:
        """Wrap a handler: 404 if the run or model is missing, 503 if retriable, else 500."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                return await handler(request)
            except (NoRun, BlobMissing) as error:
                return problem(404, str(error))
            except FedstreamError as error:
                if error.retriable:
                    return problem(503, str(error), retry_after_s=_RETRY_S)
                return problem(500, str(error))

        return answer

    async def _status(self, request: web.Request) -> web.StreamResponse:
        """The status and a page of the register: ``?limit=N`` names after ``?after=NAME``."""
        if answer := self._another(request):
            return answer
        after, limit = request.query.get("after", ""), request.query.get("limit", str(_PAGE))
        if unknown := sorted(request.query.keys() - {"after", "limit"}):
            return problem(400, f"unknown parameter {unknown[0][:40]!r}; expected after or limit")
        if not (limit.isdecimal() and len(limit) <= len(str(_PAGE)) and int(limit) <= _PAGE):
            return problem(400, f"limit={limit[:40]!r} is not a number from 0 to {_PAGE}")
        about = status(self._keys.name, await self._ledger.tally(inboxes=True))
        found, more = page(await self._ledger.trainers(), after, int(limit))
        return web.json_response(about | {"register": found, "register_more": more})

    async def _scaling(self, request: web.Request) -> web.StreamResponse:
        """The number of open tasks, for autoscalers (KEDA).

        0, not an error, before the run exists and after it has finished: on an error, an autoscaler
        keeps its trainers.
        """
        if answer := self._another(request):
            return answer
        try:
            view = await self._ledger.tally()
        except NoRun:
            return web.json_response({"open": 0, "trainers": 0, "state": "absent"})
        state = view.run.state
        tasks = view.tasks if state == "running" else 0
        return web.json_response({"open": tasks, "trainers": view.trainers, "state": state})

    def _another(self, request: web.Request) -> web.StreamResponse | None:
        """A 404 if the requested run is not served here, else None."""
        name = request.match_info["run"]
        if name == self._keys.name:
            return None
        return problem(404, f"this deployment serves run {self._keys.name!r}, not {name[:80]!r}")

    async def _model(self, request: web.Request) -> web.StreamResponse:
        """A model as safetensors. The ETag is its digest, so a current copy is not sent again."""
        wanted = request.match_info["version"]
        if wanted == "best":
            return await self._best(request)
        if wanted != "latest" and not (wanted.isdecimal() and len(wanted) < _DIGITS):
            expected = "expected a number, 'latest' or 'best'"
            return problem(400, f"{wanted[:40]!r} is not a version; {expected}")
        while True:
            head = await self._ledger.head()
            if head is None:
                return problem(404, "there is no model yet")
            version = head.version if wanted == "latest" else int(wanted)
            kept = {number: blob for blob, number in (await self._ledger.kept()).items()}
            try:
                return await self._copy(
                    request, version, kept.get(version), await self._ledger.given(version)
                )
            except BlobMissing:
                now = await self._ledger.head()
                if now is None or now.version == head.version or wanted != "latest":
                    break  # else the latest was deleted meanwhile: try the new one
        return problem(404, f"version {wanted} is not available; kept versions: {_ranges(kept)}")

    async def _best(self, request: web.Request) -> web.StreamResponse:
        """The best version's model."""
        best = None
        while best != (best := await self._ledger.best()) and best is not None:
            with suppress(BlobMissing):  # if another is the best meanwhile, try that
                return await self._copy(request, best.version, best.blob, best.digest)
        if best is None:
            why = "none was measured by a metric with a goal (Task.goal)"
            return problem(404, f"no version is the best yet: {why}")
        gone = f"version {best.version}, the best, is no longer in Redis"
        return problem(404, f"{gone}: make it again with fedstream journal export")

    async def _copy(
        self, request: web.Request, version: int, blob: str | None, digest: str | None
    ) -> web.StreamResponse:
        """A version's model, or 304 if the client has it. Raises BlobMissing, Busy, BlobDamaged."""
        if blob is None or digest is None:
            raise BlobMissing(str(version))
        headers = {"ETag": f'"{digest}"', "X-Fedstream-Version": str(version)}
        if f'"{digest}"' in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        with self._downloads.place():
            layout = (await self._ledger.run()).layout
            body = await self._downloads.body(layout, version, blob, digest)
            return await send(request, memoryview(body.data), headers)


def _ranges(versions: Iterable[int]) -> str:
    """Versions as ranges: 3, 5-20."""
    parts: list[list[int]] = []
    for version in sorted(versions):
        if parts and version == parts[-1][1] + 1:
            parts[-1][1] = version
        else:
            parts.append([version, version])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"
