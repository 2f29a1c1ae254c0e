"""The kubelet: a pod from its first container to its last, with probes, restarts and grace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from tests.k8s.cluster.pod import Container, Inside, Running, Spec

_BACKOFF_S = 10.0  # before the second restart, and any after it
_HOOK_EXTRA_S = 2  # a hook that takes the whole grace leaves so much for the rest
_PEEK_S = 0.3  # good news is not waited for as long as a probe's period
_FAILED = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(eq=False)
class Status:
    """One container's."""

    container: Container
    running: Running | None = None
    started: bool = False  # as its startup probe says
    ready: bool = False
    restarts: int = 0
    stopping: asyncio.Task[None] | None = None  # because a probe failed
    ends: list[str] = field(default_factory=list)  # how each of its processes ended


class Pod:
    """One pod. ``run`` is its life; everything else looks at it or asks for its end."""

    def __init__(self, inside: Inside, changed: Callable[[], None]) -> None:
        self.inside = inside
        self.name: str = inside.meta["name"]
        self.address = inside.address
        self.labels: dict[str, str] = inside.meta["labels"]
        self.containers = [Status(one) for one in inside.containers]
        self.terminating = asyncio.Event()
        self.gone = asyncio.Event()
        self.findings: list[str] = []  # what nobody asked for
        self._inits = [Status(one) for one in inside.inits]
        self._changed = changed
        self._ends_at = 0.0
        self._grace_s: float = inside.spec["terminationGracePeriodSeconds"]

    # looking

    @property
    def ready(self) -> bool:
        """Whether all its containers are, and it is to stay."""
        return not self.terminating.is_set() and all(one.ready for one in self.containers)

    @property
    def restarts(self) -> int:
        """Of all its containers."""
        return sum(one.restarts for one in self.containers)

    @property
    def story(self) -> str:
        """How its processes ended, and the ends of their logs: for whoever looks at it."""
        lines = [f"{self.name}: {'' if self.ready else 'not '}ready, {self.restarts} restarts"]
        for each in (*self._inits, *self.containers):
            lines += [f"  {each.container.name} {end}" for end in each.ends]
            lines += [f"    {line}" for line in each.container.last_words.splitlines()]
        return "\n".join(lines)

    def port(self, name: int | str) -> int | None:
        """The number of a port that one of its containers names."""
        ports = (one.container.port(name) for one in self.containers)
        return next((port for port in ports if port), None)

    # asking

    def delete(self) -> None:
        """As `kubectl delete pod`, or an eviction: it ends within its grace."""
        if not self.terminating.is_set():
            self._ends_at = asyncio.get_running_loop().time() + self._grace_s
            self.terminating.set()
            self._changed()

    def kill(self) -> None:
        """SIGKILL to what runs in it, as when its memory is full. The kubelet starts it again."""
        for each in (*self._inits, *self.containers):
            if each.running:
                each.running.signal(signal.SIGKILL)

    # its life

    async def run(self) -> None:
        """From its creation until nothing of it is left."""
        living = asyncio.create_task(self._live())
        terminating = asyncio.create_task(self.terminating.wait())
        try:
            await asyncio.wait({living, terminating}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()  # raises: until it is to end, a life has no other end
            await self._stop()
        finally:
            terminating.cancel()
            living.cancel()
            await asyncio.wait({living})
            await self._nothing_left()
            self.gone.set()
            self._changed()
        if not living.cancelled():
            living.result()  # raises what went wrong meanwhile

    async def _live(self) -> None:
        for each in self._inits:
            while not self.terminating.is_set() and await self._once(each) != 0:
                await self._back_off(each)
        async with asyncio.TaskGroup() as group:
            for each in self.containers:
                group.create_task(self._keep(each))

    async def _keep(self, each: Status) -> None:
        while not self.terminating.is_set():
            await self._once(each)
            await self._back_off(each)

    async def _once(self, each: Status) -> int:
        """One process of a container: its exit code."""
        loop = asyncio.get_running_loop()
        running = each.running = await each.container.start()
        began = loop.time()
        watching = asyncio.create_task(self._watch(each))
        try:
            code = await running.process.wait()
        finally:
            watching.cancel()
            each.ready = False
            started, each.started = each.started, False
            await asyncio.wait({watching})
            self._changed()
        if not watching.cancelled():
            watching.result()  # raises what went wrong
        if each.stopping:
            await each.stopping
        killed = running.killed
        running.signal(signal.SIGKILL)  # what it left behind
        # Who is told to stop before it minds signals just ends.
        clean = code == 0 or (code == -signal.SIGTERM and not started)
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        each.ends.append(f"ended with {ended} after {loop.time() - began:.1f} s")
        asked = self.terminating.is_set() or each.stopping or each in self._inits
        if not killed and not (asked and clean):
            self._finds(each, each.ends[-1])
        each.stopping = None
        return code

    async def _back_off(self, each: Status) -> None:
        if not self.terminating.is_set():
            await asyncio.sleep(_BACKOFF_S if each.restarts else 0)
            each.restarts += 1

    def _finds(self, each: Status, what: str) -> None:
        self.findings.append(f"{self.name}, container {each.container.name}, {what}")

    # probes

    async def _watch(self, each: Status) -> None:
        """Startup first; then liveness and readiness for as long as it runs."""
        spec = each.container.spec
        if how := spec.get("startupProbe"):
            within_s = how["failureThreshold"] * how["periodSeconds"]
            try:
                async with asyncio.timeout(within_s):
                    await self._comes_to_hold(each, how)
            except TimeoutError:
                self._unhealthy(each, "startup")
        each.started = True
        async with asyncio.TaskGroup() as group:
            if how := spec.get("livenessProbe"):
                group.create_task(self._alive(each, how))
            group.create_task(self._ready(each, spec.get("readinessProbe")))

    async def _alive(self, each: Status, how: Spec) -> None:
        await self._fails(each, how)
        self._unhealthy(each, "liveness")

    async def _ready(self, each: Status, how: Spec | None) -> None:
        while True:
            if how:
                await self._comes_to_hold(each, how)
            each.ready = True
            self._changed()
            if not how:
                return
            await self._fails(each, how)
            each.ready = False
            self._changed()

    async def _comes_to_hold(self, each: Status, how: Spec) -> None:
        while True:
            if await self._holds(each, how):
                return
            await asyncio.sleep(_PEEK_S)

    async def _fails(self, each: Status, how: Spec) -> None:
        """Waits until it has failed as often in a row as the manifest allows."""
        failures = 0
        while failures < how.get("failureThreshold", 3):
            await asyncio.sleep(how["periodSeconds"])
            failures = 0 if await self._holds(each, how) else failures + 1

    async def _holds(self, each: Status, how: Spec) -> bool:
        try:
            async with asyncio.timeout(how.get("timeoutSeconds", 1)):
                return await each.container.ask(how)
        except _FAILED:
            return False

    def _unhealthy(self, each: Status, probe: str) -> None:
        """It is stopped within the pod's grace, and `_keep` starts it again."""
        if not self.terminating.is_set() and each.stopping is None:
            self._finds(each, f"failed its {probe} probe")
            ends_at = asyncio.get_running_loop().time() + self._grace_s
            each.stopping = asyncio.create_task(self._ended(each, ends_at))

    # its end

    async def _nothing_left(self) -> None:
        self.kill()
        for each in (*self._inits, *self.containers):
            if each.stopping:
                each.stopping.cancel()
            if each.running:
                await each.running.process.wait()

    async def _stop(self) -> None:
        """All containers at the same time, within the grace."""
        async with asyncio.TaskGroup() as group:
            for each in (*self._inits, *self.containers):
                if each.stopping:
                    continue  # it is on its way
                if each.running and not each.running.ended:
                    group.create_task(self._ended(each, self._ends_at))
        await asyncio.gather(*(each.stopping for each in self.containers if each.stopping))

    async def _ended(self, each: Status, ends_at: float) -> None:
        """preStop, SIGTERM, and SIGKILL when the grace is over."""
        running = each.running
        assert running
        loop = asyncio.get_running_loop()
        if hook := each.container.spec.get("lifecycle", {}).get("preStop"):
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at):
                    await self._hook(each, hook)
            ends_at = max(ends_at, loop.time() + _HOOK_EXTRA_S)
        if running.most_memory > each.container.memory_limit:
            self._finds(each, "took more than its limit")
        running.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout_at(ends_at):
                await running.process.wait()
        except TimeoutError:
            if not running.killed:
                self._finds(each, "was still there when its grace was over")
            running.signal(signal.SIGKILL)
            await running.process.wait()

    async def _hook(self, each: Status, hook: Spec) -> None:
        if "sleep" in hook:
            await asyncio.sleep(hook["sleep"]["seconds"])
        elif not await each.container.ask(hook):
            self._finds(each, "its preStop hook failed")
