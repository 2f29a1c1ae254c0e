"""`fedstream simulate`: a run in virtual time, and its result files."""

from __future__ import annotations

import platform
import secrets
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import tomli_w
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from fedstream.core import __version__
from fedstream.core.errors import FedstreamError
from fedstream.core.messages import Event, Version
from fedstream.history import report
from fedstream.history.display import (
    duration,
    failing,
    fairness,
    main_row,
    never_finite,
    short,
)
from fedstream.history.report import occupied
from fedstream.history.timeline import History
from fedstream.journal import FOLDER
from fedstream.runtime.config import dump
from fedstream.runtime.process import INTERRUPTED, Stop
from fedstream.settings.config import Settings
from fedstream.settings.dry_step import try_model
from fedstream.settings.plugin_sources import doubts
from fedstream.settings.recording import CONFIG, SUMMARY
from fedstream.settings.services import check_used, described, task_of
from fedstream.simulation import SimulationResult, VersionMade, simulate
from fedstream.simulation.arrivals import without_effect
from fedstream.sinks.service import DirectSinks
from fedstream.sinks.settings import flat, named, parameters
from fedstream.sinks.sink import TrackedRun
from fedstream.terminal import console, line, two_columns
from fedstream.trainer.goals import is_over_devices
from fedstream.trainer.task import declared_goals

if TYPE_CHECKING:
    from fedstream.trainer.task import Task

_LINE_EVERY_S = 3.0
_CODES = {"finished": 0, "interrupted": INTERRUPTED, "failed": 1}


def run(settings: Settings, out: Path, *, journal: bool, quiet: bool) -> tuple[int, dict[str, Any]]:
    """Simulate and write the files; returns the exit code and the summary.

    Raises FedstreamError.
    """
    check_folder(out)
    check_used(settings)
    settings = settings.with_absolute_paths()
    with redirect_stdout(sys.stderr):  # stdout may be read by a program
        task = task_of(settings)
    for doubt in (*doubts(settings), *without_effect(settings)):
        line(doubt, err=True)
    # Ctrl-C or SIGTERM ends the run and keeps partial results. Both need handlers: a container's
    # first process ignores signals that it doesn't handle.
    with Stop() as stop:
        stop.at_once = partial(console(err=True).show_cursor, True)
        with _progress(settings.run.versions, quiet=quiet) as show:

            def shown(made: VersionMade) -> None:
                if not quiet and not made.version:
                    model = described(settings, try_model(settings, task))
                    line(f"model      {model}", err=True)
                show(made)

            outcome, numbers, files = simulate_into(
                out,
                settings,
                task,
                journal=journal,
                picture=True,
                show=shown,
                cancelled=lambda: stop.name is not None,
            )
    if not quiet:
        _show(outcome, numbers, [str(out / name) for name in files])
    return _CODES[outcome.state], numbers


