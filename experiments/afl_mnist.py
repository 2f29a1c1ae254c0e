"""AFL on MNIST with logistic regression: tables 2 and 3, figures 1, 2 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from experiments.afl import ASYNC, SYNC, constant, dynamic
from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    Panel,
    Picture,
    Results,
    Series,
    above,
    mean,
    mean_of,
    within,
)
from experiments.showing import mean_and_deviation

Line: TypeAlias = tuple[int, int, int, int]  # of a table: p, m, M, c
Value: TypeAlias = Callable[[str], float]  # of a cell

_LEVELS = (1, 2, 5, 10)  # p
_BASE: dict[str, object] = {
    "task.name": "mnist",
    "task.partition.kind": "classes",
    "run.versions": 150,
    "simulation.evaluate_every": 1,
}
_AFA: dict[str, object] = {"strategy.name": "afa-cd", "strategy.server_lr": 0.1}
_BIASED: dict[str, object] = {
    "participation": [
        {"devices": [0, 1], "rate": 0.19},
        {"devices": [2, 3, 4, 5, 6, 7], "rate": 0.1},
        {"devices": [8, 9], "rate": 0.01},
    ],
}


def _local(kind: str = "sgd") -> dict[str, object]:
    """The devices' solver."""
    return {
        "solver.kind": kind,
        "solver.lr": 0.1,
        "solver.batch_size": 64,
        "solver.sampling": "fresh",
    } | ({"solver.rho": 0.1} if kind == "proximal" else {})


def _split(p: int, devices: int = 10) -> dict[str, object]:
    return {"task.partition.p": p, "task.devices": devices}


_NOTES = (
    (
        "Decided where the paper is silent: pixels (x/255 - .1307)/.3081, x_0 = 0, a minibatch "
        "drawn anew each step, server_lr = eta eta_L = .1, every class held by exactly M p / 10 "
        "devices, 'asynchronous' = each device starts from one of the last five models."
    ),
    "Every repeat draws the partition, the arrivals and the minibatches anew.",
)


def _panels(label: Callable[[int, str], str], names: Sequence[str]) -> tuple[Panel, ...]:
    """A panel for every p; ``label`` gives the cell's label for p and a name."""
    return tuple(
        Panel(
            f"p = {p}",
            {name: label(p, name) for name in names},
            xlabel="round",
            ylabel="test accuracy",
            ylim=(0.3, 1.0),
        )
        for p in _LEVELS
    )


# table 2 and figure 2

_ROWS = tuple((p, 5, 10, 5) for p in _LEVELS) + tuple((p, 5, 10, 10) for p in _LEVELS)
_ROWS += tuple((p, 20, 100, 5) for p in _LEVELS)  # p, m, M, c
_COLUMNS = ("sync, constant", "sync, dynamic", "async, constant", "async, dynamic")
_TABLE_2 = (
    (0.8916, 0.8915, 0.8888, 0.8868),
    (0.8906, 0.8981, 0.8901, 0.8931),
    (0.9072, 0.9075, 0.9059, 0.9048),
    (0.9114, 0.9111, 0.9129, 0.9143),
    (0.8743, 0.8786, 0.8701, 0.8734),
    (0.8687, 0.8813, 0.8661, 0.8819),
    (0.9016, 0.9050, 0.9034, 0.9065),
    (0.9124, 0.9135, 0.9112, 0.9111),
    (0.8898, 0.8973, 0.8909, 0.8938),
    (0.8968, 0.9007, 0.8955, 0.9000),
    (0.9088, 0.9088, 0.9097, 0.9078),
    (0.9111, 0.9106, 0.9126, 0.9125),
)


def _label(p: int, m: int, devices: int, c: int, column: str) -> str:
    return f"p = {p}, {m}/{devices}, c = {c}: {column}"


