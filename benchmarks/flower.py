"""Flower apps: what a call costs in process, and updates per second through every service.

    .venv-flower/bin/python -m benchmarks.flower [--runs 3] [--quickstart DIR]

Two trainers, four tasks in flight, 61,706 parameters, no training. Each run measures our own echo
and then the Flower app with a new Redis each; the ratio within a run is what counts, because
machines are noisy.

``--quickstart``: instead, train Flower's examples/quickstart-pytorch of that folder, whose source
is not touched, on CIFAR-10 from FEDSTREAM_DATA, with fedasync and with fedbuff. What the app
imports to download its data is replaced (benchmarks/flower_data).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import Pipeline
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.local.redis_server import RedisServer
from fedstream.settings.services import loaded
from fedstream.trainer.solvers import Sgd, Work
from fedstream.trainer.task import TaskSettings

APPS = {
    "Message API": "benchmarks.flower_echo:app",
    "NumPyClient": "benchmarks.flower_echo:numpy_app",
}
PARAMETERS, VERSIONS, CALLS = 61_706, 1000, 500
GOAL = 100.0  # updates per second
STAND_INS = Path(__file__).parent / "flower_data"


def call_ms(app: str) -> float:
    """Milliseconds of one call: model to arrays, the client, arrays to model. The median."""
    torch.set_num_threads(1)
    subject = loaded(TaskSettings(name=app))
    module, data = subject.model(), subject.device_data(0)
    assert sum(x.numel() for x in module.parameters()) == PARAMETERS
    work = Work(0, "t", 0, 0, steps=1, epochs=None, solver=Sgd(), cancelled=lambda: False)
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        subject.train(module, data, work)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took)


def per_second(task: str) -> float:
    """Updates per second of a task, through every service."""
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        pipeline = Pipeline(server.url, PARAMETERS, VERSIONS, Path(journal), task=task)
        return float(pipeline.measure()["updates_per_s"])


def echo(runs: int) -> dict[str, Any]:
    """The figures of both kinds of app, next to our own echo."""
    calls = {name: call_ms(app) for name, app in APPS.items()}
    found: list[dict[str, float]] = []
    for _ in range(runs):
        rates = {"own": per_second("benchmarks.echo:task")}
        rates |= {name: per_second(app) for name, app in APPS.items()}
        found.append(rates)
        print("  ".join(f"{name} {rate:.1f}/s" for name, rate in rates.items()), flush=True)
    return {"call_ms": calls, "runs": found}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    about = conditions(results["machine"])
    lines = [
        "# Flower apps, without training",
        "",
        "`.venv-flower/bin/python -m benchmarks.flower`: two trainers whose client returns what it",
        f"gets, {PARAMETERS:,} parameters, four tasks in flight, next to the same as a task of our",
        "own. Medians; every run's ratio.",
        "",
        f"{about}, load {results['load']:.1f}",
        "",
        "| app | a call, ms | updates/s | own task, updates/s | ratios |",
        "|---|---|---|---|---|",
    ]
    runs = results["runs"]
    own = statistics.median(run["own"] for run in runs)
    for name, call in results["call_ms"].items():
        rate = statistics.median(run[name] for run in runs)
        ratios = ", ".join(f"{run[name] / run['own']:.2f}" for run in runs)
        verdict = "held" if rate >= GOAL else "MISSED"
        lines.append(f"| {name} | {call:.2f} | {rate:.1f} | {own:.1f} | {ratios} |")
        results.setdefault("verdicts", {})[name] = verdict
    goals = ", ".join(f"{name} {verdict}" for name, verdict in results["verdicts"].items())
    return "\n".join([*lines, "", f"Goal, {GOAL:.0f} updates/s: {goals}.", ""])


def quickstart(folder: Path, versions: dict[str, int]) -> dict[str, Any]:
    """Train Flower's own example; returns the summaries by strategy, and the sources' digests."""
    sources = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".toml")
    }
    found: dict[str, Any] = {"sources": sources}
    for strategy, last in versions.items():
        with tempfile.TemporaryDirectory() as out:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "fedstream",
                    "run",
                    "--flower",
                    folder,
                    "--strategy",
                    strategy,
                    "--versions",
                    str(last),
                    "--out",
                    f"{out}/run",
                    "--set",
                    "evaluator.every=4",
                    "--set",
                    "task.args.evaluate_on=2",
                ],
                check=True,
                env=os.environ | {"PYTHONPATH": str(STAND_INS)},
            )
            found[strategy] = json.loads(Path(out, "run", "summary.json").read_text())
    after = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in sources}
    assert after == sources, "the app was changed"
    return found


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs of each app")
    parser.add_argument("--quickstart", type=Path, help="folder of Flower's quickstart-pytorch")
    options = parser.parse_args()
    described: dict[str, Any] = {"machine": machine.described() | {"flwr": version("flwr")}}
    described["load"] = os.getloadavg()[0]  # of the last minute; more than its cores: disturbed
    if options.quickstart is not None:
        results = described | quickstart(options.quickstart, {"fedasync": 40, "fedbuff": 4})
        keep("flower-quickstart", results)
        return
    results = described | echo(options.runs)
    text = table(results)
    print(text)
    keep("flower", results, text)


if __name__ == "__main__":
    main()
