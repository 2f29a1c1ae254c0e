"""One gateway and ten thousand devices: idle, at work, and after a restart.

    python -m benchmarks.gateway [--devices 10000] [--in-flight 96] [--seconds 20] [--out DIR]

Redis, coordinator, scheduler, updater, one gateway with TLS, and the devices
(`benchmarks/gateway_devices.py`, in as many processes as there are cores) share this machine.
Devices download each whole model and upload an update of 61,706 float32 parameters, without
training. A tenth of the devices is between two check-ins at any time, so of the tasks in flight
some wait for their devices: it takes more of them to keep the machine busy. Ten thousand devices
take 7 GB of memory, 3 GB of temporary files, as many open files as devices (`ulimit -Hn`), and five
minutes.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import redis
import trustme

from benchmarks.end_to_end import processor_s
from benchmarks.gateway_devices import ADMITTED, LATE
from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.local.redis_server import RedisServer

ROOT = Path(__file__).parent.parent
RUN = "fedstream:{demo}:"
WITHIN_S = 300.0
MANY = 0.7  # of the devices wait at any time once all have come; the others are between check-ins
BACK_S = 60.0  # in which they come back after a restart
LOOK_S = 0.25
SCRAPE_S = 10.0  # between two looks at metrics while nothing happens, as of a Prometheus
SETTLE_S = 10.0  # from the first tasks until they are counted
# For ten thousand devices.
MEMORY_MB, IDLE_SHARE, TASKS_PER_S = 700.0, 0.08, 200.0
POLL_S, RETRY_S = 50.0, (1.0, 10.0)
KEPT = 64  # versions in Redis: 300 come in a second, and devices download what they are offered
PAUSE_S = 1.05 * sum(RETRY_S) / 2  # between two check-ins: up to a tenth longer than asked


@dataclass(frozen=True)
class Asked:
    """What to measure."""

    devices: int
    seconds: float  # of each phase
    arrivals: float  # devices per second
    in_flight: int
    parameters: int


class Cluster:
    """Redis and the services, each a process."""

    def __init__(self, url: str, folder: Path, asked: Asked) -> None:
        self._asked = asked
        self._folder = folder
        self._client = redis.Redis.from_url(url)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = self.health = ""
        self.ca = folder / "ca.pem"
        authority = trustme.CA()
        authority.cert_pem.write_to_path(self.ca)
        issued = authority.issue_cert("127.0.0.1")
        cert, key = folder / "cert.pem", folder / "key.pem"
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        self.env = os.environ | {
            "FEDSTREAM_ECHO_PARAMETERS": str(asked.parameters),
            "FEDSTREAM_REDIS__URL": url,
            "FEDSTREAM_LOG__LEVEL": "info",
            "FEDSTREAM_LOG__FORMAT": "json",
            "FEDSTREAM_TASK__NAME": "benchmarks.echo:task",
            "FEDSTREAM_TASK__DEVICES": str(asked.devices),
            "FEDSTREAM_RUN__VERSIONS": "100000000",
            "FEDSTREAM_JOURNAL__DIR": str(folder / "journal"),
            "FEDSTREAM_UPDATER__KEEP_VERSIONS": str(KEPT),
            "FEDSTREAM_SCHEDULER__POLICY__KIND": "in_flight",
            "FEDSTREAM_SCHEDULER__POLICY__N": str(asked.in_flight),
            "FEDSTREAM_COORDINATOR__SITES": '["pool", "gateway"]',
            "FEDSTREAM_GATEWAY__TLS_CERT": str(cert),
            "FEDSTREAM_GATEWAY__TLS_KEY": str(key),
            "FEDSTREAM_GATEWAY__POLL_S": str(POLL_S),
            "FEDSTREAM_GATEWAY__RETRY_S": json.dumps(RETRY_S),
            "FEDSTREAM_GATEWAY__DEVICES": str(max(20_000, asked.devices)),
            "FEDSTREAM_GATEWAY__MODEL_BYTES": str(32 << 20),  # 135 of these models
            "FEDSTREAM_GATEWAY__CHANGES_BYTES": "0",  # devices get whole models
            # All devices come from one address.
            "FEDSTREAM_GATEWAY__ADDRESS_RATE": "100000",
            "FEDSTREAM_GATEWAY__ADDRESS_CONNECTIONS": "100000",
        }

    def start(self, role: str, *sets: str) -> None:
        """Start a service; the gateway's log says where it listens."""
        words = [word for one in sets for word in ("--set", one)]
        self.begin(role, "fedstream", role, "--name", f"{role}-0", *words)

    def begin(
        self, name: str, module: str, *words: object, stdout: IO[bytes] | None = None
    ) -> None:
        """Start a process of this name; its failures go to its log."""
        with self._log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, words)],
                env=self.env,
                cwd=ROOT,
                stdout=stdout,
                stderr=log,
            )

    def start_gateway(self) -> None:
        """Start the gateway, again where it was if it has been there before."""
        urls = {"port": self.url, "health_port": self.health}
        ports = [f"http.{kind}={url.rpartition(':')[2]}" for kind, url in urls.items() if url]
        self._log("gateway").touch()
        seen = len(self._serving())
        self.start("gateway", *ports)
        self.wait("the gateway", lambda: len(self._serving()) > seen)
        at = self._serving()[-1]
        self.url = f"https://127.0.0.1:{at['port']}"
        self.health = f"http://127.0.0.1:{at['health_port']}"

    def _log(self, role: str) -> Path:
        return self._folder / f"{role}.log"

    def _serving(self) -> list[dict[str, Any]]:
        lines = self._log("gateway").read_text().splitlines()
        found = (json.loads(line) for line in lines if '"serving"' in line)
        return [one for one in found if one.get("event") == "serving"]

    def end(self, role: str) -> None:
        """End a service in order."""
        process = self.processes.pop(role)
        process.send_signal(signal.SIGTERM)
        process.wait(60)

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        """Wait until something is so. Exits if a service ends, or it takes too long."""
        until = time.monotonic() + WITHIN_S
        while not is_so():
            for role, process in self.processes.items():
                if process.poll() is not None:
                    log = self._log(role).read_text()[-2000:]
                    raise SystemExit(f"{role} exited with {process.returncode}: {log}")
            if time.monotonic() > until:
                raise SystemExit(f"{what}: not within {WITHIN_S:.0f} s")
            time.sleep(LOOK_S)

    def metric(self, name: str) -> float:
        """One of the gateway's metrics; 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.health}/metrics", timeout=5) as page:  # noqa: S310  (ours)
                lines = page.read().decode().splitlines()
        except OSError:
            return 0.0
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0.0)

    def polls(self) -> float:
        """Check-ins that wait at the gateway."""
        return self.metric("fedstream_gateway_polls")

    def devices(self) -> float:
        """Devices that are present at the gateway."""
        return self.metric("fedstream_gateway_devices")

    def begun(self) -> bool:
        """Whether the run is there."""
        there: Any = self._client.exists(RUN + "head")
        return bool(there)

    def version(self) -> int:
        """The newest version's number."""
        found: Any = self._client.hget(RUN + "head", "version")
        return int(found or 0)

    def usage(self) -> dict[str, float]:
        """Processor seconds used so far, by service."""
        about: Any = self._client.info("server")
        used = {"redis": processor_s(int(about["process_id"]))}
        for name, one in self.processes.items():
            role = name.partition("-")[0]  # that of devices has several processes
            used[role] = used.get(role, 0.0) + processor_s(one.pid)
        return used

    def redis_figures(self) -> dict[str, float]:
        """What Redis says of itself: commands so far, and its memory in bytes."""
        stats: Any = self._client.info("stats")
        memory: Any = self._client.info("memory")
        return {
            "commands": float(stats["total_commands_processed"]),
            "memory": float(memory["used_memory"]),
        }

    def memory_mb(self, role: str) -> float:
        """A service's resident memory."""
        return psutil.Process(self.processes[role].pid).memory_info().rss / 1e6


