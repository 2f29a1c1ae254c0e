"""FedAsync's figures 2 to 10 with logistic regression on MNIST in place of its CIFAR-10 network.

T, the devices, the delays and the schedules are the papers'. ``fedasync-mnist`` has two classes on
each device, ``fedasync-mnist-iid`` similar data on all. A run takes 5 s on an idle core, one of
FedAvg with T rounds 50 s.
"""

from __future__ import annotations

from experiments.fedasync import ALPHA, HALVED, T, fedasync, fedavg, rules, sgd
from experiments.reproduction import Cell, Experiment, KeyValues

_RHO = 0.005
_A, _B = 10.0, 4  # of hinge
_RULES: dict[str, KeyValues] = {
    **rules(_A, _B),
    "Linear": {"strategy.staleness.kind": "linear", "strategy.staleness.a": 0.5},
    "Exp": {"strategy.staleness.kind": "exponential", "strategy.staleness.a": 0.3},
}
_FLATTER = "Hinge (a = 4)"  # figure 10's
_SCHEDULES: dict[str, KeyValues] = {  # of alpha, with s = 1
    "Inverse sqrt": {"strategy.alpha_schedule.kind": "inverse_sqrt"},
    "No decay": {"strategy.alpha_schedule.kind": "constant"},
}
_MOST = (4, 16, 8)
_ALPHAS = (0.1, 0.3, 0.6, ALPHA)
_SWEPT = {
    4: ("Const", "Poly", "Inverse sqrt"),
    16: ("Const", "Poly", "Inverse sqrt", _FLATTER),
}
_BASE: KeyValues = {
    "task.name": "mnist",
    "task.devices": 100,
    "run.versions": T,
    "simulation.evaluate_every": T // 40,
    "simulation.threads": 1,
    "solver.lr": 0.1,
    "solver.batch_size": 50,
    "scheduler.steps.kind": "fixed",
    "scheduler.steps.n": 12,
}
_SGD: KeyValues = {**sgd("mnist"), "task.devices": 1, "task.partition.kind": "iid"}
_GRID = (0.01, 0.03, 0.1)
_SMALL = 0.01  # gamma
_SLOWLY = ("Const", "Poly", "Inverse sqrt")  # the rules that also run with the small gamma


def _keys(rule: str, most: int, alpha: float = ALPHA) -> KeyValues:
    staleness = rules(4.0, _B)["Hinge"] if rule == _FLATTER else _RULES.get(rule, _RULES["Const"])
    return fedasync(staleness, most, _RHO, alpha, _SCHEDULES.get(rule, HALVED))


def _label(rule: str, most: int, alpha: float = ALPHA) -> str:
    """The cell of a rule at a maximum staleness: hinge is constant up to b."""
    rule = "Const" if rule == "Hinge" and most <= _B else rule
    return f"{rule}, {most}" + (f", alpha {alpha:g}" if alpha != ALPHA else "")


def _tuned(name: str, lr: float) -> str:
    return f"{name}, gamma {lr:g}"


def _cells(fedavg_grid: tuple[float, ...], rounds: float) -> tuple[Cell, ...]:
    """A partition's cells: FedAvg with each gamma of the grid, and with one for T rounds."""
    cells = {
        _label(rule, most): _keys(rule, most) for most in _MOST for rule in (*_RULES, *_SCHEDULES)
    }
    cells["Const, 0"] = _keys("Const", 0)
    cells |= {_tuned("FedAvg", lr): {**fedavg(40), "solver.lr": lr} for lr in fedavg_grid}
    cells |= {_tuned("SGD", lr): {**_SGD, "solver.lr": lr} for lr in _GRID}
    cells |= {
        _label(rule, most, alpha): _keys(rule, most, alpha)
        for most, swept in _SWEPT.items()
        for rule in swept
        for alpha in _ALPHAS
    }
    cells |= {
        _tuned(_label(rule, most), _SMALL): {**_keys(rule, most), "solver.lr": _SMALL}
        for most in _SWEPT
        for rule in _SLOWLY
    }
    cells["FedAvg, T rounds"] = {
        **fedavg(40),
        "run.versions": T,
        "simulation.evaluate_every": T // 40,
        "solver.lr": rounds,
    }
    return tuple(Cell(label, sets) for label, sets in cells.items())


EXPERIMENTS = tuple(
    Experiment(
        name=name,
        title=f"FedAsync's figures with LR/MNIST in place of CNN/CIFAR-10, {split}",
        source="FedAsync, figures 2 to 10 (2019), figures 2 and 4 (workshop)",
        base={**_BASE, **partition},
        cells=_cells(grid, rounds),
        repeats=10,
        compare="last",
        points=41,
    )
    for name, split, partition, grid, rounds in (
        (
            "fedasync-mnist",
            "two classes on each device",
            {"task.partition.kind": "classes", "task.partition.p": 2},
            (0.003, *_GRID),
            0.01,
        ),
        (
            "fedasync-mnist-iid",
            "similar data",
            {"task.partition.kind": "iid"},
            (*_GRID, 0.3),
            0.1,
        ),
    )
)
