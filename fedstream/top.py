"""`fedstream top`: a run as it goes on, in the terminal."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.client import Client
from broker.errors import FedstreamError, NoRun
from broker.keys import Keys
from broker.messages import Event
from broker.records import View
from fedstream.display import outcomes, pace, short
from fedstream.observer import History, Observer
from fedstream.report import tasks_of

_BLOCKS = " ▁▂▃▄▅▆▇█"
_REFRESH_S = 0.5
_EVENTS = 8
_REMEMBERED = 10_000  # versions: as many as the streams hold, so that a longer look shows no more
_BINS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, None))


def sparkline(counts: list[int]) -> str:
    """Counts as a row of blocks; whatever is not zero can be seen."""
    most = max(counts, default=0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[-(-count * steps // most) if most else 0] for count in counts)


def histogram(late: Counter[int]) -> list[tuple[str, int]]:
    """Staleness in few bins, as (label, updates)."""
    return [
        (
            str(low) if low == high else f"{low}+" if high is None else f"{low}-{high}",
            sum(n for d, n in late.items() if low <= d and (high is None or d <= high)),
        )
        for low, high in _BINS
    ]


def frame(
    view: View, history: History, trainers: Mapping[str, Mapping[str, Any]],
    heard: Mapping[str, float], now: float,
) -> RenderableType:  # fmt: skip
    """One picture of the run. ``heard``: seconds since each trainer was heard last."""
    return Group(
        _headline(view, history, now), "", _numbers(view, history), "",
        _trainers(trainers, heard), "", _events(history),
    )  # fmt: skip


def _headline(view: View, history: History, now: float) -> Table:
    run, head = view.run, view.head
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    what = f"[bold]{escape(short(run.task))}[/] by {escape(run.strategy)}"
    left = f"{what}  {head.version}/{run.versions}"
    right = f"finished: {run.why}" if run.state == "finished" else pace(view, history, now)
    bar = ProgressBar(total=run.versions, completed=min(head.version, run.versions))
    line.add_row(left, bar, escape(right))
    return line


def _numbers(view: View, history: History) -> Table:
    late = history.staleness()
    bins = histogram(late)
    shape = " ".join(f"{label}:{count}" for label, count in bins if count)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_row("accuracy", _accuracy(history))
    spark = sparkline([count for _, count in bins]).rstrip()
    table.add_row(
        "staleness",
        f"mean {history.mean_staleness:.2f}, max {max(late, default=0)}  {spark}  {shape}",
    )
    table.add_row("tasks", outcomes(tasks_of(view)))
    table.add_row(
        "waiting",
        f"{view.triggers} triggers, {view.uploads} uploads, {view.backlog} in the queue",
    )
    for what in ("refused", "dead", "stray"):
        if reasons := view.reasons(what):
            text = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
            table.add_row(what, escape(text))
    return table


def _accuracy(history: History) -> str:
    known = (m.get("accuracy", math.nan) for _, m in sorted(history.evaluations.items()))
    points = [accuracy for accuracy in known if math.isfinite(accuracy)]
    if not points or history.best_accuracy is None or history.measured is None:
        return "not measured yet"
    at, best = history.best_accuracy
    few = points[:: max(1, len(points) // 24)]
    curve = sparkline([round(1000 * value) for value in few])
    return f"{points[-1]:.4f} at {history.measured[0]}, best {best:.4f} at {at}  {curve}"


def _trainers(trainers: Mapping[str, Mapping[str, Any]], heard: Mapping[str, float]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("trainer", style="cyan")
    table.add_column("host")
    for name in ("device", "answers", "heard"):
        table.add_column(name, justify="right")
    for name, about in trainers.items():
        device = about.get("device")
        age = heard.get(name)
        table.add_row(
            escape(name), escape(str(about.get("host", ""))),
            "-" if device is None else str(device), str(about.get("answers", "")),
            "" if age is None else f"{max(0.0, age):.1f} s ago",
        )  # fmt: skip
    if not trainers:
        table.add_row("[dim]none is alive[/]")
    return table


def _events(history: History) -> Text:
    lines = [_line(event) for event in list(history.events)[-_EVENTS:]]
    return Text("\n".join(lines) or "no events yet", style="dim", overflow="ellipsis", no_wrap=True)


def _line(event: Event) -> str:
    """An event in a line."""
    parts = [datetime.fromtimestamp(event.time).astimezone().strftime("%H:%M:%S"), event.service]
    if event.what != "outcome":
        parts.append(event.what)
    if event.outcome:
        parts.append(event.outcome.replace("_", " "))
    if event.device is not None:
        parts.append(f"device {event.device}")
    if event.version is not None:
        parts.append(f"version {event.version}")
    if event.staleness is not None:
        parts.append(f"staleness {event.staleness}")
    if event.weight is not None:
        parts.append(f"weight {event.weight:.3f}")
    parts += [event.reason] if event.reason else []
    parts += [f"{name} {value:.4f}" for name, value in (event.metrics or {}).items()]
    if event.text:
        parts.append(event.text.strip().splitlines()[-1])
    return "  ".join(parts)


async def watch(client: Client, keys: Keys, *, once: bool) -> None:
    """Shows the run until Ctrl-C, or until its Redis ends with it.

    Raises NoRun if there is none at the beginning.
    """
    observer = Observer(client, keys, most=_REMEMBERED)
    await observer.look()
    await observer.catch_up()
    console = Console()
    picture = await _picture(client, observer)
    if not once:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            picture = await _watched(client, observer, live, picture)
    console.print(picture)


async def _watched(
    client: Client, observer: Observer, live: Live, picture: RenderableType
) -> RenderableType:
    """Shows the run until it is finished and its Redis is gone: the last picture."""
    while True:
        try:
            picture = await _picture(client, observer)
            live.update(picture, refresh=True)
            until = time.monotonic() + _REFRESH_S
            while (left := until - time.monotonic()) > 0:
                await observer.step(block_ms=max(1, int(1000 * left)))
                await asyncio.sleep(min(0.1, max(0.0, until - time.monotonic())))
        except NoRun:
            live.update(Text(f"run {observer.keys.name!r} was purged"), refresh=True)
            await asyncio.sleep(_REFRESH_S)
        except FedstreamError as error:
            if not error.retriable:
                raise
            if observer.view is not None and observer.view.run.state == "finished":
                return picture
            live.update(Text(f"{error}: waiting for it; Ctrl-C ends this"), refresh=True)
            await asyncio.sleep(1.0)


async def _picture(client: Client, observer: Observer) -> RenderableType:
    view = await observer.look()
    scores = await client.call("ZRANGE", observer.keys.alive, 0, -1, "WITHSCORES")
    heard = {
        name.decode(errors="replace"): view.now - float(at)
        for name, at in zip(scores[::2], scores[1::2], strict=True)
        if float(at)  # 0: it said good-bye
    }
    return frame(view, observer.history, await observer.ledger.trainers(), heard, view.now)
