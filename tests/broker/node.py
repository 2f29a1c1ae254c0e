"""A node that says what a test has it say."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import hiredis


class Node:
    """Says of a cluster's node what it is told to say, and remembers what it was asked."""

    def __init__(self, **replies: bytes) -> None:
        self.replies = replies
        self.asked: list[str] = []
        self._serving: set[asyncio.Task[object]] = set()

    async def __aenter__(self) -> Node:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._serving)
        await asyncio.sleep(0)  # what was aborted is closed now

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        parser = hiredis.Reader()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                parser.feed(data)
                while (command := parser.gets()) is not False:
                    name = command[0].decode().lower()
                    self.asked.append(name)
                    writer.write(self.replies.get(name, b"+OK\r\n"))
                await writer.drain()
        writer.transport.abort()
