"""When a run is over, and what is told meanwhile: from what was seen of it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedstream.broker.messages import Event
from fedstream.local.ending import Ending, ending, notices
from fedstream.observe.history import History
from tests.fedstream.views import event, view

FINISHED = view(run=replace(view().run, state="finished", why="version 3 reached"))
RAISED = "Traceback:\n  somewhere\nZeroDivisionError: division by zero\n"


def of(*events: Event) -> History:
    history = History()
    for one in events:
        history.tell(one)
    return history


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("interrupted", 130), ("failed", 1)])
def test_exit_code_says_how_it_ended(state: str, code: int) -> None:
    assert Ending(state, "").code == code  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "last",
    [
        event("evaluation", version=3, metrics={"accuracy": 0.5}),
        event("evaluation", version=3, metrics={}),
    ],
)
def test_run_ends_once_its_last_version_is_measured(last: Event) -> None:
    history = of(
        event("evaluation", version=2, metrics={"accuracy": 0.4}),
        event("error", version=3, device=0),  # of a task
    )
    assert ending(history, FINISHED, tested=True, finished_s=120.0) is None
    history.tell(last)
    assert ending(history, view(), tested=True, finished_s=0.0) is None  # it still goes on
    assert ending(history, FINISHED, tested=True, finished_s=0.0) == Ending(
        "finished", "version 3 reached"
    )


def test_impossible_measurements_are_not_awaited() -> None:
    assert ending(History(), None, tested=False, finished_s=0.0) is None
    over = Ending("finished", "version 3 reached")
    assert ending(History(), FINISHED, tested=False, finished_s=0.0) == over
    late = "the last version was not measured within 120 s"
    given_up = ending(History(), FINISHED, tested=True, finished_s=120.1)
    assert given_up == replace(over, note=late)


def test_run_fails_if_its_last_version_cannot_be_measured() -> None:
    history = of(event("error", version=3, reason="metrics: ZeroDivisionError", text=RAISED))
    how = ending(history, FINISHED, tested=True, finished_s=0.0)
    assert how == Ending(
        "failed",
        "version 3 reached, but it could not be measured: ZeroDivisionError: division by zero",
    )


def tasks_that_raise(site: str) -> list[Event]:
    return [event("error", reason="ValueError", device=0, site=site, text="at\nno")] * 10


def tasks_that_kill(site: str) -> list[Event]:
    return [event("outcome", outcome="dead", reason="crashed its trainers", site=site)] * 10


def refusals(site: str) -> list[Event]:
    return [event("outcome", outcome="refused", reason="digest", site=site)] * 100


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (tasks_that_raise, "10 tasks in a row failed without an update in between: no"),
        (
            tasks_that_kill,
            "10 tasks in a row failed without an update in between: they killed their trainers",
        ),
        (
            refusals,
            "100 updates in a row were refused (digest): the model can't make progress",
        ),
    ],
)
def test_only_failures_of_the_pool_end_the_run(
    wrong: Callable[[str], list[Event]], why: str
) -> None:
    seen = view({"refused": 100, "refused:digest": 100})
    history = of(*wrong("north"), *wrong("pool")[1:])
    assert ending(history, seen, tested=True, finished_s=0.0) is None
    history.tell(wrong("pool")[0])
    assert ending(history, seen, tested=True, finished_s=0.0) == Ending("failed", why)


def test_full_disk_is_reported() -> None:
    history = History()
    assert list(notices(history, view(), Path("out"))) == []
    history.disk_full = True
    full = [("full", "out: the disk is full: the updater is waiting for space")]
    assert list(notices(history, view(), Path("out"))) == full


def test_problems_are_reported_by_kind() -> None:
    history = of(
        event("error", version=3, reason="metrics: ZeroDivisionError", text=RAISED),
        event("error", version=2, device=1, reason="ValueError at x.py:1", text="no\n"),
        event("error", version=2, device=2, reason="ValueError at x.py:1", text="again\n"),
    )
    counts = {"refused": 2, "refused:digest": 2, "dead": 1, "dead:crashed its trainers": 1}
    told = dict(notices(history, view(counts), Path("out")))
    assert len(told) == 4
    assert list(told.values()) == [
        f"the task raised on the test data at version 3 (updater):\n{RAISED.rstrip()}",
        "the task raised on device 1 at version 2 (updater):\nno",
        "updates are being refused: digest (for counts, see fedstream status)",
        "a task is dead: it crashed its trainers (for counts, see fedstream status)",
    ]
    assert list(dict(notices(history, None, Path("out")))) == list(told)[:2]
