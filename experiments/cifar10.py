"""CIFAR-10: FedAsync's figures 2 to 8 (2019), and AFL's row of table 2 for p = 1 and 10.

Devices train in bfloat16 where that is faster. On a core with AVX-512's bfloat16 a step of
FedAsync's network takes about 105 ms, and of AFL's 130 ms: at full length a run takes 40 min and
nine hours, so the results are those of ``--scale``. An interrupted command continues within a run.
"""

from __future__ import annotations

from torch.utils.data import TensorDataset

from experiments.afl import COLUMNS, PRECISION, column
from experiments.fedasync import ALPHA, T, fedasync, fedavg, rules, sgd
from experiments.fedasync_figures import MOST, B, Figures, label
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
    within,
)
from fedstream.trainer.images import cifar10_fedasync
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.task import TaskSettings

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
    "simulation.evaluate_every": T // 20,
    "simulation.threads": 1,
    "solver.precision": "bf16",
    "solver.lr": 0.1,
    "solver.batch_size": 50,
    "scheduler.steps.kind": "epochs",
    "scheduler.steps.n": 1,
}
_RHO = 0.005
_RULES = rules(10.0, B)
_SGD: KeyValues = {
    **sgd("experiments.cifar10:all_images"),
    "scheduler.steps.kind": "fixed",
    "scheduler.steps.n": 10,
}
_FIGURES = Figures(
    rules=tuple(_RULES),
    margin=0.02,  # 40 test images
    last=3,
    alphas=(0.3, 0.6, ALPHA),
    swept={16: ("Const", "Poly")},
    loss="training_loss",
    gradients="gradients (10: one epoch, 2 communications)",
    tuned=False,
)
_CELLS = (
    Cell("SGD", _SGD),
    Cell("FedAvg", fedavg(measured=20)),
    *(
        Cell(f"{rule}, {most}", fedasync(_RULES[rule], most, _RHO))
        for most in MOST
        for rule in _RULES
        if label(rule, most) == f"{rule}, {most}"
    ),
    *(
        Cell(label(rule, 16, alpha), fedasync(_RULES[rule], 16, _RHO, alpha))
        for rule in _FIGURES.swept[16]
        for alpha in _FIGURES.alphas
        if alpha != ALPHA
    ),
)

_AFL_BASE: KeyValues = {
    "task.name": "cifar10-afl",
    "task.partition.kind": "classes",
    "run.versions": 10_000,
    "simulation.evaluate_every": 1_000,
    "simulation.threads": 1,
    "solver.precision": "bf16",
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


_AFL_CELLS = tuple(
    Cell(
        _afl(p, arriving, steps),
        {"task.partition.p": p, **column(arriving, steps, 5)},
        paper=paper,
    )
    for p, row in _PAPER.items()
    for (arriving, steps), paper in zip(COLUMNS, row, strict=True)
)


# AFL's claims

_LEARNS = 0.15  # accuracy that a model has once it learns; by chance it has .1


def _afl_claims(results: Results) -> list[JudgedClaim]:
    ends = {p: [results.each(_afl(p, *kind), "last") for kind in COLUMNS] for p in _PAPER}
    means = {p: [mean_of(of) for of in row] for p, row in ends.items()}
    spans = {p: max(row) - min(row) for p, row in means.items()}
    rounds = results.of(_afl(1, *COLUMNS[0]))[0].versions
    rows = (f"p = {p}: " + ", ".join(f"{one:.3f}" for one in row) for p, row in means.items())
    reached = f"After {rounds} rounds, in the table's order: {'; '.join(rows)}."
    alike = {p: within(row, 0.03) for p, row in ends.items()}
    more = [above(high, low) for low, high in zip(ends[1], ends[10], strict=True)]
    learn = min(means[10]) > _LEARNS
    whole = results.scale == 1
    return [
        JudgedClaim(
            "Asynchrony and dynamic steps make no obvious difference to the accuracy (table 2; "
            "here: the four columns within .03 at full length).",
            [*alike[1], *alike[10]] if whole else [],
            f"After {rounds} rounds the columns lie within "
            + " and ".join(f"{span:.3f} (p = {p})" for p, span in spans.items())
            + ".",
        ),
        JudgedClaim(
            "The accuracy falls as p does (table 2; here: from p = 10 to p = 1, every column, at "
            "full length).",
            more if whole else [],
            reached,
        ),
        JudgedClaim(
            "At p = 10 the curves of all four are almost identical (figure 3; here: the last "
            f"accuracies within .03, once all are above {_LEARNS}).",
            alike[10] if learn else [],
            f"After {rounds} rounds they lie within {spans[10]:.3f}.",
        ),
        JudgedClaim(
            "More classes a device, fewer rounds to converge (figure 3; here: after as many "
            f"rounds every column is higher at p = 10 than at p = 1, once all at p = 10 are above "
            f"{_LEARNS}).",
            more if learn else [],
            reached,
        ),
    ]


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
    f"Accuracy is that of {_TESTED:,} of the 10,000 test images, every fifth.",
    (
        "The delays stay what they are where T is divided by S, so that they are S times as "
        "long a part of the run: 16 versions are 16 in 200 at S = 10, 16 in 2000 in the "
        "paper."
    ),
    ("The task takes its data from FEDSTREAM_DATA, and the partition is that of seed 0."),
    PRECISION,
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
    PRECISION,
)

EXPERIMENTS = (
    Experiment(
        name="fedasync-cifar10",
        title="FedAsync on CIFAR-10",
        source="FedAsync, figures 2 to 8 and 10 (2019), figures 2 and 4 (workshop)",
        base=_BASE,
        cells=_CELLS,
        compare="last",
        pictures=_FIGURES.pictures("CIFAR-10", {f"FedAsync+{rule}": rule for rule in _RULES}),
        claims=_FIGURES.claims,
        partly=True,
        notes=_NOTES,
    ),
    Experiment(
        name="afl-cifar10",
        title="AFL on CIFAR-10, table 2",
        source="AFL, table 2 and figure 3",
        base=_AFL_BASE,
        cells=_AFL_CELLS,
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
