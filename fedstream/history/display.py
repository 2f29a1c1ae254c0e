"""Progress of `fedstream run`: a bar on a terminal, lines elsewhere, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedstream.core.records import Tally
from fedstream.history.timeline import FIRST_S, History, is_stalled
from fedstream.terminal import cell, console, cut, line, measure, number, spaced, two_columns
from fedstream.trainer.goals import unknown_goal

_LINE_EVERY_S = 3.0
_NAMED = 20  # devices
_REASONED = 5  # devices, each with the reason
_NAME = len("strategy")  # characters of the longest name in a header
_MEAN = "device_mean_"  # of trainer/evaluator.py


class Display(Protocol):
    """Output of a run in progress."""

    def header(self, rows: Mapping[str, str]) -> None:
        """Show the header's rows, by name."""

    def add(self, name: str, value: str) -> None:
        """Show one more row of the header, which was not known before."""

    def say(self, text: str) -> None:
        """Report something that happened."""

    def show(self, view: Tally | None, history: History, *, stopping: bool) -> None:
        """Show progress; called several times a second. ``view`` is None until the run exists."""

    def result(self, numbers: Mapping[str, Any], files: Sequence[str]) -> None:
        """Show the result."""

    def close(self) -> None:
        """Restore the terminal."""


def duration(seconds: float) -> str:
    """Seconds in clock notation: 0:42, 1:02:03."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, last = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{last:02}" if hours else f"{minutes}:{last:02}"


def pace(view: Tally, history: History, now: float) -> str:
    """Rate and time left, or the reason why no version is made."""
    rate = history.rate(now)
    left = view.run.versions - view.head.version
    if view.run.state == "finished" or left <= 0:
        return "measuring the last version"
    if history.disk_full:
        return "waiting for space: the disk is full"
    idle = history.idle_s(now)
    if not rate and (view.head.version or idle <= FIRST_S):  # a resumed run's times are old
        return "waiting for updates"
    if is_stalled(idle, history.usual_s, first=False):
        why = _idle_why(view)
        return f"stalled: no version for {duration(idle)}" + (f" ({why})" if why else "")
    shown = f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"
    return f"{shown} versions/s, {duration(left / rate)} left"


def _idle_why(view: Tally) -> str:
    """A likely reason why no version is made; '' if none is known."""
    if not view.trainers:
        return "no trainer is there"
    if view.head.privacy is not None:
        return "if the updater can't reach the helper, its log says so"
    if not view.tasks and not view.triggers and not view.backlog:
        return "no task begins: see scheduler.policy, and the scheduler's log"
    return ""


def short(name: str) -> str:
    """Name of a task or a strategy, without the folders of its file."""
    return name.rpartition("/")[2]


def doing(view: Tally | None, history: History, *, stopping: bool) -> str:
    """Current activity: the pace, unless the services are starting or stopping."""
    if stopping:
        return "stopping the services"
    return "starting the services" if view is None else pace(view, history, view.now)


def quarantined(devices: Sequence[int]) -> str:
    """Devices in quarantine, in one line; at most 20 are named."""
    named, more = ", ".join(map(str, devices[:_NAMED])), len(devices) - _NAMED
    return f"{len(devices)}: {named}" + (f" and {more} more" if more > 0 else "")


def privacy_rows(about: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """A row for a private run's sums (``PrivacyLoss.about``); none for another run."""
    if about is None:
        return []
    epsilon = about["epsilon"]
    loss = "no noise" if epsilon is None else f"epsilon {epsilon:.3f} at delta {about['delta']:g}"
    sums = f"{about['sums_opened']:,} sums opened, {about['sums_dropped']:,} dropped"
    spent = f", {about['devices_spent']:,} devices without budget" if about["devices_spent"] else ""
    return [("privacy", f"{loss}; {sums}{spent}")]


def failing(devices: Mapping[str, Mapping[str, Any]]) -> str:
    """Devices whose last tasks failed (``Tally.failing_devices``); a few are named with reasons."""
    found = [
        f"device {device} failed {about['tasks']} tasks in a row ({about['reason']})"
        for device, about in islice(devices.items(), _REASONED)
    ]
    more = len(devices) - len(found)
    return ", ".join(found) + (f" and {more} more" if more > 0 else "")


