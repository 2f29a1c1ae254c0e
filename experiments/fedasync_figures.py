"""FedAsync's figures 2 to 10: the papers' claims about them, and the pictures, for any task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import TypeAlias

from experiments.fedasync import ALPHA, over_run
from experiments.reproduction import (
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

MOST = (0, 4, 8, 16)
SMALL, LARGE = 4, 16  # maximum staleness
B = 4  # of hinge
SCHEDULES: dict[str, KeyValues] = {  # of alpha, in place of halving, with s = 1
    "Inverse sqrt": {"strategy.alpha_schedule.kind": "inverse_sqrt"},
    "No decay": {"strategy.alpha_schedule.kind": "constant"},
}
_SWEEP = {SMALL: 9, LARGE: 10}  # the figure against alpha, by maximum staleness
Of: TypeAlias = Callable[[str], PerRepeat]


def label(rule: str, most: int, alpha: float = ALPHA) -> str:
    """The cell of a rule at a maximum staleness: hinge is constant up to b, functions are at 0."""
    same = (most == 0 and rule not in SCHEDULES) or (rule == "Hinge" and most <= B)
    return f"{'Const' if same else rule}, {most}" + (f", alpha {alpha:g}" * (alpha != ALPHA))


def once_run(
    results: Results,
    text: str,
    cells: Iterable[str],
    judge: Callable[[], tuple[list[Series], str]],
) -> JudgedClaim:
    """A claim with ``judge``'s comparisons and words, or not tested before all cells have run."""
    if lacking := [cell for cell in cells if not results.of(cell)]:
        return JudgedClaim(text, [], f"Not run yet: {', '.join(dict.fromkeys(lacking))}.")
    return JudgedClaim(text, *judge())


def steadier(results: Results, text: str, pairs: Sequence[tuple[str, str]]) -> JudgedClaim:
    """The claim that the first of each pair falls less from one measurement to the next."""
    cells = tuple(dict.fromkeys(cell for pair in pairs for cell in pair))

    def judge() -> tuple[list[Series], str]:
        falls = {cell: falling(results, cell) for cell in cells}
        told = ", ".join(f"{mean_of(of):.4f} ({cell})" for cell, of in falls.items())
        return [above(falls[b], falls[a]) for a, b in pairs], f"Mean fall: {told}."

    return once_run(results, text, cells, judge)


