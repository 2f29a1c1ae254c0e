"""Every rule with an equal budget of tuning: our own measurement on MNIST, with two models.

100 devices, of which every fifth takes ten times as long, in virtual time. A task takes a second
on average and trains 5 steps of gamma .1, but where the rule's name gives another gamma. ``rounds``
is fedbuff in rounds of ten: FedAvg with a step size. Each run takes 2,000 updates, but
ringleader's: its versions take unequally many, so its runs take more or fewer, and what is measured
after 2,000 updates does not count. Only the step is tuned: R of ringmaster and ``tau_c`` of fadas
are the defaults, and so is ``max_age`` of aced, 50, but where it is named.

Two experiments with each model. ``rules-steps`` runs each rule with the :data:`LADDER` of six step
sizes, once, with seed 0. ``python -m experiments.rules`` then writes each rule's best step to
``steps.json``, by the mean accuracy over the last third of the run. ``rules`` runs only these
steps, with the seeds 1 to 5: no run that chose a step is among the reported ones.
``rules-cnn-steps`` and ``rules-cnn`` do the same with a small CNN.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.utils.data import TensorDataset

from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    PerRepeat,
    Picture,
    Results,
    Series,
    above,
    best_elsewhere,
    mean_of,
)
from experiments.running import Store
from experiments.showing import mean_and_deviation
from fedstream.trainer.images import mnist
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.task import TaskSettings

DEVICES = 100
SLOW = tuple(range(0, DEVICES, 5))
UPDATES = 2_000
K = 10  # updates in a batch or a round
H, GAMMA = 5, 0.1
FULL = GAMMA * H  # afa-cd's and afa-cs's step with which they move as far as a mean of models
ALPHA = "strategy.alpha"
LADDER = (1.0, 0.4, 0.16, 0.064, 0.0256, 0.01)  # times a rule's largest step


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, the key of its step size, and the largest step that is tried."""

    sets: KeyValues
    step: str
    top: float
    batch: int = 1  # updates in a version; in ringleader about so many, with 20 in flight
    in_rounds: bool = False

    def steps(self, scale: float) -> list[float]:
        """The steps that are tried: LADDER times the top, and times ``scale``, except of alpha."""
        top = self.top if self.step == ALPHA else self.top * scale
        return [top * part for part in LADDER]

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
    return Rule(sets, ALPHA, 1.0)


def _batch(name: str, top: float, **more: object) -> Rule:
    table = {"name": name, "buffer_size": K, **more}
    return Rule({f"strategy.{k}": v for k, v in table.items()}, "strategy.server_lr", top, K)


def _changed(rule: Rule, more: KeyValues) -> Rule:
    return replace(rule, sets={**rule.sets, **more})


