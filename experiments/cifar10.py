"""CIFAR-10: FedAsync's figures 2 to 8 (2019), and AFL's row of table 2 for p = 1 and 10.

``fedasync-cifar10`` (at ``--scale 20``) and ``afl-cifar10`` (at ``--scale 500``) show how training
begins. ``-full`` and ``-1000`` are long enough to judge, and train in bfloat16 where that is
faster. On a core with AVX-512's bfloat16 a run of them takes about 40 min and 55 min (a step of
FedAsync's network 105 ms, of AFL's 115 ms), so all runs 50 and 37 core-hours; an interrupted
command continues within a run.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import TYPE_CHECKING

from torch.utils.data import TensorDataset

from experiments.afl import COLUMNS, column
from experiments.fedasync import ALPHA, T, fedasync, fedavg, over_run, rules, sgd
from experiments.reproduction import (
    LEAST_REPEATS,
    Cell,
    Experiment,
    JudgedClaim,
    KeyValues,
    Panel,
    PerRepeat,
    Picture,
    Results,
    Series,
    SweepPanel,
    above,
    falling,
    mean,
    mean_of,
    within,
)
from fedstream.trainer.images import cifar10_fedasync
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.task import TaskSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_TESTED = 2_000


def images() -> InMemory:
    """FedAsync's task, 100 devices of 500 images, with fewer test images."""
    return _with_fewer_tested(100)


def all_images() -> InMemory:
    """The same with all data on a single device, for SGD."""
    return _with_fewer_tested(1)


