"""A Redis that dies and comes back on the same port: empty, or with what it had at some moment."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import DEVNULL, Process
from contextlib import suppress
from pathlib import Path

from fedstream.broker.client import Client, RedisSettings
from fedstream.core.errors import Unavailable
from fedstream.local.redis_server import find_server
from fedstream.local.supervisor import HeldPort
from fedstream.runtime.process import death_with_parent
from tests.chaos.effects import whole
from tests.support import wait_until


class Server:
    """One server after the other; ``life`` counts them.

    Each writes what it does to an append-only file in a folder of its own. A later one may begin
    with the first bytes of an earlier one's: so it forgets whatever came after.
    """

    def __init__(self, folder: Path, name: str = "redis") -> None:
        self._folder = folder
        self._name = name
        self._process: Process | None = None
        self.life = 0
        self.up = asyncio.Event()
        self.changing = asyncio.Lock()  # one restart at a time
        self._held = HeldPort()
        self.port = self._held.number
        self.settings = RedisSettings(url=f"redis://127.0.0.1:{self.port}/0")
        self.client = Client(self.settings, "chaos")  # not by way of the wire

    async def start(self, *options: str) -> None:
        """Starts it with what lies in its life's folder, and waits until it answers."""
        folder = self._of(self.life + 1)
        folder.mkdir(exist_ok=True)
        with (self._folder / f"{self._name}.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                find_server(),
                "--bind",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--dir",
                folder,
                "--save",
                "",
                "--appendonly",
                "yes",
                "--appendfsync",
                "no",
                "--auto-aof-rewrite-percentage",
                "0",
                "--aof-use-rdb-preamble",
                "no",
                *options,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=death_with_parent(),
            )
        await wait_until(self._answers, what="Redis answers")
        self.life += 1
        self.up.set()

    async def _answers(self) -> bool:
        try:
            return bool(await self.client.call("PING") == b"PONG")
        except Unavailable:  # not yet, or it still loads
            return False

    @property
    def pid(self) -> int:
        """Of the process; 0 if there is none."""
        return self._process.pid if self._process and self._process.returncode is None else 0

    def _of(self, life: int) -> Path:
        return self._folder / f"{self._name}-{life}"

    @property
    def written(self) -> int:
        """The bytes of the file that it writes now."""
        with suppress(FileNotFoundError):
            return self.file(self.life).stat().st_size
        return 0

    def file(self, life: int) -> Path:
        """The append-only file of a life."""
        folder = self._of(life)
        several = folder / "appendonlydir" / "appendonly.aof.1.incr.aof"  # from Redis 7 on
        return several if several.exists() else folder / "appendonly.aof"

    @property
    def files(self) -> list[Path]:
        """Those of all lives so far."""
        return [self.file(life) for life in range(1, self.life + 1)]

    async def kill(self) -> None:
        """As a crash would."""
        self.up.clear()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def remember(self, size: int) -> None:
        """The next life begins with so many bytes of what this one wrote: a moment of before.

        A transaction that is cut goes as a whole, as by redis-check-aof. Redis 7.0 itself leaves
        its beginning in the file, and would do that half when it is started the time after.
        """
        shutil.copytree(self._of(self.life), self._of(self.life + 1))
        file = self._of(self.life + 1) / self.file(self.life).relative_to(self._of(self.life))
        if file.exists():
            with file.open("r+b") as open_:
                open_.truncate(whole(open_.read(size)))

    async def stop(self) -> None:
        """For good."""
        await self.kill()
        await self.client.close()
        self._held.close()
