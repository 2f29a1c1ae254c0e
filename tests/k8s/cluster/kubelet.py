"""The kubelet: a pod from its first container to its last, with probes, restarts and grace."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.cluster.manifests import Unsupported
from tests.k8s.cluster.pod import CannotStart, Container, Inside, Running
from tests.k8s.cluster.probes import Probe, ask

_GRACE_S = 30  # Kubernetes' default
_PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
_HOOK_EXTRA_S = 2  # a hook that takes the whole grace leaves so much for the rest


@dataclass(frozen=True)
class Manners:
    """What a cluster does in its own time. Seconds."""

    backoff_s: float = 10.0  # before the second restart in a row; then twice that each time
    most_backoff_s: float = 300.0
    forgets_s: float = 600.0  # a container that ran so long begins anew
    again_s: float = 1.0  # before what could not be started is tried again
    lag_s: float = 3.0  # before a Service forgets a pod that is not ready, or to end
    peek_s: float | None = 0.25  # between two probes: whether one has come to be ready


@dataclass(eq=False)
class Status:
    """One container's."""

    container: Container
    running: Running | None = None
    done: bool = False  # an init container that did its work
    started: bool = False  # as its startup probe says
    ready: bool = False
    restarts: int = 0
    in_a_row: int = 0  # ends without a long life between them
    stopping: asyncio.Task[None] | None = None  # because a probe failed
    waiting: str = "ContainerCreating"  # why it does not run; '' if it does
    probes: Sequence[Probe | None] = ()  # startup, liveness, readiness
    ends: list[str] = field(default_factory=list)  # how each of its processes ended


