"""What a person reads: during a run, at its end, and in `top` and `status`."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.app import status
from fedstream.core.messages import Encoded
from fedstream.core.records import Best, Failing, Head, PrivacyLoss, StepSize
from fedstream.history import display, observer, top
from fedstream.history import status as page
from fedstream.history.live.panels import headline_facts
from fedstream.history.observer import Observer
from fedstream.history.timeline import History
from tests.fedstream.history.live.snapshots import snapshot
from tests.fedstream.views import CREATED, event, trigger, update, version, view
from tests.support import Hand


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
def test_durations_look_like_a_clock(seconds: float, clock: str) -> None:
    assert display.duration(seconds) == clock


def test_task_counts_form_an_equation() -> None:
    tasks = {"issued": 5, "applied": 3, "buffered": 0, "given_up": 1, "open": 1}
    assert display.outcomes(tasks) == "5 issued = 3 applied + 1 given up + 1 open"
    assert display.outcomes({"issued": 0, "open": 0}) == "0 issued = 0"


def retaining(entries: int) -> Head:
    """A head with so many entries of the queue done, and not yet safe in the journal."""
    return replace(view().head, retained=entries)


def test_progress_shows_rate_time_left_and_problems(history: History) -> None:
    seen = view({"refused": 2}, open=(trigger("x"),), queue=12, head=retaining(7))
    assert display.pace(seen, history, CREATED + 3) == "1.0 versions/s, 1:37 left"
    line = display.figures(seen, history)
    assert line == "accuracy 0.912 at 3 · staleness 1.5 · open 1 · queue 5 · trainers 2 · refused 2"
    assert display.pace(view(), History(), CREATED) == "waiting for updates"
    over = view(run=replace(view().run, state="finished", why="done"))
    assert display.pace(over, history, CREATED) == "measuring the last version"
    assert display.figures(over, history) == "accuracy 0.912 at 3 · staleness 1.5"


def test_a_stalled_run_says_why_if_that_can_be_seen(history: History) -> None:
    stalled = "stalled: no version for 0:31"
    no_task = f"{stalled} (no task begins: see scheduler.policy, and the scheduler's log)"
    begun = History()
    begun.publish(version(0))
    new = view(head=replace(view().head, version=0))
    assert display.pace(new, begun, CREATED + 30) == "waiting for updates"
    assert display.pace(new, begun, CREATED + 31) == no_task  # not even the first
    assert display.pace(view(), begun, CREATED + 31) == "waiting for updates"  # just resumed
    now = CREATED + 3 + 31
    assert display.pace(view(), history, now) == no_task
    assert display.pace(view(open=(trigger("t"),)), history, now) == stalled
    assert display.pace(view(triggers=1), history, now) == stalled
    assert display.pace(view(trainers=0), history, now) == f"{stalled} (no trainer is there)"
    loss = PrivacyLoss(opened=0, dropped=0, epsilon=math.inf, delta=1e-5)
    private = view(head=replace(view().head, privacy=loss))
    asked = "if the updater can't reach the helper, its log says so"
    assert display.pace(private, history, now) == f"{stalled} ({asked})"


def test_result_is_shown_at_the_end(history: History, capsys: pytest.CaptureFixture[str]) -> None:
    display.Lines().show(view(), history, stopping=True)
    assert capsys.readouterr().out.startswith("version 3 of 100 · stopping the services · ")
    for seen in (None, view()):
        console = Console(width=100, force_terminal=True, file=io.StringIO())
        bar = display.Bar(console)
        bar.header({})
        with console.capture() as captured:
            bar.show(seen, history, stopping=True)
        bar.close()
        assert "stopping the services" in captured.get()


def test_row_that_was_not_known_at_first_stands_below_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = display.Lines()
    lines.header({"strategy": "fedasync"})
    lines.add("page", "http://here/")
    assert capsys.readouterr().out == "strategy   fedasync\n\npage       http://here/\n"
    console = Console(width=100, force_terminal=True, color_system=None, file=io.StringIO())
    bar = display.Bar(console)
    with console.capture() as captured:
        bar.header({"strategy": "fedasync"})
        bar.add("page", "http://here/")
    bar.close()
    text = Text.from_ansi(captured.get()).plain
    assert "strategy  fedasync" in text
    assert "page      http://here/" in text


def test_accuracy_names_its_version() -> None:
    numbers: dict[str, Any] = {
        "state": "finished",
        "why": "version 9 reached",
        "measured_version": 9,
        "main_metric": "accuracy",
        "best": {"accuracy": {"version": 4, "value": 0.6}},
        "versions": 9,
        "versions_before": 0,
        "seconds": 2.0,
        "updates_per_s": 4.5,
        "mean_staleness": 0.0,
        "max_staleness": 0,
        "tasks": {"issued": 9, "applied": 9},
        "refused": {},
        "given_up": {},
        "dead": {},
        "strays": {},
        "failing": {},
        "restarts": {},
        "metrics": {"accuracy": 0.5},
        "never_finite": [],
    }
    rows = dict(display.result_rows(numbers))
    assert "devices" not in rows
    assert rows["accuracy"] == "0.5000 (best 0.6000 at version 4)"
    assert rows["versions"] == "9 in 2.0 s, 4.5 updates/s"
    rows = dict(display.result_rows(numbers | {"measured_version": 7, "versions_before": 6}))
    assert rows["accuracy"] == "0.5000 at version 7 (best 0.6000 at version 4)"
    assert rows["versions"] == "9, 3 of them in 2.0 s, 4.5 updates/s"
    served = {
        "device_mean_loss": 2.0,
        "device_mean_accuracy": 0.4,
        "device_worst_tenth_accuracy": 0.1,
        "device_deviation_accuracy": 0.25,
    }
    numbers["main_metric"] = None
    assert dict(display.result_rows(numbers | {"metrics": served}))["devices"] == (
        "accuracy mean 0.4000, worst tenth 0.1000, deviation 0.2500"
    )
    unknown = {"device_mean_score": 2.0, "device_deviation_score": 1.0}
    assert dict(display.result_rows(numbers | {"metrics": unknown}))["devices"] == (
        "score mean 2.0000, deviation 1.0000; whether a low or a high score is good is unknown: "
        'set Task.goal = {"score": "min"} or "max"'
    )
    rows = dict(display.result_rows(numbers | {"main_metric": "devices_loss"}))
    assert rows["devices_loss"] == "not measured"
    for value in (float("nan"), None):  # as it goes on, and from summary.json
        never = {"metrics": {"mse": value}, "main_metric": "mse", "never_finite": ["mse"]}
        rows = dict(display.result_rows(numbers | never | {"best": {}}))
        assert rows["mse"] == "not a finite number"
        assert (
            rows["warning"]
            == "never a finite number: mse; look for NaN in the test data and in metrics()"
        )


def test_histogram_is_a_row_of_blocks() -> None:
    assert top.sparkline([0, 1, 50, 100]) == " ▁▄█"
    assert top.sparkline([]) == ""
    bins = dict(top.histogram(Counter({0: 3, 4: 1, 20: 2, 99: 5})))
    assert {label: n for label, n in bins.items() if n} == {"0": 3, "3-4": 1, "17-32": 2, "33+": 5}


def test_top_shows_the_run_and_its_trainers(history: History) -> None:
    history.tell(event("trainer", text="trainer-2 joined"))
    trainers = {"trainer-1": {"host": "here", "pid": 7, "device": 3, "answers": 12, "owns": []}}
    seen = view({"issued": 4, "applied": 4, "stray:late": 1}, inbox=2)
    shown = text_of(top.frame(seen, history, trainers, {"trainer-1": 1.25}, CREATED + 3))
    for part in (
        "3/100",
        "1.0 versions/s",
        "0.9120 at 3",
        "mean 1.50, max 3",
        "4 issued = 4 applied",
        "2 in the inboxes",
        "late 1",
        "trainer-1",
        "1.2 s ago",
        "trainer-2 joined",
    ):
        assert part in shown
    assert "none alive" in text_of(top.frame(seen, History(), {}, {}, CREATED))


def test_top_and_status_name_devices_and_trainers_that_fail() -> None:
    trainers = {
        "trainer-1": {"owns": [], "failing": 0},
        "trainer-2": {"owns": [], "failing": 4},
    }
    seen = view(failing={d: Failing(6, CREATED, "raised OSError") for d in range(3, 9)})
    about = status("demo", seen) | {"register": trainers}
    for shown in (
        text_of(top.frame(seen, History(), trainers, {}, CREATED)),
        text_of(page.page(about)),
    ):
        assert "device 3 failed 6 tasks in a row (raised OSError), device 4" in " ".join(
            shown.split()
        )
        assert "device 7 failed 6 tasks in a row (raised OSError) and 1 more" in " ".join(
            shown.split()
        )
        assert "trainer trainer-2 (its last 4 tasks, of several devices)" in shown
        assert "trainer trainer-1" not in shown
    older = {name: value for name, value in about.items() if name != "failing"}
    assert "failing" not in text_of(page.page(older | {"register": {}}))


def test_private_runs_epsilon_is_shown_wherever_the_run_is() -> None:
    """By status, also of a coordinator over HTTP, top, the run's own display and the page."""
    loss = PrivacyLoss(opened=1900, dropped=2, epsilon=3.6171, delta=1e-5, spent=frozenset({1, 2}))
    said = "epsilon 3.617 at delta 1e-05; 1,900 sums opened, 2 dropped, 2 devices without budget"
    seen = view(head=replace(view().head, privacy=loss))
    about = status("demo", seen) | {"register": {}}
    assert said in " ".join(text_of(page.page(about)).split())
    assert said in " ".join(text_of(top.frame(seen, History(), {}, {}, CREATED)).split())
    assert "epsilon 3.62" in display.figures(seen, History())
    assert headline_facts(snapshot(head_privacy=loss))[-4:] == [
        ("epsilon at delta 1e-05", "3.617"),
        ("sums opened", "1,900"),
        ("sums dropped", "2"),
        ("without privacy budget", "2 devices"),
    ]
    unnoised = replace(loss, epsilon=math.inf, spent=frozenset())
    seen = view(head=replace(view().head, privacy=unnoised))
    about = json.loads(json.dumps(status("demo", seen) | {"register": {}}, allow_nan=False))
    assert "no noise; 1,900 sums opened, 2 dropped  " in text_of(page.page(about))
    assert "epsilon" not in display.figures(seen, History())
    assert headline_facts(snapshot(head_privacy=unnoised))[-2][0] == "sums opened"
    plain = status("demo", view()) | {"register": {}}
    assert "privacy" not in text_of(page.page(plain))


