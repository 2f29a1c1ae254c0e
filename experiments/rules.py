"""Every rule with an equal budget of tuning: our own measurement, logistic regression on MNIST.

100 devices, of which every fifth takes ten times as long, in virtual time. A task takes a second
on average and trains 5 steps of gamma .1. Each run takes 2,000 updates. ``rounds`` is fedbuff in
rounds of ten: FedAvg with a step size.

Two experiments. ``rules-steps`` runs each rule with the :data:`LADDER` of five step sizes, once,
with seed 0. ``python -m experiments.rules`` then writes each rule's best step to ``steps.json``, by
the mean accuracy over the last third of the run. ``rules`` runs only these steps, with the seeds 1
to 5: no run that chose a step is among the reported ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from experiments.choosing import BASE, DEVICES, GAMMA, SLOW, H, K
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
from experiments.running import Store
from experiments.showing import mean_and_deviation

UPDATES = 2_000
FULL = GAMMA * H  # afa-cd's and afa-cs's step with which they move as far as a mean of models
LADDER = (1.0, 0.4, 0.16, 0.064, 0.0256)  # times a rule's largest step
STEPS = Path(__file__).parent / "results" / "rules-steps"
CHOSEN = STEPS / "steps.json"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, the key of its step size, and the largest step that is tried."""

    sets: KeyValues
    step: str
    top: float
    batch: int = 1  # updates in a version
    in_rounds: bool = False

    def keys(self, step: float, in_flight: int) -> dict[str, object]:
        """The configuration for a step size and so many tasks in flight."""
        versions = UPDATES // self.batch
        policy = {"kind": "rounds", "k": K} if self.in_rounds else {"kind": "in_flight"}
        flying = {} if self.in_rounds else {"n": in_flight}
        return {
            **{f"scheduler.policy.{key}": value for key, value in (policy | flying).items()},
            "run.versions": versions,
            "simulation.evaluate_every": versions // 40,
            **self.sets,
            self.step: step,
        }


def _mixing(**more: object) -> Rule:
    sets = {"strategy.name": "fedasync", **{f"strategy.{k}": v for k, v in more.items()}}
    return Rule(sets, "strategy.alpha", 1.0)


def _batch(name: str, top: float, **more: object) -> Rule:
    table = {"name": name, "buffer_size": K, **more}
    return Rule({f"strategy.{k}": v for k, v in table.items()}, "strategy.server_lr", top, K)


ROUNDS = "rounds"
RULES: dict[str, Rule] = {
    ROUNDS: Rule(_batch("fedbuff", 0).sets, "strategy.server_lr", 1.5, K, in_rounds=True),
    "fedasync, constant": _mixing(**{"staleness.kind": "constant"}),
    "fedasync, polynomial": _mixing(**{"staleness.kind": "polynomial"}),
    "fedasync, hinge": _mixing(**{"staleness.kind": "hinge"}),
    "fedasync, inverse sqrt": _mixing(
        **{"staleness.kind": "constant", "alpha_schedule.kind": "inverse_sqrt"}
    ),
    "fedbuff": _batch("fedbuff", 1.5),
    "fedbuff, momentum": _batch("fedbuff", 0.5, **{"server.kind": "momentum"}),
    "fedbuff, nesterov": _batch("fedbuff", 0.5, **{"server.kind": "nesterov"}),
    "fedbuff, adagrad": _batch("fedbuff", 0.3, **{"server.kind": "adagrad"}),
    "fedbuff, adam": _batch("fedbuff", 0.1, **{"server.kind": "adam"}),
    "fedbuff, yogi": _batch("fedbuff", 0.1, **{"server.kind": "yogi"}),
    "afa-cd": _batch("afa-cd", 1.5 * FULL),
    "afa-cs": _batch("afa-cs", 1.5 * FULL),
    "scaffold": Rule(
        {**_batch("scaffold", 1.5).sets, "solver.kind": "scaffold"}, "strategy.server_lr", 1.5, K
    ),
}
DATA: dict[str, KeyValues] = {
    "Dirichlet .1": {"task.partition.kind": "dirichlet", "task.partition.alpha": 0.1},
    "one class each": {"task.partition.kind": "classes", "task.partition.p": 1},
}
IN_FLIGHT = (20, 80)
SITUATIONS = tuple(f"{data}, {n} in flight" for data, n in product(DATA, IN_FLIGHT))
_OF = dict(zip(SITUATIONS, product(DATA, IN_FLIGHT), strict=True))