@contextmanager
def cluster(asked: Asked) -> Iterator[Cluster]:
    """Services that serve a run, except for the scheduler; they end with the block."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        found = Cluster(server.url, Path(folder), asked)
        try:
            for role in ("coordinator", "updater"):
                found.start(role)
            found.wait("the run", found.begun)
            found.start_gateway()
            yield found
        finally:
            for role in reversed([*found.processes]):
                found.end(role)


def fedstream(at: Cluster, *words: str) -> str:
    """What a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "fedstream", *words],
        env=at.env,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout


class Devices:
    """All devices, in processes of their own, until the cluster ends."""

    def __init__(self, at: Cluster, folder: Path, asked: Asked) -> None:
        invites = folder / "invites.json"
        invites.write_text(
            fedstream(at, "devices", "invite", *map(str, range(asked.devices)), "--json")
        )
        parts = os.cpu_count() or 1
        self._files = [folder / f"devices-{part}" for part in range(parts)]
        for part, file in enumerate(self._files):
            with file.open("wb") as out:
                at.begin(
                    file.name,
                    "benchmarks.gateway_devices",
                    "--url",
                    at.url,
                    "--ca",
                    at.ca,
                    "--invites",
                    invites,
                    "--part",
                    f"{part}/{parts}",
                    "--arrivals",
                    asked.arrivals / parts,
                    stdout=out,
                )

    def events(self, begin: float, end: float) -> list[tuple[float, str]]:
        """Milliseconds and name of each event between two moments of the monotonic clock."""
        found = []
        for file in self._files:
            for line in file.read_text().splitlines():
                when, ms, name = line.split(maxsplit=2)
                if begin <= float(when) < end:
                    found.append((float(ms), name))
        return found


