"""Charts of the page and the picture of a run: the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstream.observe import curves
from fedstream.observe.history import History
from fedstream.observe.recall import recall
from fedstream.page.charts import of_run
from fedstream.page.run import RecordedRun


def test_the_picture_has_the_numbers_of_the_charts(recorded: Path) -> None:
    history = History()
    recall(history, recorded / "journal", recorded / "metrics.csv")
    figure = curves.picture("a run", history, created=1.0, devices=10)
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
