"""What an experiment of a paper is: its cells, the paper's numbers, pictures, and claims.

An experiment is declared in a module beside this one, as a member of its ``EXPERIMENTS``, and is
found by its name: ``fedstream reproduce NAME``. A declaration is configuration and claims; running
(:mod:`experiments.running`), tables and pictures (:mod:`experiments.showing`) are common to all.

    BASE = {"task.name": "mnist", "strategy.name": "afa-cd", "run.versions": 150}

    def claims(results: Results) -> list[Claim]:
        slow, fast = results.mean("gamma = .1"), results.mean("gamma = .5")
        return [Claim("A larger step is better.", fast > slow, f"{fast:.4f} after {slow:.4f}.")]

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
that arrivals, minibatches and the partition are all drawn anew. Keys are those of the
configuration, dotted; a cell's win over the base's, and one that names another ``kind`` or ``name``
drops what the base said of that table, as in configuration files. Nothing comes from the
environment but the folder of the data. No update is refused for being larger than is usual
(``updater.norm_factor`` is 0): the papers' rules take whatever devices send.

At scale S every key in ``SCALED`` is divided by S: T, the version at which alpha decays (so that it
stays at .4 T), and how often is measured. Everything else stays as it is.

What there is of each run: one :class:`Row` of results.csv, and its curve in curves.csv.
"""

from __future__ import annotations

import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream import experiments
from fedstream.broker.errors import ConfigError
from fedstream.config import Settings
from fedstream.runtime.config import load

Vector: TypeAlias = npt.NDArray[np.float64]
Sets: TypeAlias = Mapping[str, object]
Of = Literal["best", "last"]

SCALED = ("run.versions", "strategy.alpha_schedule.at", "simulation.evaluate_every")


@dataclass(frozen=True, slots=True)
class Cell:
    """A configuration, and what the paper reports of it."""

    label: str
    """in tables, and its name in the results"""
    sets: Sets
    """configuration keys beyond the experiment's base"""
    paper: float | None = None
    repeats: int | None = None
    """where it needs another number than the experiment's"""


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves: the mean over the repeats, and its deviation as a band."""

    title: str
    lines: Mapping[str, str]
    """cells' labels by their names in the legend"""
    x: str = "version"
    """a column of curves.csv"""
    y: str = "accuracy"
    """a column of curves.csv"""
    xlabel: str = ""
    ylabel: str = ""
    ylim: tuple[float | None, float | None] = (None, None)
    xlim: tuple[float | None, float | None] = (None, None)
    log: bool = False


@dataclass(frozen=True, slots=True)
class Sweep:
    """What cells came to, against a number that sets them apart."""

    title: str
    lines: Mapping[str, Mapping[float, str]]
    """for each name in the legend: cells' labels by x"""
    of: Of = "last"
    xlabel: str = ""
    ylabel: str = ""
    ylim: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels in a grid; scale and repeats are written below."""

    file: str
    title: str
    panels: Sequence[Panel | Sweep]
    columns: int = 2


@dataclass(frozen=True, slots=True)
class Claim:
    """What a paper says, whether it held (None: not tested at this scale), and what was seen."""

    claim: str
    held: bool | None
    seen: str
    """one sentence, with its figures"""

    @property
    def verdict(self) -> str:
        """In words."""
        if self.held is None:
            return "not tested at this scale"
        return "held" if self.held else "did not hold"


@dataclass(frozen=True, slots=True)
class Row:
    """What a run came to: a row of results.csv. Best and last are of the experiment's metric."""

    cell: str
    repeat: int
    scale: float
    configuration: str
    """digest of the keys that were set: rows of another configuration are not taken for it"""
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
    """of the machine, without the loading of data"""
    commit: str = ""
    """of the program, ``+`` if there was more in it than that; nothing where it is not known"""


Points: TypeAlias = dict[str, Vector]
"""A curve: by column of curves.csv, a value for every version that was kept; NaN: not measured."""


class TooShort(Exception):
    """A claim can't be judged: the runs are so short that there is nothing to take a mean of."""


def mean(values: Iterable[float]) -> float:
    """Their mean. Raises TooShort if there are none."""
    found = list(values)
    if not found:
        raise TooShort
    return math.fsum(found) / len(found)


