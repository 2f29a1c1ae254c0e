"""The way from devices to their gateway: requests come twice, late, out of order, or not at all.

It balances load, so that each connection of a device may be to another replica. It knows HTTP, so
that it can repeat a request as a proxy or a device's own library would.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Self
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp import web
from yarl import URL

_LATE_S = 2.0  # that a copy comes behind the request, at most
_HOLD_S = 0.2  # that requests overtake one another by, at most
_PATIENCE_S = 60.0  # with the gateway, beyond the longest check-in
_HOPS = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}


class Front:
    """A proxy that makes trouble with one request in four, drawn from a seed.

    And with one upload in seven more: it is cut amid its body.
    """

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        """``ports``: the replicas'."""
        self._ports = ports
        self._port_of: WeakKeyDictionary[asyncio.Transport, int] = WeakKeyDictionary()
        self._rng = random.Random(seed)
        self._open: set[asyncio.Transport] = set()
        self._copies: set[asyncio.Task[None]] = set()
        self.did: Counter[str] = Counter()
        self.findings: list[str] = []

    @property
    def url(self) -> str:
        """The gateway, as devices see it."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=_PATIENCE_S),
        )
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        self.hang_up()
        for copy in self._copies:
            copy.cancel()
        await asyncio.gather(*self._copies, return_exceptions=True)
        await self._session.close()
        await self._runner.cleanup()

    def hang_up(self) -> None:
        """Cut the connections of all devices that wait for an answer."""
        for transport in self._open:
            transport.abort()
            self.did["devices' requests cut"] += 1

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            return web.Response()
        port = self._port_of.setdefault(transport, self._rng.choice(self._ports))
        self._open.add(transport)
        try:
            body = await request.read()
            await asyncio.sleep(self._rng.uniform(0, _HOLD_S))
            drawn = self._rng.random()
            if drawn < 0.06:
                self.did["requests lost"] += 1
                return self._none(request)
            if drawn < 0.12:
                self.did["requests sent twice at once"] += 1
                self._copy(request, body, 0.0)
            elif drawn < 0.18:
                self.did["requests repeated behind later ones"] += 1
                self._copy(request, body, self._rng.uniform(0.1, _LATE_S))
            elif drawn < 0.32 and "Upload-Complete" in request.headers and len(body) > 1:
                self.did["uploads cut amid their bodies"] += 1
                part = body[: self._rng.randrange(1, len(body))]
                await self._begin(port, request, part, len(body))
                return self._none(request)
            status, headers, said = await self._passed(port, request, body)
            if drawn > 0.94:
                self.did["answers lost"] += 1
                return self._none(request)
            return web.Response(status=status, headers=headers, body=said)
        except (aiohttp.ClientError, TimeoutError):  # the gateway is away
            return self._none(request)
        finally:
            self._open.discard(transport)

    def _none(self, request: web.Request) -> web.Response:
        """No answer: the connection is cut instead."""
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _begin(self, port: int, request: web.Request, part: bytes, size: int) -> None:
        """Send the head of a request and a part of its body, and hang up."""
        given = [(n, v) for n, v in request.headers.items() if n.lower() not in _HOPS]
        given.append(("Content-Length", str(size)))
        lines = [f"{request.method} {request.raw_path} HTTP/1.1", *map(": ".join, given), "", ""]
        with suppress(OSError):  # the gateway is away
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write("\r\n".join(lines).encode() + part)
            await asyncio.sleep(_HOLD_S / 4)  # so that it is read
            writer.close()

    def _copy(self, request: web.Request, body: bytes, after_s: float) -> None:
        async def sent() -> None:
            await asyncio.sleep(after_s)
            with suppress(aiohttp.ClientError, TimeoutError):  # the gateway is away
                await self._passed(self._rng.choice(self._ports), request, body)

        copy = asyncio.create_task(sent())
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)

    async def _passed(
        self, port: int, request: web.Request, body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        given = [(n, v) for n, v in request.headers.items() if n.lower() not in _HOPS]
        url = URL(f"http://127.0.0.1:{port}{request.raw_path}", encoded=True)
        async with self._session.request(
            request.method,
            url,
            headers=given,
            data=body or None,
            skip_auto_headers=("Content-Type", "User-Agent"),
            allow_redirects=False,
        ) as answer:
            said = await answer.read()
            if answer.status >= 500 and answer.status != 503:
                self.findings.append(f"{request.method} {request.path} was answered {said!r}")
            headers = [(n, v) for n, v in answer.headers.items() if n.lower() not in _HOPS]
            return answer.status, headers, said
