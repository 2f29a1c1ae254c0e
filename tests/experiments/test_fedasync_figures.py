"""The claims about FedAsync's figures, on results made up so that the answer is known."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

import numpy as np
import pytest

from experiments.fedasync_figures import label
from experiments.reproduction import JudgedClaim, Points, Results, Row, Series, catalogue
from experiments.showing import judged

MNIST = catalogue()["fedasync-mnist"]
POINTS, REPEATS = 41, 5
VERSIONS = np.linspace(0.0, 2000.0, POINTS)
SPENT: Points = {"version": VERSIONS, "gradients": 12 * VERSIONS}
SAWTOOTH: Series = np.where(np.arange(POINTS) % 2, -0.002, 0.002)  # mean 0 from 1 on

# Accuracies with which every claim holds; the first pattern that fits a cell counts.
AS_CLAIMED = {
    "SGD, gamma 0.03": 0.920,
    "SGD, *": 0.915,
    "FedAvg, T rounds": 0.940,
    "FedAvg, gamma 0.01": 0.900,
    "FedAvg, *": 0.890,
    "Const, 0": 0.920,
    "Const, 4": 0.917,
    "Poly, 4": 0.918,
    "Const, 16": 0.897,
    "Poly, 16": 0.910,
    "Hinge, 16": 0.908,
    "Hinge (a = 4), 16": 0.910,
    "Const, 16, alpha *": 0.903,
    "Inverse sqrt, *": 0.930,
    "No decay, *": 0.850,
    "*": 0.900,
}
STEADY = ("SGD", "FedAvg", "Inverse sqrt", "Poly", "Const, 16, alpha")


def claims(
    changed: Mapping[str, float] = MappingProxyType({}), without: str = ""
) -> list[JudgedClaim]:
    """The claims where accuracies are as claimed, but for some; ``without``: a cell not run."""
    rows: list[Row] = []
    curves: dict[tuple[str, int], Points] = {}
    levels = {**changed, **AS_CLAIMED, **changed}  # what changed comes first
    for cell in (one.label for one in MNIST.cells if one.label != without):
        level = next(of for pattern, of in levels.items() if fnmatchcase(cell, pattern))
        values: Series = level + SAWTOOTH * (not cell.startswith(STEADY))
        for repeat in range(REPEATS):
            rows.append(
                Row(cell, repeat, 1.0, "", "finished", 1, 1, 1, 1.0, 2, 0, level, 1, level, 1.0)
            )
            curves[cell, repeat] = {**SPENT, "accuracy": values, "loss": 1 - values}
    found, why_not = judged(MNIST, Results(rows, curves, 1.0))
    assert not why_not
    return found


def failing(changed: dict[str, float]) -> list[str]:
    return [one.claim for one in claims(changed) if one.short == "did not hold"]


def test_every_claim_holds_where_all_is_as_claimed() -> None:
    """Each is judged by comparisons of its own: none is empty, none lacks a cell.

    The two texts contradict each other about the best function.
    """
    (hinge,) = [one.claim for one in claims() if one.short != "held"]
    assert "Hinge is the best" in hinge
    assert not any("Hinge is the best" in text for text in failing({"Hinge, 16": 0.911}))
    assert {f"{REPEATS} repeats" in one.verdict for one in claims()} == {True}


def test_claims_fail_where_their_cells_say_otherwise() -> None:
    (slow,) = [text for text in failing({"Const, 4": 0.914}) if "as fast as SGD" in text]
    assert "less than 0.005 below" in slow
    assert any("Poly with a = .5" in text for text in failing({"Linear, 16": 0.911}))
    assert any("similar performance" in text for text in failing({"Hinge, 16": 0.904}))
    assert any("not catastrophic" in text for text in failing({"Const, 16": 0.8}))
    assert any("Diminishing alpha" in text for text in failing({"Inverse sqrt, 16": 0.9}))
    assert any("end best of their grids" in text for text in failing({"FedAvg, gamma 0.1": 0.95}))


@pytest.mark.parametrize(
    ("cell", "waits"),
    [("Linear, 16", "performs best"), ("Const, 0", "not catastrophic"), ("Hinge, 8", "")],
)
def test_a_claim_waits_for_its_own_cells_only(cell: str, waits: str) -> None:
    waiting = [one for one in claims(without=cell) if one.seen == f"Not run yet: {cell}."]
    assert [waits in one.claim for one in waiting] == [True] * bool(waits)


def test_cells_that_would_be_equal_are_one() -> None:
    assert label("Poly", 0) == label("Hinge", 0) == label("Const", 0) == "Const, 0"
    assert label("Hinge", 4) == "Const, 4"
    assert label("Hinge", 8) == "Hinge, 8"
    assert label("Inverse sqrt", 0, 0.3) == "Inverse sqrt, 0, alpha 0.3"
