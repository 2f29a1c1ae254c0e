"""A shell as a reader has it open: what one command sets, the next one has."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

GUARD_S = 300.0  # for one command, against hanging alone


@dataclass(frozen=True)
class Beside:
    """A command that goes on while others are typed."""

    command: str
    pid: int
    log: Path


class Shell:
    """bash, without a terminal."""

    def __init__(self, folder: Path, log: Path, environ: Mapping[str, str]) -> None:
        self.folder = folder
        self._log = log
        self._codes, theirs = os.pipe()
        with log.open("ab") as output:
            self._bash = subprocess.Popen(
                ["bash", "--norc"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=environ,
                pass_fds=[theirs],
                start_new_session=True,
            )
        self._theirs = theirs
        self.beside: list[Beside] = []
        self._begun = 0
        self._tell("set -m\n")  # a job is a process group, which can be sent a signal

    def _tell(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text.encode())
        self._bash.stdin.flush()

    def _answer(self, text: str, timeout: float = GUARD_S) -> int:
        self._tell(f"{text}\nprintf '%s\\n' $? >&{self._theirs}\n")
        until, code = time.monotonic() + timeout, b""
        while not code.endswith(b"\n"):
            if select.select([self._codes], [], [], max(0.0, until - time.monotonic()))[0]:
                code += os.read(self._codes, 64)
            else:
                raise AssertionError(f"goes on after {timeout} s: {text}\n{self._log.read_text()}")
        return int(code)

    def run(self, command: str) -> tuple[int, str]:
        """Types it and waits for its end: exit code and what it printed."""
        before = self._log.stat().st_size
        code = self._answer(f"{{ {command}\n}} </dev/null")
        with self._log.open("rb") as log:
            log.seek(before)
            return code, log.read().decode()

    def begin(self, command: str) -> Beside:
        """Types it in another terminal."""
        self._begun += 1  # a log of its own: an older one has another process's port
        log = self._log.with_name(f"{self._log.name}-{self._begun}")
        log.touch()
        # The subshell waits for the command, and so has its exit code when both are sent a signal.
        self._answer(f"( trap : INT TERM\n{command}\n) </dev/null >'{log}' 2>&1 &")
        code, pid = self.run("echo $!")
        assert code == 0
        self.beside.append(Beside(command, int(pid), log))
        return self.beside[-1]

    def ended(self, one: Beside, signal: str = "") -> int:
        """Waits for the end of what was begun, after a signal if one is given: its exit code."""
        if signal:
            self._answer(f"kill -{signal} -- -{one.pid}")
        self.beside.remove(one)
        return self._answer(f"wait {one.pid}")

    def interrupt(self) -> list[tuple[Beside, int]]:
        """Ctrl-C in every other terminal, the newest first: exit codes."""
        return [(one, self.ended(one, "INT")) for one in reversed(self.beside)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.beside:
            self._tell(f"kill -KILL -- -{one.pid}\n")
        assert self._bash.stdin is not None
        self._bash.stdin.close()
        try:
            self._bash.wait(10)
        except subprocess.TimeoutExpired:  # in the middle of a command
            self._bash.kill()
            self._bash.wait()
        os.close(self._codes)
        os.close(self._theirs)
