"""A master, a replica and three sentinels: Redis fails over, and forgets what was not copied."""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.settings import SentinelSettings
from fedstream.core.errors import BrokerError
from fedstream.local.supervisor import HeldPort
from fedstream.runtime.process import death_with_parent
from tests.broker.servers import redis_7
from tests.support import wait_until

_NAME = "fedstream"
_DOWN_MS = 500  # without an answer, after which sentinels think that a node is gone
_FAILED_OVER_S = 60.0
_DEMOTED_S = 15.0


class Node:
    """One process of ours, which may be started again on its port."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._held = HeldPort()
        self.port = self._held.number
        self.client = Client(RedisSettings(url=f"redis://127.0.0.1:{self.port}/0"), "chaos")
        self._process: Process | None = None

    async def start(self, *arguments: str, config: str = "") -> None:
        """Starts it, and waits until it answers."""
        binary, file = redis_7(), self._folder / "redis.conf"
        assert binary is not None
        file.write_text(config)
        with (self._folder / "log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                binary,
                file,
                "--bind",
                "127.0.0.1",
                "--port",
                str(self.port),
                "--dir",
                self._folder,
                *arguments,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=death_with_parent(),
            )
        await wait_until(self.answers, what="Redis answers")

    async def answers(self) -> bool:
        """Whether it does."""
        with suppress(BrokerError):
            return bool(await self.client.call("PING") == b"PONG")
        return False

    def signal(self, number: signal.Signals) -> None:
        """To the process."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def end(self) -> None:
        """As a crash would."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def close(self) -> None:
        """For good."""
        await self.end()
        await self.client.close()
        self._held.close()


class Sentineled:
    """What :class:`tests.chaos.server.Server` is where sentinels name the master.

    It has one life and keeps no file: each fail-over forgets a little.
    """

    def __init__(self, folder: Path) -> None:
        self._nodes = [Node(folder, f"redis-{n}") for n in range(2)]
        self._sentinels = [Node(folder, f"sentinel-{n}") for n in range(3)]
        self.life = 1
        self.files: Sequence[Path] = ()
        self.up = asyncio.Event()
        self.changing = asyncio.Lock()
        self._places = [f"127.0.0.1:{one.port}" for one in self._sentinels]
        settings = RedisSettings(sentinel=SentinelSettings(nodes=tuple(self._places), master=_NAME))
        self.client = Client(settings, "chaos")

    @property
    def environment(self) -> dict[str, str]:
        """How services find it."""
        nodes = ", ".join(f"'{place}'" for place in self._places)
        return {
            "FEDSTREAM_REDIS__SENTINEL__NODES": f"[{nodes}]",
            "FEDSTREAM_REDIS__SENTINEL__MASTER": _NAME,
        }

    async def start(self) -> None:
        """Starts all, and waits until they know each other."""
        first, second = self._nodes
        await first.start("--save", "")
        await second.start("--save", "", "--replicaof", "127.0.0.1", str(first.port))
        for one in self._sentinels:
            await one.start(
                "--sentinel",
                config=(
                    f"sentinel monitor {_NAME} 127.0.0.1 {first.port} 2\n"
                    f"sentinel down-after-milliseconds {_NAME} {_DOWN_MS}\n"
                    f"sentinel failover-timeout {_NAME} 3000\n"
                ),
            )
        for one in self._sentinels:
            # One that was itself held up, on a busy machine, would do nothing for 30 s.
            await one.client.call("SENTINEL", "DEBUG", "tilt-trigger", "60000")
            await wait_until(lambda: self._is_known(one), what="sentinels know each other")  # noqa: B023
        self.up.set()

    async def _is_known(self, sentinel: Node) -> bool:
        flat = await sentinel.client.call("SENTINEL", "MASTER", _NAME)
        about = dict(zip(flat[::2], flat[1::2], strict=True))
        return bool(about[b"num-other-sentinels"] == b"2" and about[b"num-slaves"] == b"1")

    async def _master(self) -> Node:
        """The node that a majority of sentinels names."""
        named = [await self._named(one) for one in self._sentinels]
        port = max(set(named), key=named.count)
        return next(one for one in self._nodes if one.port == port)

    async def _named(self, sentinel: Node) -> int:
        reply = await sentinel.client.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", _NAME)
        return int(reply[1])

    async def fail_over(self, *, split: bool) -> None:
        """The master dies, or is away so long that another takes its place; then it is back.

        ``split``: it does not know yet that it is master no more, and does what it is asked.
        """
        async with self.changing:
            master = await self._master()
            if split:
                master.signal(signal.SIGSTOP)
            else:
                await master.end()

            async def another() -> bool:
                return await self._master() is not master

            await wait_until(another, timeout=_FAILED_OVER_S, what="sentinels name another master")
            now = await self._master()
            if split:
                master.signal(signal.SIGCONT)
            else:
                await master.start("--save", "", "--replicaof", "127.0.0.1", str(now.port))

            async def follows() -> bool:
                with suppress(BrokerError):
                    role = await master.client.call("ROLE")
                    return bool(role[0] == b"slave" and role[3] == b"connected")
                return False

            try:
                await wait_until(follows, timeout=_DEMOTED_S)
            except AssertionError:  # sentinels take their time after two fail-overs in a row
                await master.client.call("REPLICAOF", "127.0.0.1", now.port)
                await wait_until(follows, timeout=_FAILED_OVER_S, what="a replica that follows")

    async def stop(self) -> None:
        """For good."""
        await self.client.close()
        for one in (*self._sentinels, *self._nodes):
            one.signal(signal.SIGCONT)
            await one.close()
