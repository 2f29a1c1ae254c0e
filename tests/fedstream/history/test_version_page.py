"""A version's page: what it says of the updates that made it."""

from __future__ import annotations

from pathlib import Path

from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import pages
from tests.fedstream.history.conftest import Page
from tests.fedstream.history.scribes import two_segments


def distance(run: RecordedRun, version: int, *, models: bool) -> str:
    """The cell of the only update that made a version."""
    page = Page(
        pages.version(
            run, version, None, models=models, is_waiting=lambda: True, fields={}, problems={}
        )
    )
    headers = page.cells.index("distance alone"), page.cells.index("waited")
    return page.cells[headers[1] + 1 + headers[0]]


def test_a_distance_that_the_updater_did_not_note_comes_from_the_models(tmp_path: Path) -> None:
    """As without the guard against unusual updates: with it, the guard's own figure is shown."""
    two_segments(tmp_path)
    run = RecordedRun(tmp_path)
    assert distance(run, 5, models=False) == "–"  # noqa: RUF001  (a table's sign for no value)
    [push] = run.version_stats.of(5).pushes
    assert distance(run, 5, models=False) == f"{push.distance:.4g}"  # the models are known now


def test_a_distance_that_the_updater_noted_is_shown_as_it_is(recorded: Path) -> None:
    assert distance(RecordedRun(recorded), 34, models=True) == "50"
