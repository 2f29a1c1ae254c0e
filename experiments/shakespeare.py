"""Shakespeare, character by character: AFL's row of table 2, figure 4.

A round is 3,600 local steps of 10 ms, or 14 ms in float32: at full length a run takes three
core-hours in bfloat16, so the results are those of ``--scale 20``. An interrupted command continues
within a run.
"""

from __future__ import annotations

from experiments.afl import COLUMNS, PRECISION, column
from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    Picture,
    Results,
    above,
    falling,
    mean_of,
    within,
)

_BASE: KeyValues = {
    "task.name": "shakespeare",
    "run.versions": 300,
    "simulation.evaluate_every": 30,
    "simulation.threads": 1,
    "strategy.name": "afa-cd",
    "strategy.buffer_size": 72,
    "strategy.server_lr": 40.0,
    "solver.precision": "bf16",
    "solver.lr": 0.8,
    "solver.batch_size": 10,
    "solver.sampling": "fresh",
}
_PAPER = (0.4683, 0.4831, 0.4606, 0.4687)


def _label(arriving: str, steps: str) -> str:
    return f"{arriving}, {steps}"


def _claims(results: Results) -> list[JudgedClaim]:
    ends = {kind: results.each(_label(*kind), "last") for kind in COLUMNS}
    reached = [mean_of(of) for of in ends.values()]
    rounds = results.of(_label(*COLUMNS[0]))[0].versions
    said = ", ".join(f"{mean_of(of):.4f} ({_label(*kind)})" for kind, of in ends.items())
    shaken = {kind: falling(results, _label(*kind)) for kind in COLUMNS}
    calm = shaken[COLUMNS[0]]
    return [
        JudgedClaim(
            "Asynchrony and dynamic steps make no obvious difference to the accuracy (table 2; "
            "here: the four columns within .03 at full length).",
            within(ends.values(), 0.03) if results.scale == 1 else [],
            f"After {rounds} rounds they lie within {max(reached) - min(reached):.4f}: {said}.",
        ),
        JudgedClaim(
            "Asynchrony and dynamic steps make the accuracy go up and down (figure 4; here: the "
            "mean fall from one measurement to the next, against synchronous, constant).",
            [above(shaken[kind], calm) for kind in COLUMNS[1:]],
            "Mean fall: "
            + ", ".join(f"{mean_of(of):.4f} ({_label(*kind)})" for kind, of in shaken.items())
            + ".",
        ),
    ]


_NOTES = (
    (
        "server_lr = eta eta_L = 40, minibatches of 10 drawn anew, 'asynchronous' = one of "
        "the last five models. Which roles are devices, and which windows are tested, is in "
        "docs/tasks.md."
    ),
    (
        "A small part of 300 rounds shows how training begins; what is compared with the "
        "paper's number is the last round."
    ),
    PRECISION,
)

_LINES = {f"{a.removesuffix('hronous')}, {s}": _label(a, s) for a, s in COLUMNS}

EXPERIMENTS = (
    Experiment(
        name="afl-shakespeare",
        title="AFL on Shakespeare, table 2",
        source="AFL, table 2 and figure 4",
        base=_BASE,
        cells=tuple(
            Cell(_label(arriving, steps), column(arriving, steps, 50), paper=paper)
            for (arriving, steps), paper in zip(COLUMNS, _PAPER, strict=True)
        ),
        compare="last",
        pictures=(
            Picture(
                "fig4.png",
                "AFA-CD on Shakespeare, 72 of 143 roles",
                (
                    Panel(
                        "next character",
                        _LINES,
                        xlabel="rounds",
                        ylabel="test accuracy",
                    ),
                    Panel(
                        "its loss",
                        _LINES,
                        y="loss",
                        xlabel="rounds",
                        ylabel="test loss",
                    ),
                ),
            ),
        ),
        claims=_claims,
        notes=_NOTES,
    ),
)
