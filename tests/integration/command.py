"""`fedstream run` as a user starts it: a process of its own, and what it leaves behind."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import FedstreamError
from fedstream.core.records import View
from tests.preloaded import descendants
from tests.support import EveryRole

SCRIPT = Path(sys.executable).with_name("fedstream")
# Limits are against hanging alone: six processes that load torch beside others' work take minutes.
GUARD_S = 300.0  # for one thing that is waited for
TEST_GUARD_S = 900.0  # for a test, with the fixtures that it is the first to need
FILES = [
    "best.safetensors",
    "curves.png",
    "journal",
    "logs",
    "metrics.csv",
    "model.safetensors",
    "run.toml",
    "summary.json",
]
ROLES = ("updater", "coordinator", "scheduler", "evaluator", "trainer-1")
BLOBS = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Blobs(Task):
    devices = 4
    def model(self):
        return torch.nn.Linear(2, 2)
    def device_data(self, device):
        y = torch.arange(100) % 2
        return TensorDataset(torch.randn(100, 2) + 3 * y[:, None], y)
    def test_data(self):
        return self.device_data(0)
task = Blobs()
"""  # 15 lines, the imports among them
HELD = """
    def train(self, model, data, work):
        import pathlib, time
        go = pathlib.Path(__file__).with_name("go")
        while work.version >= {version} and not go.exists() and not work.cancelled():
            time.sleep(0.01)
        return super().train(model, data, work)
"""


def held(task: str, version: int) -> str:
    """A task that trains from no later version before there is a file `go` beside it.

    So a run can't be over before a test has done to it what it has to, however late that looks.
    """
    return task.replace("\ntask =", HELD.format(version=version) + "task =")


def wait_until(condition: Callable[[], Any], what: str, timeout: float = GUARD_S) -> Any:
    """Waits for a condition: what it gave. AssertionError if it never held."""
    until = time.monotonic() + timeout
    while True:
        looks = time.monotonic()
        if result := condition():
            return result
        now = time.monotonic()
        assert now < until, f"not within {timeout} s: {what}"
        # Most of the processor's time goes to the processes that a test waits for.
        time.sleep(max(0.05, min(0.5, 4 * (now - looks))))


class Command:
    """One `fedstream run`; stdout and stderr go to files, since a pipe nobody reads fills up.

    An argument that begins with an option may hold several words; ``sets`` are values of `--set`.
    ``programs``: a folder with a `fedstream` that is forked (tests/preloaded). It saves two seconds
    of processor time where it does not matter how the command itself starts.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        sets: Sequence[str] = (),
        out: Path | None = None,
        programs: Path = SCRIPT.parent,
    ) -> None:
        self.folder = folder
        self.out = out or folder / "out"
        self._programs = programs
        words = [word for one in arguments for word in (one.split() if one[0] == "-" else [one])]
        words += [word for one in sets for word in ("--set", one)]
        with (folder / "stdout").open("a") as stdout, (folder / "stderr").open("a") as stderr:
            self._said_before = stdout.tell()
            self.process = subprocess.Popen(
                [programs / SCRIPT.name, "run", "--out", self.out, *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=folder,
                env={n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")},
            )

    @property
    def stdout(self) -> str:
        """What it said so far; without what runs in this folder said before it."""
        return (self.folder / "stdout").read_bytes()[self._said_before :].decode()

    @property
    def stderr(self) -> str:
        """And what it complained about."""
        return (self.folder / "stderr").read_text()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """metrics.csv."""
        with (self.out / "metrics.csv").open() as file:
            return list(csv.DictReader(file))

    def ended(self, timeout: float = GUARD_S) -> int:
        """Waits for its end: the exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout} s:\n{self.stdout}") from None

    def children(self) -> list[psutil.Process]:
        """Its processes, Redis among them."""
        try:
            return descendants(psutil.Process(self.process.pid), self._programs)
        except psutil.NoSuchProcess:
            return []

    def pid(self, service: str) -> int | None:
        """The process of a service."""
        for child in self.children():
            try:
                if service in " ".join(child.cmdline()).split():
                    return child.pid
            except psutil.Error:  # it has just ended
                continue
        return None

    def view(self) -> View | None:
        """The run now, if it is there and can be reached."""
        try:
            config = tomllib.loads((self.out / "run.toml").read_text())
            redis = RedisSettings.model_validate(config["redis"])
            return asyncio.run(_look(redis, config["run"]["name"]))
        except (OSError, KeyError, tomllib.TOMLDecodeError, FedstreamError):
            return None

    def version(self) -> int:
        """The newest version; -1 without one."""
        view = self.view()
        return view.head.version if view else -1

    def reaches(self, version: int) -> None:
        """Waits for a version, as long as the run goes on."""
        wait_until(
            lambda: self.version() >= version or self.process.poll() is not None,
            f"version {version}: {self.stdout}",
        )
        assert self.process.poll() is None, self.stdout + self.stderr

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def go(self) -> None:
        """Lets a task go on that was held."""
        (self.folder / "go").touch()

    def clean_up(self) -> None:
        """Leaves nothing running, whatever went wrong."""
        left = self.children()
        self.process.kill()
        self.process.wait()
        for child in left:
            if child.is_running():
                child.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # meanwhile
        return False


async def _look(redis: RedisSettings, run: str) -> View:
    client = Client(redis)
    try:
        return await EveryRole(client, Keys(run), "test").look()
    finally:
        await client.close()


def adds_up(summary: dict[str, Any]) -> bool:
    """Whether every task that was issued came to exactly one end, or is open."""
    tasks = dict(summary["tasks"])
    return bool(tasks.pop("issued") == sum(tasks.values()))
