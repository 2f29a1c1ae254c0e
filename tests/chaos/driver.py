"""One run: the services on a Redis that may die, the faults of a plan, and what is left behind."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from broker.errors import NoRun, Unavailable
from broker.keys import Keys
from broker.layout import PAGE
from broker.ledger import Ledger
from tests.chaos.checks import Facts, complaints
from tests.chaos.faults import UPDATER, Fault, Kind, Plan
from tests.chaos.history import gathered
from tests.chaos.server import Server
from tests.chaos.services import Child, Services
from tests.chaos.watcher import Watcher
from tests.chaos.wire import Wire
from tests.support import wait_until
from updater.journal import SUFFIX

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = ("updater-1", "updater-2", "coordinator", "scheduler", "trainer-1", "trainer-2")
_STUCK_S = 90.0  # without what is waited for, the run is stuck, however busy the machine is
_TAKEN_OVER_S = 60.0
_ROOM = 64 << 10  # bytes that a log may still grow by while the journal's disk is full


@dataclass(frozen=True)
class Outcome:
    """A run that is over."""

    plan: Plan
    facts: Facts
    seconds: float
    fenced: int  # updaters that found another in their place
    folder: Path | None  # what is left of a run that failed

    @property
    def complaints(self) -> list[str]:
        """What should have held and did not."""
        return complaints(self.facts)


async def run(plan: Plan) -> Outcome:
    """Plays a plan in a folder of its own, which stays if something does not hold."""
    folder = Path(tempfile.mkdtemp(prefix=f"fedstream-chaos-{plan.seed}-"))
    began = time.monotonic()
    async with _chaos(plan, folder) as chaos:
        await chaos.play()
        facts = await chaos.facts()
    failed = bool(complaints(facts))
    if not failed:
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    return Outcome(plan, facts, seconds, chaos.services.fenced, folder if failed else None)


@asynccontextmanager
async def _chaos(plan: Plan, folder: Path) -> AsyncIterator[Chaos]:
    server = Server(folder)
    try:
        await server.start()
        async with Wire(server.port) as wire:
            yield Chaos(plan, folder, server, wire)
    finally:
        await server.stop()


class Chaos:
    """The services, what lies between them, and what is done to them."""

    def __init__(self, plan: Plan, folder: Path, server: Server, wire: Wire) -> None:
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._keys = Keys("chaos")
        self._journal = folder / "journal"
        self._server = server
        self._wire = wire
        self._ledger = Ledger(server.client, self._keys, "chaos")
        self._watcher = Watcher(server, self._keys)
        self._findings: list[str] = []
        self.services = Services(folder, NAMES, self._settings())

    def _settings(self) -> dict[str, str]:
        plan = self._plan
        policy = "{kind='in_flight', n=4}"
        if plan.strategy == "fedavg":
            policy = "{kind='rounds', k=4, timeout_s=3.0}"
        settings = {
            "RUN__NAME": self._keys.name, "RUN__VERSIONS": str(plan.versions),
            "RUN__SEED": str(plan.seed), "TASK__NAME": "tests.chaos.task:task",
            "REDIS__URL": self._wire.url, "REDIS__TIMEOUT_S": "3.0",
            "STRATEGY__NAME": plan.strategy, "SCHEDULER__POLICY": policy,
            "DEVICES__LATENCY": "{kind='fixed', mean_s=0.02}",
            "JOURNAL__DIR": str(self._journal), "JOURNAL__SYNC": plan.sync,
            "JOURNAL__SYNC_S": "0.3", "JOURNAL__SEGMENT_VERSIONS": "30",
            "UPDATER__LEASE_S": "1.0", "COORDINATOR__REDELIVER_S": "2.0",
            "LEASE__SECONDS": "2.0", "LEASE__ATTEMPTS": "50",  # who is killed is not poisoned
        }  # fmt: skip
        if plan.strategy == "fedavg":
            settings["STRATEGY__CLIENTS_PER_ROUND"] = "4"
        if plan.strategy in ("scaffold", "afa-cs"):
            settings["STRATEGY__BUFFER_SIZE"] = "3"
            settings["JOURNAL__SEGMENT_VERSIONS"] = "5"  # the vectors lie in many of them
        if plan.strategy == "scaffold":
            settings["SOLVER__KIND"] = "scaffold"
        return {f"FEDSTREAM_{name}": value for name, value in settings.items()}

    async def play(self) -> None:
        """From the start to the end of the run, or until it is stuck."""
        watching = asyncio.create_task(self._watcher.watch())
        try:
            await self.services.start()
            await self._faults()
            await self._last_version()
        finally:
            await self.services.stop()
            watching.cancel()
            await asyncio.wait({watching})
        if not watching.cancelled():
            await watching  # raises what ended it

    async def _faults(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self._plan.faults:
                if not await self._watcher.reaches(fault.at, _STUCK_S):
                    self._findings.append(
                        f"stuck at version {self._watcher.version}, before {fault}"
                    )
                    return
                group.create_task(self._inject(fault))

    async def _last_version(self) -> None:
        """The run ends by itself, and what was admitted for it is dealt with."""

        async def over() -> bool:
            try:
                view = await self._ledger.look()
            except (Unavailable, NoRun):
                return False
            return view.run.state == "finished" and not view.queue and not view.admitted

        try:
            await wait_until(over, timeout=_STUCK_S)
        except AssertionError:
            self._findings.append(f"not finished: stuck at version {self._watcher.version}")

    # what goes wrong

    async def _inject(self, fault: Fault) -> None:
        done: dict[Kind, Callable[[Fault], Awaitable[None]]] = {
            Kind.KILL: self._kill, Kind.PAUSE: self._pause, Kind.USURP: self._usurp,
            Kind.AMNESIA: self._amnesia, Kind.RELAPSE: self._relapse, Kind.EMPTY: self._empty,
            Kind.REWIND: self._rewind, Kind.CUT: self._cut, Kind.DELAY: self._delay,
            Kind.DISK: self._disk,
        }  # fmt: skip
        await asyncio.sleep(fault.after_s)
        try:
            await done[fault.kind](fault)
        except AssertionError as error:  # what was waited for never came
            self._findings.append(f"{fault}: {error}")

    async def _kill(self, fault: Fault) -> None:
        name = await self._leader() if fault.target == UPDATER else fault.target
        child = self.services[name]
        child.signal(signal.SIGKILL)
        await child.process.wait()
        await self.services.alive(name)

    async def _pause(self, fault: Fault) -> None:
        child = self.services[fault.target]
        child.signal(signal.SIGSTOP)
        await asyncio.sleep(fault.seconds)
        child.signal(signal.SIGCONT)

    async def _usurp(self, fault: Fault) -> None:
        life = self._server.life
        sleeper, _ = await self._taken_over()
        await asyncio.sleep(fault.seconds)
        sleeper.signal(signal.SIGCONT)
        ended, _ = await asyncio.wait(
            {asyncio.create_task(sleeper.process.wait())}, timeout=_TAKEN_OVER_S
        )
        if not ended and life == self._server.life:  # else it may have led again
            self._findings.append(f"an updater that had a successor went on:\n{sleeper.last_words}")

    async def _amnesia(self, fault: Fault) -> None:
        async with self._server.changing:
            sleeper, successor = await self._taken_over()
            await asyncio.sleep(fault.seconds)
            await self._server.kill()
            self._server.forget()
            await self._wake(sleeper, successor)

    async def _relapse(self, fault: Fault) -> None:
        async with self._server.changing:
            await self._server.save()
            sleeper, successor = await self._taken_over()
            await asyncio.sleep(fault.seconds)
            await self._server.kill()
            await self._wake(sleeper, successor)

    async def _wake(self, sleeper: Child, successor: Child) -> None:
        """Redis comes back without a trace of the successor, and so does the sleeper."""
        successor.signal(signal.SIGKILL)
        sleeper.signal(signal.SIGCONT)
        await self._server.start()

    async def _taken_over(self) -> tuple[Child, Child]:
        """The updater that leads falls asleep until another has taken its place: both."""
        while True:
            sleeper = self.services[await self._leader()]
            sleeper.signal(signal.SIGSTOP)
            successor = await self._leader(but=sleeper)
            if not sleeper.ended:  # by another fault, and its name leads again
                return sleeper, self.services[successor]

    async def _leader(self, *, but: Child | None = None) -> str:
        """Which updater leads; waits until one does, and is another process than ``but``."""
        found = ""

        async def leads() -> bool:
            nonlocal found
            found = await self._holder()
            child = self.services[found] if found else None
            # The lease may still be that of one which has ended, and has the same name.
            return child is not None and child is not but and child.leads

        await wait_until(leads, timeout=_TAKEN_OVER_S, what="another updater leads")
        return found

    async def _holder(self) -> str:
        """Who has the updater's lease; '' if nobody has, or Redis is away."""
        try:
            holder = await self._server.client.call("GET", self._keys.leader("updater"))
        except Unavailable:
            return ""
        return (holder or b"").decode().partition("|")[0]

    async def _empty(self, fault: Fault) -> None:
        async with self._server.changing:
            await self._server.kill()
            self._server.forget()
            await asyncio.sleep(fault.seconds)
            await self._server.start()

    async def _rewind(self, fault: Fault) -> None:
        async with self._server.changing:
            await self._server.save()
            await asyncio.sleep(fault.seconds)  # what is done now, Redis will not know
            await self._server.kill()
            await self._server.start()

    async def _cut(self, fault: Fault) -> None:
        await self._wire.cut(fault.seconds)

    async def _delay(self, fault: Fault) -> None:
        async with self._wire.held():
            await asyncio.sleep(fault.seconds)

    async def _disk(self, fault: Fault) -> None:
        """No file of the updater grows any more: its next record comes to an end in the middle."""
        child = self.services[await self._leader()]
        newest = max(path for path in self._journal.iterdir() if path.name.endswith(SUFFIX))
        log = child.log.stat().st_size + _ROOM
        full = max(newest.stat().st_size + self._rng.randrange(20_000), log)
        full -= full % PAGE  # as on a real disk: no part of a block is there
        with suppress(ProcessLookupError):  # another fault may have killed it
            _, most = resource.prlimit(child.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (full, most))
            await asyncio.sleep(fault.seconds)
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (most, most))

    async def facts(self) -> Facts:
        """What is left behind, once the services have stopped."""
        return await gathered(
            self._server, self._keys, self._journal, self._watcher,
            findings=(*self._findings, *self.services.findings),
        )  # fmt: skip
