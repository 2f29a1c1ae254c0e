"""The page of all papers' experiments: what it tells of each, and that it is up to date."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from experiments.__main__ import ALGORITHMS, RESULTS
from experiments.page import PAGE, page, with_grids
from experiments.reproduction import (
    Cell,
    Experiment,
    JudgedClaim,
    Panel,
    Picture,
    Results,
    Row,
    catalogue,
)
from experiments.running import ABOUT, Call, Store
from experiments.showing import DIFFERENCES


def claims(results: Results) -> list[JudgedClaim]:
    high = results.values("high")
    return [
        JudgedClaim("High is above low.", [high - results.values("low")], "By .2."),
        JudgedClaim("High is below low.", [results.values("low") - high], "It is not."),
        JudgedClaim("High lasts.", [], "Not run."),
    ]


EXPERIMENT = Experiment(
    name="heights",
    title="Heights",
    source="A paper, table 1",
    base={"task.name": "digits"},
    cells=(Cell("high", {}, paper=0.75), Cell("low", {"solver.lr": 0.1}, paper=0.5)),
    tolerance=0.02,
    pictures=(Picture("curves.png", "Heights", (Panel("all", {"high": "high"}),)),),
    claims=claims,
)


def measure(folder: Path, repeats: int, *cells: str) -> None:
    """Store runs of ``high`` at .7 and ``low`` at .5, as two equal commands did."""
    store = Store(folder)
    store.folder.mkdir(parents=True)
    for repeat in range(repeats):
        for cell in cells:
            best = {"high": 0.7, "low": 0.5}[cell]
            row = Row(cell, repeat, 1.0, "", "finished", 1, 1, 1, 1.0, 2, 0, best, 1, best, 9.0)
            store.add(row, {"version": np.array([1.0]), "accuracy": np.array([best])})
    machine: dict[str, str | int] = {"processor": "A | B", "cores": 2, "torch": "2"}
    call = Call("repeat heights", "2026-11-29 02:00:00 UTC", 5, 1, 1, 45.0, machine)
    (folder / ABOUT).write_text(json.dumps({"calls": [asdict(call)] * 2}))


def test_claims_numbers_pictures_and_runs_are_on_the_page(tmp_path: Path) -> None:
    measure(tmp_path / "heights", 5, "high", "low")
    for file in ("curves.png", DIFFERENCES):
        (tmp_path / "heights" / file).touch()
    told = page({"heights": EXPERIMENT}, tmp_path).splitlines()
    contents = "| [Heights](#heights) | A paper, table 1 | full length, 5 repeats | 1 | 1 | 1 |"
    assert contents in told
    assert "| **held** (5 repeats) | High is above low. | By .2. |" in told
    assert "| **did not hold** (5 repeats) | High is below low. | It is not. |" in told
    assert "| **not tested** (no comparison) | High lasts. | Not run. |" in told
    assert "1 of 2 cells are within 0.02 of the paper's numbers (best version)." in told
    shown = [line for line in told if line.startswith("![")]
    assert shown == [f"![heights: {file}](heights/{file})" for file in ("curves.png", DIFFERENCES)]
    assert "| `repeat heights` | 2026-11-29 | 10 | 1:30 | 1 | A \\| B, 2 cores, torch 2 |" in told


def test_unfinished_and_own_experiments(tmp_path: Path) -> None:
    """What has not been run is named, and experiments that repeat no paper are left out."""
    measure(tmp_path / "part", 1, "high")
    own = Experiment(name="own", title="Own", source="this project's own", base={}, cells=())
    known = {"part": EXPERIMENT, "none": EXPERIMENT, "own": own}
    told = page(known, tmp_path)
    assert "Not judged: 1 cells were not run yet." in told
    assert "| not run | 0 | 0 | 0 |" in told
    assert "Not run." in told.split("## none")[1]
    assert "Own" not in told


def test_a_table_is_written_anew_between_its_marks(tmp_path: Path) -> None:
    """The best of a column is in bold; a cell that has not run says so."""
    measure(tmp_path / "heights", 2, "high", "low")
    grid = {"up": {"a": "high", "b": "high"}, "down": {"a": "low", "b": "none"}}
    known = {"heights": replace(EXPERIMENT, grid=grid)}
    text = "Before.\n\n<!-- heights -->\n\nold\n\n<!-- end -->\n\nAfter.\n"
    told = with_grids(text, known, tmp_path).splitlines()
    assert told[:2] == ["Before.", ""]
    assert told[2:-2] == [
        *("<!-- heights -->", ""),
        *("|  | a | b |", "| --- | --- | --- |"),
        "| up | **0.700 ± 0.000** | **0.700 ± 0.000** |",
        "| down | 0.500 ± 0.000 | not run |",
        *("", "<!-- end -->"),
    ]
    assert told[-2:] == ["", "After."]


def test_the_published_page_and_tables_are_up_to_date() -> None:
    """``python -m experiments --page`` writes both anew from the results that are stored."""
    known = catalogue()
    assert page(known, RESULTS) == (RESULTS / PAGE).read_text()
    assert with_grids(ALGORITHMS.read_text(), known, RESULTS) == ALGORITHMS.read_text()
