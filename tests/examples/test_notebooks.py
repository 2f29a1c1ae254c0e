"""The example notebooks run from their first cell to their last, and find what they tell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.process
NOTHING: Mapping[str, str] = {}


@pytest.fixture
def executed(tmp_path: Path, kernel_name: str) -> Callable[..., list[Any]]:
    """Runs a notebook, perhaps with other text in it: its cells with their output."""

    def run(name: str, shorter: Mapping[str, str] = NOTHING) -> list[Any]:
        book = nbformat.read(EXAMPLES / f"{name}.ipynb", 4)
        for text, other in shorter.items():
            assert any(text in cell.source for cell in book.cells), text
            for cell in book.cells:
                cell.source = cell.source.replace(text, other)
        where = {"metadata": {"path": str(tmp_path)}}
        NotebookClient(book, kernel_name=kernel_name, timeout=300, resources=where).execute()
        return list(book.cells)

    return run


def shown(cells: list[Any], source: str) -> str:
    """The plain text of what the one cell with this source showed or printed."""
    [cell] = [cell for cell in cells if cell.cell_type == "code" and source in cell.source]
    return "\n".join(
        output.text if output.output_type == "stream" else output.data["text/plain"]
        for output in cell.outputs
    )


def test_no_output_is_stored() -> None:
    books = [nbformat.read(file, 4) for file in sorted(EXAMPLES.glob("*.ipynb"))]
    cells = [cell for book in books for cell in book.cells if cell.cell_type == "code"]
    assert len(books) == 4
    assert not any(cell.outputs or cell.execution_count for cell in cells)


def test_first_run(executed: Callable[..., list[Any]]) -> None:
    cells = executed("first-run")
    assert "finished: version 100 reached" in shown(cells, "run = fedstream.run(")
    before, _, after = re.findall(r"'accuracy': ([\d.]+)", shown(cells, "module.load_state_dict"))
    assert float(before) < 0.8 < 0.9 < float(after)


def test_own_strategy(executed: Callable[..., list[Any]]) -> None:
    cells = executed("own-strategy")
    told = shown(cells, "fedstream.compare(")
    usual, mine = map(float, re.search(r"final accuracy +([\d.]+) +([\d.]+)", told).groups())  # type: ignore[union-attr]
    assert mine > usual
    assert "did you mean strategy.usual?" in shown(cells, "usal")


def test_poisoned_device(executed: Callable[..., list[Any]]) -> None:
    cells = executed("poisoned-device", {'"n": 50': '"n": 15'})
    lengths = shown(cells, "before[").splitlines()[2:]
    *others, (version, device, _, length, _) = (map(float, row.split()[1:]) for row in lengths)
    assert (version > 60, device) == (True, 3)
    assert length > 10 * max(list(row)[3] for row in others)
    assert re.search(r"^3 +norm too large +\d+$", shown(cells, "guarded ="), re.MULTILINE)


def test_compare_strategies(executed: Callable[..., list[Any]]) -> None:
    cells = executed(
        "compare-strategies", {"UPDATES = 200": "UPDATES = 40", ", 80, 120, 160, 200]": "]"}
    )
    final = re.search(r"final accuracy +(.*)", shown(cells, "fedstream.compare(runs)"))
    assert final is not None
    assert len(final[1].split()) == 5
    seconds = re.search(r"^seconds +([\d.]+) +([\d.]+)", shown(cells, "going_on ="), re.MULTILINE)
    assert seconds is not None
    assert float(seconds[1]) > 2 * float(seconds[2])  # FedAvg waits for the slow devices
