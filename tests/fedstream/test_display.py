"""What a person reads: during a run, at its end, and in `top` and `status`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from rich.console import Console, RenderableType

from coordinator.app import status
from fedstream import display, top
from fedstream import status as page
from fedstream.observer import History
from tests.fedstream.views import CREATED, event, trigger, update, version, view


def text_of(picture: RenderableType) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


@pytest.fixture
def history() -> History:
    history = History()
    for number in range(4):
        history.publish(version(number, update(f"t{number}", device=number, staleness=number)))
    history.tell(event("evaluation", version=3, metrics={"accuracy": 0.912}))
    return history


@pytest.mark.parametrize(
    ("seconds", "clock"), [(0, "0:00"), (61.4, "1:01"), (3723, "1:02:03"), (59.7, "1:00")]
)
def test_durations_read_like_a_clock(seconds: float, clock: str) -> None:
    assert display.duration(seconds) == clock


def test_the_tasks_are_an_equation() -> None:
    tasks = {"issued": 5, "applied": 3, "buffered": 0, "given_up": 1, "open": 1}
    assert display.outcomes(tasks) == "5 issued = 3 applied + 1 given up + 1 open"
    assert display.outcomes({"issued": 0, "open": 0}) == "0 issued = 0"


def test_progress_says_rate_time_left_and_what_goes_wrong(history: History) -> None:
    seen = view({"refused": 2}, open=(trigger("x"),), queue=5)
    assert display.pace(seen, history, CREATED + 3) == "1.0 versions/s, 1:37 left"
    line = display.figures(seen, history)
    assert line == "accuracy 0.912 at 3 · staleness 1.5 · open 1 · queue 5 · trainers 2 · refused 2"
    assert display.pace(view(), History(), CREATED) == "waiting for updates"
    over = view(run=replace(view().run, state="finished", why="done"))
    assert display.pace(over, history, CREATED) == "measuring the last version"


def test_a_histogram_is_a_row_of_blocks() -> None:
    assert top.sparkline([0, 1, 50, 100]) == " ▁▄█"
    assert top.sparkline([]) == ""
    bins = dict(top.histogram(Counter({0: 3, 4: 1, 20: 2, 99: 5})))
    assert {label: n for label, n in bins.items() if n} == {"0": 3, "3-4": 1, "17-32": 2, "33+": 5}


def test_top_shows_the_run_and_its_trainers(history: History) -> None:
    history.tell(event("trainer", text="trainer-2 joined"))
    trainers = {"trainer-1": {"host": "here", "pid": 7, "device": 3, "answers": 12, "owns": []}}
    seen = view({"issued": 4, "applied": 4, "stray:late": 1}, uploads=2)
    shown = text_of(top.frame(seen, history, trainers, {"trainer-1": 1.25}, CREATED + 3))
    for part in (
        "3/100", "1.0 versions/s", "0.9120 at 3", "mean 1.50, max 3", "4 issued = 4 applied",
        "2 uploads", "late 1", "trainer-1", "1.2 s ago", "trainer-2 joined",
    ):  # fmt: skip
        assert part in shown
    assert "none is alive" in text_of(top.frame(seen, History(), {}, {}, CREATED))


def test_status_shows_what_http_says() -> None:
    trainers = {"trainer-1": {"host": "here", "pid": 7, "device": None, "answers": 1, "owns": [4]}}
    seen = view({"issued": 2, "applied": 1, "refused": 1, "refused:layout": 1}, queue=3)
    shown = text_of(page.page(status("demo", seen) | {"register": trainers}))
    for part in ("demo, running", "3 of 100", "2 issued = 1 applied + 1 refused", "layout 1"):
        assert part in shown
    assert "3 in the queue" in shown
    assert "trainer-1" in shown
