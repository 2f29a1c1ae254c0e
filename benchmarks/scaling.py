"""Scaling: updates per second by number of trainer processes, if a device takes a second.

    python -m benchmarks.scaling [--runs 3] [--trainers 1,2,4,8,16,32] [--cycles 8]

Every service is a process of its own, and all share one Redis. Trainers are added for each figure.
They really train the digits, for a few ms of each simulated second, and the number of tasks in
flight follows the number of live trainers. Each figure covers whole cycles, in which every trainer
makes ``cycles`` updates, so it does not matter where in their second they are.

Also measured: the processor time per task of the coordinator and the scheduler, including their
periodic work; how long a trainer alone on the machine takes to become ready; and the memory of one
that waits for its first task. A smoke test for a busy machine:
``--runs 1 --trainers 1,4 --cycles 4 --out FOLDER``.
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
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgpack
import psutil
import redis

from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.core.messages import Version
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import HeldPort

LATENCY_S = 1.0
MEASURED = ("coordinator", "scheduler")
LINEAR, LINEAR_UP_TO = 0.85, 16  # share of linear scaling to reach, up to so many trainers
CPU_MS = 2.0  # per task, of the coordinator and of the scheduler
READY_S = 10.0
WITHIN_S = 300.0  # timeout for any wait: a busy machine takes minutes to start 16 trainers


@dataclass(frozen=True)
class Seen:
    """A version of the run: its number and the time it was published."""

    version: int
    time: float  # seconds since 1970


class Deployment:
    """The services as separate processes; leaving the context stops them."""

    def __init__(self, url: str, folder: Path, devices: int) -> None:
        self._env = os.environ | {
            "FEDSTREAM_REDIS__URL": url,
            "FEDSTREAM_LOG__LEVEL": "warning",
            "FEDSTREAM_TASK__NAME": "digits",
            "FEDSTREAM_TASK__DEVICES": str(devices),
            "FEDSTREAM_TASK__PARTITION__KIND": "iid",
            "FEDSTREAM_RUN__VERSIONS": "1000000",
            "FEDSTREAM_JOURNAL__DIR": str(folder / "journal"),
            "FEDSTREAM_DEVICES__LATENCY__KIND": "fixed",
            "FEDSTREAM_DEVICES__LATENCY__MEAN_S": str(LATENCY_S),
        }
        self._client = redis.Redis.from_url(url)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, HeldPort] = {}  # of the health endpoints

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait(60)
        for port in self._ports.values():
            port.close()

    def start(self, name: str) -> float:
        """Start a service; return the seconds until it reports ready."""
        begun = time.perf_counter()
        port = self._start(name)
        self._wait(lambda: _ready(port), f"{name} is ready")
        return time.perf_counter() - begun

    def _start(self, name: str) -> int:
        """Start a service; return its HTTP port."""
        port = self._ports[name] = HeldPort()
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", "fedstream", name.partition("-")[0], "--name", name],
            env=self._env | {"FEDSTREAM_HTTP__HEALTH_PORT": str(port.number)},
            cwd=Path(__file__).parent.parent,
        )
        return port.number

    def grow(self, trainers: int) -> None:
        """Add trainers until there are ``trainers``, and wait until each has done a task."""
        begun = len([name for name in self._processes if name.startswith("trainer")])
        for n in range(begun, trainers):
            self._start(f"trainer-{n + 1}")
        self._wait(lambda: len(self._served()) >= trainers, f"a task of {trainers} trainers")

    def _served(self) -> set[str]:
        """The trainers that have answered a task."""
        register: Any = self._client.hgetall("fedstream:{demo}:trainers")
        return {name for name, about in register.items() if msgpack.unpackb(about)["answers"]}

    def rate(self, trainers: int, cycles: int) -> tuple[float, dict[str, float]]:
        """Updates per second, and CPU time per update in ms, by service."""
        first = self._newest()
        cpu = {name: self.cpu_s(name) for name in MEASURED}
        last = self._wait(
            lambda: (
                seen
                if (seen := self._newest()).version >= first.version + cycles * trainers
                else None
            ),
            f"{cycles * trainers} updates",
        )
        used = {name: self.cpu_s(name) - cpu[name] for name in MEASURED}
        tasks = last.version - first.version
        whole = self._at(first.version + cycles * trainers)
        rate = cycles * trainers / (whole.time - first.time)
        return rate, {name: 1000 * seconds / tasks for name, seconds in used.items()}

    def _newest(self) -> Seen:
        [(_, fields)] = self._wait(
            lambda: self._client.xrevrange("fedstream:{demo}:models", count=1), "a version"
        )
        return _seen(fields)

    def _at(self, version: int) -> Seen:
        entries: Any = self._client.xrevrange("fedstream:{demo}:models")
        return next(seen for _, fields in entries if (seen := _seen(fields)).version == version)

    def cpu_s(self, name: str) -> float:
        """CPU seconds that a service has used so far."""
        times = psutil.Process(self._processes[name].pid).cpu_times()
        return float(times.user + times.system)

    def memory_mb(self, name: str) -> dict[str, float]:
        """A service's memory: resident (rss), with shared pages divided (pss), unshared (uss)."""
        found = psutil.Process(self._processes[name].pid).memory_full_info()
        return {"rss": found.rss / 1e6, "pss": found.pss / 1e6, "uss": found.uss / 1e6}

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + WITHIN_S
        while not (found := condition()):
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} exited with {process.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {WITHIN_S:.0f} s: {what}")
            time.sleep(0.01)
        return found


def _seen(fields: dict[bytes, bytes]) -> Seen:
    version = Version.decode(fields[b"m"])
    return Seen(version.version, version.time)


def _ready(port: int) -> bool:
    """Whether the service there reports ready, asked the way a kubelet does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def measured(trainers: list[int], cycles: int) -> dict[str, Any]:
    """One run, from no trainers up to the largest number."""
    with ExitStack() as stack:
        url = stack.enter_context(RedisServer()).url
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        services = stack.enter_context(Deployment(url, folder, devices=2 * max(trainers)))
        ready = {name: services.start(name) for name in ("updater", "coordinator")}
        # Before the scheduler, so that there is no task yet and the machine is otherwise idle.
        ready["trainer"] = services.start("trainer-1")
        memory = services.memory_mb("trainer-1")
        ready["scheduler"] = services.start("scheduler")
        found: dict[str, Any] = {"ready_s": ready, "trainer_mb": memory, "trainers": {}}
        for n in trainers:
            services.grow(n)
            rate, cpu = services.rate(n, cycles)
            found["trainers"][str(n)] = {"updates_per_s": rate, "cpu_ms_per_task": cpu}
            print(
                f"{n:>3} trainers: {rate:6.2f}/s  "
                + "  ".join(f"{name} {ms:.2f} ms" for name, ms in cpu.items()),
                flush=True,
            )
    for about in found["trainers"].values():
        alone = found["trainers"][str(trainers[0])]["updates_per_s"] / trainers[0]
        about["of_one"] = about["updates_per_s"] / alone
    return found


def verdicts(median: dict[str, Any]) -> list[tuple[str, float, str, bool]]:
    """(what, measured value, bound, whether it was held) for every bound."""
    rows = []
    for n, about in median["trainers"].items():
        if 1 < int(n) <= LINEAR_UP_TO:
            share = about["of_one"] / int(n)
            rows.append((f"share of linear, {n} trainers", share, f">= {LINEAR}", share >= LINEAR))
    most = max(median["trainers"], key=int)
    for name, ms in median["trainers"][most]["cpu_ms_per_task"].items():
        what = f"{name}'s processor time for a task, ms, {most} trainers"
        rows.append((what, ms, f"< {CPU_MS}", ms < CPU_MS))
    ready = median["ready_s"]["trainer"]
    rows.append(("trainer from start to ready, s", ready, f"< {READY_S:.0f}", ready < READY_S))
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    median = results["median"]
    about = conditions(results["machine"])
    lines = [
        "# Scaling",
        "",
        "`python -m benchmarks.scaling`: trainer processes beside every other service on one",
        f"machine; a device takes {LATENCY_S:.0f} s. Medians of {len(results['runs'])} runs.",
        "",
        f"{about}; load when it began {results['load']:.1f}",
        "",
        "| trainers | updates/s | times one's | of linear | coordinator, ms | scheduler, ms |",
        "|---|---|---|---|---|---|",
    ]
    for n, row in median["trainers"].items():
        cpu = row["cpu_ms_per_task"]
        lines.append(
            f"| {n} | {row['updates_per_s']:.2f} | {row['of_one']:.2f} "
            f"| {row['of_one'] / int(n):.1%} | {cpu['coordinator']:.2f} | {cpu['scheduler']:.2f} |"
        )
    memory = median["trainer_mb"]
    ready = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in median["ready_s"].items())
    lines += [
        "",
        "ms: of processor time for each task, with what is done by the clock.",
        "",
        f"From start to ready: {ready}.",
        "",
        f"A trainer that waits for its first task: {memory['rss']:.0f} MB resident,",
        f"{memory['pss']:.0f} MB as its share of what is shared, {memory['uss']:.0f} MB its alone.",
        "",
        "| | measured | bound | |",
        "|---|---|---|---|",
    ]
    for what, value, bound, held in verdicts(median):
        lines.append(f"| {what} | {value:.2f} | {bound} | {'held' if held else 'MISSED'} |")
    return "\n".join(lines) + "\n"


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the runs."""
    return {
        key: _median([run[key] for run in runs])
        if isinstance(value, dict)
        else round(statistics.median(run[key] for run in runs), 4)
        for key, value in runs[0].items()
    }


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="repeats of the whole measurement")
    parser.add_argument("--trainers", default="1,2,4,8,16,32", help="numbers of trainers")
    parser.add_argument("--cycles", type=int, default=8, help="updates of each trainer per figure")
    add_out(parser)
    options = parser.parse_args()
    trainers = sorted(int(part) for part in options.trainers.split(","))
    load = os.getloadavg()[0]
    runs = [measured(trainers, options.cycles) for _ in range(options.runs)]
    results = {
        "machine": machine.described(),
        "load": load,
        "median": _median(runs),
        "runs": runs,
    }
    print(table(results))
    keep("scaling", results, table(results), options.out)


if __name__ == "__main__":
    main()