def _label(situation: str, rule: str, step: float | None = None) -> str:
    return f"{situation}: {rule}" + (f", step {step:.4g}" if step is not None else "")


def _cell(label: str, situation: str, rule: str, step: float) -> Cell:
    data, in_flight = _OF[situation]
    return Cell(label, {**RULES[rule].keys(step, in_flight), **DATA[data]})


def _tried() -> tuple[Cell, ...]:
    return tuple(
        _cell(_label(situation, rule, step), situation, rule, step)
        for situation in SITUATIONS
        for rule in RULES
        for step in _steps(rule)
    )


def _steps(rule: str) -> list[float]:
    return [RULES[rule].top * part for part in LADDER]


def chosen(results: Results) -> dict[str, float]:
    """The best step of each rule in each situation, by label; only where all five have run."""
    found = {}
    for situation, rule in product(SITUATIONS, RULES):
        late = {
            step: results.late(_label(situation, rule, step), "accuracy") for step in _steps(rule)
        }
        if all(late.values()):
            found[_label(situation, rule)] = max(late, key=lambda step: mean_of(late[step]))
    return found


def _reported() -> tuple[Cell, ...]:
    steps: Mapping[str, float] = json.loads(CHOSEN.read_text()) if CHOSEN.is_file() else {}
    return tuple(
        _cell(_label(situation, rule), situation, rule, steps[_label(situation, rule)])
        for situation in SITUATIONS
        for rule in RULES
        if _label(situation, rule) in steps
    )


def _order(results: Results, situation: str) -> list[tuple[str, dict[int, float]]]:
    """The rules that have run, by their mean accuracy late in the run, best first."""
    found = {
        rule: results.late(_label(situation, rule), "accuracy")
        for rule in RULES
        if results.of(_label(situation, rule))
    }
    return sorted(found.items(), key=lambda one: -mean_of(one[1]))


def _claims(results: Results) -> list[JudgedClaim]:
    """In each situation: is any rule better than rounds after as many updates? The rules' order."""
    found = []
    for situation in SITUATIONS:
        order = _order(results, situation)
        rounds = dict(order).get(ROUNDS, {})
        [best, *_] = [one for one in order if one[0] != ROUNDS] or [("", {})]
        listed = ", ".join(f"{rule} {mean_and_deviation([*late.values()])}" for rule, late in order)
        found.append(
            JudgedClaim(
                f"{situation}: the best asynchronous rule is better than rounds after as many "
                "updates.",
                [above(best[1], rounds)],
                f"{listed}.",
            )
        )
    return found


_FAMILIES = {
    "every update a version": ("fedasync",),
    "batches": (ROUNDS, "fedbuff", "afa", "scaffold"),
}


def _panels() -> tuple[Panel, ...]:
    return tuple(
        Panel(
            f"{situation}: {family}",
            {rule: _label(situation, rule) for rule in RULES if rule.startswith(names)},
            x="updates",
            xlabel="updates",
            ylabel="test accuracy",
            ylim=(0.0, 0.95),
        )
        for situation in SITUATIONS
        for family, names in _FAMILIES.items()
    )


_TASK: KeyValues = {
    **BASE,
    "devices.slow_devices": SLOW,
    "devices.slow_factor": 10.0,
    "simulation.threads": 1,
}
EXPERIMENTS = (
    Experiment(
        name="rules-steps",
        title="The step size of every rule",
        source="this project's own; experiments/rules.py",
        base=_TASK,
        cells=_tried(),
        repeats=1,
        compare="last",
        points=40,
    ),
    Experiment(
        name="rules",
        title=f"Every rule, each with the best of {len(LADDER)} steps",
        source="this project's own; docs/algorithms.md",
        base=_TASK,
        cells=_reported(),
        first=1,
        compare="last",
        points=40,
        pictures=(
            Picture(
                "rules.png",
                f"{DEVICES} devices, stragglers: accuracy by updates",
                _panels(),
                columns=len(_FAMILIES),
            ),
        ),
        claims=_claims,
        notes=("Seeds 1 to 5; the steps were chosen by seed 0 (rules-steps).",),
    ),
)

if __name__ == "__main__":
    found = chosen(Store(STEPS).results())
    CHOSEN.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(f"{len(found)} of {len(SITUATIONS) * len(RULES)} steps: {CHOSEN}\n")
