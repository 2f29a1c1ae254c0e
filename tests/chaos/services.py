"""The services as processes, started again whenever they end; who ends unasked is a finding."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedstream import parent
from tests.support import wait_until

ROOT = Path(__file__).parents[2]
_AGAIN_S = 0.5  # before a service that ended unasked is started again
_ALIVE_S = 90.0  # within which one must be: all six import at once, on a machine as busy as it is
_ENDS_S = 60.0
_TOLD = 15  # last lines of a log


@dataclass(eq=False)
class Child:
    """One process of a service."""

    process: Process
    log: Path
    killed: bool = False  # by us

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.process.returncode is not None

    @property
    def has_begun(self) -> bool:
        """Whether it got as far as its loops, from where on it minds signals."""
        return '"serving"' in self.log.read_text()

    @property
    def serves(self) -> bool:
        """Whether it is there and at work."""
        return not self.ended and self.has_begun

    @property
    def leads(self) -> bool:
        """Whether it is there and ever got its role's lease."""
        return not self.ended and '"leading"' in self.log.read_text()

    @property
    def was_fenced(self) -> bool:
        """Whether it ended because another has its role: what it should do, and nothing more."""
        return self.process.returncode == 1 and '"Fenced"' in self.log.read_text()

    @property
    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text().splitlines()[-_TOLD:])

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it is still there."""
        self.killed |= number == signal.SIGKILL
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Services:
    """Processes by name; the name up to '-' is the role."""

    def __init__(self, folder: Path, names: Sequence[str], settings: Mapping[str, str]) -> None:
        self._folder = folder
        self._names = names
        ours = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
        self._env = (
            ours | dict(settings) | {parent.VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        )
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.findings: list[str] = []
        self.fenced = 0

    def __getitem__(self, name: str) -> Child:
        """The process that has the name now."""
        return self._children[name]

    async def start(self) -> None:
        """Starts all, and keeps them."""
        for name in self._names:
            self._keepers.append(asyncio.create_task(self._keep(name), name=name))
        await asyncio.gather(*(self.alive(name) for name in self._names))

    async def stop(self) -> None:
        """Tells all to stop: each must, in time and cleanly."""
        self._stopping.set()
        for child in self._children.values():
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGTERM)
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

    async def _keep(self, name: str) -> None:
        begun = 0
        while not self._stopping.is_set():
            begun += 1
            child = await self._started(name, self._folder / f"{name}.{begun}.log")
            code = await child.process.wait()
            if child.killed:
                continue
            if child.was_fenced:
                self.fenced += 1
            elif not (self._stopping.is_set() and (code == 0 or not child.has_begun)):
                self.findings.append(f"{name} exited with {code}:\n{child.last_words}")
            if not self._stopping.is_set():
                await asyncio.sleep(_AGAIN_S)  # as a supervisor would

    async def _started(self, name: str, log: Path) -> Child:
        with log.open("wb") as said:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "fedstream", name.partition("-")[0], "--name", name,
                stdin=DEVNULL, stdout=said, stderr=STDOUT, env=self._env, cwd=ROOT,
            )  # fmt: skip
        child = self._children[name] = Child(process, log)
        if self._stopping.is_set():  # while it was being started
            child.signal(signal.SIGTERM)
        return child
