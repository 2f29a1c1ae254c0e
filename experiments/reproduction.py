"""The declaration of a paper's experiment: cells, the paper's numbers, pictures and claims.

An experiment is declared in a module beside this one, as a member of its ``EXPERIMENTS``, and run
by name: ``python -m experiments NAME``. A declaration holds only configuration and claims; all
experiments share running (:mod:`experiments.running`), tables and pictures
(:mod:`experiments.showing`).

    BASE = {"task.name": "mnist", "strategy.name": "afa-cd", "run.versions": 150}

    def claims(results: Results) -> list[JudgedClaim]:
        slow, fast = results.each("gamma = .1"), results.each("gamma = .5")
        said = f"{mean(fast.values()):.4f} after {mean(slow.values()):.4f}."
        return [JudgedClaim("A larger step is better.", [above(fast, slow)], said)]

    EXPERIMENTS = (
        Experiment(
            name="afl-mnist-steps", title="...", source="AFL, table 9", base=BASE,
            cells=(
                Cell("gamma = .1", {"solver.lr": 0.1}, paper=0.89),
                Cell("gamma = .5", {"solver.lr": 0.5}, paper=0.91),
            ),
            pictures=(
                Picture("fig9.png", "...", (Panel("p = 1", {"slow": "gamma = .1"}),)),
            ),
            claims=claims,
        ),
    )

A cell is one configuration, run several times: repeat r has ``run.seed`` = ``task.seed`` = r, so
that arrivals, minibatches and the partition are all drawn anew. Keys are dotted configuration keys;
a cell's keys override the base's, and a cell that sets another ``kind`` or ``name`` drops the
base's keys of that table, as in configuration files. Nothing but the data folder comes from the
environment. No update is refused for being unusually large (``updater.norm_factor`` is 0): the
papers' rules take whatever devices send.

At scale S every key in ``SCALED`` is divided by S: T, the version at which alpha decays (so that it
stays at .4 T), and the interval between measurements. Everything else is unchanged.

Each run leaves one :class:`Row` in results.csv, and its curve in curves.csv.gz.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

import experiments
from fedstream.core.errors import ConfigError
from fedstream.runtime.config import load
from fedstream.settings.config import Settings

Series: TypeAlias = npt.NDArray[np.float64]
PerRepeat: TypeAlias = Mapping[int, float]
"""A figure of a cell in each of its repeats, by the repeat's number."""
KeyValues: TypeAlias = Mapping[str, object]
Of = Literal["best", "last"]

LEAST_REPEATS = 5  # for a verdict
ERRORS = 2.0  # standard errors that a margin must exceed for a verdict
SCALED = ("run.versions", "strategy.alpha_schedule.at", "simulation.evaluate_every")


@dataclass(frozen=True, slots=True)
class Cell:
    """A configuration, and the number that the paper reports for it."""

    label: str
    """its name in tables and results"""
    sets: KeyValues
    """configuration keys beyond the experiment's base"""
    paper: float | None = None
    beside: str | None = None
    """label of the cell that it is compared with, repeat by repeat"""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves: means over the repeats, with their standard deviations as bands."""

    title: str
    lines: Mapping[str, str]
    """cell labels by name in the legend"""
    x: str = "version"
    """a column of the curves"""
    y: str = "accuracy"
    """a column of the curves"""
    xlabel: str = ""
    ylabel: str = ""
    ylim: tuple[float | None, float | None] = (None, None)
    xlim: tuple[float | None, float | None] = (None, None)
    log: bool = False


@dataclass(frozen=True, slots=True)
class SweepPanel:
    """The results of cells against a parameter in which they differ."""

    title: str
    lines: Mapping[str, Mapping[float, str]]
    """cell labels by x, for each name in the legend"""
    of: Of = "last"
    xlabel: str = ""
    ylabel: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels in a grid; scale and repeats are written below."""

    file: str
    title: str
    panels: Sequence[Panel | SweepPanel]
    columns: int = 2

    @property
    def cells(self) -> list[str]:
        """The cells that it shows."""
        lines = [line for panel in self.panels for line in panel.lines.values()]
        return [
            cell for line in lines for cell in ([line] if isinstance(line, str) else line.values())
        ]


