"""Flat cost: processor time per update by open tasks, devices and trainers.

    python -m benchmarks.flat [--runs 3] [--seconds 8] [--only NAME]

Trainers return a model of 1,000 parameters without training, so only the pipeline works. Most open
tasks wait, for there are few trainers. Compared with the first figure of its group, the processor
time of all processes and Redis together must not rise by more than a fifth. Where there is much to
look at once a minute (all tasks, long lists of devices), a whole minute is measured at least.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.end_to_end import processor_s
from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.local.redis_server import RedisServer

SERVICES = ("coordinator", "scheduler", "updater")
SHARES = (*SERVICES, "trainers", "redis")
PARAMETERS = 1000
FLAT = 1.2  # times the first figure of the group, at most
WITHIN_S = 120.0
MINUTE_S = 60.0


@dataclass(frozen=True)
class Cell:
    """One setting: tasks in flight, devices of the run, and trainers."""

    group: str
    name: str
    tasks: int
    devices: int
    trainers: int = 2
    owned: bool = False  # whether the trainers own the devices, in equal parts
    at_least_s: float = 0.0  # to be measured, for what happens once a minute


CELLS = (
    Cell("open tasks", "10 tasks", 10, 20_000),
    Cell("open tasks", "1,000 tasks", 1000, 20_000),
    Cell("open tasks", "10,000 tasks", 10_000, 20_000, at_least_s=MINUTE_S),
    Cell("devices, not owned", "10 devices", 8, 10),
    Cell("devices, not owned", "100,000 devices", 8, 100_000),
    Cell("devices, owned", "10 owned devices", 8, 10, owned=True),
    Cell("devices, owned", "100,000 owned devices", 8, 100_000, owned=True, at_least_s=MINUTE_S),
    Cell("trainers", "1 trainer", 64, 1000, trainers=1),
    Cell("trainers", "64 trainers", 64, 1000, trainers=64),
)


class Deployment:
    """The services as processes, on a given Redis."""

    def __init__(self, url: str, cell: Cell, journal: Path) -> None:
        self._cell = cell
        self._client = redis.Redis.from_url(url)
        self._processes: list[subprocess.Popen[str]] = []
        self._services: dict[str, subprocess.Popen[str]] = {}
        self._env = os.environ | {
            "FEDSTREAM_ECHO_PARAMETERS": str(PARAMETERS),
            "FEDSTREAM_REDIS__URL": url,
            "FEDSTREAM_LOG__LEVEL": "warning",
            "FEDSTREAM_TASK__NAME": "benchmarks.echo:task",
            "FEDSTREAM_TASK__DEVICES": str(cell.devices),
            "FEDSTREAM_RUN__VERSIONS": "1000000",
            "FEDSTREAM_JOURNAL__DIR": str(journal),
            "FEDSTREAM_SCHEDULER__POLICY__KIND": "in_flight",
            "FEDSTREAM_SCHEDULER__POLICY__N": str(cell.tasks),
        }

    def start(self) -> None:
        """Start all processes; if it is interrupted, `stop` ends those that there are."""
        cell = self._cell
        share = cell.devices // cell.trainers
        crowd = [
            f"trainer-{n}" + (f":{n * share}:{(n + 1) * share}" if cell.owned else "")
            for n in range(cell.trainers)
        ]
        root = Path(__file__).parent.parent

        def start(*words: str, **more: Any) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=self._env, cwd=root, text=True, **more
            )
            self._processes.append(process)
            return process

        out = start("benchmarks.crowd", *crowd, stdout=subprocess.PIPE).stdout
        for name in SERVICES:
            self._services[name] = start("fedstream", name, "--name", name)
        assert out is not None
        self._trainers = [int(pid) for pid in out.readline().split()]

    def measure(self, seconds: float) -> dict[str, Any]:
        """Processor time per update in ms, by service, once all trainers and tasks are there."""
        run = "fedstream:{demo}:"
        cell = self._cell

        def is_ready() -> bool:
            # Redis's answers are awaitable only in its asyncio client.
            alive: Any = self._client.zcard(run + "alive")
            opened: Any = self._client.hlen(run + "open")
            owned: Any = self._client.hlen(run + "owners")
            waiting: Any = self._client.xlen(run + "triggers")  # tasks not handed out yet
            return bool(
                waiting < 10
                and alive == cell.trainers
                and opened >= 0.9 * cell.tasks
                and self._version() >= 100
                and (not cell.owned or owned == cell.devices)
            )

        self._wait(is_ready)
        begin, cpu = self._version(), self._cpu_s()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.05)
        done, used = self._version() - begin, self._cpu_s()
        ms = {name: 1000 * (used[name] - cpu[name]) / done for name in SHARES}
        return {"updates_per_s": done / seconds, "cpu_ms": ms, "all_ms": sum(ms.values())}

    def _version(self) -> int:
        version: Any = self._client.hget("fedstream:{demo}:head", "version")
        return int(version or 0)

    def _cpu_s(self) -> dict[str, float]:
        about: Any = self._client.info("server")
        used = {name: processor_s(process.pid) for name, process in self._services.items()}
        used["trainers"] = sum(map(processor_s, self._trainers))
        return used | {"redis": processor_s(int(about["process_id"]))}

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            for name, process in self._services.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} exited with {process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{self._cell.name}: not ready within {WITHIN_S:.0f} s")
            time.sleep(0.05)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)


def measured(cell: Cell, seconds: float) -> dict[str, Any]:
    """One run of a cell."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        deployment = Deployment(server.url, cell, Path(journal))
        try:
            deployment.start()
            return deployment.measure(max(seconds, cell.at_least_s))
        finally:
            deployment.stop()


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = conditions(results["machine"])
    lines = [
        "# Flat cost",
        "",
        "`python -m benchmarks.flat`: processor time per update, in ms, of all trainers, the",
        f"services and Redis; 1,000 parameters. Medians of {len(results['runs'])} runs.",
        "",
        f"{about}; load when it began {results['load']:.1f}",
        "",
        f"| | updates/s | {' | '.join(SHARES)} | all | ratio | |",
        "|---" * 10 + "|",
    ]
    first: dict[str, float] = {}
    for cell in CELLS:
        found = [run[cell.name] for run in results["runs"] if cell.name in run]
        if not found:
            continue
        ms = {
            name: statistics.median(each["cpu_ms"][name] for each in found) for name in SHARES
        } | {"all": statistics.median(each["all_ms"] for each in found)}
        ratio = ms["all"] / first.setdefault(cell.group, ms["all"])
        rate = statistics.median(each["updates_per_s"] for each in found)
        lines.append(
            f"| {cell.name} | {rate:.0f} | "
            + " | ".join(f"{n:.2f}" for n in ms.values())
            + f" | {ratio:.2f} | {'held' if ratio <= FLAT else 'MISSED'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="repeats of the whole measurement")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured in each cell, or more")
    parser.add_argument("--only", default="", help="only cells with this in their name or group")
    add_out(parser)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    runs: list[dict[str, Any]] = []
    for _ in range(options.runs):
        runs.append({})
        for cell in CELLS:
            if options.only in cell.name or options.only in cell.group:
                runs[-1][cell.name] = found = measured(cell, options.seconds)
                shares = "  ".join(f"{name} {ms:.2f}" for name, ms in found["cpu_ms"].items())
                print(
                    f"{cell.name:>22}: {found['updates_per_s']:6.1f}/s  "
                    f"{found['all_ms']:7.2f} ms: {shares}",
                    flush=True,
                )
    results = {"machine": machine.described(), "load": load, "runs": runs}
    print(table(results))
    keep("flat", results, table(results), options.out)


if __name__ == "__main__":
    main()
