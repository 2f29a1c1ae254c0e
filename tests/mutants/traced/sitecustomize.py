"""Writes down which test runs which line of ours: see ``tests/mutants/reach.py``.

Python imports a module of this name at its start, so that the processes that a test starts are
traced as well; and ``pytest -p sitecustomize`` says here which test is running. Nothing but the
standard library is imported. PYTEST_DONT_REWRITE: there is nothing to assert.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
NO_TEST = "no test"  # what runs while tests are collected


class Tracer:
    """Appends each line to a file when a test runs it for the first time.

    A line is a test, a path from the root and a number, with tabs between; without a path the
    number is how many seconds the test took. Lua runs inside Redis where nobody can trace it: of
    a script line 0 runs when it is called.
    """

    def __init__(self, path: str, test: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._paths: dict[CodeType, str] = {}  # '': not ours
        self._left: dict[CodeType, set[int]] = {}  # not run yet by this test
        self._test = test
        self._began: dict[str, float] = {}

    def start(self) -> None:
        """Traces this process from here on, in all threads."""
        threading.settrace(self._entered)
        sys.settrace(self._entered)

    def begin(self, test: str) -> None:
        """What runs from here on is another test. An earlier one may have ended the tracing."""
        self._test = test
        self._left.clear()
        self._began[test] = time.monotonic()
        self.start()

    def end(self, test: str) -> None:
        """The test is over."""
        self._write("", round(time.monotonic() - self._began.pop(test), 3))
        self._test = NO_TEST
        self._left.clear()

    def _write(self, path: str, number: float) -> None:
        os.write(self._file, f"{self._test}\t{path}\t{number}\n".encode())

    def _entered(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        path = self._paths.get(code)
        if path is None:
            path = self._paths[code] = _path_of(code)
        if not path:
            return None
        if path == "broker/scripts.py" and code.co_name == "command":
            self._write(f"broker/lua/{frame.f_locals['self'].name}.lua", 0)
        return self._ran if self._left_of(code) else None

    def _ran(self, frame: FrameType, event: str, _: Any) -> Any:
        left, line = self._left_of(frame.f_code), frame.f_lineno
        if line in left:
            left.discard(line)
            self._write(self._paths[frame.f_code], line)
        return self._ran

    def _left_of(self, code: CodeType) -> set[int]:
        left = self._left.get(code)
        if left is None:
            left = self._left[code] = {line for *_, line in code.co_lines() if line}
        return left


def _path_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    if not path.is_absolute():  # <string>
        return ""
    path = path.resolve()  # fedstream/broker is a link to broker
    if not path.is_relative_to(ROOT):
        return ""
    inside = path.relative_to(ROOT)
    return "" if inside.parts[0] in ("tests", ".venv") else str(inside)


def _tracer() -> Tracer | None:
    path = os.environ.get("MUTANTS_REACH")
    if not path:
        return None
    test = os.environ.get("PYTEST_CURRENT_TEST", NO_TEST).rsplit(" (", 1)[0]
    tracer = Tracer(path, test)
    tracer.start()
    return tracer


TRACER = _tracer()


def pytest_runtest_logstart(nodeid: str) -> None:
    """pytest begins a test."""
    if TRACER:
        TRACER.begin(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """pytest is done with a test."""
    if TRACER:
        TRACER.end(nodeid)
