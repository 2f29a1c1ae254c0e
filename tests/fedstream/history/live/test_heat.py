"""Heat maps: which cell has which number, and which shade."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import numpy as np
import pytest

from fedstream.history.devices import OUTLIER, shade_of_score
from fedstream.history.live.panels.devices import OF_JOURNAL, SHOWN, device_heat
from fedstream.history.live.panels.heat import (
    COLUMNS,
    LEVELS,
    level_of,
    slice_of,
    staleness_over_time,
)
from fedstream.history.live.scene import PUSHED, SeenPushes
from tests.fedstream.history.live.scenes import NOW, busy, ended, scene
from tests.fedstream.views import CREATED


def test_updates_are_counted_by_slice_and_staleness() -> None:
    times = np.array([0.5, 3.0, 3.9, 9.0]) + CREATED
    found = staleness_over_time(times, np.array([0, 0, 4, 40]), began=CREATED, now=CREATED + 10)
    assert found.slice_s == 1
    assert found.columns[:4] == ("0:00", "0:01", "0:02", "0:03")
    counts = {label: [cell.value for cell in cells] for label, cells in found.rows}
    assert counts["0"][:4] == [1, 0, 0, 1]
    assert counts["3-4"][3] == 1
    assert counts["33+"][9] == 1
    assert sum(map(sum, counts.values())) == 4


def test_slices_do_not_move_while_time_goes_on() -> None:
    times, late = CREATED + np.arange(0, 1000.0), np.zeros(1000, int)
    first = staleness_over_time(times, late, began=CREATED, now=CREATED + 1000)
    later = staleness_over_time(times, late, began=CREATED, now=CREATED + 1010)
    assert first.columns == later.columns[: len(first.columns)]
    assert len(first.columns) <= COLUMNS


@pytest.mark.parametrize("seconds", [0, 3, 23, 24, 1000, 90_000, 10_000_000])
def test_a_screen_has_room_for_all_slices(seconds: float) -> None:
    assert seconds / slice_of(seconds) < COLUMNS


def test_without_updates_there_are_no_rows() -> None:
    none = np.array([])
    assert staleness_over_time(none, none, began=CREATED, now=NOW).rows == ()


def test_clocks_that_disagree_do_no_harm() -> None:
    """A version may seem to be older than its run, or to come from the future."""
    times = np.array([CREATED - 5, NOW + 5])
    found = staleness_over_time(times, np.array([0, 0]), began=CREATED, now=NOW)
    assert sum(cell.value for _, cells in found.rows for cell in cells) == 2


def test_a_single_update_beside_thousands_has_a_shade() -> None:
    assert [level_of(value, 5000) for value in (0, 1, 70, 5000)] == [0, 1, 4, LEVELS]


def test_scores_have_a_shade_in_their_direction() -> None:
    scores = (None, 0.5, 1.5, 2.0, OUTLIER + 0.1, -1.5, -2.0, -9.0)
    assert [shade_of_score(one) for one in scores] == [0, 0, 1, 2, 3, -1, -2, -3]


def test_the_device_that_stands_out_is_first_and_marked() -> None:
    heat = device_heat(busy(), "")
    first = heat.lines[0]
    cells = {cell.key: cell for cell in first.cells}
    assert (first.device, heat.total) == (3, 12)
    assert (cells["loss"].mark, cells["loss"].shade) == ("▲", 3)
    assert cells["refused_share"].mark == "▲"
    assert first.marks > heat.lines[1].marks


def test_figures_of_the_journal_are_means_of_what_was_read() -> None:
    read = [(0, 1, 2.0, 1.0, 0.5), (0, 2, 4.0, 2.0, nan), (5, 3, 9.0, 9.0, 0.9)]
    rows = np.array([*read, (2, 4, 1.0, 1.0, nan)], PUSHED)
    moment = scene(ended=ended([{"device": 0}, {"device": 1}, {"device": 2}]))
    heat = device_heat(replace(moment, pushes=SeenPushes(rows, 7)), "-sent")
    found = [
        [{c.key: c.value for c in line.cells}[key] for key in OF_JOURNAL] for line in heat.lines
    ]
    assert [line.device for line in heat.lines] == [0, 2, 1]
    assert found == [[3.0, 1.5, 0.5], [1.0, 1.0, None], [None, None, None]]
    assert "cosine" not in {name for name, _, _ in device_heat(moment, "").columns}


def test_a_device_that_others_undo_stands_out() -> None:
    cells = {cell.key: cell for cell in device_heat(busy(), "").lines[0].cells}
    assert (cells["sent"].mark, cells["norm"].mark, cells["cosine"].mark) == ("▲", "▲", "▼")


def test_any_column_sorts_both_ways_and_unknown_figures_come_last() -> None:
    rows = [{"device": n, "loss": loss} for n, loss in enumerate((2.0, nan, 1.0))]
    moment = scene(ended=ended(rows))
    assert [line.device for line in device_heat(moment, "loss").lines] == [2, 0, 1]
    assert [line.device for line in device_heat(moment, "-loss").lines] == [0, 2, 1]
    assert [line.device for line in device_heat(moment, "nonsense").lines] == [0, 1, 2]


def test_of_very_many_devices_the_first_are_shown() -> None:
    heat = device_heat(busy(devices=400), "")
    assert (len(heat.lines), heat.total > SHOWN) == (SHOWN, True)


def test_a_device_alone_is_compared_with_all() -> None:
    (line,) = device_heat(busy(), "", only=3).lines
    assert line.marks
    assert device_heat(busy(), "", only=99).lines == ()