def _table_2_sets(p: int, m: int, devices: int, c: int, column: str) -> dict[str, object]:
    synchrony = SYNC if column.startswith("sync") else ASYNC
    steps = constant(c) if column.endswith("constant") else dynamic(c)
    return _AFA | {"strategy.buffer_size": m} | _local() | _split(p, devices) | synchrony | steps


def _table_2_claims(results: Results) -> list[JudgedClaim]:
    def span(of: Value, row: Line) -> float:
        reached = [of(_label(*row, column)) for column in _COLUMNS]
        return max(reached) - min(reached)

    def widest(of: Value) -> str:
        p, m, devices, c = max(_ROWS, key=partial(span, of))
        return f"{span(of, (p, m, devices, c)):.4f} at p = {p}, {m}/{devices}, c = {c}"

    best, last = partial(results.mean, of="best"), partial(results.mean, of="last")
    each = partial(results.each, of="best"), partial(results.each, of="last")
    groups = [_ROWS[n : n + len(_LEVELS)] for n in range(0, len(_ROWS), len(_LEVELS))]
    pairs = [(_label(*g[0], column), _label(*g[-1], column)) for g in groups for column in _COLUMNS]

    def falling_with_p(of: Value) -> str:
        by = [of(high) - of(low) for low, high in pairs]
        return f"in {sum(x > 0 for x in by)} of {len(by)} pairs, by {min(by):.4f} to {max(by):.4f}"

    shaken = {p: _shaking(results, _label(p, 5, 10, 5, _COLUMNS[3])) for p in _LEVELS}
    calm = {p: _shaking(results, _label(p, 5, 10, 5, _COLUMNS[0])) for p in _LEVELS}
    ends = [
        (_label(p, 5, 10, 5, column), _label(p, 5, 10, 5, _COLUMNS[0]))
        for p in _LEVELS
        for column in _COLUMNS[1:]
    ]
    return [
        JudgedClaim(
            "Asynchrony and dynamic steps make no obvious difference to the accuracy (table 2; "
            "here: the four columns of every row within .02, the best of the run and the last).",
            [
                margin
                for of in each
                for row in _ROWS
                for margin in within((of(_label(*row, column)) for column in _COLUMNS), 0.02)
            ],
            f"The widest row: of the best {widest(best)}; of the last {widest(last)}.",
        ),
        JudgedClaim(
            "The accuracy falls as p does (table 2; here: from p = 10 to p = 1, in every column, "
            "the best of the run and the last).",
            [above(of(high), of(low)) for of in each for low, high in pairs],
            f"The best {falling_with_p(best)}; the last {falling_with_p(last)}.",
        ),
        JudgedClaim(
            "Asynchrony and dynamic steps make the curves zigzag, the more the smaller p is "
            "(figure 2; here: the mean change from one kept round, every sixth, to the next, in "
            "the last 50).",
            [above(shaken[p], calm[p]) for p in _LEVELS]
            + [above(shaken[a], shaken[b]) for a, b in pairwise(_LEVELS)],
            f"Asynchronous and dynamic: {_by_level(shaken)}; synchronous and constant: "
            f"{_by_level(calm)}.",
        ),
        JudgedClaim(
            "The final accuracies differ negligibly (figure 2; here: the last round within .02 of "
            "synchronous, constant).",
            [margin for pair in ends for margin in within(map(each[1], pair), 0.02)],
            f"They differ by up to {max(abs(last(a) - last(b)) for a, b in ends):.4f}.",
        ),
    ]


def _shaking(results: Results, cell: str) -> dict[int, float]:
    """Each repeat's mean |change| of accuracy between kept versions, in its last third."""
    return {
        n: mean(abs(b - a) for a, b in pairwise(accuracy[version >= version[-1] * 2 / 3]))
        for n, (version, accuracy) in results.measured(cell, "version", "accuracy").items()
    }


def _by_level(values: Mapping[int, Mapping[int, float]]) -> str:
    return ", ".join(f"{mean_of(value):.4f} at p = {p}" for p, value in values.items())


# table 3

