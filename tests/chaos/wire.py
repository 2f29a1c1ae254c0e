"""The ways between the services and Redis, which can be cut, held, and be late."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass(frozen=True)
class _Straggler:
    """A request that arrives long after whoever sent it has lost the connection."""

    parts: tuple[bytes, ...]  # by which it is known
    kept: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class Wire:
    """Passes on whatever comes, to a Redis on this machine that may be gone for a while."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._asking, self._answering = asyncio.Event(), asyncio.Event()
        self._asking.set()
        self._answering.set()
        self._straggler: _Straggler | None = None
        self._late = 0  # how many times at once what is asked is to come late
        self.delivered = 0  # requests, or parts of one, that came when nobody waited any more

    @property
    def url(self) -> str:
        """Redis, by this way."""
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        self._abort()
        for serving in self._serving:
            serving.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await self._server.wait_closed()

    async def cut(self, seconds: float) -> None:
        """Cuts every connection. For so long before, what Redis did is done, but nobody hears."""
        self._answering.clear()
        await asyncio.sleep(seconds)
        self._abort()
        self._answering.set()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Inside the block nothing arrives; then everything does."""
        self._asking.clear()
        self._answering.clear()
        try:
            yield
        finally:
            self._asking.set()
            self._answering.set()

    @asynccontextmanager
    async def late(self) -> AsyncIterator[None]:
        """Inside the block nothing arrives; then everything does, whoever has given up meanwhile.

        Requests of a client that went away are Redis's business all the same: they were sent.
        """
        self._late += 1
        self._asking.clear()
        try:
            yield
        finally:
            self._asking.set()
            self._late -= 1

    @asynccontextmanager
    async def straggling(self, *parts: bytes) -> AsyncIterator[asyncio.Event]:
        """The first request with these parts loses its connection, and arrives behind the block.

        All else passes, its repetition too. What it gives is set once there was such a request.
        """
        straggler = self._straggler = _Straggler(parts)
        try:
            yield straggler.kept
        finally:
            self._straggler = None
            straggler.released.set()

    def _abort(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.create_task(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        self._open |= ends
        try:
            with suppress(OSError):  # Redis is not there
                there, back = await asyncio.open_connection("127.0.0.1", self._to)
                ends |= {back}
                self._open |= ends
                await asyncio.gather(
                    self._ask(reader, back, writer), self._answer(there, writer, back)
                )
        finally:
            for end in ends:
                end.transport.abort()
            self._open -= ends

    async def _ask(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 20):
                if not self._asking.is_set():
                    was_late = self._late > 0
                    await self._asking.wait()
                    gone = back.is_closing() or reader.at_eof()
                    if gone and not was_late:
                        break
                    self.delivered += gone
                if straggler := self._straggles(data):
                    straggler.kept.set()
                    back.transport.abort()
                    await straggler.released.wait()
                to.write(data)
                await to.drain()
                if straggler or reader.at_eof():
                    to.write_eof()  # Redis does what it was asked, and then closes
                    return
        to.transport.abort()  # and so, when it ends, the other direction too

    def _straggles(self, data: bytes) -> _Straggler | None:
        one = self._straggler
        if one is None or one.kept.is_set() or not all(part in data for part in one.parts):
            return None
        return one

    async def _answer(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, asked: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 20):
                await self._answering.wait()
                if not to.is_closing():
                    to.write(data)
                    await to.drain()
        to.transport.abort()
        asked.transport.abort()