def test_adapted_rate_is_shown_wherever_the_run_is() -> None:
    """By status, also of a coordinator over HTTP, by top and on the page; else nowhere."""
    step, said = StepSize("alpha", 0.8, 2.0), "0.8, 2 times the configured"
    seen = view(head=replace(view().head, step=step))
    about = json.loads(json.dumps(status("demo", seen) | {"register": {}}))
    assert about["step"] == {"key": "alpha", "rate": 0.8, "scale": 2.0}
    for picture in (page.page(about), top.frame(seen, History(), {}, {}, CREATED)):
        assert f"alpha {said}" in " ".join(text_of(picture).split())
    assert ("alpha", said) in headline_facts(snapshot(head_step=step))
    older = {key: value for key, value in about.items() if key != "step"}
    assert "alpha" not in text_of(page.page(older))


def test_status_names_the_best_version() -> None:
    best = Best("f1", 0.75, 2, "digest", "2.1")
    about = status("demo", view(best=best)) | {"register": {}}
    assert "best       f1 0.7500 at version 2  " in text_of(page.page(about))
    freed = status("demo", view(best=replace(best, blob=None))) | {"register": {}}
    assert "f1 0.7500 at version 2, its model is no longer in Redis" in text_of(page.page(freed))
    for unmeasured in (about | {"best": None}, {k: v for k, v in about.items() if k != "best"}):
        assert "best" not in text_of(page.page(unmeasured))