class Margin(NamedTuple):
    """By how much a comparison holds: its mean over the repeats, in standard errors."""

    errors: float
    repeats: int

    @property
    def holds(self) -> bool | None:
        """Whether it does; None if that may be noise."""
        clear = self.repeats >= LEAST_REPEATS and abs(self.errors) > ERRORS
        return bool(self.errors > 0) if clear else None


def margin(values: Series) -> Margin:
    """The margin with these values, one for each repeat; infinite if all are equal, and not 0."""
    mean = float(values.mean()) if len(values) else 0.0
    error = float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return Margin(mean / error if error else mean * math.inf if mean else 0.0, len(values))


def verdict(margins: Sequence[Margin]) -> tuple[str, str]:
    """(verdict on a claim that makes these comparisons, what it rests on).

    It held if every comparison clearly holds, and did not hold if any clearly fails.
    """
    if not margins:
        return "not tested", "no comparison"
    failing = [one for one in margins if one.holds is False]
    undecided = [one for one in margins if one.holds is None]
    repeats = min(one.repeats for one in failing or margins)
    some = f" of {len(margins)} comparisons" if len(margins) > 1 else ""
    if failing:
        fails = f"; {len(failing)}{some} fail{'s' * (len(failing) == 1)}" if some else ""
        return "did not hold", f"{repeats} repeats{fails}"
    if not undecided:
        return "held", f"{repeats} repeats" + (f"; {len(margins)} comparisons" if some else "")
    if repeats < LEAST_REPEATS:
        return "not tested", _FEW[repeats]
    noise = f"; {len(undecided)}{some}" if some else ","
    return "not tested", f"{repeats} repeats{noise} within two standard errors"


_FEW = ("no repeat of both", "one repeat", "two repeats", "three repeats", "four repeats")


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """A claim, the comparisons that it makes, and what was measured."""

    claim: str
    comparisons: Sequence[Series]
    """by how much each holds, in every repeat; none: not tested"""
    seen: str
    """one sentence, with its figures"""

    @property
    def verdict(self) -> str:
        """The verdict and what it rests on, in Markdown."""
        said, rests = self._decided
        return f"**{said}** ({rests})"

    @property
    def short(self) -> str:
        """The verdict alone."""
        return self._decided[0]

    @property
    def _decided(self) -> tuple[str, str]:
        return verdict([margin(values) for values in self.comparisons])


@dataclass(frozen=True, slots=True)
class Row:
    """A run's result: a row of results.csv. Best and last are of the experiment's metric."""

    cell: str
    repeat: int
    scale: float
    configuration: str
    """digest of the keys that were set, to recognise rows of another configuration"""
    state: str
    """finished, or failed: it diverged"""
    versions: int
    updates: int
    gradients: int
    epochs: float
    communications: int
    refused: int
    best: float
    best_version: int
    last: float
    seconds: float
    """wall-clock, without loading the data"""
    commit: str = ""
    """of the program, with ``+`` if its code had changes; empty if unknown"""
    precision: str = ""
    """bf16 or float32, whichever was faster where bf16 was asked for; empty: it was not"""


Points: TypeAlias = dict[str, Series]
"""A curve: for each column of curves.csv.gz, a value per kept version; NaN: not measured."""


class TooShort(Exception):
    """A claim can't be judged: the runs are too short to have anything to average."""


def mean(values: Iterable[float]) -> float:
    """The mean of the values. Raises TooShort if there are none."""
    found = list(values)
    if not found:
        raise TooShort
    return math.fsum(found) / len(found)


