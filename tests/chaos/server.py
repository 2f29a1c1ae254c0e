"""A Redis that dies and comes back on the same port: empty, or as it was when it was saved."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

from broker.client import Client, RedisSettings
from broker.errors import Unavailable
from fedstream.ports import HeldPort
from fedstream.redis_server import death_with_parent, find_server
from tests.support import wait_until


class Server:
    """One server after the other; ``life`` counts them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: Process | None = None
        self.life = 0
        self.up = asyncio.Event()
        self.changing = asyncio.Lock()  # one restart at a time
        self._held = HeldPort()
        self.port = self._held.number
        self.settings = RedisSettings(url=f"redis://127.0.0.1:{self.port}/0")
        self.client = Client(self.settings, "chaos")  # not by way of the wire

    async def start(self) -> None:
        """Starts it with what was saved, and waits until it answers."""
        with (self._folder / "redis.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                find_server(), "--bind", "127.0.0.1", "--port", str(self.port),
                "--dir", self._folder, "--save", "", "--appendonly", "no",
                stdin=DEVNULL, stdout=log, stderr=log, preexec_fn=death_with_parent(),
            )  # fmt: skip
        await wait_until(self._answers, what="Redis answers")
        self.life += 1
        self.up.set()

    async def _answers(self) -> bool:
        try:
            return bool(await self.client.call("PING") == b"PONG")
        except Unavailable:  # not yet, or it still loads
            return False

    async def save(self) -> None:
        """What it has now is what it will have after the next restart."""
        await self.client.call("SAVE")

    async def kill(self) -> None:
        """As a crash would."""
        self.up.clear()
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    async def stop(self) -> None:
        """For good."""
        await self.kill()
        await self.client.close()
        self._held.close()

    def forget(self) -> None:
        """Nothing was saved."""
        (self._folder / "dump.rdb").unlink(missing_ok=True)