def test_top_shows_a_nan_accuracy(history: History) -> None:
    history.tell(event("evaluation", version=4, metrics={"accuracy": float("nan")}))
    assert "0.9120 at 3" in text_of(top.frame(view(), history, {}, {}, CREATED))


async def test_top_uses_bounded_memory(
    client: Client, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    observers: list[Observer] = []

    class Seen(Observer):
        def __init__(self, client: Client, keys: Keys, *, most: int | None = None) -> None:
            super().__init__(client, keys, most=most)
            observers.append(self)

    monkeypatch.setattr(top, "Observer", Seen)
    monkeypatch.setattr(top, "_REMEMBERED", 2)
    await hand.create()
    for number in range(4):
        await client.call("XADD", hand.keys.models, "*", "m", version(number).encode())
        await hand.ledger.tell(event("evaluation", version=number, metrics={"accuracy": 0.5}))
    await top.watch(client, hand.keys, once=True)
    assert list(observers[0].history.evaluations) == [2, 3]


async def test_top_says_for_how_long_the_disk_is_full(
    client: Client,
    hand: Hand,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    room = [0]
    monkeypatch.setattr(observer, "disk_usage", lambda _: SimpleNamespace(free=room[0]))
    await hand.create()
    await hand.admitted(1.0)
    for room[0], full in ((0, True), (1 << 20, False)):
        await top.watch(client, hand.keys, tmp_path, once=True)
        assert ("waiting for space: the disk is full" in capsys.readouterr().out) is full


async def test_top_ends_with_a_finished_run_whose_redis_is_gone() -> None:
    client = Client(RedisSettings(url="redis://127.0.0.1:1/0"))
    observer = Observer(client, Keys("demo"))
    observer.view = view(run=replace(view().run, state="finished", why="done"))
    console = Console(file=io.StringIO())
    with Live(console=console, auto_refresh=False) as live:
        shown = await top._watched(client, observer, live, "the last picture", asyncio.Event())
    assert shown == "the last picture"


def test_status_shows_what_http_says() -> None:
    trainers = {"trainer-1": {"host": "here", "pid": 7, "device": None, "answers": 1, "owns": [4]}}
    counts = {"issued": 2, "applied": 1, "refused": 1, "refused:layout": 1}
    seen = view(counts, queue=10, head=retaining(7))
    shown = text_of(page.page(status("demo", seen) | {"register": trainers}))
    for part in ("demo, running", "3 of 100", "2 issued = 1 applied + 1 refused", "layout 1"):
        assert part in shown
    assert "3 in the queue" in shown
    assert "trainer-1" in shown
    assert "published as" not in shown  # as it is


def test_status_says_what_wire_formats_save() -> None:
    about = status("demo", view({"encoded": 1200, "encoded_bytes": 6000})) | {"register": {}}
    assert "1,200 updates of 5 bytes, 3.2 times smaller than float32" in text_of(page.page(about))
    for nothing in (status("demo", view())["encoded"], None):  # None: an older coordinator's
        assert "smaller" not in text_of(page.page(about | {"encoded": nothing}))


def test_status_names_the_format_in_which_models_are_published() -> None:
    head = replace(view().head, encoded=Encoded("bf16+zstd", 9, "d"))
    about = status("demo", view(head=head)) | {"register": {}}
    assert "16 bytes, published as bf16+zstd" in text_of(page.page(about))
    del about["published_as"]  # an older coordinator's answer
    assert "published as" not in text_of(page.page(about))