_OPTIMIZERS = ("FedProx", "SCAFFOLD", "AFL + FedProx", "AFL + SCAFFOLD")
_TABLE_3 = (
    (0.8893, 0.8928, 0.8775, 0.8946),
    (0.8868, 0.8970, 0.8832, 0.8954),
    (0.9036, 0.9032, 0.9004, 0.9019),
    (0.9075, 0.9057, 0.9054, 0.9022),
    (0.8752, 0.8789, 0.8669, 0.8838),
    (0.8685, 0.8967, 0.8789, 0.8978),
    (0.9019, 0.9047, 0.8998, 0.9029),
    (0.9072, 0.9071, 0.9052, 0.9038),
)
_PLAIN = ("AFA-CD", "AFL + AFA-CD")
"""Our own extra columns, with plain steps: synchronous, constant and asynchronous, dynamic."""
_SCAFFOLD: dict[str, object] = {
    "strategy.name": "scaffold",
    "strategy.per_step": True,
    "strategy.server_lr": 0.1,
}
_MEAN: dict[str, object] = {"strategy.name": "scaffold", "strategy.server_lr": 1.0}
_ROWS_3 = tuple((p, 5, 10, c) for c in (5, 10) for p in _LEVELS)


def _table_3_sets(
    p: int, c: int, column: str, scaffold: dict[str, object] = _SCAFFOLD
) -> dict[str, object]:
    free = ASYNC | dynamic(c) if column.startswith("AFL") else SYNC | constant(c)
    if column.endswith("SCAFFOLD"):
        server, solver = scaffold, _local("scaffold")
    else:
        server, solver = _AFA, _local("proximal" if column.endswith("FedProx") else "sgd")
    return server | {"strategy.buffer_size": 5} | solver | _split(p) | free


def _table_3_cells() -> tuple[Cell, ...]:
    return tuple(
        Cell(_label(*row, column), _table_3_sets(row[0], row[3], column), paper)
        for row, numbers in zip(_ROWS_3, _TABLE_3, strict=True)
        for column, paper in zip((*_OPTIMIZERS, *_PLAIN), (*numbers, None, None), strict=True)
    )


def _no_worse(results: Results, claim: str, column: str, than: str) -> JudgedClaim:
    """Claim that a column is nowhere more than .02 below another, by best and by last accuracy."""

    def gains(of: Value) -> dict[Line, float]:
        return {row: of(_label(*row, column)) - of(_label(*row, than)) for row in _ROWS_3}

    def told(of: Value) -> str:
        by = gains(of)
        worst = min(by, key=by.__getitem__)
        return (
            f"{mean(by.values()):+.4f} in the mean, at worst {by[worst]:+.4f}, at p = {worst[0]}, "
            f"c = {worst[3]}"
        )

    best, last = partial(results.mean, of="best"), partial(results.mean, of="last")
    return JudgedClaim(
        f"{claim} (table 3; here: {column} in no row more than .02 below {than}, neither the best "
        "of the run nor the last).",
        [
            above(of(_label(*row, column)), of(_label(*row, than)), -0.02)
            for of in (partial(results.each, of="best"), partial(results.each, of="last"))
            for row in _ROWS_3
        ],
        f"The difference of the best is {told(best)}; of the last {told(last)}.",
    )


def _table_3_claims(results: Results) -> list[JudgedClaim]:
    return [
        _no_worse(results, "FedProx performs as well as FedAvg", "FedProx", "AFA-CD"),
        _no_worse(results, "FedProx loses nothing in AFL's framework", "AFL + FedProx", "FedProx"),
        _no_worse(results, "SCAFFOLD performs well for LR on MNIST", "SCAFFOLD", "AFA-CD"),
        _no_worse(results, "SCAFFOLD loses nothing under AFL", "AFL + SCAFFOLD", "SCAFFOLD"),
    ]