@dataclass(frozen=True)
class Look:
    """What was used up to a moment."""

    at: float
    version: int
    usage: dict[str, float]
    redis: dict[str, float]

    @classmethod
    def now(cls, at: Cluster) -> Look:
        """Look at everything."""
        return cls(time.monotonic(), at.version(), at.usage(), at.redis_figures())


def measured(asked: Asked) -> dict[str, Any]:
    """Idle, at work, and after a restart."""
    with cluster(asked) as at, tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {"empty": idle(at, asked.seconds)}
        before = Look.now(at)
        devices = Devices(at, Path(folder), asked)
        at.wait("all devices", lambda: at.devices() >= asked.devices)
        at.wait("their waits", lambda: at.polls() >= MANY * asked.devices)
        found["arrivals"] = cost(before, Look.now(at), asked.devices)
        found["idle"] = idle(at, asked.seconds)
        at.start("scheduler")
        at.wait("tasks", lambda: at.version() >= asked.in_flight)
        time.sleep(SETTLE_S)
        before = Look.now(at)
        time.sleep(asked.seconds)
        after = Look.now(at)
        found["work"] = cost(before, after, after.version - before.version)
        found["work"]["memory_mb"] = at.memory_mb("gateway")
        at.end("scheduler")
        found["work"]["events"] = summed(devices.events(before.at, after.at))
        found["restart"] = restart(at, asked)
    return found


def summed(events: list[tuple[float, str]]) -> dict[str, Any]:
    """Events by name, and quantiles of tasks and of the devices' own lateness, in ms.

    Exits unless there are tasks.
    """
    by_name: dict[str, list[float]] = {}
    for ms, name in events:
        by_name.setdefault(name, []).append(ms)
    if len(by_name.get(ADMITTED, ())) < 2 or len(by_name.get(LATE, ())) < 2:
        raise SystemExit(f"no task was done: {[*by_name][:10]}")
    found: dict[str, Any] = {"counts": {name: len(ms) for name, ms in by_name.items()}}
    for name in (ADMITTED, LATE):
        percentiles = statistics.quantiles(by_name[name], n=100, method="inclusive")
        found[name] = {"p50": percentiles[49], "p99": percentiles[98], "max": max(by_name[name])}
    return found


def cost(before: Look, after: Look, events: int) -> dict[str, Any]:
    """What each event cost: processor time in ms by process, and Redis's commands."""
    seconds = after.at - before.at
    used = {role: after.usage[role] - before.usage.get(role, 0.0) for role in after.usage}
    return {
        "per_s": events / seconds,
        "ms": {role: 1000 * one / max(1, events) for role, one in used.items()},
        "commands": (after.redis["commands"] - before.redis["commands"]) / max(1, events),
        "redis_memory": after.redis["memory"],
    }


def idle(at: Cluster, seconds: float) -> dict[str, Any]:
    """What the services take while nobody has a task."""
    before, polls = Look.now(at), []
    until = before.at + seconds
    while time.monotonic() < until:
        polls.append(at.polls())
        time.sleep(min(SCRAPE_S, max(0.0, until - time.monotonic())))
    after = Look.now(at)
    seconds = after.at - before.at
    return {
        "memory_mb": at.memory_mb("gateway"),
        "polls": sum(polls) / len(polls),
        "share": {role: (after.usage[role] - before.usage[role]) / seconds for role in after.usage},
        "commands_per_s": (after.redis["commands"] - before.redis["commands"]) / seconds,
        "redis_memory": after.redis["memory"],
    }


def check_ins_per_s(devices: int) -> float:
    """How many check-ins come while nobody has a task."""
    return devices / (POLL_S + PAUSE_S)


def restart(at: Cluster, asked: Asked) -> dict[str, Any]:
    """How the devices come back after the gateway was away: how many, and how fast."""
    at.end("gateway")
    at.start_gateway()
    up = time.monotonic()
    curve = [(0.0, at.devices())]
    while curve[-1][1] < asked.devices and curve[-1][0] < BACK_S:
        time.sleep(LOOK_S)
        curve.append((time.monotonic() - up, at.devices()))
    return {
        "back": curve[-1][1],
        "half_s": next((when for when, n in curve if n >= 0.5 * asked.devices), None),
        "all_s": next((when for when, n in curve if n >= asked.devices), None),
        "most_per_s": most_per_s(curve),
    }


