"""FedAsync's experiments: the settings that its figures share, whatever the task."""

from __future__ import annotations

from experiments.reproduction import KeyValues, Results, mean

T = 2000  # FedAsync's versions
K = 10  # FedAvg's devices per round: T / K rounds take as many gradients
ALPHA = 0.9


def rules(a: float, b: int) -> dict[str, KeyValues]:
    """The staleness functions, by name; ``a`` and ``b`` of hinge."""
    return {
        "Const": {"strategy.staleness.kind": "constant"},
        "Poly": {"strategy.staleness.kind": "polynomial", "strategy.staleness.a": 0.5},
        "Hinge": {
            "strategy.staleness.kind": "hinge",
            "strategy.staleness.a": a,
            "strategy.staleness.b": b,
        },
    }


HALVED: KeyValues = {
    "strategy.alpha_schedule.kind": "step",
    "strategy.alpha_schedule.at": round(0.4 * T),
    "strategy.alpha_schedule.factor": 0.5,
}


def fedasync(
    rule: KeyValues, most: int, rho: float, alpha: float = ALPHA, schedule: KeyValues = HALVED
) -> KeyValues:
    """FedAsync with a staleness function, staleness uniform on [0, most]."""
    return {
        "strategy.name": "fedasync",
        "strategy.alpha": alpha,
        **schedule,
        "solver.kind": "proximal",
        "solver.rho": rho,
        **rule,
        "simulation.staleness.kind": "uniform",
        "simulation.staleness.most": most,
    }


def sgd(task: str) -> KeyValues:
    """SGD: a single device with all data; ``task`` names a task of one device."""
    return {
        "task.name": task,
        "strategy.name": "fedasync",
        "strategy.alpha": 1.0,
        "strategy.staleness.kind": "constant",
        "simulation.staleness.kind": "none",
    }


def fedavg(measured: int) -> KeyValues:
    """FedAvg with as many gradients as FedAsync, measured ``measured`` times."""
    return {
        "strategy.name": "fedavg",
        "strategy.clients_per_round": K,
        "simulation.staleness.kind": "none",
        "run.versions": T // K,
        "simulation.evaluate_every": T // K // measured,
    }


def over_run(results: Results, cell: str, y: str) -> dict[int, float]:
    """Each repeat's mean of y over its measurements: all cells have them at equal gradients.

    The first, of the model that all start with, doesn't count. Raises TooShort.
    """
    found = results.measured(cell, "gradients", y)
    return {n: mean(values[1:]) for n, (_, values) in found.items()}