class Results:
    """The results of an experiment so far."""

    def __init__(
        self,
        rows: Sequence[Row],
        curves: Mapping[tuple[str, int], Points],
        scale: float,
        command: str = "",
    ) -> None:
        self.rows = sorted(rows, key=lambda row: row.repeat)
        self.curves = curves
        self.scale = scale
        self.command = command
        """the last one that ran something"""

    def of(self, cell: str) -> list[Row]:
        """A cell's runs."""
        return [row for row in self.rows if row.cell == cell]

    def values(self, cell: str, of: Of = "best") -> Series:
        """Each repeat's best or last value. Raises ConfigError if there are none."""
        found = [row.best if of == "best" else row.last for row in self.of(cell)]
        if not found:
            raise ConfigError(f"no results of cell {cell!r}")
        return np.array(found)

    def each(self, cell: str, of: Of = "best") -> dict[int, float]:
        """Each repeat's best or last value."""
        values = self.values(cell, of)
        return {row.repeat: float(x) for row, x in zip(self.of(cell), values, strict=True)}

    def mean(self, cell: str, of: Of = "best") -> float:
        """The mean over the repeats."""
        return float(self.values(cell, of).mean())

    def deviation(self, cell: str, of: Of = "best") -> float:
        """The standard deviation over the repeats (of a sample); NaN for one."""
        values = self.values(cell, of)
        return float(values.std(ddof=1)) if len(values) > 1 else float("nan")

    def curve(self, cell: str, x: str, y: str) -> tuple[Series, Series, Series]:
        """(x, mean of y, deviation of y) at every kept version; a single repeat deviates by 0."""
        found = [self.curves[cell, row.repeat] for row in self.of(cell)]
        if not found:
            raise ConfigError(f"no curve of cell {cell!r}")
        if y not in found[0] or x not in found[0]:
            raise ConfigError(f"no column {x!r} or {y!r}; known: {', '.join(found[0])}")
        size = min(len(curve[y]) for curve in found)  # diverged runs are shorter
        xs, ys = (np.array([curve[name][:size] for curve in found]) for name in (x, y))
        kept = ~np.isnan(ys).any(axis=0)
        spread = ys.std(axis=0, ddof=1) if len(ys) > 1 else np.zeros(size)
        return xs.mean(axis=0)[kept], ys.mean(axis=0)[kept], spread[kept]

    def measured(self, cell: str, x: str, y: str) -> dict[int, tuple[Series, Series]]:
        """Each repeat's (x, y) at the kept versions where y was measured."""
        curves = {row.repeat: self.curves[cell, row.repeat] for row in self.of(cell)}
        kept = {n: ~np.isnan(curve[y]) for n, curve in curves.items()}
        return {n: (curve[x][kept[n]], curve[y][kept[n]]) for n, curve in curves.items()}

    def at(
        self, cell: str, x: str, value: float, y: str, *, after: bool = False
    ) -> dict[int, float]:
        """Each repeat's last y up to x = ``value``; ``after``: its first y after that, or its last.

        Nothing is interpolated: between two measurements a curve is not a line.
        """
        found = {}
        for n, (xs, ys) in self.measured(cell, x, y).items():
            later = int(np.searchsorted(xs, value, side="right"))
            found[n] = float(ys[min(later, len(ys) - 1) if after else later - 1])
        return found

    def late(self, cell: str, y: str, answers: int | None = None) -> dict[int, float]:
        """Each repeat's mean of y over the last third of the measurements, by repeat.

        A single measurement says more about its moment than about its cell. ``answers``: later
        measurements than after so many updates arrived, refused ones included, do not count.
        """
        found = {}
        for row in self.of(cell):
            curve = self.curves[cell, row.repeat]
            values = curve[y]
            if answers is not None:
                values = values[curve["communications"] <= 2 * answers]
            found[row.repeat] = float(values[-max(1, len(values) // 3) :].mean())
        return found

    def differences(self, cell: str, other: str, y: str) -> Series:
        """What a cell's late y is above another's, for every repeat that both have.

        Raises ConfigError if there is none.
        """
        found = above(self.late(cell, y), self.late(other, y))
        if not len(found):
            raise ConfigError(f"no repeat of both {cell!r} and {other!r}")
        return found


def above(high: PerRepeat, low: PerRepeat, least: float = 0.0, *, times: float = 1.0) -> Series:
    """high - times low - least, in every repeat that both have: equal seeds have equal arrivals."""
    return np.array([high[n] - times * low[n] - least for n in high if n in low])


def best_elsewhere(cells: Iterable[PerRepeat]) -> dict[int, float]:
    """Each repeat's value of the cell that is best on average in the other repeats.

    So no repeat's luck chooses its own cell. Empty with fewer than two repeats.
    """
    by_cell = list(cells)
    repeats = set[int].intersection(*map(set, by_cell)) if by_cell else set[int]()
    found = {}
    for n in sorted(repeats) if len(repeats) > 1 else ():
        best = max(by_cell, key=lambda of: mean(of[m] for m in repeats if m != n))
        found[n] = best[n]
    return found


def within(values: Iterable[PerRepeat], limit: float) -> list[Series]:
    """Margins of the claim that no two of the values differ by more than ``limit``."""
    return [above(a, b, -limit) for a, b in permutations(values, 2)]


def mean_of(values: PerRepeat) -> float:
    """The mean over the repeats. Raises TooShort if there are none."""
    return mean(values.values())


def falling(results: Results, cell: str) -> dict[int, float]:
    """How far each repeat's accuracy falls on average from one measurement to the next.

    Raises TooShort.
    """
    return {
        n: mean(max(0.0, float(a - b)) for a, b in pairwise(accuracy))
        for n, (_, accuracy) in results.measured(cell, "version", "accuracy").items()
    }


def no_claims(_results: Results) -> list[JudgedClaim]:
    """The claims of an experiment that tests none."""
    return []


@dataclass(frozen=True, slots=True)
class Experiment:
    """An experiment of a paper, and the paper's claims about it."""

    name: str
    title: str
    source: str
    base: KeyValues
    """configuration keys that all cells have"""
    cells: Sequence[Cell]
    repeats: int = LEAST_REPEATS
    """of each cell"""
    first: int = 0
    """number of the first repeat, unless the command names another"""
    metric: str = "accuracy"
    """one of the task's"""
    higher: bool = True
    """whether a higher metric is better"""
    compare: Of = "best"
    """which value is compared with the paper's number"""
    tolerance: float | None = None
    """from the paper's number; cells further away are listed"""
    points: int = 75
    """points of a stored curve, at most"""
    pictures: Sequence[Picture] = ()
    claims: Callable[[Results], Sequence[JudgedClaim]] = no_claims
    """may raise TooShort"""
    before: str = ""
    """why it has no cells yet, and the commands that give it some"""
    partly: bool = False
    """whether claims are judged before every cell has run"""
    notes: Sequence[str] = ()
    """sentences above the table: what was decided where the paper is silent"""
    grid: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """labels of cells by row and column, for a table in docs/algorithms.md"""
    answers: int | None = None
    """in that table, measurements after so many arrived updates do not count"""

    def sets(self, cell: Cell, repeat: int, scale: float) -> dict[str, object]:
        """All configuration keys of a run."""
        keys = dict(self.base)
        for key, value in cell.sets.items():
            table, _, tag = key.rpartition(".")
            if tag in ("kind", "name") and keys.get(key, value) != value:
                keys = {k: v for k, v in keys.items() if not k.startswith(f"{table}.")}
        keys |= {**cell.sets, "run.seed": repeat, "task.seed": repeat}
        for key in SCALED:
            if isinstance(value := keys.get(key), int) and value > 0:
                keys[key] = max(1, round(value / scale))
        return keys


def settings_of(sets: KeyValues) -> Settings:
    """The configuration with these keys. Raises ConfigError."""
    keys: KeyValues = {"updater.norm_factor": 0, **sets}  # the papers' rules have no such limit
    given = [f"{key}={inline_toml(value)}" for key, value in keys.items()]
    return load(Settings, path=None, environ={}, sets=given)


def inline_toml(value: object) -> str:
    """A value as inline TOML."""
    match value:
        case dict():
            return f"{{{', '.join(f'{key} = {inline_toml(one)}' for key, one in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(inline_toml, value))}]"
        case _:
            return json.dumps(value)


def catalogue() -> dict[str, Experiment]:
    """Every experiment by its name: the members of ``EXPERIMENTS`` in the modules beside this.

    Raises ConfigError if two have the same name.
    """
    found: dict[str, Experiment] = {}
    for module in pkgutil.iter_modules(experiments.__path__):
        if not module.ispkg:
            declared = importlib.import_module(f"{experiments.__name__}.{module.name}")
            for one in getattr(declared, "EXPERIMENTS", ()):
                if found.setdefault(one.name, one) is not one:
                    raise ConfigError(f"two experiments are named {one.name!r}: rename one")
    return found
