"""The services as processes, started again whenever they end; who ends unasked is a finding."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from fedstream.local import launcher
from fedstream.runtime.process import death_with_parent
from tests.chaos.seams import RELEASE, RELEASES
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
_AGAIN_S = 0.3  # before a service that ended unasked is started again
_ALIVE_S = 90.0  # within which one must be, on a machine as busy as it is
_ENDS_S = 60.0
_TOLD = 15  # last lines of a log


class Zygote:
    """The process that forks the services: `tests/chaos/zygote.py`."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                preexec_fn=death_with_parent(),  # noqa: PLW1509
            )
        self._channel, self._server = ours, launcher._Server(ours, process)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        if not self._server.ended:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._server.close()

    async def fork(self, argv: list[str], env: Mapping[str, str], log: Path) -> Child:
        """A service in a process of its own."""
        request = {"start": argv, "environment": dict(env), "log": str(log)}
        life = await self._server.start(request)
        return Child(argv[-1], life.pid, life.code, log)


@dataclass(eq=False)
class Child:
    """One process of a service."""

    name: str
    pid: int
    end: asyncio.Future[int]
    log: Path
    killed: bool = False  # by us
    excused: bool = field(default=False)  # its disk fails: it may end because of that
    _sleeps: int = 0  # how many want it asleep

    @property
    def code(self) -> int | None:
        """What it ended with; None while it lives."""
        return self.end.result() if self.end.done() else None

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.end.done()

    @property
    def text(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def has_begun(self) -> bool:
        """Whether it got as far as its loops, from where on it minds signals."""
        return '"serving"' in self.text

    @property
    def minds_signals(self) -> bool:
        """Whether it heard of a signal: not while it begins, nor once it is about to end.

        A signal that comes at its end gives it 128 + the signal's number (``end_at_once``).
        """
        at_once = self.code in (-signal.SIGTERM, 128 + signal.SIGTERM)
        return self.has_begun and (not at_once or '"stopping"' in self.text)

    @property
    def serves(self) -> bool:
        """Whether it is there and at work."""
        return not self.ended and self.has_begun

    @property
    def leads(self) -> bool:
        """Whether it is there and ever got its role's lease."""
        return not self.ended and '"leading"' in self.text

    @property
    def failed_with(self) -> list[dict[str, Any]]:
        """Why it ended, as it says itself."""
        lines = [line for line in self.text.splitlines() if '"failed"' in line]
        return [json.loads(line) for line in lines if line.startswith("{")]

    def ended_by(self, *errors: str) -> bool:
        """Whether it ended for these reasons alone, and said so in a line each."""
        said = self.failed_with
        return self.code == 1 and bool(said) and all(one.get("error") in errors for one in said)

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.text.splitlines()[-_TOLD:])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it is still there."""
        self.killed |= number == signal.SIGKILL
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """It is stopped, until the last who wanted that is done: faults overlap."""
        self._sleeps += 1
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._sleeps -= 1
            if not self._sleeps:
                self.signal(signal.SIGCONT)

    async def wait(self) -> int:
        """Until it has ended."""
        return await asyncio.shield(self.end)


class Services:
    """Processes by name; the name up to '-' is the role. ``settings``: a name's environment."""

    def __init__(
        self, zygote: Zygote, folder: Path, settings: Mapping[str, Mapping[str, str]]
    ) -> None:
        self._zygote = zygote
        self._folder = folder
        ours = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
        self._env = {
            name: ours | dict(own) | {"OMP_NUM_THREADS": "1"} for name, own in settings.items()
        }
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._may = {name: asyncio.Event() for name in settings}  # be started again
        self._begun = dict.fromkeys(settings, 0)
        self._forking = asyncio.Lock()  # so that whoever is put down is not just beginning
        self._stopping = asyncio.Event()
        self._disk_fails = 0  # how many faults at once let disks fail
        self.findings: list[str] = []
        self.fenced = 0

    def __getitem__(self, name: str) -> Child:
        """The process that has the name now."""
        return self._children[name]

    async def start(self, *names: str) -> None:
        """Starts some, and keeps them."""
        for name in names:
            self._may[name].set()
            self._keepers.append(asyncio.create_task(self._keep(name), name=name))
        await asyncio.gather(*map(self.alive, names))

    async def stop(self) -> None:
        """Tells all to stop: each must, in time and cleanly."""
        self._stopping.set()
        for may in self._may.values():
            may.set()
        for child in self._children.values():
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
        if not self._keepers:
            return
        _, late = await asyncio.wait(self._keepers, timeout=_ENDS_S)
        for keeper in late:
            self.findings.append(f"{keeper.get_name()} did not stop in {_ENDS_S:g} s")
            self._children[keeper.get_name()].signal(signal.SIGKILL)
        await asyncio.gather(*self._keepers)

    async def alive(self, name: str) -> None:
        """Waits until the process that has the name serves; a finding if it never does."""
        try:
            await wait_until(
                lambda: name in self._children and self._children[name].serves, timeout=_ALIVE_S
            )
        except AssertionError:
            self.findings.append(f"{name} did not come back within {_ALIVE_S:g} s")

    async def down(self, *names: str) -> None:
        """Kills services, which stay away until :meth:`up`."""
        async with self._forking:
            for name in names:
                self._may[name].clear()
            children = [self._children[name] for name in names]
        for child in children:
            child.signal(signal.SIGKILL)
            await child.wait()

    def up(self, *names: str) -> None:
        """Lets services be started again."""
        for name in names:
            self._may[name].set()

    def excuse(self, begins: bool) -> None:
        """While disks fail, an updater may end because of that."""
        self._disk_fails += 1 if begins else -1
        for child in self._children.values():
            child.excused |= self._disk_fails > 0

    async def twin(self, name: str) -> Child:
        """Another process of the same name, which nobody starts again."""
        child = await self._started(name)
        child.excused = True
        return child

    async def _keep(self, name: str) -> None:
        while not self._stopping.is_set():
            await self._may[name].wait()
            async with self._forking:
                if not self._may[name].is_set():
                    continue
                child = self._children[name] = await self._started(name)
            if self._stopping.is_set():  # while it was being started
                child.signal(signal.SIGTERM)
            code = await child.wait()
            if child.killed:
                continue
            if child.ended_by("Fenced"):
                self.fenced += 1
            elif not (
                (self._stopping.is_set() and (code == 0 or not child.minds_signals))
                or (child.excused and child.ended_by("JournalError", "JournalDamaged", "Fenced"))
            ):
                self.findings.append(f"{name} exited with {code}:\n{child.last_words}")
            if not self._stopping.is_set():
                await asyncio.sleep(_AGAIN_S)  # as a supervisor would

    async def _started(self, name: str) -> Child:
        self._begun[name] += 1
        log = self._folder / f"{name}.{self._begun[name]}.log"
        argv = [name.partition("-")[0], "--name", name]
        env = self._env[name] | {RELEASE: self._release(name)}
        child = await self._zygote.fork(argv, env, log)
        child.excused = self._disk_fails > 0
        return child

    def _release(self, name: str) -> str:
        """Of its messages. Services differ in it, and so does one from what it was before."""
        return RELEASES[([*self._env].index(name) + self._begun[name]) % len(RELEASES)]
