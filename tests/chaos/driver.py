"""One run: the services on a Redis that may die, the faults of a plan, and what is left behind."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.keys import GATEWAY, Keys
from fedstream.core.errors import NoRun, Unavailable
from fedstream.local.supervisor import HeldPort
from tests.chaos.arithmetic import CACHING
from tests.chaos.checks import Facts, complaints
from tests.chaos.faults import GATEWAYS, OF_ONE, TRAINERS, UPDATERS, Kind, Plan
from tests.chaos.front import Front
from tests.chaos.history import gathered
from tests.chaos.inject import Injector
from tests.chaos.phones import Phones
from tests.chaos.seams import CONTROL, PLATTER, Control
from tests.chaos.sentinel import Sentineled
from tests.chaos.server import Server
from tests.chaos.services import Services, Zygote
from tests.chaos.task import NOTES
from tests.chaos.watcher import Watcher
from tests.chaos.wire import Wire
from tests.support import EveryRole, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WIRE = "FEDSTREAM_WIRE__UPDATE"
STUCK_S = 90.0  # without what is waited for, the run is stuck, however busy the machine is


@dataclass(frozen=True)
class Outcome:
    """A run that is over."""

    plan: Plan
    facts: Facts
    complaints: tuple[str, ...]  # what should have held and did not
    seconds: float
    fenced: int  # updaters that found another in their place
    did: Mapping[str, int]  # what faults came to that may come to nothing
    folder: Path | None  # what is left of a run that failed


async def run(plan: Plan, zygote: Zygote, *, stuck_s: float = STUCK_S) -> Outcome:
    """Plays a plan in a folder of its own, which stays if something does not hold."""
    folder = Path(tempfile.mkdtemp(prefix=f"fedstream-chaos-{plan.seed}-"))
    began = time.monotonic()
    async with _chaos(plan, zygote, folder, stuck_s) as chaos:
        await chaos.play()
        facts = await chaos.facts()
    said = tuple(complaints(facts))
    if not said:
        shutil.rmtree(folder)
    seconds = time.monotonic() - began
    return Outcome(
        plan, facts, said, seconds, chaos.services.fenced, chaos.did, folder if said else None
    )


@asynccontextmanager
async def _chaos(plan: Plan, zygote: Zygote, folder: Path, stuck_s: float) -> AsyncIterator[Chaos]:
    async with AsyncExitStack() as stack:
        server = Sentineled(folder) if plan.sentinels else Server(folder)
        stack.push_async_callback(server.stop)
        await server.start()
        wires = {}
        if isinstance(server, Server):
            for name in plan.names:
                wires[name] = await stack.enter_async_context(Wire(server.port))
        ports = {name: stack.enter_context(HeldPort()).number for name in GATEWAYS}
        front = Front([*ports.values()], plan.seed)
        if plan.over_http:
            await stack.enter_async_context(front)
        yield Chaos(plan, zygote, folder, server, wires, front, ports, stuck_s)


class Chaos:
    """The services, what lies between them, and what is done to them."""

    def __init__(
        self,
        plan: Plan,
        zygote: Zygote,
        folder: Path,
        server: Server | Sentineled,
        wires: dict[str, Wire],
        front: Front,
        ports: Mapping[str, int],
        stuck_s: float,
    ) -> None:
        """``ports``: the gateway's replicas'; ``front``: what is before them."""
        self._plan = plan
        self._folder = folder
        self._stuck_s = stuck_s
        self._keys = Keys("chaos")
        self._server = server
        self._ledger = EveryRole(server.client, self._keys, "chaos")
        self._watcher = Watcher(server, self._keys)
        self._findings: list[str] = []
        for name in ("journal", "notes"):
            (folder / name).mkdir(mode=0o700)
        self._controls = {name: Control(folder / f"{name}.control") for name in plan.names}
        common = self._settings()
        own = {
            name: common
            | {CONTROL: f"{folder / name}.control"}
            | (
                {"FEDSTREAM_REDIS__URL": wires[name].url}
                if isinstance(server, Server)
                else server.environment
            )
            | ({"FEDSTREAM_HTTP__PORT": str(ports[name])} if name in ports else {})
            | ({PLATTER: str(folder / "platter")} if name in UPDATERS else {})
            | ({WIRE: plan.formats[TRAINERS.index(name)]} if name in TRAINERS else {})
            for name in plan.names
        }
        self.services = Services(zygote, folder, own)
        self._front = front
        self._phones = Phones(
            zygote,
            folder,
            self._ledger,
            server,
            common,
            devices=plan.over_http,
            url=front.url if plan.over_http else "",
        )
        self._injector = Injector(
            plan,
            folder,
            server=server,
            wires=wires,
            services=self.services,
            controls=self._controls,
            keys=self._keys,
            findings=self._findings,
            front=front,
            phones=self._phones,
        )

    @property
    def did(self) -> Mapping[str, int]:
        """What faults came to that may come to nothing."""
        forgotten = Counter({"devices that Redis forgot": self._phones.forgotten})
        return self._injector.did + self._front.did + forgotten

    def _settings(self) -> dict[str, str]:
        plan = self._plan
        policy = "{kind='in_flight', n=4}"
        if plan.strategy == "fedavg":
            policy = "{kind='rounds', k=4, timeout_s=3.0}"
        settings = {
            "RUN__NAME": self._keys.name,
            "RUN__VERSIONS": str(plan.versions),
            "RUN__SEED": str(plan.seed),
            "TASK__NAME": "tests.chaos.task:task",
            "REDIS__TIMEOUT_S": "2.0",
            "STRATEGY__NAME": plan.strategy,
            "SCHEDULER__POLICY": policy,
            "WIRE__MODEL": plan.model,
            # Faster trainers would make all versions while the devices over HTTP enrol that Redis
            # forgot.
            "DEVICES__LATENCY": f"{{kind='fixed', mean_s={0.15 if plan.over_http else 0.02}}}",
            "JOURNAL__DIR": str(self._folder / "journal"),
            "JOURNAL__SYNC": plan.sync,
            "JOURNAL__SYNC_S": "0.3",
            "JOURNAL__SEGMENT_VERSIONS": "30",
            "UPDATER__LEASE_S": "1.0",
            "COORDINATOR__REDELIVER_S": "2.0",
            "LEASE__SECONDS": "2.0",
            "LEASE__ATTEMPTS": "50",  # who is killed is not poisoned
        }
        if plan.strategy == "fedavg":
            settings["STRATEGY__CLIENTS_PER_ROUND"] = "4"
        elif plan.strategy not in OF_ONE:
            settings["STRATEGY__BUFFER_SIZE"] = "3"
        if plan.strategy in ("fedbuff", "ringmaster"):  # the slower ones' tasks become too stale
            settings |= {
                "STRATEGY__MAX_STALENESS": "0" if plan.strategy == "fedbuff" else "2",
                "STRATEGY__CANCEL_STALE": "true",
                "DEVICES__LATENCY": "{kind='exponential', mean_s=0.1}",
            }
        if plan.strategy == "aced":
            settings["STRATEGY__MAX_AGE"] = "2"
        if plan.strategy == "fadas":
            settings["STRATEGY__DELAY_ADAPTIVE"] = "code"
        if plan.adapts:
            settings["STRATEGY__ADAPT"] = "{least=0.0001, most=1.0}"
        if plan.strategy in ("scaffold", *CACHING):
            settings["JOURNAL__SEGMENT_VERSIONS"] = "5"  # the vectors lie in many of them
        if plan.strategy == "scaffold":
            settings["SOLVER__KIND"] = "scaffold"
        if plan.over_http:
            settings |= {
                "COORDINATOR__SITES": f'["pool", "{GATEWAY}"]',
                "GATEWAY__RETRY_S": "[0.1, 0.5]",
                "GATEWAY__AWAY_S": "3.0",
                "GATEWAY__LEASE_S": "6.0",
                "GATEWAY__HEARTBEAT_S": "0.5",
                "GATEWAY__DRAIN_S": "5.0",
            }
        return {f"FEDSTREAM_{name}": value for name, value in settings.items()} | {
            NOTES: str(self._folder / "notes")
        }

    async def play(self) -> None:
        """From the start to the end of the run, or until it is stuck."""
        watching = asyncio.create_task(self._watcher.watch())
        try:
            names = self._plan.names
            if self._plan.over_http:  # trainers come last, or the run gets ahead of the devices
                await self.services.start(*(name for name in names if name not in TRAINERS))
                await self._phones.start(self._stuck_s)
                await self.services.start(*TRAINERS)
            else:
                await self.services.start(*names)
            await self._faults()
            await self._last_version()
            await self._phones.over()
        finally:
            await self._phones.stop()
            await self.services.stop()
            watching.cancel()
            await asyncio.wait({watching})
        if not watching.cancelled():
            await watching  # raises what ended it

    async def _faults(self) -> None:
        async with asyncio.TaskGroup() as group:
            for fault in self._plan.faults:
                if not await self._watcher.reaches(fault.at, self._stuck_s):
                    self._findings.append(
                        f"stuck at version {self._watcher.version}, before {fault}"
                    )
                    return
                group.create_task(self._injector.bar(fault))
                if self._plan.adapts:
                    group.create_task(self._injector.scale(fault))
                group.create_task(self._injector.inject(fault))

    async def _last_version(self) -> None:
        """The run ends by itself, and what was admitted for it is dealt with."""

        async def over() -> bool:
            try:
                view = await self._ledger.look()
            except (Unavailable, NoRun):
                return False
            return view.run.state == "finished" and not view.queue and not view.admitted

        try:
            await wait_until(over, timeout=self._stuck_s)
        except AssertionError:
            self._findings.append(f"not finished: stuck at version {self._watcher.version}")

    async def facts(self) -> Facts:
        """What is left behind, once the services have stopped."""
        return await gathered(
            self._server.client,
            self._keys,
            self._folder / "journal",
            notes=self._folder / "notes",
            told=self._watcher.published,
            files=self._server.files,
            forged=self._injector.forged,
            was_full=any(fault.kind is Kind.MEMORY for fault in self._plan.faults),
            findings=(
                *self._findings,
                *self.services.findings,
                *self._phones.findings,
                *self._front.findings,
            ),
        )
