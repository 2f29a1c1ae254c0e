"""End to end: updates per second through every service, next to a bare loop.

    python -m benchmarks.end_to_end [--runs 5] [--sizes 61706,11000000] [--in-flight 4,16,64]

Two trainers return the model without training.
Each run measures the bare loop and then the pipeline, each with a new Redis; the ratio within a run
is what counts, because machines are noisy. Also measured: processor time per process and of all of
them, the updater's seconds by part, peak memory, and with one small task at a time how long a task
takes from its trigger to its version.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import redis

from benchmarks import bare
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.core.messages import Version
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import HeldPort

ROLES = ("coordinator", "scheduler", "updater", "trainer-1", "trainer-2")
IN_FLIGHT = 4
MOST_LARGE = 16  # large models in flight: 64 would fill Redis with gigabytes
UNLOADED = 300  # versions with one task at a time
UNLOADED_MS = 5.0  # from trigger to version then, at most
LARGE = 1_000_000  # parameters
PROCESSOR_MS = 1.6  # of all processes, for an update of a small model
REDIS_MB = 10  # Redis itself and everything but models: streams, counts, connection buffers
PARTS = ("fetch", "check", "mix", "digest", "journal", "publish")


class Pipeline:
    """The services as separate processes, on a given Redis."""

    def __init__(
        self,
        url: str,
        parameters: int,
        versions: int,
        journal: Path,
        sync: str = "interval",
        task: str = "benchmarks.echo:task",
        in_flight: int = IN_FLIGHT,
        settings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``sync`` is the journal's sync setting; 'none': keep no journal.

        ``settings``: others, by name without ``FEDSTREAM_``, such as ``WIRE__UPDATE``.
        """
        self._recorded = sync != "none"
        self._env = os.environ | {
            "FEDSTREAM_ECHO_PARAMETERS": str(parameters),
            "FEDSTREAM_REDIS__URL": url,
            "FEDSTREAM_LOG__LEVEL": "warning",
            "FEDSTREAM_TASK__NAME": task,
            "FEDSTREAM_RUN__VERSIONS": str(versions),
            "FEDSTREAM_JOURNAL__DIR": str(journal),
            "FEDSTREAM_JOURNAL__SYNC": sync if self._recorded else "never",
            "FEDSTREAM_JOURNAL__KEEP_BYTES": str(1 << 30),
            "FEDSTREAM_SCHEDULER__POLICY__KIND": "in_flight",
            "FEDSTREAM_SCHEDULER__POLICY__N": str(in_flight),
        }
        self._env |= {f"FEDSTREAM_{name}": value for name, value in settings.items()}
        self._client = redis.Redis.from_url(url)
        self._head = "fedstream:{demo}:head"
        self._versions = versions
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = HeldPort()  # the updater's, for its metrics

    def _start(self, name: str) -> None:
        env = self._env
        if name == "updater":
            env = env | {"FEDSTREAM_HTTP__HEALTH_PORT": str(self._port.number)}
        module = "fedstream" if self._recorded else "benchmarks.unrecorded"
        self._processes[name] = subprocess.Popen(
            [sys.executable, "-m", module, name.partition("-")[0], "--name", name],
            env=env,
            cwd=Path(__file__).parent.parent,
        )

    def measure(self) -> dict[str, Any]:
        """Updates per second, and their cost, from a tenth of the versions to the last."""
        for name in ROLES:
            self._start(name)
        try:
            begin, cpu_begin = self._at(max(2, self._versions // 10))
            parts_begin = self._parts()
            end, cpu_end = self._at(self._versions)
            parts_end = self._parts()
            done = end[0] - begin[0]
            memory = self._client.info("memory")
            cpu_ms = {name: 1000 * (cpu_end[name] - cpu_begin[name]) / done for name in cpu_begin}
            return {
                "updates_per_s": done / (end[1] - begin[1]),
                "cpu_ms_per_update": cpu_ms | {"all": sum(cpu_ms.values())},
                "updater_ms_per_update": {
                    part: 1000 * (parts_end[part] - parts_begin[part]) / done for part in PARTS
                },
                "trigger_to_version_ms": self._way_ms(),
                "updater_peak_mb": self._peak_mb("updater"),
                "trainer_peak_mb": self._peak_mb("trainer-1"),
                "redis_peak_mb": memory["used_memory_peak"] / 1e6,
                "kept": self._client.zcard("fedstream:{demo}:kept"),
            }
        finally:
            self._stop()

    def _at(self, version: int) -> tuple[tuple[int, float], dict[str, float]]:
        """(version, time) and CPU seconds per process once the head has reached ``version``."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            head = int(self._client.hget(self._head, "version") or 0)
            if head >= version:
                server = int(self._client.info("server")["process_id"])
                cpu = {name: processor_s(one.pid) for name, one in self._processes.items()}
                return (head, time.perf_counter()), cpu | {"redis": processor_s(server)}
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} exited with {process.returncode}")
            time.sleep(0.01)
        raise SystemExit(f"version {version} was not reached within 300 s")

    def _way_ms(self) -> float:
        """The median time from a task's trigger (in its id) to its version, through six hops."""
        entries: Any = self._client.xrevrange("fedstream:{demo}:models", count=1000)
        ways = []
        for entry, fields in entries:
            for update in Version.decode(fields[b"m"]).updates:
                triggered = int(update.task.replace("-", "")[:12], 16)
                ways.append(int(entry.split(b"-")[0]) - triggered)
        return statistics.median(ways)

    def _parts(self) -> dict[str, float]:
        url = f"http://127.0.0.1:{self._port.number}/metrics"
        with urllib.request.urlopen(url, timeout=5) as reply:
            text = reply.read().decode()
        seconds = dict.fromkeys(PARTS, 0.0)
        for line in text.splitlines():
            if line.startswith("fedstream_updater_seconds_sum{"):
                seconds[line.split('"')[1]] = float(line.rsplit(" ", 1)[1])
        return seconds

    def _peak_mb(self, name: str) -> float:
        status = Path(f"/proc/{self._processes[name].pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6

    def _stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait(30)
        self._port.close()


def processor_s(pid: int) -> float:
    """The processor time that a process has used, in seconds."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="pairs to measure per size")
    parser.add_argument("--sizes", default="61706,11000000", help="numbers of parameters")
    parser.add_argument("--in-flight", default="4,16,64", help="numbers of tasks in flight")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine.described(), "measured": []}
    for size, in_flight in product(_numbers(options.sizes), _numbers(options.in_flight)):
        if size >= LARGE and in_flight > MOST_LARGE:
            continue
        runs = []
        for _ in range(options.runs):
            runs.append(run := _run(size, in_flight))
            print(
                f"{size:>11,}, {in_flight} in flight: {run['updates_per_s']:8.1f}/s  "
                f"bare {run['bare_updates_per_s']:8.1f}/s  ratio {run['ratio']:.2f}  "
                f"processor {run['cpu_ms_per_update']['all']:.2f} ms",
                flush=True,
            )
        kept = max(run.pop("kept") for run in runs)
        found = {"parameters": size, "in_flight": in_flight, "kept": kept}
        results["measured"].append(found | {"median": _median(runs), "runs": runs})
        print(json.dumps(results["measured"][-1]["median"], indent=2), flush=True)
    for line in _verdicts(results):
        print(line)
    keep("end_to_end", results, _table(results))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _run(size: int, in_flight: int) -> dict[str, Any]:
    """Measure the bare loop, the pipeline, and one small task at a time, each once."""
    small = size < LARGE
    with RedisServer() as server:
        yardstick = bare.updates_per_second(server.url, size, 1500 if small else 25, in_flight)
    run = _pipeline(size, 2000 if small else 40, in_flight)
    run |= {"bare_updates_per_s": yardstick, "ratio": run["updates_per_s"] / yardstick}
    if small:
        run["unloaded_ms"] = _pipeline(size, UNLOADED, in_flight=1)["trigger_to_version_ms"]
    return run


def _pipeline(size: int, versions: int, in_flight: int) -> dict[str, Any]:
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        folder = Path(journal)
        return Pipeline(server.url, size, versions, folder, in_flight=in_flight).measure()


def _verdicts(results: dict[str, Any]) -> list[str]:
    """One line per bound: the bound, the measured value, and whether it was held."""
    lines = []
    for found in results["measured"]:
        size, median = found["parameters"], found["median"]
        model_mb = 4 * size / 1e6
        # There are no workspaces. Queued updates count as tasks in flight. Finished updates stay
        # until they are on disk, which is at most the bytes of two syncs.
        retained = -(-2 * (64 << 20) // (4 * size))
        models = found["in_flight"] + retained + found["kept"] + 2
        bound = _least_ratio(size, found["in_flight"])
        verdicts = [
            ("ratio to the bare loop", median["ratio"], bound, median["ratio"] >= bound),
            (
                "updater's peak, MB",
                median["updater_peak_mb"],
                4 * model_mb + 350,
                median["updater_peak_mb"] <= 4 * model_mb + 350,
            ),
            (
                "Redis's peak, MB",
                median["redis_peak_mb"],
                models * model_mb + REDIS_MB,
                median["redis_peak_mb"] <= models * model_mb + REDIS_MB,
            ),
        ]
        if (unloaded := median.get("unloaded_ms")) is not None:  # of small models only
            what = "trigger to version, unloaded, ms"
            verdicts.append((what, unloaded, UNLOADED_MS, unloaded <= UNLOADED_MS))
            cost = median["cpu_ms_per_update"]["all"]
            verdicts.append(("processor, ms", cost, PROCESSOR_MS, cost <= PROCESSOR_MS))
        for what, reached, bound, is_enough in verdicts:
            verdict = "held" if is_enough else "MISSED"
            lines.append(
                f"{_about(found):>25}: {what}: {reached:.2f}, bound {bound:.2f}: {verdict}"
            )
    return lines


def _least_ratio(size: int, in_flight: int) -> float:
    """The bound on the ratio to the bare loop: what tasks share must pay."""
    if size >= LARGE:
        return 1.3
    return 0.9 if in_flight >= 16 else 0.75


def _about(found: dict[str, Any]) -> str:
    return f"{found['parameters']:,}, {found['in_flight']} in flight"


def _table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = conditions(results["machine"])
    lines = [
        "# End to end, without training",
        "",
        "`make bench`: two trainers that return the model as it came, next to a bare loop, each",
        "with a new Redis. Medians; the ratios are of pairs measured one after the other.",
        "",
        about,
        "",
        "| parameters | updates/s | bare loop | ratio | every run's ratio |",
        "|---|---|---|---|---|",
    ]
    for found in results["measured"]:
        median, ratios = found["median"], [f"{run['ratio']:.2f}" for run in found["runs"]]
        lines.append(
            f"| {_about(found)} | {median['updates_per_s']:.1f} "
            f"| {median['bare_updates_per_s']:.1f} | {median['ratio']:.2f} | {', '.join(ratios)} |"
        )
    sizes = [_about(found) for found in results["measured"]]
    lines += ["", "What an update costs, in ms:", "", f"| | {' | '.join(sizes)} |"]
    lines.append("|---" * (len(sizes) + 1) + "|")
    medians = [found["median"] for found in results["measured"]]
    rows = {f"processor, {n}": ("cpu_ms_per_update", n) for n in medians[0]["cpu_ms_per_update"]}
    rows |= {f"updater's clock, {part}": ("updater_ms_per_update", part) for part in PARTS}
    for name, (group, key) in rows.items():
        lines.append(f"| {name} | " + " | ".join(f"{m[group][key]:.2f}" for m in medians) + " |")
    for name, key in (
        ("trigger to version, six hops, ms", "trigger_to_version_ms"),
        ("trigger to version, one task at a time, ms", "unloaded_ms"),
        ("updater's peak, MB", "updater_peak_mb"),
        ("trainer's peak, MB", "trainer_peak_mb"),
        ("Redis's peak, MB", "redis_peak_mb"),
    ):
        cells = (f"{m[key]:.1f}" if key in m else "" for m in medians)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "```", *_verdicts(results), "```"]
    return "\n".join(lines) + "\n"


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every figure over the runs."""
    first = runs[0]
    return {
        key: _median([run[key] for run in runs])
        if isinstance(first[key], dict)
        else round(statistics.median(run[key] for run in runs), 4)
        for key in first
    }


if __name__ == "__main__":
    main()
