"""What is between an updater and its helper: it records all bytes, and loses or repeats some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from fedstream.private.sealing import Intent

_ON_THE_WAY = {"Content-Length", "Content-Encoding", "Transfer-Encoding"}


class Trouble(StrEnum):
    """What becomes of the next intent, or of its answer."""

    REQUEST_CUT = "request cut"  # the helper never gets it
    ANSWER_LOST = "answer lost"
    ANSWER_LATE = "answer late"  # the updater has stopped waiting
    DOUBLED = "request doubled"  # the helper gets it twice at once
    ANSWER_OF_ANOTHER = "answer of another batch"  # as from a cache that mixes requests up
    GARBLED = "answer cut short"


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, both as sent."""

    path: str
    sent: bytes
    status: int
    answer: bytes
    headers: dict[str, str]

    @property
    def intent(self) -> Intent | None:
        """The intent of an opened sum; None for anything else."""
        is_opened = self.path == "/v1/open" and self.status == 200
        return Intent.decode(self.sent) if is_opened else None


class Between:
    """An HTTP proxy before a helper. ``late_s``: how long a late answer takes."""

    def __init__(self, *, late_s: float = 0.5) -> None:
        self.helper: str | None = None  # its URL; None: nobody listens
        self.exchanges: list[Exchange] = []
        self.sent: dict[str, Intent] = {}  # that the helper may have got, by digest
        self.next: list[Trouble] = []
        self.met: list[Trouble] = []  # that have happened
        self.at_request: Callable[[], object] | None = None  # called once, before the helper
        self.at_answer: Callable[[], object] | None = None  # called once; the answer is lost
        self._late_s = late_s

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._server = TestServer(app)
        await self._server.start_server()
        self._session = aiohttp.ClientSession()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._session.close()
        await self._server.close()

    @property
    def url(self) -> str:
        """Where the updater finds the helper."""
        return str(self._server.make_url("/"))

    @property
    def opened(self) -> dict[str, set[bytes]]:
        """The answers to each opened intent, by its digest."""
        found: dict[str, set[bytes]] = {}
        for one in self.exchanges:
            if (intent := one.intent) is not None:
                found.setdefault(intent.digest, set()).add(one.answer)
        return found

    async def again(self, number: int) -> None:
        """Send a recorded request to the helper once more, as a network that is late may do."""
        one = self.exchanges[number]
        await self._ask("POST", one.path, one.sent)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        sent = await request.read()
        asks = request.path == "/v1/open"
        trouble = self.next.pop(0) if asks and self.next else None
        if asks and (called := self.at_request) is not None:
            self.at_request = None
            called()
        if trouble is Trouble.REQUEST_CUT:
            return self._cut(request, trouble)
        before = next((one for one in self.exchanges[::-1] if one.intent is not None), None)
        asking = [self._ask(request.method, request.path, sent)]
        if trouble is Trouble.DOUBLED:
            self.met.append(trouble)
            asking.append(self._ask(request.method, request.path, sent))
        found, *_ = await asyncio.gather(*asking)
        if asks and (called := self.at_answer) is not None:
            self.at_answer = None
            called()
            return self._cut(request, None)
        if found is None or trouble is Trouble.ANSWER_LOST:
            return self._cut(request, trouble)
        if trouble is Trouble.ANSWER_LATE:
            self.met.append(trouble)
            await asyncio.sleep(self._late_s)
        status, answer, headers = found.status, found.answer, found.headers
        if trouble is Trouble.ANSWER_OF_ANOTHER and before is not None and before.sent != sent:
            self.met.append(trouble)
            status, answer, headers = before.status, before.answer, before.headers
        if trouble is Trouble.GARBLED and found.status == 200:
            self.met.append(trouble)
            answer = answer[:-4]
        kept = {name: value for name, value in headers.items() if name not in _ON_THE_WAY}
        return web.Response(status=status, body=answer, headers=kept)

    def _cut(self, request: web.Request, trouble: Trouble | None) -> web.StreamResponse:
        if trouble is not None:
            self.met.append(trouble)
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)

    async def _ask(self, method: str, path: str, sent: bytes) -> Exchange | None:
        """Ask the helper; None: it can't be reached, or dies."""
        if self.helper is None:
            return None
        url = self.helper.rstrip("/") + path
        if path == "/v1/open":
            intent = Intent.decode(sent)
            self.sent[intent.digest] = intent
        try:
            async with self._session.request(method, url, data=sent) as reply:
                answer = await reply.read()
                found = Exchange(path, sent, reply.status, answer, dict(reply.headers))
        except (aiohttp.ClientError, OSError):
            return None
        self.exchanges.append(found)
        return found