def _scaffold_cells() -> tuple[Cell, ...]:
    """Table 3's SCAFFOLD columns, with the server rule of SCAFFOLD's own paper."""
    return tuple(
        Cell(
            _label(*row, column),
            _table_3_sets(row[0], row[3], column, _MEAN),
            numbers[_OPTIMIZERS.index(column)],
        )
        for row, numbers in zip(_ROWS_3, _TABLE_3, strict=True)
        for column in ("SCAFFOLD", "AFL + SCAFFOLD")
    )


def _scaffold_claims(results: Results) -> list[JudgedClaim]:
    cells = _scaffold_cells()
    off = {c.label: abs(results.mean(c.label) - (c.paper or 0.0)) for c in cells}
    worst = max(off, key=lambda label: off[label])
    return [
        JudgedClaim(
            "Table 3's SCAFFOLD averages models, as SCAFFOLD's own paper does (a reading; here: "
            "every cell within .02).",
            [
                margin
                for cell in cells
                for found in [results.each(cell.label)]
                for margin in within((found, dict.fromkeys(found, cell.paper or 0.0)), 0.02)
            ],
            f"{sum(far > 0.02 for far in off.values())} of {len(off)} cells are further off, the "
            f"furthest by {off[worst]:.4f}: {worst}. afl-mnist-table3 has the reading with "
            "AFA-CD's step.",
        )
    ]


# figures 1 and 5

_CURVES: dict[str, dict[str, object]] = {
    "FedAvg": {"strategy.name": "fedavg", "strategy.clients_per_round": 5} | SYNC | constant(5),
    "AFA-CD, uniform": _AFA | ASYNC | dynamic(5),
    "AFA-CD, biased": _AFA | ASYNC | dynamic(5) | _BIASED,
    "AFA-CS, biased": _AFA | {"strategy.name": "afa-cs"} | ASYNC | dynamic(5) | _BIASED,
}


def _curve(p: int, name: str) -> str:
    return f"p = {p}: {name}"


def _arrivals_claims(results: Results) -> list[JudgedClaim]:
    def by_level(values: dict[int, Series]) -> str:
        return ", ".join(f"{mean_and_deviation(of)} at p = {p}" for p, of in values.items())

    late = {
        name: {p: results.late(_curve(p, name), "accuracy") for p in _LEVELS} for name in _CURVES
    }
    fedavg, uniform, cd, cs = late.values()
    reached = ". ".join(
        f"{name}: " + by_level({p: np.array([*found.values()]) for p, found in of.items()})
        for name, of in late.items()
    )
    lost = {p: above(uniform[p], cd[p]) for p in _LEVELS}
    behind = max(mean_of(uniform[p]) - mean_of(cs[p]) for p in _LEVELS)
    how = "mean of the last 50 rounds"
    return [
        JudgedClaim(
            "AFA-CD and AFA-CS with general arrivals are comparable to FedAvg (figure 1; here: "
            f"biased arrivals, {how}, at most .02 below FedAvg).",
            [above(of[p], fedavg[p], -0.02) for of in (cd, cs) for p in _LEVELS],
            f"{reached}.",
        ),
        JudgedClaim(
            f"Biased arrivals degrade AFA-CD at p = 1 (figure 5; here: {how}, by more than .02).",
            [lost[1] - 0.02],
            f"By {mean_and_deviation(lost[1])}.",
        ),
        JudgedClaim(
            f"At p = 2, 5, 10 they don't, significantly (figure 5; here: {how}, by at most .02).",
            [0.02 - lost[p] for p in _LEVELS[1:]],
            f"By {by_level({p: lost[p] for p in _LEVELS[1:]})}.",
        ),
        JudgedClaim(
            "AFA-CS, which reuses old gradients, performs well under biased arrivals (figure 5; "
            f"here: {how}, nowhere more than .02 below AFA-CD with uniform ones).",
            [above(cs[p], uniform[p], -0.02) for p in _LEVELS],
            f"It is up to {behind:.4f} below those.",
        ),
        JudgedClaim(
            f"AFA-CS is better than AFA-CD with the same biased arrivals at p = 1 ({how}).",
            [above(cs[1], cd[1])],
            f"At every p by {by_level({p: above(cs[p], cd[p]) for p in _LEVELS})}.",
        ),
    ]


