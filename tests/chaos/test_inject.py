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

from fedstream.broker.keys import Keys
from fedstream.core.errors import Unavailable
from fedstream.core.messages import Event
from tests.chaos import disk, inject
from tests.chaos.faults import UPDATERS, Fault, Kind, plan
from tests.chaos.inject import Injector
from tests.chaos.seams import Control
from tests.chaos.services import Child
from tests.support import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

USURP = Fault(at=0, after_s=0.0, kind=Kind.USURP, seconds=0.0)
TWICE = Fault(at=0, after_s=0.0, kind=Kind.TWICE, seconds=0.0)
TAKEOVER = Fault(at=0, after_s=0.0, kind=Kind.TAKEOVER, seconds=0.0)
POWER = Fault(at=0, after_s=0.0, kind=Kind.POWER, seconds=0.0)


class Redis:
    """Knows who leads, and what is in the queue."""

    def __init__(self) -> None:
        self.client = self
        self.life = 1
        self.changing = asyncio.Lock()
        self.holder = UPDATERS[0]
        self.queue: set[bytes] = set()
        self.asked = 0  # how often for the queue
        self.written = 0
        self.told: list[str] = []  # tasks that ended

    def bind(self, prefix: str) -> None:
        pass

    async def kill(self) -> None:
        pass

    def remember(self, size: int) -> None:
        pass

    async def start(self) -> None:
        self.life += 1

    async def call(self, command: str, *args: object) -> Any:
        if command == "GET":
            return self.holder.encode()
        if command == "XRANGE" and str(args[0]).endswith("events"):
            events = (Event(what="outcome", service="u", time=0.0, task=task) for task in self.told)
            return [(b"1-0", [b"m", event.encode()]) for event in events]
        if command == "XRANGE":
            self.asked += 1
            return [(entry, []) for entry in self.queue]
        raise Unavailable("it does not answer")


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


def injector(
    folder: Path,
    redis: Redis,
    services: Updaters,
    findings: list[str],
    controls: dict[str, Control] | None = None,
) -> Injector:
    parts: Any = SimpleNamespace(server=redis, services=services, front=None, phones=None)
    return Injector(
        plan(6, 0),
        folder,
        server=parts.server,
        wires={},
        services=parts.services,
        controls=controls or {},
        keys=Keys("chaos"),
        findings=findings,
        front=parts.front,
        phones=parts.phones,
    )


def is_asleep(child: Child) -> bool:
    state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state == "T"


async def test_ending_fault_does_not_wake_what_another_paused(
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
        redis.life = 2  # it may lead again
        async with asyncio.timeout(30.0):  # half of what it has to end
            await usurping
    assert findings == []


@pytest.mark.parametrize("commits", [True, False])
async def test_successor_waits_until_the_first_has_committed_or_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    """However long that takes."""
    used: dict[str, bytes] = {}
    monkeypatch.setattr(inject, "Server", Redis)
    monkeypatch.setattr(Injector, "_used", lambda _: dict(used))
    redis, findings = Redis(), list[str]()
    controls = {name: Control(tmp_path / name) for name in UPDATERS}
    async with updaters(tmp_path) as services:
        first, successor = (services[name] for name in UPDATERS)
        control = controls[successor.name]
        faults = injector(tmp_path, redis, services, findings, controls)
        taking_over = asyncio.create_task(faults.inject(TAKEOVER))
        await wait_until(lambda: is_asleep(first) and control["hold"])
        control["held"] = 1.0
        await wait_until(lambda: redis.life == 2 and not is_asleep(first))
        await wait_until(lambda: is_asleep(successor))
        assert control["hold"]

        if commits:
            redis.told, redis.queue = ["t"], {b"1-0"}
            used["t"] = b"1-0"  # which has still to leave the queue
            asked = redis.asked
            await wait_until(lambda: redis.asked > asked + 6)
            assert is_asleep(successor)
            redis.queue = set()
        else:
            first.signal(signal.SIGKILL)
        await taking_over
        assert not control["hold"]
        await wait_until(lambda: not is_asleep(successor))
    assert findings == []


class Disk:
    """A journal's folder, and what of it is on disk."""

    def __init__(self, folder: Path) -> None:
        self._journal, self._platter = folder / "journal", folder / "platter"
        self._journal.mkdir()
        self._platter.mkdir()

    def put(self, name: str, size: int, *, synced: int) -> None:
        path = self._journal / name
        path.write_bytes(bytes(size))
        (self._platter / str(path.stat().st_ino)).write_bytes(bytes(synced))
        (self._platter / "names").write_text(json.dumps(disk.names_of(self._journal)))


def test_what_a_failed_sync_did_not_write_is_gone_once_the_cache_forgets_it(
    tmp_path: Path,
) -> None:
    """A later sync succeeds, and does not write it."""
    folder = tmp_path / "journal"
    folder.mkdir()
    platter = disk.Platter(folder, tmp_path / "platter")
    path = folder / "00000001-000000.journal"
    page = 4096

    def write(number: int) -> None:
        file.seek(number * page)
        file.write(bytes([number + 1]) * page)
        platter.wrote(file.fileno(), number * page)

    with path.open("w+b", buffering=0) as file:
        write(0)
        platter.syncing(file.fileno())()
        write(1)
        assert platter.failed(file.fileno()) == 1
        write(2)
        platter.syncing(file.fileno())()
        assert path.read_bytes()[page] == 2
        platter.forget(path)
    assert [*path.read_bytes()[::page]] == [1, 0, 3]


async def test_ignored_records_need_not_reach_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inject, "_TAKEN_OVER_S", 5.0)
    folder = Disk(tmp_path)
    redis, findings = Redis(), list[str]()
    async with updaters(tmp_path) as services:
        faults = injector(tmp_path, redis, services, findings)
        folder.put("00000004-000000.journal", 3, synced=2)
        failing = asyncio.create_task(faults.inject(POWER))
        await wait_until(redis.changing.locked)
        assert not failing.done()
        folder.put("00000005-000000.journal", 1, synced=1)
        await failing
    assert findings == []


async def test_redis_forgets_nothing_before_lost_records_are_rewritten(
    tmp_path: Path,
) -> None:
    Disk(tmp_path).put("00000001-000000.journal", 1, synced=1)
    redis, findings = Redis(), list[str]()
    redis.queue = {b"1-0"}
    async with updaters(tmp_path) as services:
        faults = injector(tmp_path, redis, services, findings)
        failing = asyncio.create_task(faults.inject(POWER))
        await wait_until(lambda: redis.asked > 3 or failing.done())
        assert redis.changing.locked()
        redis.queue = {b"2-0"}  # that came later
        await failing
    assert not redis.changing.locked()
    assert findings == []
