"""The table of devices, and who stands out in it."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import numpy as np
import pytest

from fedstream.history.devices import (
    OUTLIER,
    devices_of,
    mark_of_score,
    robust_scores,
    style_of_score,
)
from fedstream.history.index import columns_of
from fedstream.history.model_stats import MeasuredShares
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.jobs import PageJob
from fedstream.history.ui.question_pages import FormState, distances_page
from fedstream.history.ui.questions import Distances
from tests.fedstream.history.conftest import Page


def test_devices_by_hand(recorded: Path) -> None:
    table = devices_of(columns_of(recorded / "journal").updates)
    rows = {row.device: row.figures for row in table.rows()}
    assert list(rows) == list(range(10))
    assert all(row["used"] == 6 for row in rows.values())
    assert (rows[3]["refused"], rows[3]["refused_share"]) == (5, 5 / 11)
    assert (rows[7]["refused"], rows[0]["refused"]) == (1, 0)
    assert rows[3]["norm"] == rows[3]["largest"] == 50.0
    assert rows[0]["norm"] == pytest.approx(1.26)  # 1.01, 1.11, ... 1.51
    assert rows[0]["largest"] == 1.51
    assert rows[0]["bytes"] == 16.0  # four float32
    assert rows[9]["last"] == 60
    assert not {"cosine", "lost", "heard_s"} & rows[0].keys()  # nothing is known of these


def test_the_large_device_stands_out_and_no_other(recorded: Path) -> None:
    rows = devices_of(columns_of(recorded / "journal").updates).rows()
    assert {row.device for row in rows if "norm" in row.outliers} == {3}
    assert {row.device for row in rows if "loss" in row.outliers} == set()


def test_a_figures_colour_says_what_its_mark_says() -> None:
    scores = (None, 0.9, 1.1, -2.0, 3.6, -3.6)
    assert [style_of_score(one) for one in scores] == [
        "",
        "",
        "heat above1",
        "heat below2",
        "heat above3 outlier",
        "heat below3 outlier",
    ]
    assert [mark_of_score(one) for one in scores] == ["", "", "", "", "▲", "▼"]


def test_scores_are_robust() -> None:
    """One extreme value changes neither the median nor the deviation that others are judged by."""
    scores = robust_scores([1.0, 2.0, 3.0, 4.0, 1e9])
    assert scores[2] == 0.0
    assert scores[0] == pytest.approx(-2 / 1.4826)
    assert scores[4] > 1e8


def test_scores_where_most_are_the_same() -> None:
    scores = robust_scores([0.0] * 9 + [1.0])
    assert scores[0] == 0.0
    assert scores[9] == pytest.approx(1 / (1.2533 * 0.1))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_devices_that_hardly_differ_do_not_stand_out(sign: float) -> None:
    alike = [0.2826, 0.2827, 0.2828, 0.2829, 0.2830]
    for last, stands_out in ((0.2844, False), (0.2828 * 1.09, False), (0.2828 * 1.11, True)):
        scores = robust_scores([sign * value for value in (*alike, last)])
        assert bool(abs(scores[-1]) > OUTLIER) is stands_out
        assert all(np.abs(scores[:-1]) < 1)


def test_scores_of_what_is_missing_or_all_the_same() -> None:
    none, one, other = robust_scores([None, 2.0, 2.0])
    assert isnan(none)
    assert (one, other) == (0.0, 0.0)
    assert all(isnan(score) for score in robust_scores([None, None]))


def test_distances_are_shown_beside_what_else_there_was_at_their_version(recorded: Path) -> None:
    """Of a run that has gone on since."""
    run = RecordedRun(recorded)
    job = PageJob(Distances(20), "/distances?until=20")
    job.answer, job.seconds = MeasuredShares({}, 20), 1.0
    form = FormState({"until": "20"}, {}, job, None, "", "may", job.address, "")
    text = distances_page(run, form)
    run.close()
    cells = Page(text).cells
    width = cells.index("0")  # the first device's number follows the header
    at = [key for key, _, _ in devices_of(run.columns.updates, shares={}).columns].index("used")
    used = cells[width + at :: width]
    assert sum(map(int, used)) == 20
    assert "?sort=" not in text  # that is the table of the whole run