def failing_rows(
    devices: Mapping[str, Mapping[str, Any]], trainers: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str]]:
    """A row for the devices, and a row for the trainers, whose last tasks failed."""
    rows = [("failing", failing(devices))] if devices else []
    bad = [
        f"trainer {name} (its last {number(about['failing'])} tasks, of several devices)"
        for name, about in trainers.items()
        if about.get("failing")
    ]
    more = len(bad) - _REASONED
    if bad:
        rows.append(
            ("failing", ", ".join(bad[:_REASONED]) + (f" and {more} more" if more > 0 else ""))
        )
    return rows


def figures(view: Tally, history: History) -> str:
    """The main metric, staleness and counts, in one line."""
    parts = []
    if newest := history.newest_of_main:
        version, value = newest
        parts.append(f"{history.main} {value:.3f} at {version}")
    parts.append(f"staleness {history.recent_staleness():.1f}")
    if (loss := view.head.privacy) is not None and isfinite(loss.epsilon):
        parts.append(f"epsilon {loss.epsilon:.2f}")
    if view.run.state == "running":  # meaningless once training is over
        parts += [
            f"open {view.tasks}",
            f"queue {view.backlog}",
            f"trainers {view.trainers}",
        ]
    for outcome in ("refused", "dead"):
        if count := view.counts.get(outcome):
            parts.append(f"{outcome} {count}")
    return " · ".join(parts)


def outcomes(tasks: Mapping[str, int]) -> str:
    """Task balance in words: 402 issued = 400 applied + 2 open."""
    parts = [
        f"{count} {spaced(name)}" for name, count in tasks.items() if name != "issued" and count
    ]
    return f"{tasks['issued']} issued = {' + '.join(parts) or '0'}"


def fairness(metrics: Mapping[str, float | None]) -> str:
    """How the devices are served, by accuracy or else by the first metric; '' if not measured."""
    means = [name for name in metrics if name.startswith(_MEAN)]
    if not means:
        return ""
    name = min(means, key=lambda one: one != f"{_MEAN}accuracy").removeprefix(_MEAN)
    parts = (("mean", "mean"), ("worst tenth", "worst_tenth"), ("deviation", "deviation"))
    values = [(said, metrics.get(f"device_{key}_{name}")) for said, key in parts]
    told = ", ".join(f"{said} {measure(v)}" for said, v in values if v is not None)
    has_worst = f"device_worst_tenth_{name}" in metrics
    return f"{name} {told}" if has_worst else f"{name} {told}; {unknown_goal(name)}"


def main_row(numbers: Mapping[str, Any]) -> tuple[str, str] | None:
    """The main metric at the end and at its best, as (name, value); None if nothing was measured.

    Its best is unknown if it was never a finite number, or has no goal.
    """
    name = numbers["main_metric"]
    if name is None:
        return None
    value = numbers["metrics"].get(name)
    text = "not a finite number" if value is None or not isfinite(value) else measure(value)
    if name not in numbers["metrics"]:  # devices measured earlier versions only
        text = "not measured"
    if numbers["measured_version"] != numbers["versions"]:
        text += f" at version {numbers['measured_version']}"
    if best := numbers["best"].get(name):
        text += f" (best {measure(best['value'])} at version {best['version']})"
    return name, text


def never_finite(numbers: Mapping[str, Any]) -> str:
    """The metrics that never were a finite number, or were not measured, in words; '' for none."""
    if lack := numbers.get("devices_lack"):
        return f"no metrics of {lack}"
    never = ", ".join(numbers["never_finite"])
    return (
        f"never a finite number: {never}; look for NaN in the test data and in metrics()"
        if never
        else ""
    )


