"""Beside others: updates per second without training, next to FedLab and to a bare loop.

    make .venv-fedlab/installed
    python -m benchmarks.peers [--runs 5] [--sizes 61706,11000000]

FedLab 1.3.0 is the fastest peer that we know of. It sends models from process to process, keeps
nothing and checks nothing. The script that runs it, ``shared/peers/fedlab_net.py`` beside this
checkout, is not part of fedstream. Within a run, everything is measured once, one after the other,
each with a new Redis. What counts are the ratios within a run, because machines are noisy.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import bare
from benchmarks.end_to_end import IN_FLIGHT, Pipeline
from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.local.redis_server import RedisServer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT.parent / "shared" / "peers" / "fedlab_net.py"
FEDLAB = ROOT / ".venv-fedlab" / "bin" / "python"
WITHIN_S = 180.0  # of one run of FedLab, which gives up by itself after 60 s
MANY = 64  # tasks in flight, in addition; of FedLab's clients, each has one


@dataclass(frozen=True)
class Size:
    """How much is measured of models of one size."""

    bare: int  # updates
    versions: int
    fedlab: int  # updates
    clients: tuple[int, ...]  # of FedLab
    ways: dict[str, tuple[str, int]]  # of fedstream: format both ways, tasks in flight


WAYS = {"fedstream": ("f32", IN_FLIGHT), "fedstream, bf16": ("bf16", IN_FLIGHT)}
SMALL = Size(
    bare=1500,
    versions=2000,
    fedlab=600,
    clients=(2, 8),
    ways=WAYS | {f"fedstream, {MANY} in flight": ("f32", MANY)},
)
LARGE = Size(bare=25, versions=40, fedlab=60, clients=(2,), ways=WAYS)
# Of a ratio of the first to the better of the others.
BOUNDS = {
    61_706: [("fedstream", "bare loop", 0.75), ("fedstream", "FedLab", 3.0)],
    11_000_000: [("fedstream", "bare loop", 1.3), ("fedstream, bf16", "FedLab", 2.2)],
}


def missing() -> str | None:
    """What is missing to run FedLab, in one sentence."""
    if not SCRIPT.is_file():
        return f"peers: not measured, because {SCRIPT}, which runs FedLab, is not there"
    if not FEDLAB.is_file():
        return "peers: not measured, because FedLab is not installed: make .venv-fedlab/installed"
    return None


def fedlab(parameters: int, clients: int, updates: int) -> float:
    """FedLab's updates per second. Raises SystemExit if it says none."""
    ended = subprocess.run(
        [FEDLAB, "-W", "ignore", SCRIPT, str(parameters), str(clients), str(updates)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    found = re.search(r"= ([\d.]+) upd/s", ended.stdout)
    if found is None:
        raise SystemExit(f"FedLab made no updates:\n{ended.stdout}{ended.stderr}")
    return float(found[1])


def fedstream(parameters: int, versions: int, wire: str, in_flight: int) -> float:
    """Our updates per second, with updates and models in the format ``wire``."""
    formats = {"WIRE__UPDATE": wire, "WIRE__MODEL": wire}
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        pipeline = Pipeline(
            server.url, parameters, versions, Path(journal), in_flight=in_flight, settings=formats
        )
        return float(pipeline.measure()["updates_per_s"])


def bare_loop(parameters: int, updates: int) -> float:
    """The bare loop's updates per second."""
    with RedisServer() as server:
        return bare.updates_per_second(server.url, parameters, updates)


def measured(parameters: int) -> dict[str, float]:
    """Updates per second of each, measured once."""
    size = SMALL if parameters < 1_000_000 else LARGE
    each: dict[str, Callable[[], float]] = {
        "bare loop": partial(bare_loop, parameters, size.bare),
        **{
            name: partial(fedstream, parameters, size.versions, *way)
            for name, way in size.ways.items()
        },
        **{
            f"FedLab, {n} clients": partial(fedlab, parameters, n, size.fedlab)
            for n in size.clients
        },
    }
    return {name: measure() for name, measure in each.items()}


def ratio(run: Mapping[str, float], ours: str, other: str) -> float:
    """Of ``ours`` to the fastest whose name begins with ``other``, in one run."""
    return run[ours] / max(rate for name, rate in run.items() if name.startswith(other))


def page(runs: Mapping[int, list[dict[str, float]]], about: Mapping[str, object]) -> str:
    """The results as Markdown."""
    lines = [
        "# Beside others, without training",
        "",
        "`python -m benchmarks.peers`: updates per second. fedstream has two trainers, a journal",
        f"and all checks, and {IN_FLIGHT} tasks in flight unless said otherwise; bf16 is the",
        "format of updates and models. FedLab has one task in flight for each client.",
        "FedLab 1.3.0 (gloo) and the bare loop over the same Redis keep and check nothing.",
        "Medians; the ratios are of what was measured one after the other.",
        "",
        conditions(about),
        "",
        "| parameters | | updates/s | of the bare loop | of FedLab's better figure |",
        "|---|---|---|---|---|",
    ]
    for size, found in runs.items():
        for name in found[0]:
            rate = statistics.median(run[name] for run in found)
            cells = [
                f"{statistics.median(ratio(run, name, other) for run in found):.2f}"
                for other in ("bare loop", "FedLab")
            ]
            lines.append(f"| {size:,} | {name} | {rate:.1f} | {' | '.join(cells)} |")
    lines += ["", "```", *verdicts(runs), "```"]
    return "\n".join(lines) + "\n"


def verdicts(runs: Mapping[int, list[dict[str, float]]]) -> list[str]:
    """One line per bound: the measured ratio, and whether the bound was held."""
    lines = []
    for size, found in runs.items():
        for ours, other, bound in BOUNDS.get(size, ()):
            reached = statistics.median(ratio(run, ours, other) for run in found)
            verdict = "held" if reached >= bound else "MISSED"
            lines.append(
                f"{size:>11,}: {ours} / {other}: {reached:.2f}, bound {bound:.2f}: {verdict}"
            )
    return lines


def main() -> None:
    """Measure, print the table, and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", default="61706,11000000", help="numbers of parameters")
    add_out(parser)
    asked = parser.parse_args()
    if (lacking := missing()) is not None:
        print(lacking)
        return
    about = machine.described() | {"load when it began": f"{os.getloadavg()[0]:.1f}"}
    runs: dict[int, list[dict[str, float]]] = {}
    for size in map(int, asked.sizes.split(",")):
        for _ in range(asked.runs):
            run = measured(size)
            runs.setdefault(size, []).append(run)
            rates = "  ".join(f"{name} {rate:.1f}" for name, rate in run.items())
            print(f"{size:>11,}: {rates}", flush=True)
    text = page(runs, about)
    print(text)
    keep("peers", {"machine": about, "runs": runs}, text, asked.out)


if __name__ == "__main__":
    main()