_SCAFFOLD: KeyValues = {"solver.kind": "scaffold"}
_ACED = Rule({"strategy.name": "aced"}, "strategy.server_lr", 0.3 * FULL)
ADAPTIVE = "fedasync, adaptive"
RULES: dict[str, Rule] = {
    "rounds": replace(_batch("fedbuff", 3.75), in_rounds=True),
    "rounds, gamma .02": _changed(
        replace(_batch("fedbuff", 18.75), in_rounds=True), {"solver.lr": 0.02}
    ),
    "fedasync, constant": _mixing(**{"staleness.kind": "constant"}),
    "fedasync, polynomial": _mixing(**{"staleness.kind": "polynomial"}),
    "fedasync, hinge": _mixing(**{"staleness.kind": "hinge"}),
    "fedasync, inverse sqrt": _mixing(
        **{"staleness.kind": "constant", "alpha_schedule.kind": "inverse_sqrt"}
    ),
    ADAPTIVE: _mixing(**{"staleness.kind": "polynomial", "adapt.every": 50}),
    "ringmaster": Rule({"strategy.name": "ringmaster"}, "strategy.server_lr", 1.0),
    "ringleader": Rule({"strategy.name": "ringleader"}, "strategy.server_lr", 0.15, 7),
    "fedbuff": _batch("fedbuff", 1.5),
    "fedbuff, gamma .02": _changed(_batch("fedbuff", 7.5), {"solver.lr": 0.02}),
    "fedbuff, momentum": _batch("fedbuff", 0.2, **{"server.kind": "momentum"}),
    "fedbuff, nesterov": _batch("fedbuff", 0.2, **{"server.kind": "nesterov"}),
    "fedbuff, adagrad": _batch("fedbuff", 0.3, **{"server.kind": "adagrad"}),
    "fedbuff, adam": _batch("fedbuff", 0.016, **{"server.kind": "adam"}),
    "fedbuff, yogi": _batch("fedbuff", 0.016, **{"server.kind": "yogi"}),
    "fedbuff, amsgrad": _batch("fedbuff", 0.016, **{"server.kind": "amsgrad"}),
    "fadas, paper": _batch("fadas", 0.016, delay_adaptive="paper"),
    "fadas, code": _batch("fadas", 0.1, delay_adaptive="code"),
    "afa-cd": _batch("afa-cd", 1.5 * FULL),
    "afa-cs": _batch("afa-cs", 1.5 * FULL),
    "ca2fl": _batch("ca2fl", 1.5),
    "aced": _ACED,
    "aced, max_age 200": _changed(_ACED, {"strategy.max_age": 200}),
    "scaffold": _changed(_batch("scaffold", 3.75), _SCAFFOLD),
    "scaffold, gamma .02": _changed(_batch("scaffold", 18.75), {**_SCAFFOLD, "solver.lr": 0.02}),
}
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
PARTITIONS: dict[str, KeyValues] = {
    "iid": {"kind": "iid"},
    "Dirichlet .1": {"kind": "dirichlet", "alpha": 0.1},
    "one class each": {"kind": "classes", "p": 1},
}
RESULTS = Path(__file__).parent / "results"
CHOSEN = "steps.json"
_FAMILIES = {
    "every update a version": ("fedasync", "ringmaster", "aced"),
    "batches": ("rounds", "fedbuff", "fadas"),
    "vectors of devices": ("afa", "ca2fl", "scaffold", "ringleader"),
}


