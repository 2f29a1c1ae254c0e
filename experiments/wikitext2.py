"""WikiText-2, word by word: FedAsync's figure 3 (workshop).

On a CPU it is feasible only scaled down: ``python -m experiments fedasync-wikitext2 --scale 20``
takes most of a core-hour. Models are evaluated on every fortieth window of the test text, since all
of it takes minutes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from torch.utils.data import TensorDataset

from experiments.fedasync import T, fedasync, fedavg, over_run, rules, sgd
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
    mean_of,
    within,
)
from fedstream.trainer.task import TaskSettings
from fedstream.trainer.texts import Words, wikitext2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_EVERY = 40  # windows


def text() -> Words:
    """FedAsync's task, 100 devices, with less test text."""
    return _with_less_tested(100)


def all_text() -> Words:
    """The same with all data on a single device, for SGD."""
    return _with_less_tested(1)


def _with_less_tested(devices: int) -> Words:
    task = wikitext2(TaskSettings(name="wikitext2", devices=devices))
    some = TensorDataset(*(tensor[::_EVERY] for tensor in task.test_data().tensors))
    return Words(task.model, [task.device_data(number) for number in range(devices)], some)


_H = 2  # local steps; the paper's epoch is 30
_BASE: KeyValues = {
    "task.name": "experiments.wikitext2:text",
    "run.versions": T,
    "simulation.evaluate_every": T // 4,
    "simulation.threads": 1,
    "solver.lr": 20.0,
    "solver.batch_size": 20,
    "solver.clip_norm": 0.25,
    "scheduler.steps.kind": "fixed",
    "scheduler.steps.n": _H,
}
_RHO = 0.0001
_RULES = rules(10.0, 2)
_SGD: KeyValues = sgd("experiments.wikitext2:all_text")
_FEDAVG = fedavg(measured=4)
_MOST = (4, 16)


_CELLS = (
    Cell("SGD", _SGD),
    Cell("FedAvg", _FEDAVG),
    *(
        Cell(f"{rule}, {most}", fedasync(_RULES[rule], most, _RHO))
        for most in _MOST
        for rule in _RULES
    ),
)


_TELLING = 20  # beyond this scale it is too early to tell: models know only frequencies
_MARGIN = 0.05  # of log perplexity: 5% of perplexity; less counts as no difference


def _speed(results: Results, cell: str) -> dict[int, float]:
    """Slowness: mean log perplexity over the run."""
    return over_run(results, cell, "loss")


def _end(results: Results, cell: str) -> dict[int, float]:
    """Log perplexity at the end."""
    return {n: math.log(last) for n, last in results.each(cell, "last").items()}


def _said(results: Results, cells: Iterable[str]) -> str:
    """Perplexity over the run (its geometric mean), and at the end."""
    return ", ".join(
        f"{math.exp(mean_of(_speed(results, cell))):.0f} and {results.mean(cell, 'last'):.0f} "
        f"({cell})"
        for cell in cells
    )