def simulate_into(
    out: Path,
    settings: Settings,
    task: Task,
    *,
    journal: bool,
    picture: bool,
    show: Callable[[VersionMade], object],
    cancelled: Callable[[], bool],
) -> tuple[SimulationResult, dict[str, Any], list[str]]:
    """Simulate, and write the files into a folder; returns the result, the summary and their names.

    ``picture``: draw the curves, which takes a second. ``show`` is called for each version. Raises
    as :func:`simulate` does; ConfigError for a folder that cannot be written.
    """
    history, table = History(), report.Table(out, 0.0)
    history.goal.update(declared_goals(task))
    history.stop_metric = settings.run.stop_metric
    told: set[str] = set()
    began = time.time()
    settings = settings.model_copy(
        update={"sinks": tuple(sink.placed(out.absolute()) for sink in settings.sinks)}
    )
    with _folder(out, settings, begun=lambda: len(history.versions) > 1):
        about = {**parameters(settings), **flat({"goal": history.goal})}
        tracked = TrackedRun(secrets.token_hex(8), settings.run.name, began, about)
        sinks = DirectSinks(named(settings.sinks), tracked, lambda why: line(why, err=True))

        def heard(made: VersionMade, _model: object) -> None:
            version = Version(
                version=made.version,
                time=made.time,
                epoch=1,
                digest="none",
                blob="none",
                size=0,
                updates=made.updates,
            )
            history.publish(version)
            at, found = began + made.time, made.on_devices
            there = found.metrics if found is not None else {}
            central = {name: one for name, one in made.metrics.items() if name not in there}
            sinks.publish(
                version.model_copy(update={"time": at}),
                *(
                    Event(
                        what=what,
                        service="simulation",
                        time=at,
                        version=made.version,
                        metrics=metrics,
                    )
                    for what, metrics in (("evaluation", central), ("devices_evaluated", there))
                ),
            )
            history.measure(made.version, made.metrics)
            if found is not None:
                history.measure_on_devices(made.version, found.metrics, found.summary)
            for key, notice in history.notices(journal=journal):
                if key not in told:
                    told.add(key)
                    line(notice, err=True)
            with report.usable(out):
                table.follow(history)
            show(made)

        outcome = simulate(
            settings,
            task,
            journal=out / FOLDER if journal else None,
            on_version=heard,
            on_error=partial(line, err=True),
            lineage=tracked.id,
            cancelled=cancelled,
        )
        numbers = summary(settings, outcome, history)
        files = _write(settings, out, outcome, history, numbers, picture=picture)
        sinks.end(numbers, out / report.MODEL, finished=outcome.state == "finished")
    return outcome, numbers, [*files, *([FOLDER] if journal else []), CONFIG]


def check_folder(out: Path) -> None:
    """Raise FedstreamError if the folder holds a run already."""
    if taken := report.taken(out):
        raise FedstreamError(f"{out} already contains a run ({taken}): choose another folder")


@contextmanager
def _folder(out: Path, settings: Settings, *, begun: Callable[[], bool]) -> Iterator[None]:
    """Create the folder with run.toml; undo that on an error before version 1."""
    missing = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        with report.usable(out):
            out.mkdir(parents=True, exist_ok=True)
            (out / CONFIG).write_text(as_toml(settings), encoding="utf-8")
        with occupied(out):
            yield
    except Exception:
        if not begun():
            rmtree(out / FOLDER, ignore_errors=True)
            for undo in ((out / CONFIG).unlink, *(folder.rmdir for folder in missing)):
                with suppress(OSError):
                    undo()
        raise


def as_toml(settings: Settings) -> str:
    """Text of the resolved run.toml; redis.url only if given, so that services can use it too."""
    tables = tomllib.loads(dump(settings))
    if "url" not in settings.redis.model_fields_set:
        del tables["redis"]["url"]
    return tomli_w.dumps(tables)


