"""Which rule for which situation: our own measurement, with logistic regression on MNIST.

100 devices, virtual time. A task takes a second on average; stragglers, every fifth device, take
ten times as long. 20 tasks are in flight, so FedAsync's updates are 19 versions stale on average;
rounds wait for the slowest of ten. Each rule runs with a full step (alpha .6, or the mean of the
devices' models) and with a third of it; the claims use the better one, and the better rule, as
chosen by the same repeats. Two more experiments vary
the staleness, through the tasks in flight, and the number of devices, and compare the rules after
equally many updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    PerRepeat,
    Picture,
    Results,
    SweepPanel,
    above,
    mean_of,
)
from experiments.showing import mean_and_deviation

DEVICES = 100
UPDATES = 2_000
K = 10
IN_FLIGHT = 20
H, GAMMA = 5, 0.1
SECONDS = UPDATES / IN_FLIGHT  # for UPDATES, if every device takes a second
SLOW = tuple(range(0, DEVICES, 5))
FULL, THIRD = "full step", "a third"
ROUNDS_OF_K = "fedavg, rounds"

BASE: KeyValues = {
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
FLYING: KeyValues = {"scheduler.policy.kind": "in_flight", "scheduler.policy.n": IN_FLIGHT}
ROUNDS: KeyValues = {"scheduler.policy.kind": "rounds", "scheduler.policy.k": K}

EVERY_ARRIVAL: KeyValues = {"run.versions": UPDATES, "simulation.evaluate_every": 50}
EVERY_K: KeyValues = {"run.versions": UPDATES // K, "simulation.evaluate_every": 5}


def _batch(name: str, server_lr: float, **more: object) -> KeyValues:
    rule = {"name": name, "buffer_size": K, "server_lr": server_lr, **more}
    return {**FLYING, **EVERY_K, **{f"strategy.{key}": value for key, value in rule.items()}}


def _mixing(staleness: str, alpha: float) -> KeyValues:
    return {
        **FLYING,
        **EVERY_ARRIVAL,
        "strategy.name": "fedasync",
        "strategy.alpha": alpha,
        "strategy.staleness.kind": staleness,
    }


def _rules(part: float) -> dict[str, KeyValues]:
    """Every asynchronous rule, with its full step multiplied by ``part``."""
    return {
        "fedasync, constant": _mixing("constant", 0.6 * part),
        "fedasync, polynomial": _mixing("polynomial", 0.6 * part),
        "fedasync, hinge": _mixing("hinge", 0.6 * part),
        "fedbuff": _batch("fedbuff", part),
        "afa-cd": _batch("afa-cd", part * GAMMA * H),
        "afa-cs": _batch("afa-cs", part * GAMMA * H),
        "scaffold": {**_batch("scaffold", part), "solver.kind": "scaffold"},
    }


FEDAVG: KeyValues = {
    **EVERY_K,
    **ROUNDS,
    "strategy.name": "fedavg",
    "strategy.clients_per_round": K,
}
RULES: dict[str, dict[str, KeyValues]] = {
    ROUNDS_OF_K: {FULL: FEDAVG},
    **{
        name: {FULL: full, THIRD: third}
        for (name, full), third in zip(_rules(1.0).items(), _rules(1 / 3).values(), strict=True)
    },
}
SITUATIONS: dict[str, KeyValues] = {
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


STALENESS: dict[int, KeyValues] = {
    n: {"task.partition.kind": "classes", "task.partition.p": 1, "scheduler.policy.n": n}
    for n in (1, 5, 20, 80)
}
NUMBERS: dict[int, KeyValues] = {
    devices: {
        "task.partition.kind": "classes",
        "task.partition.p": 1,
        "task.devices": devices,
        "scheduler.policy.n": devices // 2 if devices < 2 * IN_FLIGHT else IN_FLIGHT,
    }
    for devices in (10, 100, 1000)
}


def _label(situation: str, rule: str, step: str) -> str:
    return f"{situation}: {rule}, {step}"


def _cells(situations: Mapping[str, KeyValues]) -> tuple[Cell, ...]:
    """Every rule and step in every situation, whose keys win; rounds ignore the tasks in flight."""
    cells = []
    for situation, where in situations.items():
        for rule, steps in RULES.items():
            for step, sets in steps.items():
                keys = {**sets, **where}
                if sets["scheduler.policy.kind"] == "rounds":
                    keys.pop("scheduler.policy.n", None)
                cells.append(Cell(_label(situation, rule, step), keys))
    return tuple(cells)


class RuleReached(NamedTuple):
    """The accuracy of a rule with the better of its steps."""

    mean: float
    step: str
    rule: str
    accuracy: PerRepeat


def _order(results: Results, situation: str, x: str, at: float) -> list[RuleReached]:
    """The rules by their accuracy where x is ``at``, best first."""
    found = []
    for rule, steps in RULES.items():
        each = {
            step: results.at(_label(situation, rule, step), x, at, "accuracy") for step in steps
        }
        step = max(each, key=lambda step: mean_of(each[step]))
        found.append(RuleReached(mean_of(each[step]), step, rule, each[step]))
    return sorted(found, key=lambda one: -one.mean)


def _claims(
    labels: Iterable[str], x: str, at: float, when: str
) -> Callable[[Results], list[JudgedClaim]]:
    """For every situation, the best asynchronous rule against rounds, and the rules in order."""

    def claims(results: Results) -> list[JudgedClaim]:
        found = []
        for situation in labels:
            order = _order(results, situation, x, at)
            rounds = next(one for one in order if one.rule == ROUNDS_OF_K)
            best = next(one for one in order if one.rule != ROUNDS_OF_K)
            found.append(
                JudgedClaim(
                    f"{situation}: some asynchronous rule is better than rounds after {when}.",
                    [above(best.accuracy, rounds.accuracy)],
                    ", ".join(
                        f"{one.rule} {mean_and_deviation([*one.accuracy.values()])} ({one.step})"
                        for one in order
                    )
                    + ".",
                )
            )
        return found

    return claims


def _sweep(situations: Mapping[int, KeyValues], what: str, xlabel: str) -> tuple[SweepPanel, ...]:
    return tuple(
        SweepPanel(
            step,
            {
                rule: {n: _label(what.format(n), rule, step) for n in situations}
                for rule in RULES
                if step in RULES[rule]
            },
            xlabel=xlabel,
            ylabel=f"test accuracy after {UPDATES} updates",
            ylim=(0.0, 0.95),
        )
        for step in (FULL, THIRD)
    )


FLIGHT, MANY = "one class each, {} in flight", "one class each, {} devices"
_AFTER_UPDATES = ("updates", UPDATES, f"{UPDATES} updates")
EXPERIMENTS = (
    Experiment(
        name="choosing",
        title="Which rule for which situation",
        source="this project's own; docs/algorithms.md",
        base=BASE,
        cells=_cells(SITUATIONS),
        compare="last",
        pictures=(
            Picture(
                "choosing.png",
                f"Accuracy in virtual time: {DEVICES} devices, {IN_FLIGHT} tasks in flight",
                tuple(
                    Panel(
                        situation,
                        {
                            rule: _label(situation, rule, THIRD if THIRD in steps else FULL)
                            for rule, steps in RULES.items()
                        },
                        x="time",
                        xlabel="virtual seconds",
                        ylabel=f"test accuracy, {THIRD} (fedavg: {FULL})",
                        ylim=(0.0, 0.95),
                        xlim=(0.0, SECONDS),
                    )
                    for situation in SITUATIONS
                ),
            ),
        ),
        claims=_claims(SITUATIONS, "time", SECONDS, f"{SECONDS:.0f} s"),
    ),
    Experiment(
        name="choosing-staleness",
        title="Which rule for how much staleness",
        source="this project's own; docs/algorithms.md",
        base=BASE,
        cells=_cells({FLIGHT.format(n): where for n, where in STALENESS.items()}),
        compare="last",
        pictures=(
            Picture(
                "staleness.png",
                f"{DEVICES} devices of one class each: accuracy against tasks in flight",
                _sweep(STALENESS, FLIGHT, "tasks in flight"),
            ),
        ),
        claims=_claims([FLIGHT.format(n) for n in STALENESS], *_AFTER_UPDATES),
    ),
    Experiment(
        name="choosing-devices",
        title="Which rule for how many devices",
        source="this project's own; docs/algorithms.md",
        base=BASE,
        cells=_cells({MANY.format(n): where for n, where in NUMBERS.items()}),
        compare="last",
        pictures=(
            Picture(
                "devices.png",
                "Devices of one class each: accuracy against their number",
                _sweep(NUMBERS, MANY, "devices"),
            ),
        ),
        claims=_claims([MANY.format(n) for n in NUMBERS], *_AFTER_UPDATES),
    ),
)