def _claims(results: Results) -> list[JudgedClaim]:
    small, large = ([f"{rule}, {most}" for rule in _RULES] for most in _MOST)
    gradients = results.of("SGD")[0].gradients

    def claim(
        text: str, compare: Callable[[Callable[[str], PerRepeat]], list[Series]], seen: str
    ) -> JudgedClaim:
        """A claim on log perplexities that must hold both over the run and at the end."""
        cases = (partial(_speed, results), partial(_end, results))
        tells = results.scale <= _TELLING
        found = [one for of in cases for one in compare(of)] if tells else []
        return JudgedClaim(text, found, f"{seen}.")

    return [
        claim(
            "At small staleness (4) FedAsync converges as fast as SGD (figure 3; here and below: "
            "both the geometric mean of the perplexity over the run, at equal gradients, and the "
            f"last one; less than {_MARGIN:.0%} above SGD's).",
            lambda of: [above(of("SGD"), of(cell), -_MARGIN) for cell in small],
            f"Perplexity over the run and at the end, {gradients} gradients in all: "
            f"{_said(results, ('SGD', *small))}",
        ),
        claim(
            f"At small staleness it converges faster than FedAvg (by more than {_MARGIN:.0%}).",
            lambda of: [above(of("FedAvg"), of(cell), _MARGIN) for cell in small],
            _said(results, ("FedAvg", *small)),
        ),
        claim(
            "At larger staleness it converges slower (figure 3; 16 against 4, each rule, by more "
            f"than {_MARGIN:.0%}).",
            lambda of: [above(of(b), of(a), _MARGIN) for a, b in zip(small, large, strict=True)],
            _said(results, (*small, *large)),
        ),
        claim(
            "In the worst case it has a convergence rate similar to FedAvg's (the slowest rule is "
            f"less than {_MARGIN:.0%} above it).",
            lambda of: [above(of("FedAvg"), of(cell), -_MARGIN) for cell in (*small, *large)],
            _said(results, ("FedAvg", *small, *large)),
        ),
        claim(
            "At large staleness adaptive alpha always improves the performance (workshop, 5.3; "
            f"Poly and Hinge at 16 by more than {_MARGIN:.0%}).",
            lambda of: [above(of(large[0]), of(cell), _MARGIN) for cell in large[1:]],
            _said(results, large),
        ),
        claim(
            "Poly and Hinge have similar performance (workshop, 5.4; at 16, within "
            f"{_MARGIN:.0%}).",
            lambda of: within(map(of, large[1:]), _MARGIN),
            _said(results, large[1:]),
        ),
        JudgedClaim(
            "The perplexity that training ends with.",
            [],
            f"After {gradients} gradients, at most.",
        ),
    ]


def _lines(most: int) -> dict[str, str]:
    rules = {f"FedAsync+{rule}": f"{rule}, {most}" for rule in _RULES}
    return {"SGD": "SGD", "FedAvg": "FedAvg", **rules}


def _against(y: str, ylabel: str, *, log: bool = False) -> tuple[Panel, ...]:
    return tuple(
        Panel(
            f"maximum staleness {most}",
            _lines(most),
            x="gradients",
            y=y,
            xlabel=f"gradients ({_H} of them: 2 communications)",
            ylabel=ylabel,
            log=log,
        )
        for most in _MOST
    )


_NOTES = (
    (
        "The figure has no numbers to compare with; the claims are the text's, of figures 2 "
        "and 3 alike."
    ),
    (
        "gamma 20, rho .0001, a and b as in the figure. Not given there: the model (PyTorch's"
        " word_language_model, see docs/tasks.md), T (2000, as in the other figures, divided "
        "by S), alpha (.9 as in figure 4, halved after .4 T); gradients are clipped at .25, "
        "without which gamma 20 makes no sense."
    ),
    (
        f"A task is {_H} steps of 20 windows, not an epoch of 30, so that there are versions "
        "enough for a staleness of 16 in the steps that were affordable."
    ),
    (
        "SGD is one device that holds all the text, alpha = 1, no staleness. FedAvg has a "
        "tenth of the versions, so that all take as many gradients."
    ),
    (
        f"Perplexity is that of every {_EVERY}th window of the test text, each window "
        "beginning with an empty memory."
    ),
    (
        "The delays stay what they are where T is divided by S: 16 versions are S times as "
        "long a part of the run."
    ),
    (
        "An epoch of the whole text is 2,984 gradients: at S = 20, with 200, only the beginning "
        "of training is seen."
    ),
    ("The task takes its data from FEDSTREAM_DATA."),
)

EXPERIMENTS = (
    Experiment(
        name="fedasync-wikitext2",
        title="FedAsync on WikiText-2",
        source="FedAsync (workshop), figure 3",
        base=_BASE,
        cells=_CELLS,
        repeats=1,
        metric="perplexity",
        higher=False,
        compare="last",
        pictures=(
            Picture(
                "fig3.png",
                "FedAsync on WikiText-2, against gradients",
                (
                    *_against("perplexity", "test perplexity", log=True),
                    *_against("training_loss", "training loss"),
                ),
            ),
        ),
        claims=_claims,
        notes=_NOTES,
    ),
)
