"""Panels as HTML: plain, escaped, and quick."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import pytest

from fedstream.broker.records import Failing
from fedstream.history.live.panel import LivePanel
from fedstream.history.live.panels import PANELS, headline
from fedstream.history.live.panels.curves import of_metrics, of_pace, of_weights
from fedstream.history.live.panels.drawn import (
    device_html,
    devices_html,
    end_counts,
    headline_facts,
)
from fedstream.history.live.scene import Scene, SeenMetrics, SeenPushes
from fedstream.settings.config import Settings
from tests.fedstream.history.conftest import Page
from tests.fedstream.history.live.scenes import NOW, busy, crowd, scene, worker


@pytest.mark.parametrize("panel", PANELS, ids=[panel.name for panel in PANELS])
def test_a_panel_needs_no_script_and_no_style(panel: LivePanel) -> None:
    for moment in (busy(), scene()):
        text = panel.html(moment)
        assert Page(text).inline == []
        assert re.search(r">[^<]*\w[^<]*<", text)  # it says something, even if there is nothing


def test_the_headline_has_progress_and_numbers() -> None:
    text = headline(busy())
    assert "version <strong>559</strong> of 1,000, 55.9 %" in text
    assert "5.8 versions/s, 1:16 left" in text
    assert "standstill" not in text
    assert "Stalled for 0:10 because no trainer is alive" in headline(
        replace(scene(head_time=scene().now - 10, trainers=0), made=busy().made)
    )


def test_the_headline_names_failing_devices() -> None:
    assert "failing and resting" not in headline(scene())
    text = headline(scene(failing={3: Failing(6, 1.0, "raised OSError")}))
    assert "device 3 failed 6 tasks in a row (raised OSError)" in text


def test_foreign_text_is_escaped() -> None:
    script = "<script>alert(1)</script>"
    evil = scene(workers=(worker(script, host="\u202eb"),), failing={3: Failing(2, 1.0, script)})
    text = "".join(panel.html(evil) for panel in PANELS)
    assert "<script>alert" not in text
    assert "\u202e" not in text


def test_outcomes_add_up_to_all_tasks() -> None:
    moment = busy()
    assert sum(one.count for one in end_counts(moment)) == moment.tally.issued
    rows = [(one.outcome, one.reason, one.count) for one in end_counts(moment)]
    assert rows == [
        ("applied", "", 559), ("refused", "not finite", 30), ("given up", "timed out", 10),
        ("dead", "unreadable", 1), ("open", "", 12),
    ]  # fmt: skip


def test_the_best_of_a_metric_is_on_the_side_of_its_goal() -> None:
    values = ((0, 3.0), (5, 1.0), (9, 2.0))
    seen = tuple(
        SeenMetrics(version, NOW, {"rmse": value, "bits": value}) for version, value in values
    )
    facts = dict(headline_facts(scene(measured=seen)))
    assert facts["best rmse"] == "1.0000 at 5"
    assert "best bits" not in facts
    declared = dict(headline_facts(scene(measured=seen, run_goal={"bits": "max"})))
    assert declared["best bits"] == "3.0000 at 0"


def test_metrics_are_drawn_over_versions_and_over_time() -> None:
    found = of_metrics(busy())
    assert [one.title for one in found] == [
        "Test accuracy over versions", "Test accuracy over time",
        "Test loss over versions", "Test loss over time",
    ]  # fmt: skip
    assert all(one.x == sorted(one.x) for one in found)
    assert found[1].x[-1] == pytest.approx(560 / 6)


def test_pace_counts_every_update_of_whole_slices() -> None:
    pace, *_ = of_pace(busy())
    width = pace.x[1] - pace.x[0]
    total = sum(value or 0 for value in pace.series[0].values) * width
    assert total == pytest.approx(len(busy().made), rel=0.05)


def test_weights_lie_over_the_histogram() -> None:
    chart, rule = of_weights(busy())
    updates, by_rule, given = chart.series
    assert sum(value or 0 for value in updates.values) == sum(busy().ended["outcome"] == 0)
    assert by_rule.values[0] == pytest.approx(0.4)
    assert given.values[0] == pytest.approx(0.4)
    assert rule.notes == ()


def test_a_rule_is_asked_as_often_however_late_an_update_is() -> None:
    ended = busy().ended.copy()
    ended["staleness"][0] = 1 << 40
    chart, rule = of_weights(replace(busy(), ended=ended))
    assert len(rule.weights) == len(chart.x) < 100


def test_weights_are_drawn_before_the_first_update() -> None:
    chart, _ = of_weights(
        scene(settings=Settings.model_validate({"strategy": {"name": "fedbuff"}}))
    )
    assert len(chart.x) >= 10


@pytest.mark.parametrize(
    ("pushes", "said"),
    [
        (SeenPushes(), ""),
        (SeenPushes(problem="it is gone"), "No norms, distances and cosines: it is gone."),
        (busy().pushes, "600 updates that were read in the journal, up to version 540."),
        (replace(busy().pushes, problem="it is gone"), "version 540, and not on: it is gone."),
    ],
    ids=["nothing yet", "no journal", "read", "no longer read"],
)
def test_the_table_says_what_was_read_in_the_journal(pushes: SeenPushes, said: str) -> None:
    text = devices_html(replace(busy(), pushes=pushes))
    assert said in text
    assert ('data-key="cosine"' in text) == bool(len(pushes.rows))


def test_a_device_has_a_page() -> None:
    text = device_html(busy(), 3)
    assert "It stands out in" in text
    assert text.count("<figure") == 3
    assert "It ended none of the newest" in device_html(busy(), 77)


@pytest.mark.parametrize(
    "make", [lambda: busy(devices=400, trainers=200), crowd], ids=["busy", "crowd"]
)
def test_all_panels_together_are_drawn_quickly(make: Callable[[], Scene]) -> None:
    """They are drawn every second, for as long as somebody looks: 50 ms would be 5% of a core."""
    moment = make()
    [panel.html(moment) for panel in PANELS]  # templates are compiled once
    took = []
    for _ in range(5):
        began = perf_counter()
        [panel.html(moment) for panel in PANELS]
        took.append(perf_counter() - began)
    assert min(took) < 0.25  # generous: other work may go on beside the test
