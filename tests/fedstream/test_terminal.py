"""Whatever others wrote: it is shown, and neither obeyed by a terminal nor fatal to the page."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import sys
import termios
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.live import Live

from fedstream import terminal
from fedstream.broker.client import Client
from fedstream.coordinator.app import status
from fedstream.core.errors import FedstreamError
from fedstream.core.messages import OUTCOMES, Contribution, Dead, Event, Trigger, Version
from fedstream.doctor import checkup as doctor
from fedstream.doctor.findings import Finding
from fedstream.history import display, top
from fedstream.history import journal_text as pages
from fedstream.history import status as page
from fedstream.history.bisect import Cause
from fedstream.history.observer import Observer
from fedstream.history.timeline import History
from fedstream.journal import opened
from fedstream.journal.inspection import Verdict
from fedstream.operate import dead
from fedstream.runtime.text import escaped
from tests.fedstream.views import CREATED, event, version, view
from tests.journals import Scribe
from tests.support import Hand

ESCAPE = "\x1b[2J\x1b]0;owned\x07"
OVERRIDE = "abc\u202egpj.exe"
MARKUP = "[bold red]x[/] [link=http://evil]y[/link] [/] :boom: \\"
HOSTILE = [ESCAPE, OVERRIDE, MARKUP, "two\nlines\r\x85\u2028", "\x00\x9b31m", "", " ", "\n \n"]

unicode = st.characters(exclude_categories=["Cs"])  # no message has a surrogate in it
texts = st.one_of(st.sampled_from(HOSTILE), st.text(unicode, max_size=20))
names = texts.filter(lambda text: 1 <= len(text) <= 200)
floats = st.floats()  # infinities and nan among them
counts = st.one_of(st.integers(0, 5), st.sampled_from([10**15, 2**64 - 1]))


def drawn(picture: RenderableType, width: int = 100) -> str:
    """As a terminal would get it, but for our own colours."""
    console = Console(width=width, file=io.StringIO(), force_terminal=False, color_system=None)
    with console.capture() as captured:
        console.print(picture)
    return captured.get()


def is_harmless(shown: str) -> bool:
    return all(sign.isprintable() or sign == "\n" for sign in shown)


@given(st.text())
def test_visible_text_is_printable_and_one_line(text: str) -> None:
    assert escaped(text).isprintable()
    assert is_harmless(escaped(text, lines=True).replace("\t", ""))
    if text.isprintable():
        assert escaped(text) == text


def test_escapes_look_like_pythons() -> None:
    assert escaped(f"a{ESCAPE}b") == "a\\x1b[2J\\x1b]0;owned\\x07b"
    assert escaped(OVERRIDE) == "abc\\u202egpj.exe"
    assert escaped("two\nlines") == "two\\nlines"
    assert escaped("two\nlines\r", lines=True) == "two\nlines\\r"
    assert escaped("caf\udce9") == "caf\\udce9"
    assert escaped("Größe 模型 🙂") == "Größe 模型 🙂"
    assert len(escaped("x" * 10**6)) < 20_000
    assert escaped("x" * 10**6).endswith("... (1000000 characters)")


hostile_events = st.builds(
    Event,
    what=st.one_of(st.sampled_from(["evaluation", "error", "outcome", "trainer"]), names),
    service=names,
    time=st.one_of(st.just(CREATED), floats),
    task=st.none() | texts,
    device=st.none() | counts,
    outcome=st.none() | st.sampled_from(OUTCOMES),
    reason=st.none() | texts,
    version=st.none() | counts,
    staleness=st.none() | counts,
    weight=st.none() | floats,
    text=st.none() | texts,
    metrics=st.none() | st.dictionaries(st.just("accuracy") | texts, floats, max_size=3),
)
hostile_updates = st.builds(
    Contribution,
    task=st.just("t"),
    device=counts,
    tau=counts,
    staleness=counts,
    weight=floats,
    samples=counts,
    steps=counts,
    loss=st.none() | floats,
)
hostile_trainers = st.dictionaries(
    texts,
    st.fixed_dictionaries(
        {"owns": st.lists(counts | texts, max_size=3)},
        optional={
            name: st.none() | texts | counts | st.floats(allow_nan=False, allow_infinity=False)
            for name in ("host", "pid", "device", "answers")
        },
    ),
    max_size=3,
)


@settings(max_examples=60)
@given(
    told=st.lists(hostile_events, max_size=8),
    updates=st.lists(hostile_updates, max_size=3),
    trainers=hostile_trainers,
    text=texts,
    now=st.one_of(st.just(CREATED + 4), floats),
    width=st.sampled_from([20, 80, 200]),
)
@example(
    told=[event("trainer").model_copy(update={"time": time}) for time in (math.inf, math.nan)],
    updates=[],
    trainers={},
    text="",
    now=math.inf,
    width=80,
)
@example(
    told=[
        event("evaluation", version=n, metrics={"accuracy": x})
        for n, x in enumerate([-5.0, 1.0, 1e308, math.inf])
    ],
    updates=[],
    text=ESCAPE,
    now=0.0,
    width=80,
    trainers={
        ESCAPE: {"owns": [], "host": MARKUP, "answers": MARKUP, "device": MARKUP, "pid": MARKUP}
    },
)
def test_hostile_text_is_escaped_in_top_status_and_bar(
    told: list[Event],
    updates: list[Contribution],
    trainers: dict[str, dict[str, Any]],
    text: str,
    now: float,
    width: int,
) -> None:
    history = History()
    for number in range(3):
        history.publish(version(number, *updates))
    for one in told:
        history.tell(one)
    reasons = {"issued": 3, f"refused:{text}": 1, f"stray:{text}": 2, f"dead:{text}": 1}
    for seen in (
        view(reasons, run=replace(view().run, task=text, strategy=text)),
        view(reasons, run=replace(view().run, state="finished", why=text)),
    ):
        picture = top.frame(seen, history, trainers, dict.fromkeys(trainers, now), now)
        assert is_harmless(drawn(picture, width))
        about = status(text, seen) | {"register": trainers}
        assert is_harmless(drawn(page.page(about), width))
        assert is_harmless(escaped(display.figures(seen, history)))
        later = replace(seen, now=CREATED + 4)
        assert is_harmless(escaped(display.doing(later, history, stopping=False)))


@settings(max_examples=40)
@given(
    reason=texts,
    stream=names,
    entry=names,
    at=floats | st.just(CREATED),
    data=st.binary(max_size=40),
    trigger_why=texts,
    task=st.text("abc\x1b\u202e[]/\\", min_size=1, max_size=30),
)
def test_hostile_text_is_escaped_in_dead_letters(
    reason: str, stream: str, entry: str, at: float, data: bytes, trigger_why: str, task: str
) -> None:
    about = Dead(stream=stream, entry=entry, reason=reason, time=at, deliveries=1, data=data)
    message = Trigger(task=task, device=1, seed=1, steps=1, why=trigger_why, origin=stream)
    letters = (dead.Letter("1-0", about, message), dead.Letter("1-1", about, None, reason, reason))
    assert is_harmless(drawn(dead.page(dead.DeadLetters(letters, 2))))
    for letter in letters:
        assert is_harmless(drawn(dead.details(letter)))


def test_hostile_text_is_escaped_in_journals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"{ESCAPE}{OVERRIDE}{MARKUP}two\nlines\r"
    scribe = Scribe(tmp_path, run=text, task=text)
    scribe.update(task=text.replace("|", "").replace(".", ""))
    scribe.refuse(3, reason=text)
    scribe.close()
    with opened(tmp_path) as chain:
        pages.show(pages.lines(chain, pages.Filter()))
    assert is_harmless(capsys.readouterr().out)
    cause = Cause(1, text, 0, 0, math.inf, math.nan, 1e308, None)
    for said in (pages.verdict(Verdict(text, 0, 0, damage=text)), pages.cause(cause)):
        terminal.line(said)
    shown = capsys.readouterr().out
    assert is_harmless(shown)
    assert escaped(text, lines=True) in shown


def test_hostile_text_is_escaped_in_findings_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.show([Finding("problem", ESCAPE, OVERRIDE, ESCAPE)])
    terminal.line(f"fedstream: {ESCAPE}", err=True)
    display.Quiet().say(ESCAPE)
    display.Lines().say(ESCAPE)
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    display.Bar(console).say(ESCAPE + MARKUP)
    shown = capsys.readouterr()
    assert is_harmless(shown.out)
    assert is_harmless(shown.err)
    assert isinstance(console.file, io.StringIO)
    assert is_harmless(console.file.getvalue())
    assert "[bold red]x[/]" in console.file.getvalue()


def test_piped_table_is_neither_cut_nor_padded(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "short"), ("b", f"{'long ' * 50}"), ("c", "")]
    terminal.console().print(terminal.two_columns(rows))
    shown = capsys.readouterr().out
    assert shown == f"a  short\nb  {'long ' * 49}long\nc\n"  # and none is cut


async def test_evaluation_without_a_version_or_by_a_device_is_ignored(
    client: Client, hand: Hand
) -> None:
    await hand.create()
    forged: list[Mapping[str, Any]] = [
        {"version": 7},
        {"version": 10**12},
        {"version": None},
        {"version": 0, "device": 3},
    ]
    for about in forged:
        await hand.ledger.tell(event("evaluation", metrics={"accuracy": 1.0}, **about))
    observer = Observer(client, hand.keys)
    await observer.catch_up()
    assert observer.history.measured is None
    await hand.ledger.tell(event("evaluation", version=0, metrics={"accuracy": 0.5}))
    await observer.catch_up()
    assert observer.history.best["accuracy"] == (0, 0.5)


@pytest.mark.parametrize("wrong", [{"tasks": {}}, {"published": None}, {"register": {"a": 5}}])
def test_foreign_http_answer_is_reported(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answering(about: Mapping[str, Any]) -> None:
        body = json.dumps(about).encode()
        monkeypatch.setattr(page, "urlopen", lambda *_a, **_k: io.BytesIO(body))

    right = status("demo", view()) | {"register": {}}
    answering(right)
    assert page.fetch("http://here:1", "demo") == right
    answering(right | wrong)
    with pytest.raises(FedstreamError, match="does not answer like a coordinator"):
        page.fetch("http://here:1", "demo")


def test_invalid_times_and_huge_numbers_are_short() -> None:
    for time in (math.inf, -math.inf, math.nan, 1e300, 10**400):
        assert terminal.clock(time) == "?"
    assert len(terminal.number(10**4000)) < 20
    assert terminal.number(-(2**70)) == "-1e15 or more"
    assert terminal.measure(1e308) == "1e+308"
    assert terminal.measure(math.nan) == "nan"


def versions(*times: float) -> History:
    """A history of versions that were published then."""
    history = History()
    for number, at in enumerate(times):
        history.publish(
            Version(version=number, time=CREATED + at, epoch=1, digest="d", blob="b", size=1)
        )
    return history


def test_stalled_run_has_no_estimate() -> None:
    fast, slow = versions(0, 1), versions(0, 60, 120, 180)

    def pace(history: History, at: float) -> str:
        return display.pace(view(), history, CREATED + at)

    assert pace(fast, 4) == "0.2 versions/s, 6:28 left"
    why = "(no task begins: see scheduler.policy, and the scheduler's log)"
    assert pace(fast, 40) == f"stalled: no version for 0:39 {why}"
    assert pace(slow, 180 + 300).endswith(" left")  # versions far apart are no stall
    assert pace(slow, 180 + 601) == f"stalled: no version for 10:01 {why}"


def test_line_of_what_is_going_on_is_shown_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_terminal, shown in ((True, "task \\x1b[2J"), (False, "")):
        screen = io.StringIO()
        here = Console(file=screen, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(terminal, "console", lambda here=here, **_how: here)
        with terminal.doing() as show:
            show("task \x1b[2J")
        assert shown in screen.getvalue()
        assert bool(screen.getvalue()) == is_terminal


async def test_key_press_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    keyboard, screen = os.openpty()
    try:
        with os.fdopen(screen) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            before = termios.tcgetattr(screen)
            with terminal.pressed("q") as leave:
                os.write(keyboard, b"x")
                assert not leave.is_set()
                os.write(keyboard, b"Q")  # and no return key
                await asyncio.wait_for(leave.wait(), 60)
            assert termios.tcgetattr(screen) == before
    finally:
        os.close(keyboard)


async def test_top_ends_when_its_key_is_pressed(client: Client, hand: Hand) -> None:
    await hand.create()
    observer, leave = Observer(client, hand.keys), asyncio.Event()

    class Screen(Live):
        def update(self, renderable: RenderableType, *, refresh: bool = False) -> None:
            leave.set()  # once the first picture is there

    live = Screen(console=Console(file=io.StringIO()), auto_refresh=False)
    shown = await top._watched(client, observer, live, "none yet", leave)
    assert "0/100" in drawn(shown)
