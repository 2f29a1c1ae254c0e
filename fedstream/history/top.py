"""`fedstream top`: a live view of a run in the terminal."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.errors import FedstreamError, NoRun
from fedstream.core.messages import Event
from fedstream.core.records import Tally
from fedstream.history.display import failing_rows, outcomes, pace, privacy_rows, quarantined, short
from fedstream.history.observer import Observer, out_of_space
from fedstream.history.report import tasks_of
from fedstream.history.timeline import BINS, History
from fedstream.runtime.backoff import pause
from fedstream.runtime.text import escaped
from fedstream.terminal import (
    cell,
    clock,
    console,
    cut,
    measure,
    number,
    pressed,
    room,
    spaced,
    two_columns,
)

_BLOCKS = " ▁▂▃▄▅▆▇█"
_REFRESH_S = 0.5
_EVENTS = 8
_TRAINERS = 10  # shown individually
_REMEMBERED = 10_000  # versions, as many as the streams hold: watching longer shows no more


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of blocks; every positive value is visible."""
    most = max(values, default=0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[math.ceil(steps * (v / most)) if v > 0 else 0] for v in values)


def histogram(late: Counter[int]) -> list[tuple[str, int]]:
    """Staleness in a few bins, as (label, number of updates)."""
    return [
        (label, sum(n for d, n in late.items() if low <= d and (high is None or d <= high)))
        for label, low, high in BINS
    ]


def frame(
    view: Tally,
    history: History,
    trainers: Mapping[str, Mapping[str, Any]],
    heard: Mapping[str, float],
    now: float,
) -> RenderableType:
    """One frame of the view. ``heard``: seconds since each trainer's last heartbeat."""
    return Group(
        _headline(view, history, now),
        "",
        _numbers(view, history, trainers),
        "",
        _trainers(trainers, heard),
        "",
        _events(history),
    )


def _headline(view: Tally, history: History, now: float) -> Table:
    run, head = view.run, view.head
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    left = Text.assemble(
        cell(short(run.task), style="bold"),
        cell(f" by {short(run.strategy)}"),
        cell(f"  {head.version}/{run.versions}"),
    )
    right = f"finished: {run.why}" if run.state == "finished" else pace(view, history, now)
    bar = ProgressBar(total=run.versions, completed=min(head.version, run.versions))
    line.add_row(left, bar, cell(right))
    return line


def _numbers(view: Tally, history: History, trainers: Mapping[str, Mapping[str, Any]]) -> Table:
    late = history.staleness()
    bins = histogram(late)
    shape = " ".join(f"{label}:{count}" for label, count in bins if count)
    spark = sparkline([count for _, count in bins]).rstrip()
    rows = [
        (history.main or "accuracy", _measured(history)),
        (
            "staleness",
            f"mean {history.mean_staleness:.2f}, max {max(late, default=0)}  {spark}  {shape}",
        ),
        *([(step.key, str(step))] if (step := view.head.step) is not None else []),
        ("tasks", outcomes(tasks_of(view))),
        (
            "waiting",
            f"{view.triggers} triggers, {view.inbox} in the inboxes, {view.backlog} in the queue",
        ),
    ]
    if barred := sorted(view.head.quarantines.by_device):
        rows.append(("quarantined", quarantined(barred)))
    if (loss := view.head.privacy) is not None:
        rows += privacy_rows(loss.about)
    rows += failing_rows(view.failing_devices, trainers)
    rows += [
        (what, ", ".join(f"{why} {count}" for why, count in reasons.items()))
        for what in ("refused", "dead", "stray")
        if (reasons := view.reasons(what))
    ]
    return two_columns(rows)


def _measured(history: History) -> str:
    """The main metric: its newest value, its best, and its curve."""
    name = history.main
    if name is None:
        return "not measured yet"
    known = [(at, m.get(name, math.nan)) for at, m in sorted(history.evaluations.items())]
    known = [(at, value) for at, value in known if math.isfinite(value)]
    points = [value for _, value in known]
    if not points:
        return "never a finite number"
    text = f"{measure(points[-1])} at {known[-1][0]}"
    if name in history.best:
        at, best = history.best[name]
        text += f", best {measure(best)} at {at}"
    return f"{text}  {sparkline(points[:: max(1, len(points) // 24)])}"


