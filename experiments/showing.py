"""An experiment's results as pictures, and as a table beside the paper's numbers."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    Of,
    Panel,
    Picture,
    Results,
    Series,
    SweepPanel,
    TooShort,
)
from fedstream.history.pictures import STYLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    Styles = Mapping[str, dict[str, Any]]  # of a picture's lines, by name

TABLE, DIFFERENCES = "table.md", "differences.png"
COLOURS = ("#1f5fa8", "#d9772b", "#3a8f5c", "#8a4fa3", "#7a5a3a", "#c03a6b", "#5a6b7a")
_FAINT, _BOUND = "#888888", "#b03030"
_DASHES = ("-", "--", "-.", ":")


def show(experiment: Experiment, results: Results, folder: Path) -> None:
    """Write table.md and the pictures; an experiment's picture once all of its cells have run."""
    (folder / TABLE).write_text(table(experiment, results))
    if any(cell.paper is not None and results.of(cell.label) for cell in experiment.cells):
        differences(experiment, results, folder / DIFFERENCES)
    for picture in experiment.pictures:
        if all(results.of(cell) for cell in picture.cells):
            draw(experiment, results, picture, folder / picture.file)


def missing(experiment: Experiment, results: Results) -> list[str]:
    """Cells that have not been run yet."""
    return [cell.label for cell in experiment.cells if not results.of(cell.label)]


def beyond(experiment: Experiment, results: Results) -> list[Cell]:
    """Cells further from the paper's number than the tolerance; none unless at full length."""
    return [
        cell
        for cell in experiment.cells
        if results.scale == 1
        and experiment.tolerance is not None
        and cell.paper is not None
        and results.of(cell.label)
        and abs(results.mean(cell.label, experiment.compare) - cell.paper) > experiment.tolerance
    ]


def length(experiment: Experiment, results: Results) -> str:
    """Scale and repeats, as printed on every picture."""
    counts = sorted({len(found) for c in experiment.cells if (found := results.of(c.label))})
    repeats = " or ".join(map(str, counts)) + (" repeat" if counts == [1] else " repeats")
    if results.scale == 1:
        return f"full length, {repeats}"
    return f"T divided by {results.scale:g}, {repeats}"


def title(experiment: Experiment, results: Results) -> str:
    """The experiment's title, with the length where it isn't the paper's."""
    return experiment.title + (f", T / {results.scale:g}" if results.scale > 1 else "")


# the table


def table(experiment: Experiment, results: Results) -> str:
    """The results in Markdown: every cell, then every claim."""
    of = experiment.metric
    about = (
        f"{experiment.source}. Here: {length(experiment, results)}; `{results.command}`; "
        f"{_program(results)}; machine, date and configurations are in about.json."
    )
    how = (
        f"{of[0].upper()}{of[1:]}, mean ± standard deviation over the repeats. The best is that of "
        "all measured versions, so it looks at the test set; the last is the last version's."
    )
    columns = ["cell", "best", "last", "repeats"]
    if any(cell.paper is not None for cell in experiment.cells):
        how += f" The difference is the {experiment.compare} less the paper's number."
        columns = ["cell", "paper", "best", "last", "difference", "repeats"]
    lines = [
        f"# {title(experiment, results)}",
        "",
        about,
        "",
        *(f"* {note}" for note in experiment.notes),
        *([""] if experiment.notes else []),
        how,
        "",
        table_row(*columns),
        table_row(*["---"] * len(columns)),
    ]
    far = {cell.label for cell in beyond(experiment, results)}
    for cell in experiment.cells:
        runs = results.of(cell.label)
        shown = {"cell": cell.label, "best": "not run", "repeats": str(len(runs))}
        if runs:
            shown |= {key: spread(results, cell.label, key) for key in ("best", "last")}
            if failed := sum(run.state != "finished" for run in runs):
                shown["repeats"] += f" ({failed} diverged)"
        if cell.paper is not None:
            shown["paper"] = _figure(cell.paper)
            if runs:
                more = f"{results.mean(cell.label, experiment.compare) - cell.paper:+.4f}"
                shown["difference"] = f"**{more}**" if cell.label in far else more
        lines.append(table_row(*(shown.get(column, "") for column in columns)))
    lines += ["", *_agreement(experiment, results, far), *_beside(experiment, results)]
    lines += _claims(experiment, results)
    return "\n".join(lines).rstrip() + "\n"