class Results:
    """What there is of an experiment."""

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
        """The last one that ran something."""

    def of(self, cell: str) -> list[Row]:
        """A cell's runs."""
        return [row for row in self.rows if row.cell == cell]

    def values(self, cell: str, of: Of = "best") -> Vector:
        """A number of every repeat. Raises ConfigError if there is none."""
        found = [row.best if of == "best" else row.last for row in self.of(cell)]
        if not found:
            raise ConfigError(f"there are no results of the cell {cell!r}")
        return np.array(found)

    def mean(self, cell: str, of: Of = "best") -> float:
        """Over the repeats."""
        return float(self.values(cell, of).mean())

    def deviation(self, cell: str, of: Of = "best") -> float:
        """The standard deviation over the repeats (of a sample); NaN for one."""
        values = self.values(cell, of)
        return float(values.std(ddof=1)) if len(values) > 1 else float("nan")

    def curve(self, cell: str, x: str, y: str) -> tuple[Vector, Vector, Vector]:
        """(x, mean of y, deviation of y) at every version that was kept."""
        found = [self.curves[cell, row.repeat] for row in self.of(cell)]
        if not found:
            raise ConfigError(f"there is no curve of the cell {cell!r}")
        if y not in found[0] or x not in found[0]:
            raise ConfigError(f"no column {x!r} or {y!r}; there are {', '.join(found[0])}")
        size = min(len(curve[y]) for curve in found)  # one that diverged is shorter
        xs, ys = (np.array([curve[name][:size] for curve in found]) for name in (x, y))
        kept = ~np.isnan(ys).any(axis=0)
        return xs.mean(axis=0)[kept], ys.mean(axis=0)[kept], ys.std(axis=0)[kept]

    def at(self, cell: str, x: str, value: float, y: str) -> float:
        """The mean curve's y where x is ``value``, between two kept versions linearly."""
        xs, ys, _ = self.curve(cell, x, y)
        return float(np.interp(value, xs, ys))


def falling(results: Results, cell: str) -> float:
    """How far a cell's accuracy falls from one measurement to the next, in the mean.

    Raises TooShort.
    """
    _, accuracy, _ = results.curve(cell, "version", "accuracy")
    return mean(max(0.0, float(a - b)) for a, b in pairwise(accuracy))


def judged(
    judge: Callable[[Callable[[str], float]], bool],
    over: Callable[[str], float],
    end: Callable[[str], float],
) -> tuple[bool, str]:
    """(whether a claim holds both over the run and at the end, where it does if only in one).

    ``over`` and ``end`` give a cell's number, ``judge`` decides by either.
    """
    held = {"over the run": judge(over), "at the end": judge(end)}
    if len(set(held.values())) == 1:
        return held["at the end"], ""
    there, elsewhere = sorted(held, key=lambda where: not held[where])
    return False, f"It holds {there}, and not {elsewhere}. "


def no_claims(_results: Results) -> list[Claim]:
    """For an experiment that tests none."""
    return []


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a paper did, and what it says of it."""

    name: str
    title: str
    source: str
    base: Sets
    """configuration keys that all cells have"""
    cells: Sequence[Cell]
    repeats: int = 3
    metric: str = "accuracy"
    """one of the task's"""
    higher: bool = True
    """is better"""
    compare: Of = "best"
    """which is set beside the paper's number"""
    tolerance: float | None = None
    """A cell further than this from the paper's number is named."""
    points: int = 75
    """of a curve in curves.csv, at most"""
    pictures: Sequence[Picture] = ()
    claims: Callable[[Results], Sequence[Claim]] = no_claims
    """may raise TooShort"""
    notes: Sequence[str] = ()
    """sentences above the table: what was decided where the paper is silent"""

    def repeats_of(self, cell: Cell) -> int:
        """How often it is run."""
        return cell.repeats or self.repeats

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


def settings_of(sets: Sets) -> Settings:
    """The configuration that has these keys. Raises ConfigError."""
    keys: Sets = {"updater.norm_factor": 0, **sets}  # the papers have no such rule
    given = [f"{key}={_toml(value)}" for key, value in keys.items()]
    return load(Settings, path=None, environ={}, sets=given)


def _toml(value: object) -> str:
    """A value as it stands in a line of TOML."""
    match value:
        case dict():
            return f"{{{', '.join(f'{key} = {_toml(one)}' for key, one in value.items())}}}"
        case list() | tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case _:
            return json.dumps(value)


def catalogue() -> dict[str, Experiment]:
    """Every experiment by its name: the members of ``EXPERIMENTS`` in the modules beside this."""
    found: dict[str, Experiment] = {}
    for module in pkgutil.iter_modules(experiments.__path__):
        if not module.ispkg:
            declared = importlib.import_module(f"{experiments.__name__}.{module.name}")
            found |= {one.name: one for one in getattr(declared, "EXPERIMENTS", ())}
    return found