def result_rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Result as rows of (name, value)."""
    rows = [("result", f"{numbers['state']}: {numbers['why']}")]
    if main := main_row(numbers):
        rows.append(main)
    if never := never_finite(numbers):
        rows.append(("warning", never))
    if served := fairness(numbers["metrics"]):
        rows.append(("devices", served))
    speed = f"{numbers['seconds']:.1f} s, {numbers['updates_per_s']:.1f} updates/s"
    before = numbers["versions_before"]
    new = f", {numbers['versions'] - before} of them" if before else ""
    rows += [
        ("versions", f"{numbers['versions']}{new} in {speed}"),
        ("staleness", f"mean {numbers['mean_staleness']:.2f}, max {numbers['max_staleness']}"),
        ("tasks", outcomes(numbers["tasks"])),
    ]
    if privacy := numbers.get("privacy"):
        rows.append(("privacy", privacy["statement"]))
    for what in ("refused", "given_up", "dead", "strays", "evaluated"):
        if reasons := numbers.get(what):
            text = ", ".join(f"{reason} {count}" for reason, count in reasons.items())
            rows.append((spaced(what), text))
    rows += failing_rows(numbers["failing"], {})
    if again := {name: n for name, n in numbers["restarts"].items() if n}:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in again.items())))
    return rows


class Lines:
    """Plain lines of text, for a file or a pipe."""

    def __init__(self) -> None:
        self._shown = -_LINE_EVERY_S

    def header(self, rows: Mapping[str, str]) -> None:
        for name, value in rows.items():
            self.add(name, value)
        line()

    def add(self, name: str, value: str) -> None:
        line(f"{name:<10} {value}")

    def say(self, text: str) -> None:
        line(text)

    def show(self, view: Tally | None, history: History, *, stopping: bool) -> None:
        if view is None or time.monotonic() - self._shown < _LINE_EVERY_S:
            return
        self._shown = time.monotonic()
        done = f"version {view.head.version} of {view.run.versions}"
        now = doing(view, history, stopping=stopping)
        line(f"{done} · {now} · {figures(view, history)}")

    def result(self, numbers: Mapping[str, Any], files: Sequence[str]) -> None:
        line()
        for name, value in result_rows(numbers):
            line(f"{name:<10} {value}")
        line(f"{'files':<10} {' '.join(files)}")

    def close(self) -> None:
        pass


class Quiet:
    """No output on stdout, which is reserved for JSON; events go to stderr."""

    def header(self, rows: Mapping[str, str]) -> None:
        pass

    def add(self, name: str, value: str) -> None:
        pass

    def say(self, text: str) -> None:
        line(text, err=True)

    def show(self, view: Tally | None, history: History, *, stopping: bool) -> None:
        pass

    def result(self, numbers: Mapping[str, Any], files: Sequence[str]) -> None:
        pass

    def close(self) -> None:
        pass


class Bar:
    """Progress bar on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def header(self, rows: Mapping[str, str]) -> None:
        self._console.print(two_columns(rows.items()))
        self._console.print()
        self._live = Live(
            Text("starting the services", style="dim"),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._live.start()

    def add(self, name: str, value: str) -> None:
        self._console.print(two_columns([(f"{name:<{_NAME}}", value)]))

    def say(self, text: str) -> None:
        self._console.print(cell(text, style="yellow", lines=True))

    def show(self, view: Tally | None, history: History, *, stopping: bool) -> None:
        if self._live is None:
            return
        text = doing(view, history, stopping=stopping)
        if view is None:
            waiting = Text(f"{text} {'.' * (int(time.monotonic() * 2) % 4)}")
            self._live.update(waiting, refresh=True)
            return
        now, last = view.head.version, view.run.versions
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            f"[bold]{now}[/]/{last}",
            ProgressBar(total=last, completed=min(now, last)),
            f"{now / last:.0%}, {text}",
        )
        numbers = cut(figures(view, history), style="dim")
        self._live.update(Group(bar, numbers), refresh=True)

    def result(self, numbers: Mapping[str, Any], files: Sequence[str]) -> None:
        self.close()
        colour = {"finished": "green", "interrupted": "yellow"}.get(numbers["state"], "red")
        (result, how), *rows = result_rows(numbers)
        self._console.print(
            two_columns([(result, cell(how, style=colour)), *rows, ("files", "\n".join(files))])
        )

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def choose(*, as_json: bool) -> Display:
    """Choose the display for where the output goes."""
    if as_json:
        return Quiet()
    here = console()
    return Bar(here) if here.is_terminal else Lines()
