"""The picture of a run is drawn ahead, and again if it has changed."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from fedstream.history.timeline import History, SeenUpdate, SeenVersion
from fedstream.local.picture import Drawn, Painter
from fedstream.settings.config import Settings
from tests.fedstream.views import view


def drawn() -> Drawn:
    history = History()
    for n in range(4):
        made = (SeenUpdate(f"t{n}", n % 2, 0, 0.5, 1.0 / (n + 1)),) if n else ()
        history.versions[n] = SeenVersion(float(n), made)
    history.measure(3, {"accuracy": 0.5, "loss": 1.0})
    found = Drawn.of(Settings(), "2 trainers", view(), history)
    history.measure(4, {"accuracy": 0.9})  # later on
    return found


async def test_picture_that_was_drawn_ahead_is_used_unless_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture, asked, png = Painter(), drawn(), Drawn.png
    assert asked == drawn()
    assert set(asked.evaluations) == {3}
    times: list[str] = []

    def counted(self: Drawn) -> bytes:
        times.append(self.title)
        return png(self)

    monkeypatch.setattr(Drawn, "png", counted)
    picture.get_ready()
    picture.begin(asked)
    first = await picture.png(drawn())
    assert first.startswith(b"\x89PNG")
    assert len(times) == 1
    later = replace(asked, evaluations={3: {"accuracy": 0.9}})
    assert await picture.png(later) not in (first, b"")
    assert len(times) == 2


def test_picture_shows_the_main_metric_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str | None] = []

    def draw(file: object, title: str, history: History, **about: object) -> None:
        shown.append(history.main)

    monkeypatch.setattr("fedstream.history.pictures.draw", draw)
    for stop in (None, "loss"):
        replace(drawn(), evaluations={3: {"rmse": 0.5, "loss": 1.0}}, stop_metric=stop).png()
    assert shown == ["rmse", "loss"]


async def test_picture_of_a_run_that_ended_unexpectedly_is_drawn_at_its_end() -> None:
    assert (await Painter().png(drawn())).startswith(b"\x89PNG")


async def test_what_cannot_be_imported_is_told_by_drawing_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would retrieve another task's exception: asyncio prints its traceback."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = Painter()
    picture.get_ready()
    picture.begin(drawn())
    with pytest.raises(ImportError):
        await picture.png(drawn())
    assert picture._ready is not None
    await picture._ready
