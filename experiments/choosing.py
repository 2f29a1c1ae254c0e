"""Which rule for which situation: the project's own measurement, on MNIST's logistic regression.

100 devices, virtual time. A task takes a second in the mean; with stragglers every fifth device
takes ten times as long. 20 tasks are in flight, so that FedAsync's updates are 19 versions late in
the mean; rounds wait for the slowest of ten. Each rule has a step that moves the model all the way
(alpha .6, or the mean of the devices' models) and one of a third of it; the better one is shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.reproduction import Cell, Claim, Experiment, Panel, Picture, Results, Sets

DEVICES = 100
UPDATES = 2_000
K = 10
IN_FLIGHT = 20
H, GAMMA = 5, 0.1
SECONDS = UPDATES / IN_FLIGHT  # that it takes where all devices take a second
SLOW = tuple(range(0, DEVICES, 5))
FULL, THIRD = "full step", "a third"

BASE: Sets = {
    "task.name": "mnist",
    "task.devices": DEVICES,
    "solver.lr": GAMMA,
    "solver.batch_size": 50,
    "solver.sampling": "fresh",
    "scheduler.steps.kind": "fixed",
    "scheduler.steps.n": H,
    "simulation.staleness.kind": "latency",
    "devices.latency.kind": "lognormal",
    "devices.latency.mean_s": 1.0,
    "devices.latency.sigma": 0.3,
}
FLYING: Sets = {"scheduler.policy.kind": "in_flight", "scheduler.policy.n": IN_FLIGHT}
ROUNDS: Sets = {"scheduler.policy.kind": "rounds", "scheduler.policy.k": K}

EVERY_ARRIVAL: Sets = {"run.versions": UPDATES, "simulation.evaluate_every": 50}
EVERY_K: Sets = {"run.versions": UPDATES // K, "simulation.evaluate_every": 5}


def _batch(name: str, server_lr: float, **more: object) -> Sets:
    rule = {"name": name, "buffer_size": K, "server_lr": server_lr, **more}
    return {**FLYING, **EVERY_K, **{f"strategy.{key}": value for key, value in rule.items()}}


def _mixing(staleness: str, alpha: float) -> Sets:
    return {
        **FLYING,
        **EVERY_ARRIVAL,
        "strategy.name": "fedasync",
        "strategy.alpha": alpha,
        "strategy.staleness.kind": staleness,
    }


def _rules(part: float) -> dict[str, Sets]:
    """Every rule whose step is such a part of a full one."""
    return {
        "fedasync, constant": _mixing("constant", 0.6 * part),
        "fedasync, polynomial": _mixing("polynomial", 0.6 * part),
        "fedasync, hinge": _mixing("hinge", 0.6 * part),
        "fedbuff": _batch("fedbuff", part),
        "afa-cd": _batch("afa-cd", part * GAMMA * H),
        "afa-cs": _batch("afa-cs", part * GAMMA * H),
        "scaffold": {**_batch("scaffold", part), "solver.kind": "scaffold"},
    }


FEDAVG: Sets = {
    **EVERY_K,
    **ROUNDS,
    "strategy.name": "fedavg",
    "strategy.clients_per_round": K,
}
RULES: dict[str, dict[str, Sets]] = {
    "fedavg, rounds": {FULL: FEDAVG},
    **{
        name: {FULL: full, THIRD: third}
        for (name, full), third in zip(_rules(1.0).items(), _rules(1 / 3).values(), strict=True)
    },
}
SITUATIONS: dict[str, Sets] = {
    "alike, equally fast": {"task.partition.kind": "iid"},
    "one class each, equally fast": {"task.partition.kind": "classes", "task.partition.p": 1},
    "alike, stragglers": {
        "task.partition.kind": "iid",
        "devices.slow_devices": SLOW,
        "devices.slow_factor": 10.0,
    },
    "one class each, stragglers": {
        "task.partition.kind": "classes",
        "task.partition.p": 1,
        "devices.slow_devices": SLOW,
        "devices.slow_factor": 10.0,
    },
}


def _label(situation: str, rule: str, step: str) -> str:
    return f"{situation}: {rule}, {step}"


def _cells() -> Iterator[Cell]:
    for situation, where in SITUATIONS.items():
        for rule, steps in RULES.items():
            for step, sets in steps.items():
                yield Cell(_label(situation, rule, step), {**where, **sets})


def _after(results: Results, situation: str, rule: str) -> tuple[float, str]:
    """Accuracy after SECONDS of virtual time with the better step, and which that is."""
    return max(
        (results.at(_label(situation, rule, step), "time", SECONDS, "accuracy"), step)
        for step in RULES[rule]
    )


def claims(results: Results) -> list[Claim]:
    """In every situation, the rules in the order of what they reached."""
    found = []
    for situation in SITUATIONS:
        reached = sorted(
            ((*_after(results, situation, rule), rule) for rule in RULES), reverse=True
        )
        order = ", ".join(f"{rule} {value:.3f} ({step})" for value, step, rule in reached)
        asynchronous = max(value for value, _, rule in reached if rule != "fedavg, rounds")
        fedavg, _ = _after(results, situation, "fedavg, rounds")
        found.append(
            Claim(
                f"{situation}: some asynchronous rule is better than rounds after {SECONDS:.0f} s.",
                asynchronous > fedavg,
                f"{order}.",
            )
        )
    return found


EXPERIMENTS = (
    Experiment(
        name="choosing",
        title="Which rule for which situation",
        source="this project's own; docs/algorithms.md",
        base=BASE,
        cells=tuple(_cells()),
        repeats=2,
        compare="last",
        pictures=(
            Picture(
                "choosing.png",
                f"Accuracy in virtual time: {DEVICES} devices, {IN_FLIGHT} tasks in flight",
                tuple(
                    Panel(
                        situation,
                        {rule: _label(situation, rule, FULL) for rule in RULES},
                        x="time",
                        xlabel="virtual seconds",
                        ylabel="test accuracy, full step",
                        ylim=(0.0, 0.95),
                    )
                    for situation in SITUATIONS
                ),
            ),
        ),
        claims=claims,
    ),
)
