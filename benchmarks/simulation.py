"""Simulation: device-epochs per second, next to a plain PyTorch loop on the same machine.

    python -m benchmarks.simulation [--runs 5] [--threads 2]

The plain loop trains one device after the other in float32 with torch.optim.SGD, on tensors in
memory, and does nothing else; the simulation also draws, mixes and keeps versions. Both are
measured in pairs, and the median ratio counts. Then estimates how long AFL's table 2 for LR/MNIST
takes (12 rows, 4 columns, 3 repeats, measured after every round) from one run of each kind, and
measures what FedAsync's CNN loses with bfloat16. The peak is that of a large matrix product.
FEDSTREAM_DATA must contain MNIST and CIFAR-10.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.settings.config import Settings, read
from fedstream.simulation import SimulationResult, simulate
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import Task

LR = (
    "task.name=mnist",
    "task.devices=100",
    "task.partition.kind=iid",
    "solver.batch_size=64",
    "solver.lr=0.1",
    "scheduler.steps.kind=epochs",
    "simulation.evaluate_every=0",
)
AFL = ("strategy.name=afa-cd", "strategy.server_lr=0.1", "simulation.staleness.kind=recent")
CNN = (
    "task.name=cifar10-fedasync",
    "task.devices=100",
    "solver.kind=proximal",
    "solver.rho=0.005",
    "solver.batch_size=50",
    "solver.lr=0.1",
    "scheduler.steps.kind=epochs",
    "simulation.evaluate_every=0",
)
BARS = {
    "LR, AFA-CD, 20 of 100": 5.0,
    "LR, rounds of all 100": 5.0,
    "CNN, float32": 1.0,
    "CNN, bfloat16": 2.0,
}
TABLE_2 = {(10, 5, 5): 4, (10, 5, 10): 4, (100, 20, 5): 4}  # (M, m, c): rows
TABLE_2_S = 15 * 60
TABLE_2_RUN = Path(__file__).parents[1] / "experiments/results/afl-mnist-table2/about.json"


def plain(task: Task, settings: Settings, epochs: int) -> float:
    """Seconds for ``epochs`` device-epochs, one device after the other."""
    module, solver = task.model(), settings.solver
    shares = [task.device_data(n % (task.devices or 1)) for n in range(epochs)]
    module.train()
    began = time.perf_counter()
    for share in shares:
        assert isinstance(share, TensorDataset)
        x, y = share.tensors
        optimizer = torch.optim.SGD(module.parameters(), lr=solver.lr)
        for rows in torch.split(torch.randperm(len(x)), solver.batch_size):
            optimizer.zero_grad()
            torch.autograd.backward(cross_entropy(module(x[rows]), y[rows]))
            optimizer.step()
    return time.perf_counter() - began


def rate(outcome: SimulationResult) -> float:
    """Device-epochs per second, not counting evaluation, which the plain loop lacks."""
    return outcome.versions[-1].epochs / (outcome.seconds - outcome.measuring)


def flops(task: Task, batch_size: int) -> float:
    """Operations in one device-epoch: those of one step, scaled to the first device's samples."""
    module, share = task.model(), task.device_data(0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(task.loss(module, task.gather(share, torch.arange(batch_size))))
    samples = len(share)  # type: ignore[arg-type]  # torch's Dataset declares no length
    return float(counter.get_total_flops()) * samples / batch_size


def peak() -> float:
    """Floating-point operations per second in a large float32 matrix product."""
    a, seconds = torch.randn(2048, 2048), []
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a)
        seconds.append(time.perf_counter() - began)
    return 2 * 2048**3 / min(seconds)


def paired(
    runs: int, epochs: int, loop: Callable[[], float], simulated: Callable[[], float]
) -> dict[str, Any]:
    """Device-epochs per second of both, measured alternately."""
    rows = [(epochs / loop(), simulated()) for _ in range(runs)]
    return {
        "plain_per_s": round(statistics.median(row[0] for row in rows), 2),
        "simulated_per_s": round(statistics.median(row[1] for row in rows), 2),
        "ratio": round(statistics.median(fast / slow for slow, fast in rows), 2),
        "ratios": [round(fast / slow, 2) for slow, fast in rows],
    }


