"""The live page as HTML: the whole of it, and its parts as they change."""

from __future__ import annotations

from collections.abc import Iterable
from time import thread_time
from typing import Any

import markupsafe

from fedstream.broker.keys import Keys
from fedstream.history.live.broadcast import DrawnGlance, LivePicture
from fedstream.history.live.collector import Glance
from fedstream.history.live.panels import PANELS, device_html, devices_html, headline_html
from fedstream.history.live.recent import Told
from fedstream.history.live.scene import Note, Scene, SeenMetrics, TaskEnd
from fedstream.history.ui.templating import rendered
from fedstream.operate.dead import DeadLetters
from fedstream.runtime.text import escaped
from fedstream.terminal import measure, number, spaced

HEADLINE = "headline"
_TEXT = 300  # characters of an error that the log shows


def drawn(look: Glance) -> DrawnGlance:
    """A look as its viewers get it."""
    began = thread_time()
    run = look.scene.tally.run
    state = f"{run.state}: {run.why}" if run.why else run.state
    parts = {"state": str(markupsafe.escape(escaped(state))), HEADLINE: headline_html(look.scene)}
    parts |= {panel.name: panel.html(look.scene) for panel in PANELS}
    rows = [(id_, row(told)) for id_, told in look.news]
    return DrawnGlance(parts, rows, thread_time() - began)


def away(scene: Scene, away_s: float) -> dict[str, str]:
    """The part that says for how long Redis has not answered."""
    return {HEADLINE: headline_html(scene, away_s=away_s)}


def row(told: Told) -> list[object]:
    """What was told, as a line of the log: when, what kind, in words."""
    if isinstance(told, SeenMetrics):
        said = [f"{name} {measure(value)}" for name, value in told.metrics.items()]
        return [told.time, "measured", f"version {told.version}: {', '.join(said)}"]
    where = [
        f"{name} {number(value)}"
        for name, value in (("device", told.device), ("version", told.version))
        if value is not None
    ]
    if isinstance(told, Note):
        text = told.text.strip().rpartition("\n")[2][:_TEXT]
        words = [told.service, *where, spaced(told.reason), text]
        return [told.time, told.what, escaped(" · ".join(filter(None, words)))]
    words = [*where, f"because {spaced(told.reason)}" if told.reason else ""]
    if told.staleness is not None:
        words.append(f"staleness {told.staleness}")
    if told.weight is not None:
        words.append(f"weight {number(told.weight, 3)}")
    return [told.time, spaced(told.outcome), escaped(" · ".join(filter(None, words)))]


def page(
    picture: LivePicture,
    *,
    has_past: bool,
    journal: str,
    is_operator: bool,
    has_operators: bool,
    may_leave: bool,
) -> str:
    """The whole page. ``journal``: where it would be; ``may_leave``: the viewer has logged in."""
    scene = picture.scene
    return rendered(
        "live.html",
        **_frame(scene, "Live", has_past=has_past, has_operators=has_operators),
        headline=picture.parts[HEADLINE],
        position=scene.position,
        lines=_lines(scene),
        panels=[(panel, picture.parts[panel.name]) for panel in PANELS],
        is_operator=is_operator,
        may_leave=may_leave,
        journal=journal,
    )


def devices(picture: LivePicture, sort: str, *, has_operators: bool) -> str:
    """The devices of the newest tasks, by a column. For a run without a journal here."""
    return _inside(picture, "Devices", devices_html(picture.scene, sort), has_operators)


def device(picture: LivePicture, number: int, *, has_operators: bool) -> str:
    """What the newest tasks say of a device."""
    text = device_html(picture.scene, number)
    return _inside(picture, f"Device {number}", text, has_operators)


def _inside(picture: LivePicture, title: str, text: str, has_operators: bool) -> str:
    frame = _frame(picture.scene, title, has_past=False, has_operators=has_operators)
    return rendered("live/inside.html", **frame, inside=text)


def _lines(scene: Scene) -> list[tuple[str, list[object]]]:
    """The last lines of the log, newest first."""
    told: Iterable[TaskEnd | Note] = (*scene.outcomes, *scene.notes)
    found = sorted(told, key=lambda one: tuple(map(int, one.id.split("-"))), reverse=True)
    return [(one.id, row(one)) for one in found[:50]]


def login(run: str, to: str, *, is_operator: bool, problem: str) -> str:
    """The form that asks for a token. ``to``: where to go on."""
    return rendered(
        "login.html", **_bare(run, "Log in"), to=to, is_operator=is_operator, problem=problem
    )


def operate(
    run: str, found: DeadLetters | None, form: str, *, told: str, problem: str, ended: str
) -> str:
    """What an operator may do. ``form``: what forms must contain; ``told``: what was just done.

    ``ended``: how the run did; '' if it goes on.
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
    """Why there is nothing to see yet."""
    return rendered("waiting.html", **_bare(run, "Waiting"), text=text)


def problem(run: str, title: str, text: str) -> str:
    """What went wrong."""
    return rendered("problem.html", **_bare(run, title), text=text)


def _frame(scene: Scene, title: str, *, has_past: bool, has_operators: bool) -> dict[str, Any]:
    about = scene.tally.run
    run = {
        "name": scene.name,
        "task": about.task,
        "strategy": about.strategy,
        "state": about.state,
        "why": about.why or "",
        "damage": (),
        "past": has_past,
        "operators": has_operators,
        "newest": scene.tally.head.version,
    }
    return {"title": title, "here": title, "run": run}


def _bare(run: str, title: str) -> dict[str, Any]:
    about = {
        "name": Keys(run).name,
        "task": "",
        "strategy": "",
        "state": "",
        "why": "",
        "damage": (),
        "past": False,
        "operators": False,
        "newest": 0,
    }
    return {"title": title, "here": title, "run": about}
