"""Figures of devices in a live run: of the newest tasks, and of what was read of the journal."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np

from fedstream.history.live.panels import device_table
from fedstream.history.live.snapshot import PUSHED, SeenPushes
from tests.fedstream.history.live.snapshots import busy, ended, snapshot


def test_the_device_that_stands_out_is_first_and_marked() -> None:
    table = device_table(busy())
    first, second, *_ = table.rows("")
    assert (first.device, len(table.devices)) == (3, 12)
    assert {"loss", "refused_share", "sent", "norm", "cosine"} <= {*first.outliers}
    assert first.scores["cosine"] < 0 < first.scores["norm"]
    assert len(first.outliers) > len(second.outliers)


def test_figures_of_the_journal_are_means_of_what_was_read() -> None:
    read = [(0, 1, 2.0, 1.0, 0.5), (0, 2, 4.0, 2.0, nan), (5, 3, 9.0, 9.0, 0.9)]
    rows = np.array([*read, (2, 4, 1.0, 1.0, nan)], PUSHED)
    moment = snapshot(ended=ended([{"device": 0}, {"device": 1}, {"device": 2}]))
    found = device_table(replace(moment, pushes=SeenPushes(rows, 7))).rows("-sent")
    keys = ("sent", "norm", "cosine")
    assert [line.device for line in found] == [0, 2, 1]
    assert [[line.figures[key] for key in keys] for line in found] == [
        [3.0, 1.5, 0.5],
        [1.0, 1.0, None],
        [None, None, None],
    ]
    assert "cosine" not in device_table(moment).figures


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