def _with_fewer_tested(devices: int) -> InMemory:
    task = cifar10_fedasync(TaskSettings(name="cifar10-fedasync", devices=devices))
    test = task.test_data()
    some = TensorDataset(*(tensor[:: len(test) // _TESTED] for tensor in test.tensors))
    return InMemory(task.model, [task.device_data(number) for number in range(devices)], some)


_BASE: KeyValues = {
    "task.name": "experiments.cifar10:images",
    "run.versions": T,
    "simulation.evaluate_every": T // 10,
    "simulation.threads": 1,
    "solver.lr": 0.1,
    "solver.batch_size": 50,
    "scheduler.steps.kind": "epochs",
    "scheduler.steps.n": 1,
}
_RHO = 0.005
_A, _B = 10.0, 4  # of hinge
_RULES = rules(_A, _B)
_SGD: KeyValues = {
    **sgd("experiments.cifar10:all_images"),
    "scheduler.steps.kind": "fixed",
    "scheduler.steps.n": 10,
}
_FEDAVG = fedavg(measured=10)
_PRECISION: KeyValues = {"solver.precision": "bf16"}
_FULL: KeyValues = {
    **_BASE,
    **_PRECISION,
    "task.name": "cifar10-fedasync",
    "simulation.evaluate_every": T // 20,
}


def _late(rule: str, most: int) -> str:
    """The cell of a rule at a maximum staleness: hinge is constant up to b, all rules are at 0."""
    same = most == 0 or (rule == "Hinge" and most <= _B)
    return f"{'Const' if same else rule}, {most}"


_SWEPT = ("Const", "Poly")  # over alpha, only at staleness 16
_ALPHAS = (0.3, 0.6, ALPHA)


def _swept(rule: str, alpha: float) -> str:
    """The cell of a rule with an alpha at maximum staleness 16."""
    return f"{rule}, 16" + (f", alpha {alpha:g}" if alpha != ALPHA else "")


_MOST = (0, 4, 8, 16)
_CELLS = (
    Cell("SGD", _SGD),
    Cell("FedAvg", _FEDAVG),
    *(
        Cell(f"{rule}, {most}", fedasync(_RULES[rule], most, _RHO))
        for most in _MOST
        for rule in _RULES
        if _late(rule, most) == f"{rule}, {most}"
    ),
    *(
        Cell(_swept(rule, alpha), fedasync(_RULES[rule], 16, _RHO, alpha))
        for rule in _SWEPT
        for alpha in _ALPHAS
        if alpha != ALPHA
    ),
)

_FIRST = ("SGD", "FedAvg", "Const, 4", "Const, 16", "Poly, 16", "Hinge, 16")  # the paper's lines
_OVER = {
    "SGD": {**_SGD, "task.name": "cifar10-fedasync", "task.devices": 1},
    "FedAvg": fedavg(measured=20),
}
_FULL_CELLS = tuple(
    replace(cell, sets=_OVER.get(cell.label, cell.sets))
    for cell in sorted(_CELLS, key=lambda cell: cell.label not in _FIRST)
)

_AFL_BASE: KeyValues = {
    "task.name": "cifar10-afl",
    "task.partition.kind": "classes",
    "run.versions": 10_000,
    "simulation.evaluate_every": 2_000,
    "simulation.threads": 1,
    "strategy.name": "afa-cd",
    "strategy.buffer_size": 5,
    "strategy.server_lr": 0.1,
    "solver.lr": 0.1,
    "solver.batch_size": 500,
    "solver.sampling": "fresh",
}
_PAPER = {1: (0.7474, 0.7606, 0.7319, 0.7350), 10: (0.8081, 0.8072, 0.8065, 0.8119)}


def _afl(p: int, arriving: str, steps: str) -> str:
    return f"p = {p}, {arriving}, {steps}"


_AFL_1000: KeyValues = {
    **_AFL_BASE,
    **_PRECISION,
    "run.versions": 1_000,
    "simulation.evaluate_every": 50,
}
_AFL_CELLS = tuple(
    Cell(
        _afl(p, arriving, steps),
        {"task.partition.p": p, **column(arriving, steps, 5)},
        paper=paper,
    )
    for p, row in _PAPER.items()
    for (arriving, steps), paper in zip(COLUMNS, row, strict=True)
)


# FedAsync's claims

_MARGIN = 0.02  # of accuracy: 40 test images; less counts as no difference


def _speed(results: Results, cell: str) -> dict[int, float]:
    """Speed of learning: mean accuracy at the gradient counts of FedAvg's measured rounds."""
    return over_run(results, cell, "accuracy")


def _end(results: Results, cell: str) -> dict[int, float]:
    """Mean accuracy at the last three points, since single ones fluctuate."""
    found = results.measured(cell, "gradients", "accuracy")
    return {n: float(accuracy[-3:].mean()) for n, (_, accuracy) in found.items()}


def _loss(results: Results, cell: str) -> float:
    """Mean training loss between the last two measurements."""
    _, loss, _ = results.curve(cell, "gradients", "training_loss")
    return mean(loss[-1:])


def _said(results: Results, cells: Iterable[str]) -> str:
    """Accuracy over the run, and at the end."""
    return ", ".join(
        f"{mean_of(_speed(results, cell)):.3f} and {mean_of(_end(results, cell)):.3f} ({cell})"
        for cell in dict.fromkeys(cells)
    )


def _fedasync_claims(results: Results) -> list[JudgedClaim]:
    small, large = ([_late(rule, most) for rule in _RULES] for most in (4, 16))
    compared = ("SGD", "FedAvg", *dict.fromkeys((*small, *large)))
    losses = ", ".join(f"{_loss(results, cell):.3f} ({cell})" for cell in compared)
    version = results.curve("FedAvg", "version", "accuracy")[0][-1]
    early = {cell: results.at(cell, "version", version, "accuracy") for cell in compared[1:]}
    swept = "; ".join(
        f"{rule} " + _said(results, [_late(rule, most) for most in _MOST]) for rule in _RULES
    )
    alphas = {rule: [_swept(rule, alpha) for alpha in _ALPHAS] for rule in _SWEPT}
    by_alpha = "; ".join(_said(results, cells) for cells in alphas.values())
    falls = {rule: falling(results, _swept(rule, ALPHA)) for rule in _SWEPT}
    falls[f"Const, alpha {_ALPHAS[0]:g}"] = falling(results, _swept("Const", _ALPHAS[0]))

    def claim(
        text: str, compare: Callable[[Callable[[str], PerRepeat]], list[Series]], seen: str
    ) -> JudgedClaim:
        """A claim that must hold both over the run and at the end."""
        cases = partial(_speed, results), partial(_end, results)
        return JudgedClaim(text, [one for of in cases for one in compare(of)], f"{seen}.")

    return [
        claim(
            "At small staleness (4) FedAsync converges as fast as SGD (figure 2; here, as in all "
            "that compare accuracies: both its mean over the run and that of the last three "
            f"measurements; less than {_MARGIN:g} below SGD's).",
            lambda of: [above(of(cell), of("SGD"), -_MARGIN) for cell in small],
            f"Over the run and at the end {_said(results, ('SGD', *small))}; training loss at the "
            f"end {losses}",
        ),
        claim(
            "At small staleness FedAsync converges faster than FedAvg, against gradients and "
            f"against communications (figures 2 and 6; here: by more than {_MARGIN:g}).",
            lambda of: [above(of(cell), of("FedAvg"), _MARGIN) for cell in small],
            _said(results, ("FedAvg", *small)),
        ),
        claim(
            "At larger staleness FedAsync converges slower (figures 2 and 3; here: 16 against 4, "
            f"each rule, by more than {_MARGIN:g}).",
            lambda of: [above(of(a), of(b), _MARGIN) for a, b in zip(small, large, strict=True)],
            _said(results, (*small, *large)),
        ),
        claim(
            "In the worst case FedAsync has a convergence rate similar to FedAvg's (figure 3; "
            f"here: the slowest rule is less than {_MARGIN:g} below it).",
            lambda of: [above(of(cell), of("FedAvg"), -_MARGIN) for cell in (*small, *large)],
            _said(results, ("FedAvg", *small, *large)),
        ),
        JudgedClaim(
            "FedAvg makes more progress in each global epoch, of which each costs it ten times as "
            "much (figures 4 and 5; here: accuracy when FedAvg ends).",
            [above(early["FedAvg"], of) for cell, of in early.items() if cell != "FedAvg"],
            f"At version {version:.0f}: "
            + ", ".join(f"{mean_of(of):.3f} ({cell})" for cell, of in early.items())
            + ".",
        ),
        claim(
            f"Larger staleness is not catastrophic (figure 8; here: at {_MOST[-1]} the accuracy is "
            f"at least nine tenths of that at {_MOST[0]}).",
            lambda of: [
                above(of(_late(rule, _MOST[-1])), of(_late(rule, _MOST[0])), times=0.9)
                for rule in _RULES
            ],
            swept,
        ),
        claim(
            "Adaptive alpha makes large staleness less harmful (figure 8; the workshop: it always "
            f"improves; here: Poly and Hinge over Const at 16 by more than {_MARGIN:g}).",
            lambda of: [above(of(cell), of(large[0]), _MARGIN) for cell in large[1:]],
            _said(results, large),
        ),
        claim(
            f"Poly and Hinge have similar performance (workshop, 5.4; here: at 16, within "
            f"{_MARGIN:g}).",
            lambda of: within(map(of, large[1:]), _MARGIN),
            _said(results, large[1:]),
        ),
        claim(
            "FedAsync is robust to different alpha (figure 10; here: at 16, the lowest accuracy of "
            "each rule is at least nine tenths of its highest).",
            lambda of: [
                above(low, high, times=0.9)
                for cells in alphas.values()
                for low, high in permutations(map(of, cells), 2)
            ],
            by_alpha,
        ),
        claim(
            "Without adaptive alpha a smaller one is better at large staleness (workshop, 5.4; "
            f"here: Const at 16, each smaller alpha over {ALPHA:g} by more than {_MARGIN:g}).",
            lambda of: [
                above(of(cell), of(alphas["Const"][-1]), _MARGIN) for cell in alphas["Const"][:-1]
            ],
            by_alpha,
        ),
        JudgedClaim(
            "Too large an alpha can be unstable, less so where it is adaptive (figures 3 and 10; "
            "here: the mean fall of the accuracy from one measurement to the next at 16 and "
            f"alpha {ALPHA:g}, Const more than with the smallest alpha and than Poly).",
            [above(falls["Const"], of) for name, of in falls.items() if name != "Const"],
            "Mean fall: "
            + ", ".join(f"{mean_of(of):.4f} ({name})" for name, of in falls.items())
            + ".",
        ),
        JudgedClaim(
            "FedAsync is robust to different alpha at staleness 4, and so is Hinge (a = 4) at 16 "
            "(figures 9 and 10).",
            [],
            "Not run.",
        ),
    ]


# AFL's claims

_TELLING = 20  # beyond this scale the runs are too short to tell


def _afl_claims(results: Results) -> list[JudgedClaim]:
    ends = {p: [results.each(_afl(p, *kind), "last") for kind in COLUMNS] for p in _PAPER}
    means = {p: [mean_of(of) for of in row] for p, row in ends.items()}
    spans = {p: max(row) - min(row) for p, row in means.items()}
    tells = results.scale <= _TELLING
    reached = "; ".join(
        f"p = {p}: " + ", ".join(f"{value:.3f}" for value in row) for p, row in means.items()
    )
    rounds = results.of(_afl(1, *COLUMNS[0]))[0].versions
    alike = {p: within(row, 0.03) if tells else [] for p, row in ends.items()}
    columns = zip(ends[1], ends[10], strict=True)
    return [
        JudgedClaim(
            "Asynchrony and dynamic steps make no obvious difference to the accuracy (table 2; "
            "here: the four columns within .03).",
            [*alike[1], *alike[10]],
            f"After {rounds} rounds the columns lie within "
            + " and ".join(f"{span:.3f} (p = {p})" for p, span in spans.items())
            + ".",
        ),
        JudgedClaim(
            "The accuracy falls as p does (table 2; here: from p = 10 to p = 1, every column).",
            [above(high, low) for low, high in columns] if tells else [],
            f"After {rounds} rounds, in the table's order: {reached}.",
        ),
        JudgedClaim(
            "At p = 10 the curves of all four are almost identical (figure 3).",
            alike[10],
            f"After {rounds} rounds they lie within {spans[10]:.3f}.",
        ),
        JudgedClaim(
            "More classes a device, fewer rounds to converge (figure 3).",
            [],
            f"No cell is anywhere near converged: the best is {max(map(max, means.values())):.3f}.",
        ),
    ]


def _lines(most: int) -> dict[str, str]:
    rules = {f"FedAsync+{rule}": _late(rule, most) for rule in _RULES}
    return {"SGD": "SGD", "FedAvg": "FedAvg", **rules}


def _against(x: str, xlabel: str, y: str, ylabel: str) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            f"maximum staleness {most}{' (Hinge is Const)' if most <= _B else ''}",
            _lines(most),
            x=x,
            y=y,
            xlabel=xlabel,
            ylabel=ylabel,
        )
        for most in (4, 16)
    )


_GRADIENTS = "gradients (10: one epoch, 2 communications)"
_STALENESS = {
    f"FedAsync+{rule}": {float(most): _late(rule, most) for most in _MOST} for rule in _RULES
}
_BY_ALPHA = {
    f"FedAsync+{rule}": {alpha: _swept(rule, alpha) for alpha in _ALPHAS} for rule in _SWEPT
}

_NOTES = (
    ("The figures have no numbers to compare with; the claims are the text's."),
    (
        "gamma .1 and rho .005 as in the workshop's figure 2; alpha .9 is that of its figure "
        "4, neither text names another. SGD and FedAvg have the same gamma, the paper's were "
        "found by grid search; FedAvg's local steps have no rho."
    ),
    (
        "SGD is one device that holds all images, alpha = 1, no staleness. FedAvg has a tenth"
        " of the versions, so that all take as many gradients."
    ),
    (
        "Against gradients, epochs and communications the curves are the same but for the "
        "axis: every update is 10 gradients, one epoch of a device's 500 images, and a model "
        "sent and one received. SGD has no communications."
    ),
    ("Hinge at staleness 4 is Const's run, and at 0 all rules are: s is 1 there."),
    (
        "Training loss is the mean of what devices report between two measurements: of local "
        "steps from the model that they start from, dropout and random crops included."
    ),
)
_SCALED_NOTES = (
    *_NOTES,
    f"Accuracy is that of {_TESTED:,} of the 10,000 test images, every fifth.",
    (
        "The delays stay what they are where T is divided by S, so that they are S times as "
        "long a part of the run: 16 versions are 16 in 100 at S = 20, 16 in 2000 in the "
        "paper."
    ),
    ("The task takes its data from FEDSTREAM_DATA, and the partition is that of seed 0."),
)

_FULL_NOTES = (
    *_NOTES,
    (
        "Devices train in bfloat16, or in float32 on a machine where that is faster; the server "
        "computes in float32."
    ),
)

_AFL_NOTES = (
    (
        "server_lr = eta eta_L = .1, minibatches drawn anew, 'asynchronous' = one of the last"
        " five models, all 10,000 test images."
    ),
    (
        "A round is one step of length .1 along a mean gradient, however many local steps it "
        "costs; a small part of 10,000 rounds shows how training begins, and no more."
    ),
)

_SCALED = (
    Experiment(
        name="fedasync-cifar10",
        title="FedAsync on CIFAR-10",
        source="FedAsync, figures 2 to 8 (2019), figures 2 and 4 (workshop)",
        base=_BASE,
        cells=_CELLS,
        repeats=1,
        compare="last",
        pictures=(
            Picture(
                "gradients.png",
                "FedAsync on CIFAR-10, against gradients",
                (
                    *_against("gradients", _GRADIENTS, "accuracy", "test accuracy"),
                    *_against("gradients", _GRADIENTS, "training_loss", "training loss"),
                ),
            ),
            Picture(
                "versions.png",
                "FedAsync on CIFAR-10, against versions ('global epochs')",
                _against("version", "versions", "accuracy", "test accuracy"),
            ),
            Picture(
                "staleness.png",
                "FedAsync on CIFAR-10, by maximum staleness",
                (
                    SweepPanel("last version", _STALENESS, "last", "maximum staleness", "accuracy"),
                    SweepPanel("best version", _STALENESS, "best", "maximum staleness", "accuracy"),
                ),
            ),
            Picture(
                "alpha.png",
                "FedAsync on CIFAR-10, by alpha, maximum staleness 16",
                (
                    SweepPanel("last version", _BY_ALPHA, "last", "alpha", "accuracy"),
                    SweepPanel("best version", _BY_ALPHA, "best", "alpha", "accuracy"),
                ),
            ),
        ),
        claims=_fedasync_claims,
        notes=_SCALED_NOTES,
    ),
    Experiment(
        name="afl-cifar10",
        title="AFL on CIFAR-10, table 2",
        source="AFL, table 2 and figure 3",
        base=_AFL_BASE,
        cells=_AFL_CELLS,
        repeats=1,
        compare="last",
        pictures=(
            Picture(
                "fig3.png",
                "AFA-CD on CIFAR-10, 5 of 10 devices",
                tuple(
                    Panel(
                        f"p = {p}",
                        {f"{a.removesuffix('hronous')}, {s}": _afl(p, a, s) for a, s in COLUMNS},
                        xlabel="rounds",
                        ylabel="test accuracy",
                    )
                    for p in _PAPER
                ),
            ),
        ),
        claims=_afl_claims,
        notes=_AFL_NOTES,
    ),
)

_FEDASYNC, _AFL = _SCALED
EXPERIMENTS = (
    *_SCALED,
    replace(
        _FEDASYNC,
        name="fedasync-cifar10-full",
        title="FedAsync on CIFAR-10, at full length",
        base=_FULL,
        cells=_FULL_CELLS,
        repeats=LEAST_REPEATS,
        notes=_FULL_NOTES,
    ),
    replace(
        _AFL,
        name="afl-cifar10-1000",
        title="AFL on CIFAR-10, table 2, for 1,000 of 10,000 rounds",
        base=_AFL_1000,
        cells=tuple(replace(cell, paper=None) for cell in _AFL_CELLS),
        repeats=LEAST_REPEATS,
    ),
)