@contextmanager
def _progress(versions: int, *, quiet: bool) -> Iterator[Callable[[VersionMade], None]]:
    """Progress with metrics and time left: a bar on a terminal, occasional lines elsewhere."""
    here = console(err=True)
    if quiet:
        yield lambda _made: None
        return
    if not here.is_terminal:
        yield _ProgressLines(versions).show
        return
    columns = (
        TextColumn("simulate"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[measured]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=here, transient=True) as bar:
        task = bar.add_task("simulate", total=versions, measured="")

        def show(made: VersionMade) -> None:
            bar.update(task, completed=made.version)
            if made.metrics:
                bar.update(task, measured=in_words(made.metrics))

        yield show


class _ProgressLines:
    """Progress as lines, for a file or a pipe."""

    def __init__(self, versions: int) -> None:
        self._versions = versions
        self._began = self._shown = time.monotonic()
        self._measured = ""

    def show(self, made: VersionMade) -> None:
        """Print a line if the last one was at least 3 s ago."""
        if made.metrics:
            self._measured = f" · {in_words(made.metrics)}"
        now = time.monotonic()
        if now - self._shown < _LINE_EVERY_S or not made.version:
            return
        self._shown = now
        left = (now - self._began) / made.version * (self._versions - made.version)
        done = f"version {made.version} of {self._versions}"
        line(f"{done} · {duration(left)} left{self._measured}", err=True)


def in_words(metrics: dict[str, float]) -> str:
    """Metrics in one line, without their spread over devices."""
    shown = {name: value for name, value in metrics.items() if not is_over_devices(name)}
    return ", ".join(f"{name} {value:.4f}" for name, value in shown.items())


def summary(settings: Settings, outcome: SimulationResult, history: History) -> dict[str, Any]:
    """The run in numbers."""
    import torch

    late, last = history.staleness(), outcome.versions[-1]
    return {
        **report.measurements(history),
        "versions": last.version,
        "versions_wanted": settings.run.versions,
        "updates": last.used,
        "gradients": last.gradients,
        "device_epochs": round(last.epochs, 3),
        "communications": last.communications,
        "update_bytes": outcome.update_bytes,
        "devices_with_feedback": outcome.remembering,
        "refused": dict(outcome.refused),
        "given_up": dict(outcome.given_up),
        "failing": {
            str(device): {"tasks": tasks, "reason": reason}
            for device, (tasks, reason) in outcome.failing.items()
        },
        "mean_staleness": round(history.mean_staleness, 4),
        "max_staleness": max(late, default=0),
        "virtual_seconds": last.time,
        "seconds": round(outcome.seconds, 3),
        "device_epochs_per_s": round(last.epochs / outcome.seconds, 3),
        "trained_together": outcome.together,
        "precision": outcome.precision or "float32",
        "state": outcome.state,
        "why": outcome.why,
        "run": settings.run.name,
        "task": settings.task.name,
        "strategy": settings.strategy.name,
        "devices": outcome.devices,
        "seed": settings.run.seed,
        "start": outcome.start or None,
        "parameters": outcome.model.layout.parameters,
        "fedstream": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _write(
    settings: Settings,
    out: Path,
    outcome: SimulationResult,
    history: History,
    numbers: dict[str, Any],
    *,
    picture: bool,
) -> list[str]:
    """Write the files; returns their names."""
    title = (
        f"{short(settings.task.name)} · {short(settings.strategy.name)} · "
        f"{outcome.devices} devices, simulated · {numbers['versions']} versions"
    )
    about = {
        "version": str(numbers["versions"]),
        "digest": outcome.model.digest(settings.wire.digest),
        "run": settings.run.name,
        "task": settings.task.name,
    }
    with report.usable(out):
        report.write_summary(out, numbers)
        report.Table(out, 0.0).write(history)
        if picture:
            from fedstream.history import pictures

            pictures.draw(
                out / report.CURVES,
                title,
                history,
                created=0.0,
                devices=outcome.devices,
                time="virtual seconds" if settings.staleness.kind == "latency" else "arrivals",
            )
        has_best = report.write_best(out, numbers, outcome.module)
        report.write_model(out, outcome.model, outcome.module, about)
        if outcome.per_device:
            report.write_devices(out, outcome.per_device)
    more = [report.CURVES] if picture else []
    more += [report.DEVICES] if outcome.per_device else []
    more += [report.BEST] if has_best else []
    return [SUMMARY, report.METRICS, *more, report.MODEL]


def _show(outcome: SimulationResult, numbers: dict[str, Any], files: list[str]) -> None:
    """Print the result as a table."""
    main = main_row(numbers)
    rows = {
        "run": f"{numbers['run']}: {outcome.state} ({outcome.why})",
        "measured": in_words(numbers["metrics"]) or ("" if main else "not measured"),
        **dict([main] if main else []),
        "devices": fairness(numbers["metrics"]),
        "warning": never_finite(numbers),
        "versions": f"{numbers['versions']}, from {numbers['updates']} updates, "
        f"{numbers['gradients']} gradients, {numbers['device_epochs']:g} device-epochs",
        "staleness": f"mean {numbers['mean_staleness']:.2f}, max {numbers['max_staleness']}",
        "refused": ", ".join(f"{n} {why}" for why, n in outcome.refused.items()),
        "given up": ", ".join(f"{n} {why}" for why, n in outcome.given_up.items()),
        "failing": failing(numbers["failing"]),
        "took": f"{outcome.seconds:.1f} s, {numbers['device_epochs_per_s']:,.0f} device-epochs/s",
        "files": "\n".join(files),
    }
    console().print(two_columns((name, value) for name, value in rows.items() if value))
