"""Faults that overlap: none undoes another, and none waits for what can't come any more."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import Unavailable
from broker.keys import Keys
from tests.chaos import disk, inject
from tests.chaos.faults import UPDATERS, Fault, Kind, plan
from tests.chaos.inject import Injector
from tests.chaos.services import Child
from tests.support import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

USURP = Fault(at=0, after_s=0.0, kind=Kind.USURP, seconds=0.0)
TWICE = Fault(at=0, after_s=0.0, kind=Kind.TWICE, seconds=0.0)
POWER = Fault(at=0, after_s=0.0, kind=Kind.POWER, seconds=0.0)


class Redis:
    """Knows who leads, and nothing else."""

    def __init__(self) -> None:
        self.client = self
        self.life = 1
        self.changing = asyncio.Lock()
        self.holder = UPDATERS[0]

    def bind(self, prefix: str) -> None:
        pass

    async def call(self, command: str, *_args: object) -> bytes:
        if command != "GET":
            raise Unavailable("it does not answer")
        return self.holder.encode()


class Updaters(dict[str, Child]):
    """Processes that do nothing."""

    async def down(self, *_names: str) -> None:
        pass

    def up(self, *_names: str) -> None:
        pass


@asynccontextmanager
async def updaters(folder: Path) -> AsyncIterator[Updaters]:
    processes, children = [], Updaters()
    for name in UPDATERS:
        process = await asyncio.create_subprocess_exec("sleep", "1000")
        log = folder / f"{name}.log"
        log.write_text('{"event": "serving"}\n{"event": "leading"}\n')
        ended: asyncio.Task[Any] = asyncio.create_task(process.wait())
        processes.append(process)
        children[name] = Child(name, process.pid, ended, log)
    try:
        yield children
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


def injector(folder: Path, redis: Redis, services: Updaters, findings: list[str]) -> Injector:
    parts: Any = SimpleNamespace(server=redis, services=services)
    return Injector(
        plan(6, 0), folder, server=parts.server, wires={}, services=parts.services, controls={},
        keys=Keys("chaos"), findings=findings,
    )  # fmt: skip


def is_asleep(child: Child) -> bool:
    state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


async def test_a_fault_that_ends_wakes_nobody_whom_another_put_to_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "_TWICE_S", 0.0)
    redis, findings = Redis(), list[str]()
    async with updaters(tmp_path) as services:
        sleeper = services[UPDATERS[0]]
        faults = injector(tmp_path, redis, services, findings)
        usurping = asyncio.create_task(faults.inject(USURP))
        await wait_until(lambda: is_asleep(sleeper))
        await faults.inject(TWICE)
        assert is_asleep(sleeper)

        redis.holder = UPDATERS[1]
        await wait_until(lambda: not is_asleep(sleeper))
        redis.life = 2  # nobody asks what became of it
        sleeper.signal(signal.SIGKILL)
        await usurping
    assert findings == []


async def test_what_a_successor_does_not_count_need_not_get_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "_TAKEN_OVER_S", 5.0)
    journal, platter = tmp_path / "journal", tmp_path / "platter"
    journal.mkdir()
    platter.mkdir()

    def put(name: str, size: int, *, synced: int) -> None:
        (journal / name).write_bytes(bytes(size))
        (platter / str((journal / name).stat().st_ino)).write_bytes(bytes(synced))
        (platter / "names").write_text(json.dumps(disk.names_of(journal)))

    redis, findings = Redis(), list[str]()
    async with updaters(tmp_path) as services:
        faults = injector(tmp_path, redis, services, findings)
        put("00000004-000000.journal", 3, synced=2)
        failing = asyncio.create_task(faults.inject(POWER))
        await wait_until(redis.changing.locked)
        assert not failing.done()
        put("00000005-000000.journal", 1, synced=1)
        await failing
    assert findings == []
