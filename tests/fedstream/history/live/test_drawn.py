"""Panels as HTML: plain, escaped, and quick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from time import thread_time

import pytest

from fedstream.core.records import Best, Failing
from fedstream.history.live.panels import (
    PANELS,
    curves_of,
    device_table,
    devices_html,
    headline_facts,
    headline_html,
    staleness_html,
)
from fedstream.history.live.snapshot import Snapshot
from tests.fedstream.history.live.snapshots import busy, crowd, ended, measurement, snapshot


def test_the_headline_has_progress_and_numbers() -> None:
    text = headline_html(busy())
    assert "version <strong>559</strong> of 1,000, 55.9 %" in text
    assert "5.8 versions/s, 1:16 left" in text
    assert "standstill" not in text
    assert "Stalled for 0:10 because no trainer is alive" in headline_html(
        replace(snapshot(head_time=snapshot().now - 10, trainers=0), made=busy().made)
    )


def test_the_headline_names_failing_devices() -> None:
    assert "failing and resting" not in headline_html(snapshot())
    text = headline_html(snapshot(failing={3: Failing(6, 1.0, "raised OSError")}))
    assert "device 3 failed 6 tasks in a row (raised OSError)" in text


def test_suspects_are_named_above_the_devices_table() -> None:
    """Most suspicions first; nothing is said if there are none."""
    assert "Suspects" not in devices_html(snapshot())
    text = devices_html(snapshot(suspects={7: 1, 3: 12}))
    assert "device 3 (12 times), device 7 (1 time)." in text


def test_foreign_text_is_escaped() -> None:
    script = "<script>alert(1)</script>"
    evil = snapshot(
        measured=(measurement(1, **{f"\u202e{script}": 1.0}),),
        failing={3: Failing(2, 1.0, script)},
    )
    text = headline_html(evil) + "".join(panel.html(evil) for panel in PANELS)
    assert "<script>alert" not in text
    assert "\u202e" not in text


def test_the_best_of_a_metric_is_on_the_side_of_its_goal() -> None:
    values = ((0, 3.0), (5, 1.0), (9, 2.0))
    seen = tuple(measurement(version, rmse=value, bits=value) for version, value in values)
    facts = dict(headline_facts(snapshot(measured=seen)))
    assert facts["best rmse"] == "1.0000 at 5"
    assert "best bits" not in facts
    declared = dict(headline_facts(snapshot(measured=seen, run_goal={"bits": "max"})))
    assert declared["best bits"] == "3.0000 at 0"


def test_the_headline_begins_with_the_main_metric_and_knows_its_best() -> None:
    values = {"bits": 8.0, "loss": 3.0, "rmse": 2.0}
    seen = (measurement(100, **values), measurement(105, **values))
    best = Best("rmse", 1.0, 40, "digest", None)  # measured before all that is remembered
    facts = headline_facts(snapshot(measured=seen, best=best))
    assert facts[:2] == [("test rmse", "2.0000 at 105"), ("best rmse", "1.0000 at 40")]
    stopping = snapshot(measured=seen, best=best, run_stop_metric="loss")
    assert headline_facts(stopping)[:2] == [
        ("test loss", "3.0000 at 105"),
        ("best loss", "3.0000 at 100"),
    ]


def test_metrics_are_drawn_over_versions_and_over_time() -> None:
    found = curves_of(busy())[:4]
    assert [one.title for one in found] == [
        "Test accuracy",
        "Test accuracy over time",
        "Test loss",
        "Test loss over time",
    ]
    assert all(one.x == sorted(one.x) for one in found)
    assert found[1].x[-1] == pytest.approx(560 / 6)


def test_staleness_lies_over_the_weights_that_were_given() -> None:
    ended = busy().ended.copy()
    ended["staleness"][0] = 1 << 40  # however late, there are few bars
    text = staleness_html(replace(busy(), ended=ended))
    assert "Staleness of updates, and the weight they were given" in text
    assert len(text) < 100_000


@pytest.mark.parametrize(
    "make", [lambda: busy(devices=400, trainers=200), crowd], ids=["busy", "crowd"]
)
def test_all_panels_together_are_drawn_quickly(make: Callable[[], Snapshot]) -> None:
    """They are drawn every second, for as long as somebody looks: 50 ms would be 5% of a core."""
    moment = make()
    [panel.html(moment) for panel in PANELS]  # templates are compiled once
    took = []
    for _ in range(5):
        began = thread_time()
        [panel.html(moment) for panel in PANELS]
        took.append(thread_time() - began)
    assert min(took) < 0.25


def test_the_device_that_stands_out_is_first_and_marked() -> None:
    table = device_table(busy())
    first, second, *_ = table.rows("")
    assert (first.device, len(table.devices)) == (3, 12)
    assert {"loss", "refused_share"} <= {*first.outliers}
    assert len(first.outliers) > len(second.outliers)


def test_any_column_sorts_both_ways_and_unknown_figures_come_last() -> None:
    rows = [{"device": n, "loss": loss} for n, loss in enumerate((2.0, nan, 1.0))]
    table = device_table(snapshot(ended=ended(rows)))
    assert [line.device for line in table.rows("loss")] == [2, 0, 1]
    assert [line.device for line in table.rows("-loss")] == [0, 2, 1]
    assert [line.device for line in table.rows("nonsense")] == [0, 1, 2]


def test_a_device_alone_is_compared_with_all() -> None:
    (line,) = device_table(busy()).rows(only=3)
    assert line.outliers
    assert device_table(busy()).rows(only=99) == []