@dataclass(frozen=True, slots=True)
class Study:
    """The rules on a task, in each combination of data and tasks in flight."""

    name: str
    of: str  # the model, for titles
    base: KeyValues
    in_flight: Sequence[int]
    model: Literal["linear", "cnn"]
    data: Mapping[str, KeyValues]  # by partition
    apart: str  # the note on the training images that devices lack
    scale: float = 1.0  # of the steps in RULES, except of alpha

    @property
    def situations(self) -> dict[str, tuple[str, int]]:
        """The partition and the tasks in flight, by name."""
        return {
            f"{name}, {n} in flight": (name, n) for name, n in product(self.data, self.in_flight)
        }

    @property
    def folder(self) -> Path:
        """Where the runs that choose the steps are."""
        return RESULTS / f"{self.name}-steps"

    def cell(self, situation: str, rule: str, step: float, label: str) -> Cell:
        """A run."""
        partition, in_flight = self.situations[situation]
        data = _held_out(partition, self.model) if rule == ADAPTIVE else self.data[partition]
        return Cell(label, {**RULES[rule].keys(step, in_flight), **data})

    def tried(self) -> tuple[Cell, ...]:
        """The runs that choose the steps."""
        return tuple(
            self.cell(situation, rule, step, _label(situation, rule, step))
            for situation in self.situations
            for rule in RULES
            for step in RULES[rule].steps(self.scale)
        )

    def reported(self) -> tuple[Cell, ...]:
        """The runs with the chosen steps; empty before these are chosen."""
        path = self.folder / CHOSEN
        steps: Mapping[str, float] = json.loads(path.read_text()) if path.is_file() else {}
        return tuple(
            self.cell(situation, rule, steps[label], label)
            for situation, rule in product(self.situations, RULES)
            if (label := _label(situation, rule)) in steps
        )

    def best(self) -> dict[str, float]:
        """The best step of each rule whose steps have all run, by the label of its cell."""
        results, found = Store(self.folder).results(), {}
        for situation, rule in product(self.situations, RULES):
            steps = RULES[rule].steps(self.scale)
            late = {step: _late(results, situation, rule, step) for step in steps}
            if all(late.values()):
                found[_label(situation, rule)] = max(late, key=lambda step: mean_of(late[step]))
        return found

    def choose(self) -> str:
        """Write the best steps; say how many these are."""
        if found := self.best():
            (self.folder / CHOSEN).write_text(json.dumps(found, indent=1) + "\n")
        return f"{self.name}: {len(found)} of {len(self.situations) * len(RULES)} steps chosen"

    def claims(self, results: Results) -> list[JudgedClaim]:
        """In each situation: is any rule better than rounds, and the rules in order."""
        found = []
        for situation in self.situations:
            found += self._against_rounds(results, situation)
            if self.model == "linear" and situation == "one class each, 80 in flight":
                found += _aced(results, situation)
        return found

    def _against_rounds(self, results: Results, situation: str) -> list[JudgedClaim]:
        late = {one: _late(results, situation, one) for one in RULES}
        order = sorted(late, key=lambda one: -mean_of(late[one]))
        listed = (f"{one} {mean_and_deviation([*late[one].values()])}" for one in order)
        rounds = [one for one in RULES if RULES[one].in_rounds]
        others = [one for one in RULES if one not in rounds]
        until = min(_lasted(results, situation, one) for one in others)
        by_then = {
            one: results.at(_label(situation, one), "time", until, "accuracy", after=one in rounds)
            for one in RULES
        }
        fast = max(others, key=lambda one: mean_of(by_then[one]))
        told = (f"{one} {mean_and_deviation([*by_then[one].values()])}" for one in (fast, *rounds))

        def ahead(of: Mapping[str, PerRepeat]) -> Series:
            return above(
                best_elsewhere(of[one] for one in others), best_elsewhere(of[one] for one in rounds)
            )

        return [
            JudgedClaim(
                f"{situation}: the best asynchronous rule is better than rounds after as many "
                "updates.",
                [ahead(late)],
                f"{', '.join(listed)}.",
            ),
            JudgedClaim(
                f"{situation}: the best asynchronous rule is better than rounds in the same time.",
                [ahead(by_then)],
                f"After {until:.0f} virtual seconds, when the first run ends, and of rounds at "
                f"their first measurement after that: {', '.join(told)}.",
            ),
        ]

    def panels(self) -> tuple[Panel, ...]:
        """For each situation, the curves of each family of rules."""
        return tuple(
            Panel(
                f"{situation}:\n{family}",
                {rule: _label(situation, rule) for rule in RULES if rule.startswith(names)},
                x="updates",
                xlabel="updates",
                ylabel="test accuracy",
                xlim=(0.0, UPDATES),
                ylim=(0.5, 1.0),
            )
            for situation in self.situations
            for family, names in _FAMILIES.items()
        )

    def experiments(self) -> tuple[Experiment, Experiment]:
        """The runs that choose the steps, and those that are reported."""
        return (
            Experiment(
                name=f"{self.name}-steps",
                title=f"The step size of every rule, {self.of}",
                source="this project's own; experiments/rules.py",
                base=self.base,
                cells=self.tried(),
                repeats=1,
                compare="last",
                points=40,
            ),
            Experiment(
                name=self.name,
                title=f"Every rule with the best of {len(LADDER)} steps, {self.of}",
                source="this project's own; docs/algorithms.md",
                base=self.base,
                cells=self.reported(),
                first=1,
                compare="last",
                points=40,
                pictures=(
                    Picture(
                        "rules.png",
                        f"{DEVICES} devices, stragglers, {self.of}: accuracy by updates",
                        self.panels(),
                        columns=len(_FAMILIES),
                    ),
                ),
                claims=self.claims,
                answers=UPDATES,
                grid={rule: {one: _label(one, rule) for one in self.situations} for rule in RULES},
                notes=(
                    f"Seeds 1 to 5; the steps were chosen by seed 0 ({self.name}-steps).",
                    f"Only the steps were tuned: K is {K}, and all other keys are the defaults.",
                    (
                        f"Claims and pictures end at {UPDATES:,} updates. Ringleader's versions "
                        "take unequally many, so its runs can be longer, and its 'best' and 'last' "
                        "below cost more updates, or shorter."
                    ),
                    (
                        "Rounds have ten devices at work, however many are in flight elsewhere. "
                        "Claims compare with the better of their two rows."
                    ),
                    "Tasks that ringmaster cancels are not counted as updates.",
                    "Runs fail if too many updates in a row are refused, here as not finite.",
                    "All devices take as many steps, so afa-cd is fedbuff.",
                    self.apart,
                    (
                        "In the claims, accuracy is the mean over the last third of the "
                        "measurements; in each repeat, the best rule is that of the other repeats."
                    ),
                ),
                before=f"its steps are chosen by `python -m experiments {self.name}-steps`, then "
                "`python -m experiments.rules`",
            ),
        )