def most_per_s(curve: list[tuple[float, float]]) -> float:
    """The most devices that came back within a second."""
    most = 0.0
    for when, n in curve:
        before = [other for other_at, other in curve if other_at <= when - 1.0]
        most = max(most, n - (before[-1] if before else 0.0))
    return most


def most_tasks_per_s(found: dict[str, Any], cores: int) -> float:
    """The tasks a second with which all cores would be busy: more are not possible."""
    waiting = float(sum(found["idle"]["share"].values()))
    ms = float(sum(found["work"]["ms"].values())) - 1000 * waiting / float(found["work"]["per_s"])
    return 1000 * (cores - waiting) / ms


def verdicts(found: dict[str, Any]) -> list[str]:
    """One line per bound: the measured value, and whether the bound was held."""
    memory = max(found["idle"]["memory_mb"], found["work"]["memory_mb"])
    rows = (
        ("gateway's memory, MB", memory, MEMORY_MB, memory <= MEMORY_MB),
        (
            "gateway's share of a core, idle",
            share := found["idle"]["share"]["gateway"],
            IDLE_SHARE,
            share <= IDLE_SHARE,
        ),
        ("tasks per second", rate := found["work"]["per_s"], TASKS_PER_S, rate >= TASKS_PER_S),
    )
    return [
        f"{what:>32}: {reached:.3g}, bound {bound:g}: {'held' if good else 'MISSED'}"
        for what, reached, bound, good in rows
    ]


def page(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = conditions(results["machine"])
    found, asked = results["found"], results["asked"]
    arrival = found["arrivals"]["ms"]["gateway"]
    idle_, work, back = found["idle"], found["work"], found["restart"]
    share, rate = idle_["share"]["gateway"], check_ins_per_s(asked["devices"])
    task, late = work["events"][ADMITTED], work["events"][LATE]
    most = most_tasks_per_s(found, results["machine"]["cores"])
    rows = {
        "devices that wait": f"{idle_['polls']:.0f}",
        "gateway's memory, idle": f"{idle_['memory_mb']:.0f} MB",
        "gateway's memory, at work": f"{work['memory_mb']:.0f} MB",
        f"gateway's share of a core, idle, {rate:.0f} check-ins/s": f"{share:.1%}",
        "gateway, for an arrival (TLS, enrolment, token)": f"{arrival:.2f} ms",
        "tasks handed out and taken back": f"{work['per_s']:.1f}/s",
        "tasks that would keep all cores busy, by what each cost": f"{most:.0f}/s",
        "offer to receipt, p50": f"{task['p50']:.1f} ms",
        "offer to receipt, p99": f"{task['p99']:.1f} ms",
        "the devices' own lateness, p99": f"{late['p99']:.1f} ms",
        "after a restart: half of the devices are back": said(back["half_s"]),
        "after a restart: all devices are back": said(back["all_s"]),
        "after a restart: the most that came within a second": f"{back['most_per_s']:.0f}",
    }
    ms = work["ms"]
    lines = [
        "# One gateway, many devices",
        "",
        f"`python -m benchmarks.gateway --devices {asked['devices']}`: Redis, services and devices",
        "on one machine, over TLS; each task with a download and an upload of",
        f"{asked['parameters']:,} float32 parameters, {asked['in_flight']} tasks in flight.",
        "",
        f"{about}; load when it began {results['load']:.1f}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows.items()),
        "",
        "Processor time per task, in ms, with that of devices which wait meanwhile:",
        "",
        f"| {' | '.join(ms)} |",
        "|---" * len(ms) + "|",
        f"| {' | '.join(f'{one:.2f}' for one in ms.values())} |",
        "",
        "```",
        *verdicts(found),
        "```",
        "",
    ]
    return "\n".join(lines)


def said(seconds: float | None) -> str:
    """A time, or that it was not reached."""
    return f"not within {BACK_S:.0f} s" if seconds is None else f"{seconds:.1f} s"


def main() -> None:
    """Measure, print a page, and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--arrivals", type=float, default=100.0, help="devices per second")
    parser.add_argument("--in-flight", type=int, default=96, help="tasks")
    add_out(parser)
    parser.add_argument("--parameters", type=int, default=61_706, help="of the model")
    options = parser.parse_args()
    asked = Asked(
        options.devices, options.seconds, options.arrivals, options.in_flight, options.parameters
    )
    load = os.getloadavg()[0]
    found = measured(asked)
    results = {
        "machine": machine.described(),
        "load": load,
        "found": found,
        "asked": {**vars(asked), "poll_s": POLL_S, "pause_s": PAUSE_S},
    }
    text = page(results)
    print(text)
    keep("gateway", results, text, options.out)


if __name__ == "__main__":
    main()