def table_row(*cells: object) -> str:
    """A line of a table in Markdown."""
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _program(results: Results) -> str:
    """The commits with which the runs were made."""
    runs = Counter(row.commit for row in results.rows)
    named = [
        commit.removesuffix("+")
        + " with changes" * commit.endswith("+")
        + f" ({n} {'run' if n == 1 else 'runs'})" * (len(runs) > 1)
        for commit, n in runs.most_common()
        if commit
    ]
    told = [f"commit {', '.join(named)}"] if named else []
    if runs[""]:
        told.append(f"{runs['']} runs of a commit that was not recorded")
    return " and ".join(told) or "no runs"


def _agreement(experiment: Experiment, results: Results, far: set[str]) -> list[str]:
    """How many cells are within the tolerance, and which are not."""
    known = [c for c in experiment.cells if c.paper is not None and results.of(c.label)]
    if experiment.tolerance is None or not known or results.scale != 1:
        return []
    near = len(known) - len(far)
    said = f"Within {experiment.tolerance:g} of the paper: {near} of {len(known)} cells"
    return [f"{said}{'; not: ' + '; '.join(sorted(far)) if far else ''}.", ""]


def _beside(experiment: Experiment, results: Results) -> list[str]:
    """The cells that are compared with others, repeat by repeat; nothing if there are none."""
    of = experiment.metric
    pairs = [
        (cell, cell.beside)
        for cell in experiment.cells
        if cell.beside is not None and results.of(cell.label) and results.of(cell.beside)
    ]
    if not pairs:
        return []
    found = [
        table_row(
            cell.label,
            mean_and_deviation(list(results.late(cell.label, of).values())),
            other,
            mean_and_deviation(list(results.late(other, of).values())),
            mean_and_deviation(results.differences(cell.label, other, of), sign="+"),
        )
        for cell, other in pairs
    ]
    said = (
        f"{of[0].upper()}{of[1:]} over the last third of the measurements, mean ± standard "
        "deviation over the repeats. Differences are between repeats of the same number."
    )
    return [
        "## Repeat by repeat",
        "",
        said,
        "",
        "| cell | late | beside | late | difference |",
        "|---|---|---|---|---|",
        *found,
        "",
    ]


def judged(experiment: Experiment, results: Results) -> tuple[list[JudgedClaim], str]:
    """The claims; or none, and why none is judged."""
    if (absent := missing(experiment, results)) and not experiment.partly:
        return [], f"Not judged: {len(absent)} cells were not run yet."
    try:
        return list(experiment.claims(results)), ""
    except TooShort:
        return [], f"Not judged: at T / {results.scale:g} the runs are too short."


def _claims(experiment: Experiment, results: Results) -> list[str]:
    claims, why_not = judged(experiment, results)
    if why_not:
        return ["## Claims", "", why_not]
    if not claims:
        return []
    scaled = (
        [f"At T / {results.scale:g} a verdict is of the run's beginning, not of the paper.", ""]
        if results.scale > 1
        else []
    )
    said = (f"* {c.verdict}: {c.claim} {c.seen}" for c in claims)
    return ["## Claims", "", *scaled, *said]


def spread(results: Results, cell: str, of: Of) -> str:
    """Mean and deviation."""
    mean, deviation = results.mean(cell, of), results.deviation(cell, of)
    return _figure(mean) + ("" if math.isnan(deviation) else f" ± {_figure(deviation)}")


def mean_and_deviation(
    values: Sequence[float] | Series, *, sign: Literal["", "+"] = "", places: int = 4
) -> str:
    """Mean and deviation of some values; only the mean of a single one.

    ``sign``: '+' for differences.
    """
    deviation = f" ± {np.std(values, ddof=1):.{places}f}" if len(values) > 1 else ""
    mean = round(float(np.mean(values)), places) + 0.0  # which turns -0.0 into 0.0
    return f"{mean:{sign}.{places}f}{deviation}"


def _figure(value: float) -> str:
    """A share to four decimal places, or a perplexity to two."""
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


# pictures


