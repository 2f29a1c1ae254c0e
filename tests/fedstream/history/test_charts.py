"""Charts of the page and the picture of a run: the same numbers."""

from __future__ import annotations

from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.history import pictures
from fedstream.history.charts import Window, of_both, of_metrics, of_run, thinned
from fedstream.history.measurements import Measurement, recall
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.timeline import History


def test_the_picture_has_the_numbers_of_the_charts(recorded: Path) -> None:
    history = History()
    recall(history, recorded / "journal", recorded / "metrics.csv")
    figure = pictures.picture("a run", history, created=1.0, devices=10)
    charts = {one.name: one for one in of_run(RecordedRun(recorded))}
    drawn: Any = figure.axes  # matplotlib's types say little of what lines have
    accuracy, _, late, loss, *_ = drawn
    for axes, name in ((accuracy, "metric-0"), (loss, "loss")):
        line = axes.lines[0]
        wanted = charts[name]
        assert list(map(float, line.get_xdata())) == wanted.x
        assert list(map(float, line.get_ydata())) == wanted.series[0].values
    heights = [bar.get_height() for bar in late.patches]
    assert heights == charts["lateness"].series[0].values


def test_what_devices_measure_is_drawn_beside_the_test_data() -> None:
    measured = [
        Measurement(0, 0.0, 0, {"accuracy": 0.1, "devices_accuracy": 0.2}),
        Measurement(5, 1.0, 5, {"accuracy": 0.5}),
        Measurement(7, 2.0, 7, {"devices_accuracy": 0.6, "devices_loss": 0.9}),
    ]
    both, alone = of_metrics(measured, ["accuracy", "devices_accuracy", "devices_loss"])
    assert both.x == [0.0, 5.0, 7.0]
    assert [(one.label, one.values) for one in both.series] == [
        ("accuracy", [0.1, 0.5, None]),
        ("devices_accuracy", [0.2, None, 0.6]),
    ]
    assert (alone.name, alone.x, alone.series[0].label) == ("metric-1", [7.0], "devices_loss")


def test_two_runs_over_time_begin_together(recorded: Path, other: Path) -> None:
    """Each over its own seconds; a point leads to what the first run had by then."""
    ours, theirs = RecordedRun(recorded), RecordedRun(other)
    over_versions = {one.name: one for one in of_both(ours, theirs)}
    over_time = {one.name: one for one in of_both(ours, theirs, Window(over_time=True))}
    assert over_time.keys() == over_versions.keys() == {"metric-accuracy", "metric-loss", "loss"}
    for name, chart in over_time.items():
        before = over_versions[name]
        assert chart.unit == "seconds since the beginning"
        assert chart.header == [chart.unit, "version of A", "A", "B"]
        for n, run in enumerate((ours, theirs)):
            points = {
                seconds: value
                for seconds, value in zip(chart.x, chart.series[n].values, strict=True)
                if value is not None
            }
            wanted = [
                (version, value)
                for version, value in zip(before.x, before.series[n].values, strict=True)
                if value is not None
            ]
            times = run.times([int(version) for version, _ in wanted])
            assert points == dict(zip(times, (value for _, value in wanted), strict=True))
            if run is ours:
                lead = dict(zip(chart.x, chart.leads, strict=True))
                assert [lead[at] for at in times] == [version for version, _ in wanted]


def test_the_newest_version_at_a_time(recorded: Path) -> None:
    run = RecordedRun(recorded)
    (third,) = run.times([3])
    assert run.newest_at([0.0, third - 0.001, third, 1e9]) == [0, 2, 3, run.newest]


@pytest.mark.parametrize("length", [0, 1, 2, 99, 100])
def test_few_are_all_shown(length: int) -> None:
    assert thinned([0.5] * length, most=100) == list(range(length))


@pytest.mark.parametrize("length", [101, 1000, 99_991])
def test_each_extreme_is_shown_and_both_ends(length: int) -> None:
    values = np.sin(np.arange(length) / 50)
    values[length // 2], values[length // 3] = 9.0, -9.0
    values[1] = nan
    places = thinned(values, most=100)
    assert places == sorted(set(places))
    assert len(places) <= 102
    assert {0, length // 3, length // 2, length - 1} <= set(places)


def test_extremes_of_every_curve() -> None:
    first, second = np.zeros(10_000), np.zeros(10_000)
    first[1234], second[7654] = 1.0, -1.0
    assert {1234, 7654} <= set(thinned(first, second, most=100))


def test_what_is_not_known_anywhere() -> None:
    places = thinned([nan] * 1000, most=10)
    assert {0, 999} <= set(places) <= set(range(1000))