def _trainers(trainers: Mapping[str, Mapping[str, Any]], heard: Mapping[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trainer", style="cyan", overflow="ellipsis", no_wrap=True)
    table.add_column("host", overflow="ellipsis", no_wrap=True)
    for name in ("device", "answers", "heard"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, about in islice(trainers.items(), _TRAINERS):
        device = about.get("device")
        age = heard.get(name)
        table.add_row(
            cell(name),
            cell(about.get("host", "")),
            "-" if device is None else cell(number(device)),
            cell(number(about.get("answers"))),
            "" if age is None else f"{max(0.0, age):.1f} s ago",
        )
    if not trainers:
        table.add_row("[dim]none alive[/]")
    if (more := len(trainers) - _TRAINERS) > 0:
        table.add_row(f"[dim]and {more} more[/]")
    return table


def _events(history: History) -> Text:
    lines = [escaped(_line(event)) for event in list(history.events)[-_EVENTS:]]
    return cut("\n".join(lines) or "no events yet", style="dim", lines=True)


def _line(event: Event) -> str:
    """Event in one line."""
    parts = [clock(event.time), event.service]
    if event.what != "outcome":
        parts.append(event.what)
    if event.outcome:
        parts.append(spaced(event.outcome))
    named = (("device", event.device), ("version", event.version), ("staleness", event.staleness))
    parts += [f"{name} {number(value)}" for name, value in named if value is not None]
    if event.weight is not None:
        parts.append(f"weight {number(event.weight, 3)}")
    parts += [event.reason] if event.reason else []
    parts += [f"{name} {measure(value)}" for name, value in (event.metrics or {}).items()]
    if event.text:
        parts += event.text.strip().splitlines()[-1:]
    return "  ".join(parts)


async def watch(client: Client, keys: Keys, journal: Path | None = None, *, once: bool) -> None:
    """Show the run until `q` or Ctrl-C, or until the run and its own Redis end.

    ``journal``: the folder of its journal, which need not be on this machine.

    Raises NoRun if there is no run at the start.
    """
    observer = Observer(client, keys, most=_REMEMBERED)
    await observer.look()
    await observer.catch_up()
    # A frame's bar fills the width, so piped output needs a limit.
    here = console(width=None if room() else get_terminal_size().columns)
    picture = await _picture(client, observer, journal)
    if not once:
        with Live(console=here, auto_refresh=False, screen=True) as live, pressed("q") as leave:
            picture = await _watched(client, observer, live, picture, leave, journal)
    here.print(picture)


async def _watched(
    client: Client,
    observer: Observer,
    live: Live,
    picture: RenderableType,
    leave: asyncio.Event,
    journal: Path | None = None,
) -> RenderableType:
    """Show the run until ``leave`` is set, or the run is finished and its Redis gone.

    Returns the last frame.
    """
    while not leave.is_set():
        try:
            picture = await _picture(client, observer, journal)
            live.update(picture, refresh=True)
            until = time.monotonic() + _REFRESH_S
            while (left := until - time.monotonic()) > 0 and not leave.is_set():
                await observer.step(block_ms=max(1, int(1000 * left)))
                await pause(leave, min(0.1, max(0.0, until - time.monotonic())))
        except NoRun:
            live.update(cell(f"run {observer.keys.name!r} was purged"), refresh=True)
            await pause(leave, _REFRESH_S)
        except FedstreamError as error:
            if not error.retriable:
                raise
            if observer.view is not None and observer.view.run.state == "finished":
                return picture
            live.update(cell(f"{error}: waiting for Redis; press q to quit"), refresh=True)
            await pause(leave, 1.0)
    return picture


async def _picture(client: Client, observer: Observer, journal: Path | None) -> RenderableType:
    view = await observer.look()
    observer.history.disk_full = journal is not None and out_of_space(journal, view)
    scores = await client.call("ZRANGE", observer.keys.alive, 0, -1, "WITHSCORES")
    heard = {
        name.decode(errors="replace"): view.now - float(at)
        for name, at in zip(scores[::2], scores[1::2], strict=True)
        if float(at)  # 0: it signed off
    }
    return frame(view, observer.history, await observer.ledger.trainers(), heard, view.now)