class Pod:
    """One pod. ``run`` is its life; everything else looks at it or asks for its end."""

    def __init__(
        self, inside: Inside, manners: Manners, changed: Callable[[], None],
        admitted: Callable[[Pod], str],
    ) -> None:  # fmt: skip
        self.inside = inside
        self.name: str = inside.meta["name"]
        self.address = inside.address
        self.labels: dict[str, str] = inside.meta.get("labels") or {}
        self.containers = [
            Status(one, probes=[Probe.of(one, inside.address, kind) for kind in _PROBES])
            for one in inside.containers
        ]
        self.waiting = "to be scheduled"  # why it has not begun
        self.terminating = asyncio.Event()
        self.gone = asyncio.Event()
        self.became_ready = 0.0  # on the loop's clock; 0: not yet
        self._inits = [Status(one, probes=(None, None, None)) for one in inside.inits]
        self.findings: list[str] = []  # what nobody asked for
        self._manners = manners
        self._changed = changed
        self._admitted = admitted
        self._ends_at = 0.0
        grace = inside.spec.get("terminationGracePeriodSeconds", _GRACE_S)
        self.grace_s: float = grace
        if inside.spec.get("restartPolicy", "Always") != "Always":
            raise Unsupported(f"pod {self.name} with restartPolicy {inside.spec['restartPolicy']}")

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
    def state(self) -> str:
        """What `kubectl get pods` would say of it."""
        if self.gone.is_set():
            return "gone"
        if self.terminating.is_set():
            return "Terminating"
        if self.waiting:
            return f"Pending: {self.waiting}"
        for each in (*self._inits, *self.containers):
            if each.waiting and not each.done:
                return f"{each.container.name}: {each.waiting}"
        return "Ready" if self.ready else "Running, not ready"

    @property
    def story(self) -> str:
        """State, how its processes ended, and the ends of their logs: for whoever looks at it."""
        lines = [f"{self.name}: {self.state}, {self.restarts} restarts"]
        for each in (*self._inits, *self.containers):
            lines += [f"  {each.container.name} {end}" for end in each.ends]
            lines += [f"    {line}" for line in each.container.last_words.splitlines()]
        return "\n".join(lines)

    def port(self, name: int | str) -> int | None:
        """The number of a port that one of its containers names."""
        ports = (one.container.port(name) for one in self.containers)
        return next((port for port in ports if port), None)

    # asking

    def delete(self, grace_s: float | None = None) -> None:
        """As `kubectl delete pod`: it ends within its grace, or the one given; 0: at once."""
        if not self.terminating.is_set():
            grace_s = self.grace_s if grace_s is None else grace_s
            self._ends_at = asyncio.get_running_loop().time() + grace_s
            self.terminating.set()
            self._changed()
        if grace_s == 0:
            self.kill()

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
        while why := self._admitted(self):
            self._waits(why)
            await asyncio.sleep(self._manners.again_s)
        self._waits("")
        for each in self._inits:
            while not each.done and not self.terminating.is_set():
                each.done = await self._once(each) == 0
        async with asyncio.TaskGroup() as group:
            for each in self.containers:
                group.create_task(self._keep(each))

    def _waits(self, why: str) -> None:
        self.waiting = why
        self._changed()

    async def _keep(self, each: Status) -> None:
        while not self.terminating.is_set():
            await self._once(each)

    async def _once(self, each: Status) -> int:
        """One process of a container, and the wait before the next: its exit code."""
        loop = asyncio.get_running_loop()
        running = each.running = await self._started(each)
        began, each.waiting = loop.time(), ""
        self._changed()
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
        self._ends(each, code, loop.time() - began, clean=clean, killed=killed)
        each.stopping = None
        if not self.terminating.is_set() and not (each in self._inits and code == 0):
            await self._back_off(each, loop.time() - began)
        return code

    def _ends(
        self, each: Status, code: int, ran_s: float, *, clean: bool, killed: bool
    ) -> None:  # fmt: skip
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        each.ends.append(f"ended with {ended} after {ran_s:.1f} s")
        asked = self.terminating.is_set() or each.stopping or each in self._inits
        if not killed and not (asked and clean):
            self.findings.append(f"{self.name}, container {each.container.name}, {each.ends[-1]}")

    async def _back_off(self, each: Status, ran_s: float) -> None:
        manners = self._manners
        if ran_s > manners.forgets_s:
            each.in_a_row = 0
        wait_s = 0.0
        if each.in_a_row:
            wait_s = min(manners.backoff_s * 2 ** (each.in_a_row - 1), manners.most_backoff_s)
            each.waiting = f"CrashLoopBackOff: {each.ends[-1]}, {wait_s:g} s to wait"
        else:
            each.waiting = each.ends[-1]
        self._changed()
        await asyncio.sleep(wait_s)
        each.in_a_row += 1
        each.restarts += 1

    async def _started(self, each: Status) -> Running:
        while True:
            try:
                return await each.container.start()
            except CannotStart as error:
                each.waiting = f"CreateContainerConfigError: {error}"
                self._changed()
                await asyncio.sleep(self._manners.again_s)

    # probes

    async def _watch(self, each: Status) -> None:
        """Startup first; then liveness and readiness for as long as it runs."""
        startup, liveness, readiness = each.probes
        if startup:
            await startup.asked(
                lambda holds: holds or self._unhealthy(each, "startup"), self._manners.peek_s
            )
        each.started = True
        async with asyncio.TaskGroup() as group:
            if liveness:
                group.create_task(
                    liveness.asked(lambda holds: not holds and self._unhealthy(each, "liveness"))
                )
            if readiness:
                group.create_task(
                    readiness.asked(lambda holds: self._readies(each, holds), self._manners.peek_s)
                )
            else:
                self._readies(each, True)

    def _readies(self, each: Status, holds: bool) -> bool:
        if each.ready != holds:
            each.ready = holds
            if self.ready:
                self.became_ready = asyncio.get_running_loop().time()
            self._changed()
        return False

    def _unhealthy(self, each: Status, probe: str) -> bool:
        """It is stopped within the pod's grace, and `_keep` starts it again."""
        if not self.terminating.is_set() and each.stopping is None:
            each.ends.append(f"failed its {probe} probe")
            self.findings.append(f"{self.name}, container {each.container.name}, {each.ends[-1]}")
            ends_at = asyncio.get_running_loop().time() + self.grace_s
            each.stopping = asyncio.create_task(self._ended(each, ends_at))
        return False

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
        hook = each.container.spec.get("lifecycle", {}).get("preStop")
        if hook and loop.time() < ends_at:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_at):
                    await self._hook(each, hook)
            ends_at = max(ends_at, loop.time() + _HOOK_EXTRA_S)
        if running.most_memory > each.container.memory_limit:
            self.findings.append(f"{self.name}, {each.container.name} took more than its limit")
        running.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout_at(ends_at):
                await running.process.wait()
        except TimeoutError:
            if not running.killed:
                each.ends.append("was still there when its grace was over")
                self.findings.append(f"{self.name}, {each.container.name} {each.ends[-1]}")
            running.signal(signal.SIGKILL)
            await running.process.wait()

    async def _hook(self, each: Status, hook: dict[str, Any]) -> None:
        [handler] = hook
        if handler == "sleep":
            await asyncio.sleep(hook["sleep"]["seconds"])
            return
        try:
            if not await ask(each.container, self.address, handler, hook[handler]):
                each.ends.append("its preStop hook failed")
        except (OSError, CannotStart) as error:
            each.ends.append(f"its preStop hook failed: {error}")
