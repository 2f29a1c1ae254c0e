"""The example tasks learn, by the commands that they and their page give."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

import pytest

import fedstream as api
from tests.fedstream.cli.test_cli import fedstream

ROOT = Path(__file__).parents[2]
SHORTER = (
    "--versions",
    "60",
    "--set",
    "simulation.threads=1",
    "--set",
    "simulation.evaluate_every=60",
)


def command(name: str) -> list[str]:
    """The words of the command in an example's docstring, which the page has too."""
    program = ast.parse((ROOT / "examples" / f"{name}.py").read_text())
    said = shlex.split((ast.get_docstring(program) or "").partition("\n\n")[2])
    page = (ROOT / "docs" / "examples.md").read_text()
    assert said in [
        shlex.split(line) for line in page.splitlines() if line.startswith("fedstream ")
    ]
    return said


@pytest.mark.parametrize(
    ("name", "metric", "first", "last"),
    # Bounds for seeds 0 to 4, whose worst last values are 0.965, 61.6, 0.914, 0.60 and 0.89.
    [
        ("text_padding", "accuracy", 0.7, 0.9),
        ("regression", "test_rmse", 100.0, 70.0),  # the mean of all patients has 81
        ("segmentation", "test_mean_iou", 0.5, 0.8),
        ("gan", "test_distance", 3.0, 1.2),
        ("augmentation", "accuracy", 0.3, 0.8),
    ],
)
def test_example_learns(
    name: str,
    metric: str,
    first: float,
    last: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    _, *arguments = command(name)
    out = tmp_path / "run"
    assert fedstream(*arguments, *SHORTER, "--out", str(out)) == 0
    measured = api.open(out).history()[metric].dropna()
    before, after = measured.iloc[0], measured.iloc[-1]
    assert before < first < last < after or before > first > last > after
