"""What each rule withstands: 20 of 100 devices attack, with logistic regression on MNIST.

20 tasks in flight, as in :mod:`experiments.rules` but with devices of equal speed. Each attack of
:mod:`experiments.attackers`, against fedbuff and the rules that resist attackers. What is measured
after 1,000 updates have arrived does not count: basgd's and aflguard's runs are longer, as basgd's
versions wait for all buckets, and aflguard refuses updates.
The pipeline's own limit of norms is off (``updater.norm_factor`` is 0), so the rules stand alone.
"""

from __future__ import annotations

from itertools import product

from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    Picture,
    Results,
    above,
    best_elsewhere,
)
from experiments.rules import BASE, DEVICES, K
from experiments.showing import mean_and_deviation

UPDATES, IN_FLIGHT = 1_000, 20
STEP = 0.33  # times the mean of the models
CLIP = 0.3
BUCKETS = 50  # above twice the attackers: no fewer resist them
ATTACKS = ("none", "labels", "flip", "scaled", "alie")
COLLAPSED, NEAR = 0.1, 0.02
PARTITIONS: dict[str, KeyValues] = {
    "iid": {"kind": "iid"},
    "Dirichlet .1": {"kind": "dirichlet", "alpha": 0.1},
}
PLAIN = "fedbuff"
_ROOT: KeyValues = {"participation": [{"devices": [0], "rate": 10.0}]}


def _fedbuff(**more: object) -> KeyValues:
    return _of("fedbuff", UPDATES // K, buffer_size=K, **more)


def _of(name: str, versions: int, **more: object) -> KeyValues:
    table = {"name": name, "server_lr": STEP, **more}
    return {
        **{f"strategy.{key}": value for key, value in table.items()},
        "run.versions": versions,
        "simulation.evaluate_every": max(1, versions // 20),
    }


RULES: dict[str, KeyValues] = {
    PLAIN: _fedbuff(),
    "median": _fedbuff(aggregate="median"),
    "geometric median": _fedbuff(aggregate="geometric median"),
    "clipped": _fedbuff(clip=CLIP),
    "clipped geometric median": _fedbuff(clip=CLIP, aggregate="geometric median"),
    "basgd": _of("basgd", UPDATES // BUCKETS, buckets=BUCKETS),
    "aflguard": {**_of("aflguard", UPDATES // K, buffer_size=K), **_ROOT},
}


def _label(partition: str, attack: str, rule: str) -> str:
    return f"{partition}, {attack}: {rule}"


def _cells() -> tuple[Cell, ...]:
    return tuple(
        Cell(
            _label(partition, attack, rule),
            {
                **RULES[rule],
                "task.args.attack": attack,
                "task.args.partition": PARTITIONS[partition],
            },
        )
        for partition, attack, rule in product(PARTITIONS, ATTACKS, RULES)
    )


def _late(results: Results, partition: str, attack: str, rule: str) -> dict[int, float]:
    return results.late(_label(partition, attack, rule), "accuracy", UPDATES)


def _claims(results: Results) -> list[JudgedClaim]:
    """Does an attack make fedbuff collapse? Is the best rule near fedbuff without attackers?"""
    found = []
    for partition, attack in product(PARTITIONS, ATTACKS[1:]):
        late = {rule: _late(results, partition, attack, rule) for rule in RULES}
        calm = _late(results, partition, "none", PLAIN)
        best = best_elsewhere(of for rule, of in late.items() if rule != PLAIN)
        each = (f"{rule} {mean_and_deviation([*of.values()])}" for rule, of in late.items())
        found += [
            JudgedClaim(
                f"{partition}, {attack}: fedbuff loses more than {COLLAPSED:g}.",
                [above(calm, late[PLAIN], COLLAPSED)],
                f"From {mean_and_deviation([*calm.values()])} to "
                f"{mean_and_deviation([*late[PLAIN].values()])}.",
            ),
            JudgedClaim(
                f"{partition}, {attack}: the best robust rule is less than {NEAR:g} below fedbuff "
                "without attackers.",
                [above(best, calm, -NEAR)],
                f"{', '.join(each)}.",
            ),
        ]
    return found


EXPERIMENTS = (
    Experiment(
        name="attacks",
        title="What each rule withstands",
        source="this project's own; docs/algorithms.md",
        base={
            **{key: value for key, value in BASE.items() if not key.startswith("task.")},
            "task.name": "experiments.attackers:attacked",
            "task.args.data": "mnist",
            "task.args.devices": DEVICES,
            "task.args.share": 0.2,
            "scheduler.policy.kind": "in_flight",
            "scheduler.policy.n": IN_FLIGHT,
            "simulation.threads": 1,
        },
        cells=_cells(),
        compare="last",
        points=20,
        pictures=(
            Picture(
                "attacks.png",
                f"20 of {DEVICES} devices attack: accuracy by updates",
                tuple(
                    Panel(
                        f"{partition}: {attack}",
                        {rule: _label(partition, attack, rule) for rule in RULES},
                        x="communications",
                        xlabel="communications",
                        ylabel="test accuracy",
                        xlim=(0.0, 2.0 * UPDATES),
                        ylim=(0.0, 1.0),
                    )
                    for partition, attack in product(PARTITIONS, ATTACKS)
                ),
                columns=len(ATTACKS),
            ),
        ),
        claims=_claims,
        answers=UPDATES,
        grid={
            rule: {
                f"{partition}, {attack}": _label(partition, attack, rule)
                for partition, attack in product(PARTITIONS, ATTACKS)
            }
            for rule in RULES
        },
        notes=(
            "The attackers and the partition are the same in every repeat.",
            f"No rule is tuned: server_lr is {STEP:g} for all, and clip {CLIP:g}.",
            (
                "aflguard's root device has a share of the data like any other: with Dirichlet .1, "
                "half of its images are of one class, and three classes are missing. Its rate is "
                "ten times that of the others; as it is idle only between tasks, about 35 of 1,000 "
                "updates are its own."
            ),
            (
                f"Claims and pictures end when {UPDATES:,} updates have arrived, refused ones "
                f"included: {2 * UPDATES:,} communications, in which basgd makes four to six "
                "versions. The runs of basgd and aflguard are longer, so their 'best' and 'last' "
                "below cost more updates than the others'."
            ),
            (
                "In the claims, accuracy is the mean over the last third of the measurements; in "
                "each repeat, the best rule is that of the other repeats."
            ),
        ),
    ),
)
