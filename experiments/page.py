"""Writes the stored results of all experiments as pages: ``python -m experiments --page``.

The page of the papers' experiments has every claim beside its verdict, its pictures and its runs.
docs/algorithms.md has the grids of the project's own experiments.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reproduction import Experiment, JudgedClaim, Results
from experiments.running import ABOUT, Store
from experiments.showing import (
    DIFFERENCES,
    TABLE,
    beyond,
    judged,
    length,
    mean_and_deviation,
    table_row,
    title,
)
from fedstream.history.display import duration

PAGE = "README.md"
OWN = "this project's own"  # sources of experiments that repeat no paper
_VERDICTS = ("held", "did not hold", "not tested")

_ABOUT = """\
# The papers' claims, and what was measured

`python -m experiments --page` writes this page from the results in these folders. A claim *held* or
*did not hold* where at least five repeats decide it by more than two standard errors, else it is
*not tested*: [the rule](../README.md#results). The theorems are in [theory](../theory/README.md).

Numbers to compare with: AFL's tables give the accuracy of every cell, and `differences.png` shows
what was measured less the paper's number. The figures' values are not known here, as the texts that
were read lack the pictures. So FedAsync's experiments, which are all figures, and AFL's figures are
judged by what the texts say about them.
"""


def page(known: Mapping[str, Experiment], folder: Path) -> str:
    """The page in Markdown. ``folder``: where each experiment has a folder of results."""
    shown = {
        name: (experiment, Store(folder / name).results())
        for name, experiment in known.items()
        if not experiment.source.startswith(OWN)
    }
    contents = [
        "| experiment | source | length | held | did not hold | not tested |",
        "|---|---|---|---|---|---|",
    ]
    parts = []
    for name, (experiment, results) in shown.items():
        claims, why_not = judged(experiment, results)
        counts = Counter(claim.short for claim in claims)
        contents.append(
            table_row(
                f"[{experiment.title}](#{name})",
                experiment.source,
                length(experiment, results) if results.rows else "not run",
                *(counts[verdict] for verdict in _VERDICTS),
            )
        )
        parts += ["", *_part(name, experiment, results, claims, why_not, folder)]
    return "\n".join((_ABOUT, *contents, *parts)) + "\n"


def with_grids(text: str, known: Mapping[str, Experiment], folder: Path) -> str:
    """The text with each table between ``<!-- NAME -->`` and ``<!-- end -->`` written anew.

    NAME is an experiment with a grid. Raises KeyError for any other name.
    """

    def anew(found: re.Match[str]) -> str:
        name = found[1]
        table = _grid(known[name], Store(folder / name).results())
        return "\n".join((f"<!-- {name} -->", "", *table, "", "<!-- end -->"))

    return re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", anew, text, flags=re.DOTALL)


def _grid(experiment: Experiment, results: Results) -> list[str]:
    """Accuracy in the last third of a run, by row and column; the best of a column in bold."""
    late = {
        row: {
            column: [*results.late(label, experiment.metric, experiment.answers).values()]
            for column, label in cells.items()
        }
        for row, cells in experiment.grid.items()
    }
    columns = list(next(iter(late.values())))
    best = {
        column: max(
            (row for row in late if late[row][column]),
            key=lambda row: float(np.mean(late[row][column])),
            default=None,
        )
        for column in columns
    }
    lines = [table_row("", *columns), table_row(*["---"] * (1 + len(columns)))]
    for row, cells in late.items():
        shown = [mean_and_deviation(cells[c], places=3) if cells[c] else "not run" for c in columns]
        bold = [best[c] == row for c in columns]
        lines.append(
            table_row(
                row, *(f"**{cell}**" if b else cell for cell, b in zip(shown, bold, strict=True))
            )
        )
    return lines


def _part(
    name: str,
    experiment: Experiment,
    results: Results,
    claims: list[JudgedClaim],
    why_not: str,
    folder: Path,
) -> list[str]:
    """An experiment: its claims, pictures and runs."""
    lines = [f"## {name}", "", f"{title(experiment, results)}: [every cell]({name}/{TABLE})."]
    numbered = [c for c in experiment.cells if c.paper is not None and results.of(c.label)]
    if numbered and experiment.tolerance is not None and results.scale == 1:
        near = len(numbered) - len(beyond(experiment, results))
        lines.append(
            f"{near} of {len(numbered)} cells are within {experiment.tolerance:g} of the paper's "
            f"numbers ({experiment.compare} version)."
        )
    if results.scale > 1:
        lines.append(f"At T / {results.scale:g}, a verdict is of the run's beginning.")
    lines.append("")
    if claims:
        lines += ["| verdict | claim | measured |", "|---|---|---|"]
        lines += [table_row(claim.verdict, claim.claim, claim.seen) for claim in claims]
    else:
        lines.append(why_not)
    files = [picture.file for picture in experiment.pictures] + [DIFFERENCES]
    pictures = [file for file in files if (folder / name / file).is_file()]
    lines += ["", *(f"![{name}: {file}]({name}/{file})" for file in pictures)]
    return [*lines, "", *_runs(folder / name / ABOUT)]


def _runs(about: Path) -> list[str]:
    """The commands that ran something, with their time and machine; equal ones are one line."""
    if not about.is_file():
        return ["Not run."]
    calls: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for call in json.loads(about.read_text())["calls"]:
        of = call["machine"]
        machine = f"{of['processor']}, {of['cores']} cores, torch {of['torch']}"
        calls.setdefault((call["command"], machine), []).append(call)
    lines = ["| command | from | runs | time | processes | machine |", "|---|---|---|---|---|---|"]
    for (command, machine), found in calls.items():
        runs, seconds = (sum(call[key] for call in found) for key in ("runs", "seconds"))
        first = found[0]
        lines.append(
            table_row(
                f"`{command}`",
                first["date"][:10],
                runs,
                duration(seconds),
                first["processes"],
                machine,
            )
        )
    return lines