def compared(runs: int, threads: int) -> dict[str, dict[str, Any]]:
    """All comparisons with the plain loop."""
    cases = {
        "LR, AFA-CD, 20 of 100": (LR, (*AFL, "strategy.buffer_size=20"), 250, 500),
        "LR, rounds of all 100": (
            LR,
            (
                "strategy.name=fedavg",
                "strategy.clients_per_round=100",
                "simulation.staleness.kind=none",
            ),
            50,
            500,
        ),
        "CNN, float32": (CNN, (), 2, 2),
        "CNN, bfloat16": (CNN, ("solver.precision=bf16",), 2, 2),
    }
    tasks: dict[str, Task] = {}
    found = {}
    for name, (base, more, versions, epochs) in cases.items():
        sets = (*base, *more, f"run.versions={versions}", f"simulation.threads={threads}")
        settings = read(None, sets)
        task = tasks.setdefault(settings.task.name, load_task(settings.task.name, settings.task))
        torch.set_num_threads(threads)
        found[name] = paired(
            runs if base is LR else min(runs, 3),
            epochs,
            lambda task=task, settings=settings, epochs=epochs: plain(task, settings, epochs),  # type: ignore[misc]
            lambda task=task, settings=settings: rate(simulate(settings, task)),  # type: ignore[misc]
        )
        per_epoch = flops(task, settings.solver.batch_size)
        found[name]["share_of_peak"] = round(found[name]["simulated_per_s"] * per_epoch / peak(), 4)
        print(name, found[name], flush=True)
    return found


def table_2(threads: int) -> dict[str, Any]:
    """Seconds for AFL's table 2, extrapolated from one run of each kind of row."""
    total, kinds = 0.0, {}
    for (devices, m, c), rows in TABLE_2.items():
        sets = (
            "task.name=mnist",
            f"task.devices={devices}",
            "task.partition.p=2",
            "run.versions=150",
            "solver.batch_size=64",
            "solver.lr=0.1",
            "solver.sampling=fresh",
            "scheduler.steps.kind=uniform",
            f"scheduler.steps.c={c}",
            f"strategy.buffer_size={m}",
            "simulation.evaluate_every=1",
            f"simulation.threads={threads}",
            *AFL,
        )
        settings = read(None, sets)
        task = load_task(settings.task.name, settings.task)
        outcome = simulate(settings, task)
        kinds[f"M={devices}, m={m}, c={c}"] = {
            "seconds": round(outcome.seconds, 2),
            "best": outcome.best(),
        }
        total += outcome.seconds * rows * 4 * 3
        print(kinds, flush=True)
    return {"kinds": kinds, "whole_table_s": round(total), "at_most_s": TABLE_2_S}


def accuracy(threads: int, versions: int) -> dict[str, float]:
    """Accuracy of FedAsync's CNN after ``versions`` versions, by precision."""
    found = {}
    for precision in ("float32", "bf16"):
        settings = read(
            None,
            [
                *CNN,
                "strategy.alpha=0.6",
                f"run.versions={versions}",
                f"simulation.threads={threads}",
                f"solver.precision={precision}",
            ],
        )
        found[precision] = simulate(settings).last()
        print(precision, found[precision], flush=True)
    return found


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="pairs to measure")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads")
    parser.add_argument("--versions", type=int, default=20, help="versions per run")
    wanted = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine.described(),
        "load": os.getloadavg()[0],
        "threads": wanted.threads,
    }
    torch.set_num_threads(wanted.threads)
    results["peak_gflops"] = round(peak() / 1e9, 1)
    results["compared"] = compared(wanted.runs, wanted.threads)
    results["table_2"] = table_2(wanted.threads)
    results["accuracy"] = accuracy(wanted.threads, wanted.versions)
    lines = [
        f"| {name} | {row['plain_per_s']} | {row['simulated_per_s']} | {row['ratio']} "
        f"| {BARS[name]:g} | {'held' if row['ratio'] >= BARS[name] else 'MISSED'} "
        f"| {row['share_of_peak']:.1%} | {', '.join(map(str, row['ratios']))} |"
        for name, row in results["compared"].items()
    ]
    table, costs = results["table_2"], results["accuracy"]
    whole = json.loads(TABLE_2_RUN.read_text())["calls"][-1]
    kinds = "; ".join(f"{name}: {row['seconds']} s" for name, row in table["kinds"].items())
    said = (
        f"- AFL table 2, LR/MNIST, whole (144 runs, measured after every round): "
        f"{table['whole_table_s'] / 60:.1f} min of {TABLE_2_S / 60:g}, from one run of each "
        f"kind ({kinds}); as `reproduce --jobs 2` it was measured in full: "
        f"{whole['seconds'] / 60:.1f} min for {whole['runs']} runs ({whole['date']})"
    )
    cost = f"- FedAsync's CNN after {wanted.versions} versions: accuracy " + ", ".join(
        f"{value:.4f} in {name}" for name, value in costs.items()
    )
    text = "\n".join(
        [
            "# Simulation",
            "",
            "`python -m benchmarks.simulation`: device-epochs a second beside a plain PyTorch loop",
            "in float32, one device after the other; medians of pairs.",
            "",
            conditions(results["machine"])
            + f"; {wanted.threads} threads, load {results['load']:.1f}, "
            f"matrix peak {results['peak_gflops']} GFLOP/s",
            "",
            "| | plain | simulated | ratio | at least | | share of the peak | every pair |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
            "",
            said,
            cost,
            "",
        ]
    )
    print(text)
    keep("simulation", results, text)


if __name__ == "__main__":
    main()