@dataclass(frozen=True, slots=True)
class Figures:
    """A task's cells, and what counts as a difference there."""

    rules: Sequence[str]
    """staleness functions; Const, Poly and Hinge are the papers'"""
    alphas: Sequence[float]
    swept: Mapping[int, Sequence[str]]
    """the rules that run with all alphas, by maximum staleness"""
    margin: float
    """of accuracy; less counts as no difference"""
    last: int
    """measurements that make the end of a run"""
    loss: str
    """the column of the curves that the papers' loss is compared with"""
    gradients: str
    """the pictures' axis"""
    sgd: str = "SGD"
    fedavg: str = "FedAvg"
    """with as many gradients as FedAsync"""
    epochs: str = "FedAvg"
    """FedAvg, where versions are compared"""
    tuned: bool = True
    """whether SGD and FedAvg have the best of several gammas, as in the paper"""

    def speed(self, results: Results, cell: str) -> dict[int, float]:
        """Speed of learning: mean accuracy over the run."""
        return over_run(results, cell, "accuracy")

    def end(self, results: Results, cell: str) -> dict[int, float]:
        """Mean accuracy at the last measurements, since single ones fluctuate."""
        found = results.measured(cell, "gradients", "accuracy")
        return {n: float(values[-self.last :].mean()) for n, (_, values) in found.items()}

    def said(self, results: Results, cells: Iterable[str]) -> str:
        """Accuracy over the run, and at the end."""
        return ", ".join(
            f"{mean_of(self.speed(results, cell)):.3f} and "
            f"{mean_of(self.end(results, cell)):.3f} ({cell})"
            for cell in dict.fromkeys(cells)
        )

    def claim(
        self,
        results: Results,
        text: str,
        compare: Callable[[Of], list[Series]],
        cells: Sequence[str],
        more: Callable[[], str] = str,
    ) -> JudgedClaim:
        """A claim that must hold both over the run and at the end; ``cells``: all that it needs."""

        def judge() -> tuple[list[Series], str]:
            cases = partial(self.speed, results), partial(self.end, results)
            found = [one for of in cases for one in compare(of)]
            against = not self.tuned and {self.sgd, self.fedavg} & set(cells)
            how = " SGD and FedAvg have FedAsync's gamma, which need not be their best."
            return found, f"{self.said(results, cells)}{more()}.{how if against else ''}"

        return once_run(results, text, cells, judge)

    def claims(self, results: Results) -> list[JudgedClaim]:
        """The papers' claims."""
        return [*self._speeds(results), *self._staleness(results), *self._alphas(results)]

    def _speeds(self, results: Results) -> list[JudgedClaim]:
        """Figures 2 to 7: SGD, FedAvg and FedAsync."""
        claim, margin = partial(self.claim, results), self.margin
        sgd, fedavg, epochs = self.sgd, self.fedavg, self.epochs
        small, large = self._late()
        late = tuple(dict.fromkeys((*small, *large)))

        def losses() -> str:
            found = (f"{self._loss(results, cell):.3f} ({cell})" for cell in (sgd, fedavg, *small))
            return f"; {self.loss.replace('_', ' ')} at the end {', '.join(found)}"

        def progress() -> tuple[list[Series], str]:
            version = results.curve(epochs, "version", "accuracy")[0][-1]
            rounds, *others = (
                results.at(cell, "version", version, "accuracy") for cell in (epochs, *late)
            )
            reached = zip((epochs, *late), map(mean_of, (rounds, *others)), strict=True)
            told = ", ".join(f"{accuracy:.3f} ({cell})" for cell, accuracy in reached)
            return [above(rounds, of) for of in others], f"At version {version:.0f}: {told}."

        return [
            claim(
                "At small staleness (4) FedAsync converges as fast as SGD (figure 2; here, as in "
                "all that compare accuracies: both its mean over the run and that of the last "
                f"{self.last} measurements, given in this order; less than {margin:g} below "
                "SGD's).",
                lambda of: [above(of(cell), of(sgd), -margin) for cell in small],
                (sgd, fedavg, *small),
                losses,
            ),
            claim(
                "At small staleness FedAsync converges faster than FedAvg, against gradients and "
                f"against communications (figures 2 and 6; here: by more than {margin:g}).",
                lambda of: [above(of(cell), of(fedavg), margin) for cell in small],
                (fedavg, *small),
            ),
            claim(
                "In the worst case FedAsync has a convergence rate similar to FedAvg's (figures 3 "
                f"and 7; here: the slowest rule is less than {margin:g} below it).",
                lambda of: [above(of(cell), of(fedavg), -margin) for cell in (*small, *large)],
                (fedavg, *small, *large),
            ),
            claim(
                "FedAsync is no faster than SGD (2019, 6.4: between SGD and FedAvg; here: less "
                f"than {margin:g} above SGD).",
                lambda of: [above(of(sgd), of(cell), -margin) for cell in (*small, *large)],
                (sgd, *small, *large),
            ),
            once_run(
                results,
                "FedAvg makes more progress in each global epoch, but each costs it ten times as "
                "much (figures 4 and 5; here: accuracy when FedAvg ends).",
                (epochs, *late),
                progress,
            ),
        ]

    def _staleness(self, results: Results) -> list[JudgedClaim]:
        """Figures 3 and 8: rules and staleness."""
        claim, margin = partial(self.claim, results), self.margin
        small, large = self._late()
        const, poly, hinge = large
        gains = [(label("Poly", most), label("Const", most)) for most in (LARGE, SMALL)]
        others = [label(rule, LARGE) for rule in self.rules if rule != "Poly"]

        def needed(of: Of) -> list[Series]:
            late, early = ({n: a - b for n, a, b in _both(of, pair)} for pair in gains)
            return [above(late, early)]

        return [
            claim(
                "At larger staleness FedAsync converges slower (figures 2 and 3; here: 16 against "
                f"4, each rule, by more than {margin:g}).",
                lambda of: [above(of(a), of(b), margin) for a, b in zip(small, large, strict=True)],
                (*small, *large),
            ),
            claim(
                f"Larger staleness is not catastrophic (figure 8; here: at {LARGE} the accuracy is "
                f"at least nine tenths of that at {MOST[0]}).",
                lambda of: [
                    above(of(cell), of(label("Const", MOST[0])), times=0.9) for cell in large
                ],
                (label("Const", MOST[0]), *large),
            ),
            claim(
                "Adaptive alpha makes large staleness less harmful (figure 8; the workshop: it "
                f"always improves; here: Poly and Hinge over Const at 16 by more than {margin:g}).",
                lambda of: [above(of(cell), of(const), margin) for cell in large[1:]],
                large,
            ),
            claim(
                "At small staleness adaptive alpha is less necessary (2019, 6.3; here: Poly gains "
                "less over Const at 4 than at 16).",
                needed,
                [cell for pair in gains for cell in pair],
            ),
            claim(
                f"Poly and Hinge have similar performance (workshop, 5.4; here: at 16, within "
                f"{margin:g}).",
                lambda of: within(map(of, large[1:]), margin),
                large[1:],
            ),
            claim(
                "Poly with a = .5 performs best (2019, 6.4; here: at 16, over every other "
                "function).",
                lambda of: [above(of(poly), of(cell)) for cell in others],
                (poly, *others),
            ),
            claim(
                "Hinge is the best choice (workshop, 5.4; here: at 16, over Poly).",
                lambda of: [above(of(hinge), of(poly))],
                (hinge, poly),
            ),
        ]

    def _alphas(self, results: Results) -> list[JudgedClaim]:
        """Figures 9 and 10, and 3's instability."""
        claim, margin = partial(self.claim, results), self.margin
        cells = {
            most: {rule: self.by_alpha(rule, most) for rule in rules}
            for most, rules in self.swept.items()
        }
        const = cells[LARGE]["Const"]
        adaptive = [of for rule, of in cells[LARGE].items() if rule.startswith(_PAPERS[1:])]
        lowest, full = const[0], const[-1]
        return [
            *(
                claim(
                    f"FedAsync is robust to different alpha (figure {_SWEEP[most]}; here: at "
                    f"{most}, the lowest accuracy of each rule is at least nine tenths of its "
                    "highest).",
                    partial(_robust, list(rules.values())),
                    [cell for of_rule in rules.values() for cell in of_rule],
                )
                for most, rules in cells.items()
            ),
            *(
                JudgedClaim(
                    f"FedAsync is robust to different alpha (figure {figure}).", [], "Not run."
                )
                for most, figure in _SWEEP.items()
                if most not in cells
            ),
            claim(
                "Without adaptive alpha a smaller one is better at large staleness (2019, 6.3; "
                f"here: Const at 16, each smaller alpha over {ALPHA:g} by more than {margin:g}).",
                lambda of: [above(of(cell), of(full), margin) for cell in const[:-1]],
                const,
            ),
            claim(
                "With adaptive alpha a larger one is better at large staleness (2019, 6.3; here: "
                f"Poly and Hinge at 16, {ALPHA:g} over each smaller alpha by more than "
                f"{margin:g}).",
                lambda of: [
                    above(of(rule[-1]), of(cell), margin) for rule in adaptive for cell in rule[:-1]
                ],
                [cell for rule in adaptive for cell in rule],
            ),
            steadier(
                results,
                "Too large an alpha can be unstable, less so where it is adaptive (figures 3 and "
                "10; here: the mean fall of the accuracy from one measurement to the next at 16 "
                f"and alpha {ALPHA:g}, Const more than with the smallest alpha and than Poly).",
                [(label("Poly", LARGE), full), (lowest, full)],
            ),
        ]

    def by_alpha(self, rule: str, most: int) -> list[str]:
        """A rule's cells in the order of alpha."""
        return [label(rule, most, alpha) for alpha in self.alphas]

    def _late(self) -> list[list[str]]:
        """The cells of the papers' rules at small and at large staleness."""
        return [[label(rule, most) for rule in _PAPERS] for most in (SMALL, LARGE)]

    def _loss(self, results: Results, cell: str) -> float:
        """Mean loss at the last measurement."""
        return mean(results.curve(cell, "gradients", self.loss)[1][-1:])

    # pictures

    def pictures(self, on: str, names: Mapping[str, str]) -> tuple[Picture, ...]:
        """The figures. ``on``: the task; ``names``: the rules of the curves, by legend."""
        by_staleness = {
            name: {float(most): label(rule, most) for most in MOST} for name, rule in names.items()
        }
        return (
            Picture(
                "gradients.png",
                f"FedAsync on {on}, against gradients",
                tuple(
                    self._panel(names, most, "gradients", self.gradients, column)
                    for column in ("accuracy", self.loss)
                    for most in (SMALL, LARGE)
                ),
            ),
            Picture(
                "versions.png",
                f"FedAsync on {on}, against versions ('global epochs')",
                tuple(
                    self._panel(names, most, "version", "versions", "accuracy")
                    for most in (SMALL, LARGE)
                ),
            ),
            Picture(
                "staleness.png",
                f"FedAsync on {on}, by maximum staleness",
                _sweeps(by_staleness, "maximum staleness"),
            ),
            *(
                Picture(
                    f"alpha{most}.png" if len(self.swept) > 1 else "alpha.png",
                    f"FedAsync on {on}, by alpha, maximum staleness {most}",
                    _sweeps(
                        {
                            f"FedAsync+{rule}": dict(
                                zip(self.alphas, self.by_alpha(rule, most), strict=True)
                            )
                            for rule in rules
                        },
                        "alpha",
                    ),
                )
                for most, rules in self.swept.items()
            ),
        )

    def _panel(
        self, names: Mapping[str, str], most: int, x: str, xlabel: str, column: str
    ) -> Panel:
        fedavg = self.epochs if x == "version" else self.fedavg
        return Panel(
            f"maximum staleness {most}{' (Hinge is Const)' if most <= B else ''}",
            {
                "SGD": self.sgd,
                "FedAvg": fedavg,
                **{name: label(rule, most) for name, rule in names.items()},
            },
            x=x,
            y=column,
            xlabel=xlabel,
            ylabel="training loss" if column == "training_loss" else f"test {column}",
        )


_PAPERS = ("Const", "Poly", "Hinge")


def _robust(rules: Iterable[Sequence[str]], of: Of) -> list[Series]:
    """Margins of the claim that each rule's lowest value is nine tenths of its highest, or more."""
    return [
        above(low, high, times=0.9)
        for cells in rules
        for low, high in permutations(map(of, cells), 2)
    ]


def _both(of: Of, pair: tuple[str, str]) -> list[tuple[int, float, float]]:
    a, b = map(of, pair)
    return [(n, a[n], b[n]) for n in a if n in b]


def _sweeps(lines: Mapping[str, Mapping[float, str]], xlabel: str) -> tuple[SweepPanel, ...]:
    return (
        SweepPanel("last version", lines, "last", xlabel, "accuracy"),
        SweepPanel("best version", lines, "best", xlabel, "accuracy"),
    )
