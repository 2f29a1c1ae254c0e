"""The live page as HTML: the whole of it, and its parts as they change."""

from __future__ import annotations

from time import thread_time
from typing import Any

import markupsafe

from fedstream.broker.keys import Keys
from fedstream.core.messages import Event
from fedstream.history.live.broadcast import DrawnSnapshot, LivePicture
from fedstream.history.live.collector import Collected
from fedstream.history.live.panels import PANELS, device_html, devices_html, headline_html
from fedstream.history.live.recent import is_measurement
from fedstream.history.live.snapshot import Snapshot
from fedstream.history.ui.templating import rendered
from fedstream.operate.dead import DeadLetters
from fedstream.runtime.text import escaped
from fedstream.terminal import measure, number, spaced

HEADLINE = "headline"
_TEXT = 300  # characters of an error that the log shows


def drawn(look: Collected) -> DrawnSnapshot:
    """Draw a snapshot's panels, and its events as lines of the log."""
    began = thread_time()
    run = look.snapshot.tally.run
    state = f"{run.state}: {run.why}" if run.why else run.state
    parts = {
        "state": str(markupsafe.escape(escaped(state))),
        HEADLINE: headline_html(look.snapshot),
    }
    parts |= {panel.name: panel.html(look.snapshot) for panel in PANELS}
    rows = [(id_, row(event)) for id_, event in look.news]
    return DrawnSnapshot(parts, rows, thread_time() - began)


def away(snapshot: Snapshot, away_s: float) -> dict[str, str]:
    """The headline that says for how long Redis has not answered."""
    return {HEADLINE: headline_html(snapshot, away_s=away_s)}


def row(event: Event) -> list[object]:
    """An event as a line of the log: its time, its kind, and words."""
    kind = event.outcome or event.what
    if is_measurement(event):
        said = [f"{name} {measure(value)}" for name, value in (event.metrics or {}).items()]
        return [event.time, "measured", f"version {event.version}: {', '.join(said)}"]
    words = [
        f"{name} {number(value)}"
        for name, value in (("device", event.device), ("version", event.version))
        if value is not None
    ]
    if event.outcome is None:
        text = (event.text or "").strip().rpartition("\n")[2][:_TEXT]
        words = [event.service, *words, spaced(event.reason or ""), text]
    elif event.reason:
        words.append(f"because {spaced(event.reason)}")
    if event.outcome is not None and event.staleness is not None:
        words.append(f"staleness {event.staleness}")
    if event.outcome is not None and event.weight is not None:
        words.append(f"weight {number(event.weight, 3)}")
    return [event.time, spaced(kind), escaped(" · ".join(filter(None, words)))]


def page(
    picture: LivePicture,
    *,
    is_recorded: bool,
    journal: str,
    is_operator: bool,
    has_operators: bool,
    may_leave: bool,
) -> str:
    """The whole page. ``journal``: path of the journal; ``may_leave``: the viewer has logged in."""
    snapshot = picture.snapshot
    return rendered(
        "live.html",
        **_frame(snapshot, "Live", is_recorded=is_recorded, has_operators=has_operators),
        headline=picture.parts[HEADLINE],
        position=snapshot.position,
        lines=[(id_, row(event)) for id_, event in reversed(snapshot.told)],
        panels=[(panel, picture.parts[panel.name]) for panel in PANELS],
        is_operator=is_operator,
        may_leave=may_leave,
        journal=journal,
    )


def devices(picture: LivePicture, sort: str, *, has_operators: bool) -> str:
    """The devices' figures in the newest tasks, sorted by a column; used without a journal."""
    return _inside(picture, "Devices", devices_html(picture.snapshot, sort), has_operators)


def device(picture: LivePicture, number: int, *, has_operators: bool) -> str:
    """A device's figures in the newest tasks; used without a journal."""
    text = device_html(picture.snapshot, number)
    return _inside(picture, f"Device {number}", text, has_operators)


def _inside(picture: LivePicture, title: str, text: str, has_operators: bool) -> str:
    frame = _frame(picture.snapshot, title, is_recorded=False, has_operators=has_operators)
    return rendered("live/inside.html", **frame, inside=text)


def login(run: str, to: str, *, is_operator: bool, problem: str) -> str:
    """The form that asks for a token. ``to``: the path that was asked for."""
    return rendered(
        "login.html", **_bare(run, "Log in"), to=to, is_operator=is_operator, problem=problem
    )


def operate(
    run: str, found: DeadLetters | None, form: str, *, told: str, problem: str, ended: str
) -> str:
    """The page of operators' actions.

    ``form``: secret for the page's forms; ``told``: result of the last action; ``ended``: state of
    a run that has ended, '' for a running one.
    """
    return rendered(
        "operate.html",
        **_bare(run, "Operate"),
        found=found,
        form=form,
        told=told,
        problem=problem,
        ended=ended,
    )


def waiting(run: str, text: str) -> str:
    """A page that says why there is no snapshot yet, and loads itself again."""
    return rendered("waiting.html", **_bare(run, "Waiting"), text=text)


def problem(run: str, title: str, text: str) -> str:
    """A page that shows an error."""
    return rendered("problem.html", **_bare(run, title), text=text)


def _frame(
    snapshot: Snapshot, title: str, *, is_recorded: bool, has_operators: bool
) -> dict[str, Any]:
    run = snapshot.tally.run
    return _bare(
        snapshot.name,
        title,
        task=run.task,
        strategy=run.strategy,
        state=run.state,
        why=run.why or "",
        recorded=is_recorded,
        operators=has_operators,
        newest=snapshot.tally.head.version,
    )


def _bare(run: str, title: str, **about: object) -> dict[str, Any]:
    """The fields that each template needs. ``about``: facts of the run, if they are known."""
    unknown = {"task": "", "strategy": "", "state": "", "why": "", "damage": (), "newest": 0}
    rights = {"recorded": False, "operators": False}
    return {
        "title": title,
        "here": title,
        "run": {"name": Keys(run).name} | unknown | rights | about,
    }