EXPERIMENTS = (
    Experiment(
        name="afl-mnist-table2",
        title="AFL, table 2: LR/MNIST",
        source="Anarchic Federated Learning, table 2 (rows of LR/MNIST) and figure 2: AFA-CD, "
        "uniform arrivals",
        base=_BASE,
        cells=tuple(
            Cell(_label(*row, column), _table_2_sets(*row, column), paper)
            for row, numbers in zip(_ROWS, _TABLE_2, strict=True)
            for column, paper in zip(_COLUMNS, numbers, strict=True)
        ),
        tolerance=0.02,
        points=26,
        notes=_NOTES,
        pictures=(
            Picture(
                "figure2.png",
                "AFL, figure 2: LR/MNIST, 5 of 10 devices, c = 5",
                _panels(lambda p, column: _label(p, 5, 10, 5, column), _COLUMNS),
            ),
        ),
        claims=_table_2_claims,
    ),
    Experiment(
        name="afl-mnist-table3",
        title="AFL, table 3: LR/MNIST",
        source="Anarchic Federated Learning, table 3 (rows of LR/MNIST): FedProx (rho = .1) and "
        "SCAFFOLD, synchronous with constant steps, and in AFL asynchronous with dynamic steps",
        base=_BASE,
        cells=_table_3_cells(),
        tolerance=0.02,
        points=51,
        notes=(
            *_NOTES,
            (
                "SCAFFOLD's server takes AFA-CD's step, on mean gradients (x_tau - x_new) / "
                "(gamma H) with server_lr = .1; afl-mnist-scaffold has the other reading."
            ),
            "AFA-CD's columns are table 2's, to compare with; the paper's table 3 has none.",
        ),
        claims=_table_3_claims,
    ),
    Experiment(
        name="afl-mnist-scaffold",
        title="AFL, table 3: LR/MNIST, SCAFFOLD's server averaging models",
        source="Anarchic Federated Learning, table 3 (rows of LR/MNIST), the columns of SCAFFOLD "
        "read as its own paper has its server: x += mean(x_new - x_tau), server_lr = 1",
        base=_BASE,
        cells=_scaffold_cells(),
        tolerance=0.02,
        points=51,
        notes=_NOTES,
        claims=_scaffold_claims,
    ),
    Experiment(
        name="afl-mnist-arrivals",
        title="AFL, figures 1 and 5: LR/MNIST under uniform and biased arrivals",
        source="Anarchic Federated Learning, figures 1 and 5: 5 of 10 devices, c = 5; AFA-CD and "
        "AFA-CS asynchronous with dynamic steps, FedAvg synchronous with constant ones",
        base=_BASE,
        cells=tuple(
            Cell(_curve(p, name), _local() | _split(p) | sets)
            for p in _LEVELS
            for name, sets in _CURVES.items()
        ),
        points=151,
        notes=(
            *_NOTES,
            (
                "Biased: drawn without replacement with weights .19 .19 .1x6 .01 .01. The paper "
                "calls figure 1's arrivals 'general': biased here, as in figure 5."
            ),
            "FedAvg averages the models of 5 devices: it steps 5 times as far as server_lr = .1.",
        ),
        pictures=(
            Picture(
                "figure1.png",
                "AFL, figure 1: LR/MNIST, biased arrivals to AFA",
                _panels(_curve, ("FedAvg", "AFA-CD, biased", "AFA-CS, biased")),
            ),
            Picture(
                "figure5.png",
                "AFL, figure 5: LR/MNIST, asynchronous, dynamic steps",
                _panels(_curve, ("AFA-CD, uniform", "AFA-CD, biased", "AFA-CS, biased")),
            ),
        ),
        claims=_arrivals_claims,
    ),
)