def _label(situation: str, rule: str, step: float | None = None) -> str:
    return f"{situation}: {rule}" + (f", step {step:.4g}" if step is not None else "")


def _aced(results: Results, situation: str) -> list[JudgedClaim]:
    """Does ACED withstand the staleness that AFA-CS, with an untuned step, did not?"""
    late = {one: _late(results, situation, one) for one in RULES if one.startswith("aced")}
    cached = _late(results, situation, "afa-cs")
    told = (f"{one} {mean_and_deviation([*of.values()])}" for one, of in late.items())
    return [
        JudgedClaim(
            f"{situation}: aced reaches .85.",
            [above(of, dict.fromkeys(of, 0.85)) for of in late.values()],
            f"{', '.join(told)}.",
        ),
        JudgedClaim(
            f"{situation}: afa-cs falls to .72 (here: below .75).",
            [above(dict.fromkeys(cached, 0.75), cached)],
            f"afa-cs {mean_and_deviation([*cached.values()])}.",
        ),
    ]


def _late(
    results: Results, situation: str, rule: str, step: float | None = None
) -> dict[int, float]:
    return results.late(_label(situation, rule, step), "accuracy", UPDATES)


def _lasted(results: Results, situation: str, rule: str) -> float:
    """Virtual seconds of the rule's shortest run that did not fail."""
    label = _label(situation, rule)
    runs = results.measured(label, "time", "accuracy")
    whole = (runs[row.repeat] for row in results.of(label) if row.state == "finished")
    return min((float(times[-1]) for times, _ in whole), default=math.inf)


class HeldOut(InMemory):
    """A task whose devices lack every 60th item of their shares. Those items score models."""

    def __init__(
        self, model: Callable[[], nn.Module], shares: Iterable[TensorDataset], test: TensorDataset
    ) -> None:
        kept, apart = [], []
        for share in shares:
            values = share.tensors
            scores = torch.arange(len(values[0])) % 60 == 59
            kept.append(TensorDataset(*(of[~scores] for of in values)))
            apart.append([of[scores] for of in values])
        super().__init__(model, kept, test)
        self._apart = TensorDataset(*map(torch.cat, zip(*apart, strict=True)))

    def validation_data(self) -> TensorDataset:
        """The items that no device has."""
        return self._apart


def held_out(partition: str, model: Literal["linear", "cnn"]) -> HeldOut:
    """MNIST with held-out training images. The partition is the same in every repeat.

    ``model``: "linear", or "cnn", a CNN of 5,994 parameters.
    """
    keys = {"name": "mnist", "devices": DEVICES, "partition": PARTITIONS[partition]}
    task = mnist(TaskSettings.model_validate(keys))

    def cnn() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 28, 28)),
            *(nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(256, 10)),
        )

    shares = map(task.device_data, range(DEVICES))
    return HeldOut(cnn if model == "cnn" else task.model, shares, task.test_data())


def _held_out(partition: str, model: str) -> KeyValues:
    return {
        "task.name": "experiments.rules:held_out",
        "task.args.partition": partition,
        "task.args.model": model,
    }


_BASE: KeyValues = {
    **BASE,
    "devices.slow_devices": SLOW,
    "devices.slow_factor": 10.0,
    "simulation.threads": 1,
}
STUDIES = (
    Study(
        "rules",
        "logistic regression on MNIST",
        _BASE,
        in_flight=(20, 80),
        model="linear",
        data={
            name: {f"task.partition.{key}": value for key, value in sets.items()}
            for name, sets in PARTITIONS.items()
        },
        apart="'fedasync, adaptive' scores its alphas on training images, every 60th, that its "
        "devices lack; its partition is the same in every repeat.",
    ),
    Study(
        "rules-cnn",
        "a small CNN on MNIST",
        {key: value for key, value in _BASE.items() if not key.startswith("task.")},
        in_flight=(20, 80),
        model="cnn",
        data={name: _held_out(name, "cnn") for name in PARTITIONS if name != "iid"},
        apart="All rules train without every 60th training image, on which 'fedasync, adaptive' "
        "scores its alphas; the partition is the same in every repeat.",
        scale=2.5,
    ),
)
EXPERIMENTS = tuple(one for study in STUDIES for one in study.experiments())

if __name__ == "__main__":
    for study in STUDIES:
        sys.stdout.write(f"{study.choose()}\n")
