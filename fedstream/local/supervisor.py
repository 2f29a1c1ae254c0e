"""The processes of a run: their programs and ports, and their supervisor.

The supervisor starts them, restarts those that die, and stops them in order. A service waits in
Redis for up to a second at a time, and a wait must not be cancelled: Redis may have answered
already. So :func:`end_waits` makes Redis end the waits, as if they had timed out.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import tomli_w

from fedstream.broker.client import Client
from fedstream.local.launcher import Launcher, ServiceProcess
from fedstream.runtime.backoff import pause
from fedstream.runtime.process import open_regular
from fedstream.settings.config import Settings
from fedstream.sinks.service import DRAIN_S


async def end_waits(client: Client, names: Collection[str]) -> None:
    """End every wait of the clients of these names. Raises FedstreamError.

    Needs the rights to CLIENT LIST and CLIENT UNBLOCK.
    """
    listing = await client.call("CLIENT", "LIST", "TYPE", "NORMAL")
    if waiting := list(_waiting(listing.decode(errors="replace"), names)):
        await client.pipeline([("CLIENT", "UNBLOCK", number) for number in waiting])


def _waiting(listing: str, names: Collection[str]) -> Iterator[str]:
    """Ids of the clients that are blocked, from the reply to CLIENT LIST."""
    for line in listing.splitlines():
        about = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if about.get("name") in names and "b" in about.get("flags", ""):
            yield about["id"]


_ANSWER_S = 0.1  # a local connection is accepted or refused at once


class HeldPort:
    """Port reserved until closed; a context manager closes it.

    A socket is bound to the port but never listens. A process that sets SO_REUSEADDR (asyncio and
    Redis do) can still listen there, while the kernel assigns the port to no connection and no
    socket that asks for any free one. This works on Linux only. Elsewhere the two sockets exclude
    each other, so the port is released at once and another process may take it.
    """

    def __init__(
        self,
        address: Any = ("127.0.0.1", 0),
        family: socket.AddressFamily = socket.AF_INET,
    ) -> None:
        """Reserve a port; 0 means any free one.

        Raises OSError if another process listens there or this user may not.
        """
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def is_answering(host: str, port: int) -> bool:
    """Whether a process accepts connections at a host and port."""
    try:
        socket.create_connection((host, port), _ANSWER_S).close()
    except OSError:
        return False
    return True


# Producers of work stop before its consumers, so that nothing is left half done.
STOP_ORDER = (
    "scheduler",
    "trainer",
    "device",
    "gateway",
    "coordinator",
    "updater",
    "helper",
    "evaluator",
    "sinks",
)

_MOST_DELAY_S = 10.0
_STEADY_S = 30.0  # a process that ran this long counts as working
_DEATHS_IN_A_ROW = 5
_KILL_AFTER_S = 5.0  # beyond the drain
_WRONG_CONFIGURATION = 2  # exit code
_WAITS_S = 0.02  # between ending the waits of those that stop
_TAIL = 64 * 1024  # bytes at the end of a log to search for a reason


class Restarts:
    """Restart policy of one process, by its previous ends."""

    def __init__(self, first_delay_s: float = 0.5) -> None:
        self._first_delay_s = first_delay_s
        self._in_a_row = 0

    def died(self, lived_s: float, *, worked: bool = False) -> float | None:
        """Seconds to wait before the next start; None if it died too often in a row.

        ``worked``: the process had begun to work. Its death doesn't count then, as a task may have
        killed it, and such a task goes to `dead` after some attempts.
        """
        if worked or lived_s >= _STEADY_S:
            self._in_a_row = 0
        self._in_a_row += not worked
        if self._in_a_row >= _DEATHS_IN_A_ROW:
            return None
        return min(self._first_delay_s * 2.0 ** max(0, self._in_a_row - 1), _MOST_DELAY_S)


def how_it_ended(code: int) -> str:
    """An exit code, for people."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_words(log: str) -> str:
    """The reason in the last error of a log, or its last line that isn't JSON; '' if neither."""
    plain = ""
    for line in reversed(log.splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            plain = plain or line.strip()
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            trace = str(entry.get("exception", "")).strip().splitlines()
            return str(entry.get("reason") or (trace or [entry.get("event", "")])[-1])
    return plain


@dataclass(frozen=True)
class Program:
    """One service to keep alive."""

    name: str
    role: str
    arguments: Sequence[str]
    drain_s: float
    vital: bool = True  # whether the run fails if it can't be kept alive
    ends: bool = False  # whether it may end by itself, with code 0
    environment: Mapping[str, str] = field(default_factory=dict)  # besides the run's


class Child:
    """A program and its current process."""

    def __init__(self, program: Program, log: Path, supervisor: Supervisor) -> None:
        self.program = program
        self.restarts = 0
        self.process: ServiceProcess | None = None
        self._log = log
        self._supervisor = supervisor
        self._policy = Restarts(supervisor.first_delay_s)
        self._stopping = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the program, and restart it whenever it dies."""
        self._keeper = asyncio.create_task(self._keep(), name=self.program.name)
        self._keeper.add_done_callback(self._kept)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Fail the run if the keeper itself failed: its service is no longer supervised."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._supervisor.failed(f"{self.program.name} is no longer supervised: {error!r}")

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL 5 s after its drain should have ended."""
        self._stopping.set()
        self._terminate()
        if self._keeper is not None:
            await asyncio.wait((self._keeper,), timeout=self.program.drain_s + _KILL_AFTER_S)
            if not self._keeper.done():
                self._supervisor.say(f"{self.program.name} did not stop in time: killed")
                self.kill()
            await self._keeper

    def kill(self) -> None:
        """Kill the process at once."""
        self._stopping.set()
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.kill()

    def _terminate(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.terminate()

    async def _keep(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                code, pid, at = await self._one_life()
            except OSError as error:  # no file descriptor or memory left, or no access to the log
                delay = self._died(f"cannot be started: {error}", lived_s=0.0, worked=False)
            else:
                if self._stopping.is_set():
                    return
                delay = await self._after_death(code, pid, time.monotonic() - began, at)
            if delay is None:
                return
            await pause(self._stopping, delay)
            if not self._stopping.is_set():
                self.restarts += 1

    async def _one_life(self) -> tuple[int, int, int]:
        """Run the program once; returns exit code, process id, and where its log lines begin.

        Raises OSError if it can't be started.
        """
        log = open_regular(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            at = os.lseek(log, 0, os.SEEK_END)
        finally:
            os.close(log)
        program, supervisor = self.program, self._supervisor
        self.process = await supervisor.launcher.start(
            [program.role, *program.arguments],
            {**supervisor.environment, **program.environment},
            self._log,
        )
        if self._stopping.is_set():
            self._terminate()
        return await self.process.wait(), self.process.pid, at

    async def _after_death(self, code: int, pid: int, lived_s: float, at: int) -> float | None:
        """Seconds to wait before the next start; None for none."""
        if code == 0 and self.program.ends:
            return None
        reason = self._last_words(at) if code >= 0 else ""
        how = how_it_ended(code) + (f": {reason}" if reason else "")
        if code == _WRONG_CONFIGURATION:
            self._lost(how)
            return None
        worked = await self._supervisor.worked(self.program, pid)
        return self._died(how, lived_s=lived_s, worked=worked)

    def _last_words(self, at: int) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(at, self._log.stat().st_size - _TAIL))
                return last_words(log.read().decode(errors="replace"))
        except OSError as error:
            return f"its log cannot be read: {error}"

    def _lost(self, how: str) -> None:
        """Give the program up: the run fails if the program is vital."""
        name = self.program.name
        if self.program.vital:
            self._supervisor.failed(f"{name} {how}")
        else:
            self._supervisor.say(f"{name} {how}; the run goes on without it")

    def _died(self, how: str, *, lived_s: float, worked: bool) -> float | None:
        """Count a death and report it; returns the same as :meth:`_after_death`."""
        name = self.program.name
        delay = self._policy.died(lived_s, worked=worked)
        if delay is None:
            times = f"{_DEATHS_IN_A_ROW} times in a row"
            self._lost(f"died {times}; the last time it {how}")
        else:
            self._supervisor.say(f"{name} {how}; restarting it in {delay:g} s")
        return delay


class Supervisor:
    """All processes of a run.

    ``say``: called with a line for the user. ``failed``: called with the reason why the run can't
    continue. ``worked``: whether a dead process, given by program and process id, had begun to
    work.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        launcher: Launcher,
        logs: Path,
        environment: Mapping[str, str],
        say: Callable[[str], None],
        failed: Callable[[str], None],
        worked: Callable[[Program, int], Awaitable[bool]],
        end_waits: Callable[[Collection[str]], Awaitable[None]] | None = None,
        first_delay_s: float = 0.5,
    ) -> None:
        """``end_waits``: ends the waits of the services of these names, so that they stop sooner;
        None: impossible."""
        self.first_delay_s = first_delay_s
        self.launcher = launcher
        self.environment = environment
        self.say = say
        self.failed = failed
        self.worked = worked
        self._end_waits = end_waits
        self._logs = logs
        self.children = [self._child(program) for program in programs]

    @property
    def restarts(self) -> dict[str, int]:
        """Number of restarts of each service, by name."""
        return {child.program.name: child.restarts for child in self.children}

    def start(self) -> None:
        """Start all processes; services wait for one another by themselves."""
        for child in self.children:
            child.start()

    def add(self, programs: Sequence[Program]) -> None:
        """Start more programs."""
        added = [self._child(program) for program in programs]
        self.children += added
        for child in added:
            child.start()

    def _child(self, program: Program) -> Child:
        return Child(program, self._logs / f"{program.name}.log", self)

    async def stop(self) -> None:
        """Stop all processes, role by role, even if some fail; errors are raised at the end."""
        wrong: list[BaseException] = []
        for role in STOP_ORDER:
            stopping = [child for child in self.children if child.program.role == role]
            ending = asyncio.gather(*(one.stop() for one in stopping), return_exceptions=True)
            names = [one.program.name for one in stopping]
            while self._end_waits is not None and not ending.done():
                await self._end_waits(names)
                await asyncio.wait((ending,), timeout=_WAITS_S)
            wrong += [error for error in await ending if error is not None]
        if wrong:
            raise BaseExceptionGroup("supervision failed for some services", wrong)

    def kill(self) -> None:
        """Kill all processes at once."""
        for child in self.children:
            child.kill()


_OURS = ("FEDSTREAM_CONFIG", "FEDSTREAM_NAME")


def programs(
    settings: Settings, trainers: int, config: Path, port: int, *, changed_rules: bool = False
) -> list[Program]:
    """Services of a run, in starting order. ``changed_rules``: for the updater."""

    def service(
        role: str, drain_s: float, *options: str, name: str = "", vital: bool = True
    ) -> Program:
        # Free ports: all services share one machine.
        file = ("--config", str(config), "--set", "http.port=0", "--set", "http.health_port=0")
        name = name or role
        return Program(name, role, ("--name", name, *file, *options), drain_s, vital)

    rules = ("--changed-rules",) if changed_rules else ()
    return [
        # First those that load torch, which takes longest.
        service("updater", settings.updater.drain_s, *rules),
        *(
            service("trainer", settings.trainer.drain_s, name=f"trainer-{n}")
            for n in range(1, trainers + 1)
        ),
        service("evaluator", settings.evaluator.drain_s),
        service("coordinator", settings.coordinator.drain_s, "--set", f"http.port={port}"),
        service("scheduler", settings.scheduler.drain_s),
        *(service("sinks", DRAIN_S, vital=False) for _ in settings.sinks[:1]),
    ]


def environment(environ: Mapping[str, str], settings: Settings, redis_url: str) -> dict[str, str]:
    """Environment of the services, without overrides: the resolved configuration contains those.

    Redis URL, passwords, token and secret are passed here, because `ps` must not show them; only
    the URL is also written to a file.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if name not in _OURS and not (name.startswith("FEDSTREAM_") and "__" in name)
    }
    redis = settings.redis
    secrets = {
        "FEDSTREAM_REDIS__PASSWORD": redis.password,
        "FEDSTREAM_HTTP__TOKEN": settings.http.token,
        "FEDSTREAM_GATEWAY__SECRET": settings.gateway.secret,
        "FEDSTREAM_PRIVATE__TOKEN": settings.private.token,
        "FEDSTREAM_PAGE__OPERATOR_TOKEN": settings.page.operator_token,
        "FEDSTREAM_PAGE__OPERATOR_PASSWORD": settings.page.operator_password,
    }
    if redis.sentinel is not None:
        secrets["FEDSTREAM_REDIS__SENTINEL__PASSWORD"] = redis.sentinel.password
    known = {
        name: tomli_w.dumps({"": secret.get_secret_value()}).removeprefix('"" = ').strip()
        for name, secret in secrets.items()
        if secret is not None
    }
    return kept | known | {"FEDSTREAM_REDIS__URL": redis_url}
