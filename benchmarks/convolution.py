"""A step of FedAsync's convolutional network: plain loops of PyTorch, a trainer, a simulation.

    python -m benchmarks.convolution [--runs 7]

Every case takes one device-epoch (10 steps of 50 images of CIFAR-10) in turn, with one thread; the
medians of the ratios to the fastest plain loop count. Processor time is measured, which other work
on the machine hardly changes. Then two processes of one thread each are compared with one process
of two threads, by the clock. FEDSTREAM_DATA must contain CIFAR-10.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any, cast

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from benchmarks.results import conditions, keep
from benchmarks.simulation import CNN
from experiments import machine
from fedstream.core.layout import Model
from fedstream.settings.config import Settings, read
from fedstream.simulation import simulate
from fedstream.sweep.parallel import each
from fedstream.trainer.learner import Learner
from fedstream.trainer.loading import load_task
from fedstream.trainer.solvers import Work
from fedstream.trainer.task import Task, initial
from fedstream.trainer.workspace import Start

STEPS, BATCH = 10, 50
AT_MOST = 1.1  # times the fastest plain loop


def settings_of(precision: str) -> Settings:
    """FedAsync on CIFAR-10 without evaluations; its end is decided elsewhere."""
    return read(None, [*CNN, "run.versions=1000000", f"solver.precision={precision}"])


def plain(task: Task, precision: str, *, last: bool) -> Callable[[], object]:
    """A loop over one device's images. ``last``: with the channels last."""
    return loop(task.model(), task.device_data(0), precision, last=last)


def loop(
    module: nn.Module, data: Dataset[Any], precision: str, *, last: bool
) -> Callable[[], object]:
    """An epoch that trains the module on a device's images. ``last``: with the channels last."""
    if last:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(module.train().parameters(), lr=settings_of(precision).solver.lr)
    x, y = cast(TensorDataset, data).tensors

    def epoch() -> None:
        for rows in torch.split(torch.randperm(STEPS * BATCH), BATCH):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = cross_entropy(module(x[rows]), y[rows])
            torch.autograd.backward(loss)
            optimizer.step()

    return epoch


def trainer(task: Task, precision: str) -> Callable[[], object]:
    """A trainer's work, from the model that it has received to the update that it sends."""
    learner, x_0 = Learner(lambda: task, 1, "cpu"), initial(task, 0)
    solver = settings_of(precision).solver.model_copy(update={"channels_last": True})
    start, into = Start(0, x_0.digest(), x_0), Model(x_0.layout)
    work = Work(0, "task", 0, 0, STEPS, None, solver, lambda: False)
    return lambda: learner.train(start, work, into, "model")


def simulated(task: Task, precision: str, runs: int, others: Callable[[], object]) -> list[float]:
    """Processor seconds of a simulation's versions but the first. ``others``: called in between."""
    seconds, began = list[float](), 0.0

    def heard(made: Any, _model: object) -> None:
        nonlocal began
        if made.version > 1:
            seconds.append(time.process_time() - began)
            others()
        began = time.process_time()

    simulate(settings_of(precision), task, on_version=heard, cancelled=lambda: len(seconds) == runs)
    return seconds


def compared(task: Task, precision: str, runs: int) -> dict[str, list[float]]:
    """Processor seconds of a device-epoch of every case; one precision beside all plain loops."""
    cases = {
        f"plain loop, {one}{', channels last' * last}": plain(task, one, last=last)
        for one, last in product(("float32", "bf16"), (False, True))
    }
    cases["trainer, channels last"] = trainer(task, precision)
    found = defaultdict[str, list[float]](list)

    def others() -> None:
        for name, epoch in cases.items():
            began = time.process_time()
            epoch()
            found[name].append(time.process_time() - began)

    for epoch in cases.values():
        epoch()  # prepares torch's kernels, and settles the trainer's precision
    found["simulation"] = simulated(task, precision, runs, others)
    return found


def ratios(found: dict[str, list[float]], precision: str) -> dict[str, float]:
    """Each case's median of the ratios to the fastest plain loop of this precision."""
    loops = [times for name, times in found.items() if name.startswith(f"plain loop, {precision}")]
    fastest = min(loops, key=statistics.median)
    return {
        name: statistics.median(a / b for a, b in zip(times, fastest, strict=True))
        for name, times in found.items()
    }


def epochs_per_s(number: int) -> float:
    """Device-epochs a second of the fastest plain loop, over ``number`` of them."""
    settings = settings_of("bf16")
    epoch = plain(load_task(settings.task.name, settings.task), "bf16", last=True)
    epoch()
    began = time.perf_counter()
    for _ in range(number):
        epoch()
    return number / (time.perf_counter() - began)


def main() -> None:
    """Measure, print the tables, and write them to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7, help="device-epochs of each case")
    runs = parser.parse_args().runs
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    settings = settings_of("bf16")
    task = load_task(settings.task.name, settings.task)
    results: dict[str, Any] = {"machine": machine.described(), "load": load, "seconds": {}}
    lines = []
    for precision in ("float32", "bf16"):
        found = results["seconds"][precision] = compared(task, precision, runs)
        lines += [
            "",
            f"Trainer and simulation in {precision} (at most {AT_MOST} times the fastest loop):",
            "",
            "| | ms a step | ratio |",
            "|---|---|---|",
            *(
                f"| {name} | {1e3 * statistics.median(found[name]) / STEPS:.1f} | {ratio:.2f} |"
                for name, ratio in ratios(found, precision).items()
            ),
        ]
    apart = [sum(each(epochs_per_s, [runs] * n, processes=n, threads=2 // n)) for n in (1, 2)]
    results["epochs_per_s"] = dict(zip(("one process", "two processes"), apart, strict=True))
    text = "\n".join(
        [
            "# Convolutions",
            "",
            "`python -m benchmarks.convolution`: a step of 50 images of FedAsync's network for",
            "CIFAR-10, with one thread; medians of processor time.",
            "",
            conditions(results["machine"]) + f"; load {load:.1f}",
            *lines,
            "",
            f"By the clock, two processes of one thread train {apart[1]:.2f} device-epochs a",
            f"second, one process of two threads {apart[0]:.2f}.",
            "",
        ]
    )
    print(text)
    keep("convolution", results, text)


if __name__ == "__main__":
    main()
