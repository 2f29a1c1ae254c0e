"""What wire formats cost in accuracy: LR/MNIST and CNN/CIFAR-10, each format beside float32.

The settings are AFL's, shortened alike for all formats, with the strategies that take deltas
(FedBuff; with the same number of local steps everywhere its step is AFA-CD's) and models
(FedAsync). Repeats with the same seed have the same arrivals and minibatches, so a format is
compared with float32 seed by seed. `+zstd` changes no value, so it is not run.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch.utils.data import TensorDataset

from experiments.afl import ASYNC, constant
from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    Picture,
    Results,
)
from experiments.showing import mean_and_deviation
from fedstream.trainer.images import cifar10_afl
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.partitions import Classes
from fedstream.trainer.task import TaskSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

_REPEATS = 5
_TESTED = 2_000
_K = 5
_LIMITS = {"bf16": 0.005, "int8": 0.005, "int4": 0.02, "topk:0.1": 0.02}  # lost accuracy
_FEDBUFF = ("bf16", "int8", "int4", "topk:0.1")
_FEDASYNC = ("bf16", "int8")  # devices send models


def images() -> InMemory:
    """AFL's task, 10 devices of all classes, with fewer test images."""
    task = cifar10_afl(TaskSettings(name="cifar10-afl", devices=10, partition=Classes(p=10)))
    test = task.test_data()
    some = TensorDataset(*(tensor[:: len(test) // _TESTED] for tensor in test.tensors))
    return InMemory(task.model, [task.device_data(number) for number in range(10)], some)


def _cells(strategy: str, updates: Sequence[str], sets: KeyValues) -> tuple[Cell, ...]:
    """A strategy with float32 and other formats of updates, and with int8 both ways."""
    plain = f"{strategy}, f32"
    rest = [
        Cell(f"{strategy}, {update}", {**sets, "wire.update": update}, beside=plain)
        for update in updates
    ]
    both = [
        Cell(
            _both(strategy, model),
            {**sets, "wire.update": "int8", "wire.model": model},
            beside=plain,
        )
        for model in ("bf16", "int8")
    ]
    return Cell(plain, sets), *rest, *both


def _both(strategy: str, model: str) -> str:
    return f"{strategy}, int8, models {model}"


def _claims(results: Results, *, cells: Sequence[Cell]) -> list[JudgedClaim]:
    """Each format loses no more accuracy than it may, in the mean over the seeds."""
    found = []
    for cell in cells:
        if cell.beside is None:
            continue
        most = _LIMITS[str(cell.sets["wire.update"])]
        lost = results.differences(cell.label, cell.beside, "accuracy")
        found.append(
            JudgedClaim(
                f"{cell.label}: at most {most:g} less accurate than float32.",
                [lost + most],
                f"{mean_and_deviation(lost, sign='+')}.",
            )
        )
    return found


def _panel(strategy: str, updates: Sequence[str], low: float, high: float) -> Panel:
    return Panel(
        strategy,
        # Those of all strategies come first, and so have the same colours everywhere.
        {update: f"{strategy}, {update}" for update in ("f32", *_FEDASYNC)}
        | {f"int8, models {model}": _both(strategy, model) for model in ("bf16", "int8")}
        | {update: f"{strategy}, {update}" for update in updates if update not in _FEDASYNC},
        x="updates",
        xlabel="updates",
        ylabel="test accuracy",
        ylim=(low, high),
    )


_MNIST: KeyValues = {
    **ASYNC,
    **constant(5),
    "task.name": "mnist",
    "task.partition.kind": "classes",
    "task.partition.p": 2,
    "solver.lr": 0.1,
    "solver.batch_size": 64,
    "solver.sampling": "fresh",
    "simulation.threads": 1,
}
_MNIST_CELLS = (
    *_cells(
        "fedbuff",
        _FEDBUFF,
        {
            "strategy.name": "fedbuff",
            "strategy.buffer_size": _K,
            "run.versions": 150,
            "simulation.evaluate_every": 5,
        },
    ),
    *_cells(
        "fedasync",
        _FEDASYNC,
        {
            "strategy.name": "fedasync",
            "strategy.alpha": 1 / _K,
            "strategy.staleness.kind": "constant",
            "run.versions": 150 * _K,
            "simulation.evaluate_every": 5 * _K,
        },
    ),
)
_CIFAR10: KeyValues = {
    **constant(10),
    "simulation.staleness.kind": "recent",
    "simulation.staleness.of": 2,
    "task.name": "experiments.wire:images",
    "solver.lr": 0.03,
    "solver.batch_size": 20,
    "simulation.threads": 1,
}
_CIFAR10_CELLS = (
    *_cells(
        "fedbuff",
        _FEDBUFF,
        {
            "strategy.name": "fedbuff",
            "strategy.buffer_size": 2,
            "run.versions": 50,
            "simulation.evaluate_every": 10,
        },
    ),
)

EXPERIMENTS = (
    Experiment(
        name="wire-mnist",
        title="What wire formats cost in accuracy: LR/MNIST",
        source="this project's own; docs/how-to/wire-formats.md",
        base=_MNIST,
        cells=_MNIST_CELLS,
        repeats=_REPEATS,
        compare="last",
        pictures=(
            Picture(
                "formats.png",
                "LR/MNIST, two classes a device, by the updates' format",
                (
                    _panel("fedbuff", _FEDBUFF, 0.7, 0.93),
                    _panel("fedasync", _FEDASYNC, 0.7, 0.93),
                ),
            ),
        ),
        claims=partial(_claims, cells=_MNIST_CELLS),
        notes=("AFL's settings at p = 2, m/M = 5/10, c = 5; 750 updates in every cell.",),
    ),
    Experiment(
        name="wire-cifar10",
        title="What wire formats cost in accuracy: CNN/CIFAR-10",
        source="this project's own; docs/how-to/wire-formats.md",
        base=_CIFAR10,
        cells=_CIFAR10_CELLS,
        repeats=_REPEATS,
        compare="last",
        pictures=(
            Picture(
                "formats.png",
                "CNN/CIFAR-10, by the updates' format",
                (_panel("fedbuff", _FEDBUFF, 0.0, 0.5),),
            ),
        ),
        claims=partial(_claims, cells=_CIFAR10_CELLS),
        notes=(
            (
                "AFL's network (645,450 parameters) on 10 devices with all classes, minibatches of "
                "20 and not 500, 100 updates of 10 steps: so short that accuracies are of the "
                "beginning of training. Measured on every fifth test image."
            ),
            (
                "The step size and the staleness (one of the last two models, not of the last "
                "five) were chosen with float32 alone, on seed 0: with more of either, float32 "
                "itself swings by .1 from one measurement to the next in so short a run."
            ),
        ),
    ),
)
