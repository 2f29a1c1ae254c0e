"""`fedstream report`: summary, table and picture of a run, from its journal alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstream.core.errors import ConfigError, DataError
from fedstream.history import pictures, report, summary
from fedstream.history.measuring import measuring
from fedstream.history.record import RunRecord
from fedstream.history.replay import MeasureAll
from fedstream.journal import newest_version, opened
from fedstream.journal.inspection import history
from fedstream.settings.recording import SUMMARY, settings_of

_POINTS = 50  # default number of versions to measure
FILES = (SUMMARY, report.METRICS, report.CURVES)


@dataclass
class Report:
    """The summary, the files written, and notes on missing measurements."""

    numbers: dict[str, Any]
    files: list[Path]
    notes: list[str] = field(default_factory=list)


def write(
    folder: Path,
    out: Path | None,
    *,
    config: Path | None = None,
    task: str | None = None,
    trusted: bool = False,
    data_root: str | None = None,
    every: int | None = None,
    step: Callable[[int], object] = lambda _version: None,
) -> Report:
    """Write the files of a report; ``step`` is called with each version that was read.

    A folder with metrics.csv keeps its measurements, unless ``task`` or ``every`` asks for others.
    Otherwise every ``every``-th version, and the newest, are measured if the task, and the rule
    that made them, can be loaded; 0 measures nothing. Raises FedstreamError.
    """
    out = report.beside(folder, "report", out, FILES)
    run = RunRecord(folder)
    (columns, head), seen, notes = run.columns(), run.seen(), []
    if every != 0 and (task is not None or every is not None or not run.measurements):
        seen.forget_measurements()
        try:
            settings = settings_of(folder, config, trusted=trusted, task=task, data_root=data_root)
            measure = measuring(settings)
            if measure is None:
                notes.append(f"not measured: task {settings.task.name!r} has no test data")
            else:
                for version, metrics in _measured(run.journal, measure, every, step, notes):
                    seen.measure(version, metrics)
        except (ConfigError, DataError) as error:
            if task is not None or trusted or every is not None:
                raise
            notes.append(f"not measured: {error}")
    numbers = summary.summary(head, columns, seen, *run.stands())
    figure = pictures.curves_of(numbers, head, seen, run.clock)
    with report.usable(out):
        out.mkdir(parents=True, exist_ok=True)
        report.write_summary(out, numbers)
        report.Table(out, head.created).write(seen)
        (out / report.CURVES).write_bytes(pictures.png(figure))
    return Report(numbers, [out / name for name in FILES], notes)


def _measured(
    journal: Path,
    measure: MeasureAll,
    every: int | None,
    step: Callable[[int], object],
    notes: list[str],
) -> Iterator[tuple[int, dict[str, float]]]:
    """The metrics of some versions, each rebuilt from the journal."""
    with opened(journal) as chain:
        last = newest_version(chain)
        every = every or max(1, (last - chain[0].standing.version) // _POINTS)
        for move in history(chain):
            version = move.message.version
            if not move.is_made:
                continue
            step(version)
            if version % every and version != last:
                continue
            if move.after is None:
                notes.append(
                    f"not measured from version {version} on: updates were recorded without "
                    "their weights (journal.weights = false)"
                )
                return
            yield version, measure(version, move.after)
