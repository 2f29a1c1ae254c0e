"""FedAsync's adaptive alpha (``strategy.adapt``) against a grid of constant ones.

FedAsync leaves an adaptive alpha to future work. Four tasks: digits and LR/MNIST, each with alike
devices and with two classes each; staleness is uniform up to 16. The adaptive runs begin at two
values of the grid. Half of each task's test data scores models, and the other half measures all
runs, so no run is measured on data that chose its alpha.
"""

from __future__ import annotations

from typing import Literal

from torch.utils.data import TensorDataset

from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    Picture,
    Results,
    above,
    mean_of,
)
from fedstream.trainer import images
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.task import TaskSettings

T = 2_000
GRID = (0.1, 0.2, 0.4, 0.6, 0.9)
STARTS = (0.4, 0.9)
CLOSE = 0.005
PARTITIONS: dict[str, KeyValues] = {
    "alike": {"kind": "iid"},
    "two classes": {"kind": "classes", "p": 2},
}
DEVICES = {"digits": 10, "mnist": 100}


class Halved(InMemory):
    """A task whose test data are split: odd rows measure, even rows score models."""

    def test_data(self) -> TensorDataset:
        """The odd rows."""
        return TensorDataset(*(values[1::2] for values in self._test.tensors))

    def validation_data(self) -> TensorDataset:
        """The even rows."""
        return TensorDataset(*(values[::2] for values in self._test.tensors))


def halved(data: Literal["digits", "mnist"], partition: str) -> Halved:
    """A built-in task with half of its test data. The partition is the same in every repeat."""
    keys = {"name": data, "devices": DEVICES[data], "partition": PARTITIONS[partition]}
    task = getattr(images, data)(TaskSettings.model_validate(keys))
    shares = [task.device_data(device) for device in range(DEVICES[data])]
    return Halved(task.model, shares, task.test_data())


SITUATIONS: dict[str, KeyValues] = {
    f"{data}, {partition}": {
        "task.name": "experiments.adaptive_alpha:halved",
        "task.args.data": data,
        "task.args.partition": partition,
    }
    for data in DEVICES
    for partition in PARTITIONS
}


def constant(situation: str, alpha: float) -> str:
    """The cell of a constant alpha."""
    return f"{situation}: {alpha:g}"


def adaptive(situation: str, start: float) -> str:
    """The cell of an adaptive alpha."""
    return f"{situation}: adaptive from {start:g}"


def _cells() -> tuple[Cell, ...]:
    found = []
    for situation, where in SITUATIONS.items():
        found += [
            Cell(constant(situation, alpha), {**where, "strategy.alpha": alpha}) for alpha in GRID
        ]
        found += [
            Cell(
                adaptive(situation, start),
                {**where, "strategy.alpha": start, "strategy.adapt.every": 50},
            )
            for start in STARTS
        ]
    return tuple(found)


def _claims(results: Results) -> list[JudgedClaim]:
    """For every task and start: at least the best of the grid, less a little."""
    found = []
    for situation in SITUATIONS:
        late = {alpha: results.late(constant(situation, alpha), "accuracy") for alpha in GRID}
        best = max(GRID, key=lambda alpha: mean_of(late[alpha]))
        seen = ", ".join(f"{alpha:g} {mean_of(late[alpha]):.4f}" for alpha in GRID)
        for start in STARTS:
            reached = results.late(adaptive(situation, start), "accuracy")
            found.append(
                JudgedClaim(
                    f"{situation}: alpha adapted from {start:g} is at most {CLOSE} below the best "
                    "of five constant ones, in the last third of the run.",
                    [above(reached, late[best], -CLOSE)],
                    f"adapted {mean_of(reached):.4f}; constant: {seen}.",
                )
            )
    return found


EXPERIMENTS = (
    Experiment(
        name="adaptive-alpha",
        title="Adaptive alpha",
        source="this project's own; docs/strategies.md",
        base={
            "run.versions": T,
            "simulation.evaluate_every": 20,
            "simulation.threads": 1,
            "simulation.staleness.kind": "uniform",
            "simulation.staleness.most": 16,
            "solver.lr": 0.1,
            "solver.batch_size": 50,
        },
        cells=_cells(),
        compare="last",
        claims=_claims,
        notes=(
            "The partition is the same in every repeat.",
            "Half of the test data scores the models, and the other half measures all runs.",
            (
                "The best constant alpha is that of the runs that it is compared in, which favours "
                "the constant ones."
            ),
        ),
        grid={
            **{
                f"constant, {alpha:g}": {one: constant(one, alpha) for one in SITUATIONS}
                for alpha in GRID
            },
            **{
                f"adaptive from {start:g}": {one: adaptive(one, start) for one in SITUATIONS}
                for start in STARTS
            },
        },
        pictures=(
            Picture(
                "curves.png",
                "Constant and adaptive alpha",
                tuple(
                    Panel(
                        situation,
                        {f"{alpha:g}": constant(situation, alpha) for alpha in GRID}
                        | {f"from {a:g}": adaptive(situation, a) for a in STARTS},
                        ylabel="test accuracy",
                    )
                    for situation in SITUATIONS
                ),
            ),
        ),
    ),
)
