"""When a run is over, and what is told meanwhile: from what was seen of it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedstream.core.messages import Event
from fedstream.core.records import NO_QUARANTINES, Failing
from fedstream.history.timeline import History
from fedstream.local.ending import Ending, ending, notices
from tests.fedstream.views import event, view

FINISHED = view(run=replace(view().run, state="finished", why="version 3 reached"))
DEVICES = view().run.devices
NONE_WORKS = f"no device works: {DEVICES} tasks in a row failed, on {DEVICES} of {DEVICES} devices"
RAISED = "Traceback:\n  somewhere\nZeroDivisionError: division by zero\n"


def of(*events: Event) -> History:
    history = History()
    for one in events:
        history.tell(one)
    return history


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("interrupted", 130), ("failed", 1)])
def test_exit_code_says_how_it_ended(state: str, code: int) -> None:
    assert Ending(state, "").code == code  # type: ignore[arg-type]


def test_run_ends_once_its_last_version_is_measured() -> None:
    history = of(
        event("evaluation", version=2, metrics={"accuracy": 0.4}),
        event("error", version=3, device=0),  # of a task
    )
    assert ending(history, FINISHED, tested=True, finished_s=120.0) is None
    history.tell(event("evaluation", version=3, metrics={}))
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
    return [
        event("error", reason="ValueError", device=device, site=site, text="at\nno")
        for device in range(DEVICES)
    ]


def tasks_that_kill(site: str) -> list[Event]:
    return [
        event("outcome", outcome="dead", reason="crashed its trainers", device=device, site=site)
        for device in range(DEVICES)
    ]


def refusals(site: str) -> list[Event]:
    return [event("outcome", outcome="refused", reason="digest", site=site)] * 100


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (tasks_that_raise, f"{NONE_WORKS}: no"),
        (tasks_that_kill, f"{NONE_WORKS}: they killed their trainers"),
        (refusals, "100 updates in a row were refused (digest): the model can't make progress"),
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


def test_answers_of_a_root_device_do_not_hide_that_all_others_are_refused() -> None:
    seen = view({"refused": 100, "refused:far from the root": 100})
    history = History()
    history.references = (0,)
    for device, ends in ((1, False), (0, True)):
        for refused in refusals("pool"):
            history.tell(refused)
            history.tell(event("outcome", outcome="buffered", device=device))
        found = ending(history, seen, tested=True, finished_s=0.0)
        assert (found is not None) == ends


def test_a_run_waits_longer_for_its_root_device() -> None:
    """Each of a hundred devices comes about ten times, before the root device is missed."""
    seen = view({"refused": 999, "refused:no root update yet": 999})
    seen = replace(seen, run=replace(seen.run, devices=100))
    history = of(*10 * refusals("pool")[1:])
    assert ending(history, seen, tested=True, finished_s=0.0) is None
    for refused in refusals("pool")[:10]:
        history.tell(refused)
    assert ending(history, seen, tested=True, finished_s=0.0) is not None


@pytest.mark.parametrize(
    ("devices", "failed", "fails"),
    [
        (10, [*range(9)] * 9, False),
        (10, range(10), True),
        (1, [0] * 4, False),
        (1, [0] * 5, True),
        (100_000, range(29), False),
        (100_000, range(30), True),
    ],
)
def test_run_fails_only_if_no_device_works(
    devices: int, failed: Iterable[int], fails: bool
) -> None:
    seen = view(run=replace(view().run, devices=devices))
    history = of(*(event("error", reason="ValueError", device=d, text="no") for d in failed))
    assert (ending(history, seen, tested=True, finished_s=0.0) is not None) == fails
    history.tell(event("outcome", outcome="buffered", device=0))
    assert ending(history, seen, tested=True, finished_s=0.0) is None


@pytest.mark.parametrize(
    ("barred", "owned", "pool", "failed", "fails"),
    [
        ([9], (), False, range(9), True),
        ([9], (), False, [*range(8), 9], False),  # it failed before it was barred
        ([99], (), False, range(9), False),  # no device of the run
        (range(10), (), False, range(10), False),  # until some are released
        ([], (0, 1, 2), False, [0, 1, 2, 0, 1], True),
        ([], (0, 1, 2), False, [0, 1, 0, 1, 0], False),
        ([], (0, 1, 2), True, [0, 1, 2, 0, 1], False),  # a trainer serves the others
    ],
)
def test_devices_that_cannot_be_asked_need_not_fail(
    barred: Sequence[int], owned: tuple[int, ...], pool: bool, failed: Iterable[int], fails: bool
) -> None:
    quarantines = NO_QUARANTINES.quarantined(barred, "", 1.5, 0)
    seen = view(head=replace(view().head, quarantines=quarantines), owned=owned, pool=pool)
    history = of(*(event("error", reason="ValueError", device=d, text="no") for d in failed))
    assert (ending(history, seen, tested=True, finished_s=0.0) is not None) == fails


def test_failing_devices_are_told_once_and_again_when_twice_as_many_fail() -> None:
    def told(*devices: int) -> dict[str, str]:
        failing = {device: Failing(2, 1.0, "raised OSError") for device in devices}
        return dict(notices(History(), view(failing=failing), Path("out")))

    named = [f"device {device} failed 2 tasks in a row (raised OSError)" for device in range(9)]
    assert list(told(3).values()) == [f"{named[3]}: it is asked less often"]
    assert told(3).keys() == told(4).keys() != told(3, 4).keys() == told(2, 3, 4).keys()
    assert [*told(*range(9)).values()] == [
        f"{', '.join(named[:5])} and 4 more: they are asked less often"
    ]
    assert told() == {}


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


def test_a_run_waits_for_its_devices() -> None:
    """Both measurements of the last version, or the time in which two evaluations end."""
    history = of(event("evaluation", version=3, metrics={"accuracy": 0.5}))
    over = Ending("finished", "version 3 reached")
    awaits = {"tested": True, "on_devices_s": 30.0}
    assert ending(history, FINISHED, finished_s=180.0, **awaits) is None  # type: ignore[arg-type]
    late = ending(history, FINISHED, finished_s=180.1, **awaits)  # type: ignore[arg-type]
    note = "the last version was not measured on the devices within 180 s"
    assert late == replace(over, note=note)
    history.tell(event("devices_evaluated", version=3, metrics={}, text="too few"))
    assert ending(history, FINISHED, finished_s=0.0, **awaits) == over  # type: ignore[arg-type]
    assert ("on devices", "no metrics of version 3 on the devices: too few") in notices(
        history, None, Path("out")
    )