def draw(experiment: Experiment, results: Results, picture: Picture, path: Path) -> None:
    """Draw a picture as PNG, 960 pixels wide."""
    # Figure rather than pyplot: no global state, no display, half the import.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    names = dict.fromkeys(name for panel in picture.panels for name in panel.lines)
    styles = {
        name: {"color": COLOURS[n % len(COLOURS)], "ls": _DASHES[n % len(_DASHES)], "lw": 1.3}
        for n, name in enumerate(names)
    }
    columns = min(picture.columns, len(picture.panels))
    rows = -(-len(picture.panels) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(8.0, 3.1 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, panel in zip(grid, picture.panels, strict=False):
            if isinstance(panel, Panel):
                _curves(axes, results, panel, styles)
            else:
                _sweep(axes, results, panel, styles)
        for axes in grid[len(picture.panels) :]:
            axes.set_axis_off()
        below = f"{length(experiment, results)}: mean and deviation"
        figure.suptitle(f"{picture.title}\n{below}", x=0.01, ha="left", fontsize=11)
        handles: dict[str, Artist] = {}
        for axes in grid:
            shown, labels = axes.get_legend_handles_labels()
            handles |= dict(zip(labels, shown, strict=True))
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower left",
            ncols=min(4, len(handles)),
        )
        # No metadata: the same results give the same bytes.
        figure.savefig(path, dpi=120, metadata={"Software": None})


def _curves(axes: Axes, results: Results, panel: Panel, styles: Styles) -> None:
    for name, cell in panel.lines.items():
        x, mean, deviation = results.curve(cell, panel.x, panel.y)
        colour = styles[name]["color"]
        axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, lw=0)
        axes.plot(x, mean, label=name, **styles[name])
    axes.set(title=panel.title, xlabel=panel.xlabel or panel.x, ylabel=panel.ylabel or panel.y)
    if panel.log:
        axes.set_yscale("log")
    axes.set_xlim(*panel.xlim)
    axes.set_ylim(*panel.ylim)


def _sweep(axes: Axes, results: Results, sweep: SweepPanel, styles: Styles) -> None:
    for name, cells in sweep.lines.items():
        x = list(cells)
        mean = [results.mean(cell, sweep.of) for cell in cells.values()]
        deviation = np.nan_to_num([results.deviation(cell, sweep.of) for cell in cells.values()])
        axes.errorbar(x, mean, deviation, marker="o", ms=3, capsize=2, label=name, **styles[name])
    axes.set(title=sweep.title, xlabel=sweep.xlabel, ylabel=sweep.ylabel)


def differences(experiment: Experiment, results: Results, path: Path) -> None:
    """Draw every cell's difference from the paper's number, its deviation, and the tolerance."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    cells = [c for c in experiment.cells if c.paper is not None and results.of(c.label)]
    of = experiment.compare
    with rc_context(STYLE):
        figure = Figure(figsize=(8.0, 0.22 * len(cells) + 1.6), layout="constrained")
        axes = figure.subplots()
        for y, cell in enumerate(cells):
            paper = cell.paper or 0.0
            deviation = float(np.nan_to_num(results.deviation(cell.label, of)))
            axes.errorbar(
                results.mean(cell.label, of) - paper,
                y,
                xerr=deviation,
                color=COLOURS[0],
                marker="o",
                ms=4,
                capsize=2,
                lw=1.1,
            )
            axes.plot(results.mean(cell.label, "last") - paper, y, "x", color=COLOURS[1], ms=5)
        axes.axvline(0, color=_FAINT, lw=1)
        if experiment.tolerance is not None:
            for edge in (-experiment.tolerance, experiment.tolerance):
                axes.axvline(edge, color=_BOUND, lw=1, ls="--")
        axes.set_yticks(range(len(cells)), [cell.label for cell in cells])
        axes.set_ylim(len(cells) - 0.4, -0.6)
        axes.set_xlabel(
            f"{experiment.metric} less the paper's: {of} (dot, ± deviation), last (cross)"
        )
        axes.grid(visible=False, axis="y")
        figure.suptitle(
            f"{experiment.title}\n{length(experiment, results)}", x=0.01, ha="left", fontsize=11
        )
        figure.savefig(path, dpi=120, metadata={"Software": None})
