"""``fedstream sweep``: simulate many configurations, and show which is best."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from fedstream.core.errors import FedstreamError
from fedstream.history.display import duration
from fedstream.runtime.config import Option
from fedstream.settings.config import Settings
from fedstream.sweep import results
from fedstream.sweep.parallel import each, share
from fedstream.sweep.results import Ranked, Ranking, SweepFolder, as_csv, lines
from fedstream.sweep.space import axes, drawn, grid
from fedstream.sweep.trials import (
    Configuration,
    Finished,
    Trial,
    check_some_works,
    configurations,
    run_trial,
    words,
)
from fedstream.terminal import cell, console, counted, line, measure

_SHOWN = 20  # rows of the printed table


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """The configurations, repeats and result files of a sweep."""

    over: Sequence[str]
    """axes in the form KEY=VALUES"""
    out: Path
    ranking: Ranking
    repeats: int = 1
    random: int | None = None
    """number of random configurations; None: the whole grid"""
    seed: int = 0
    """seed of the random search"""
    processes: int | None = None
    """None: one per core"""


def points(
    request: SweepRequest, read: Callable[[Sequence[Option]], Settings]
) -> list[Configuration]:
    """The requested configurations. Raises ConfigError if one is invalid."""
    found = axes(request.over)
    keys = grid(found) if request.random is None else drawn(found, request.random, request.seed)
    return configurations(keys, read)


def sweep(
    request: SweepRequest,
    read: Callable[[Sequence[Option]], Settings],
    say: Callable[[str], object],
) -> list[Ranked]:
    """Run missing trials and write the files; return the table, the best configuration first.

    ``read``: returns the configuration with some keys changed. The files always have all finished
    runs. Raises FedstreamError, KeyboardInterrupt.
    """
    wanted = points(request, read)
    store = SweepFolder(request.out)
    store.begin(wanted)
    there = {(run.configuration, run.repeat) for run in store.runs() if run.state != "raised"}
    metric, goal = request.ranking.metric, request.ranking.goal
    # All configurations once, then all again, so that an interrupted sweep covers all.
    trials = [
        Trial(one.name, store.file(one), one.keys, repeat, metric, goal)
        for repeat in range(request.repeats)
        for one in wanted
        if (one.name, repeat) not in there
    ]
    total = len(wanted) * request.repeats
    what = f"{counted(len(wanted), 'configuration')}, {counted(total, 'run')}"
    say(f"{what}, {total - len(trials)} of them done already")
    if trials:
        say("trying the task")
        check_some_works(trials)
    try:
        _run(trials, request, store, say)
    finally:
        found = lines(wanted, store.runs(), request.ranking, request.repeats)
        _write(store, wanted, found, request.ranking)
    return found


def _run(
    trials: Sequence[Trial], request: SweepRequest, store: SweepFolder, say: Callable[[str], object]
) -> None:
    keys = {trial.configuration: trial.keys for trial in trials}
    processes, threads = share(len(trials), request.processes)
    began = time.perf_counter()
    finished = each(run_trial, trials, processes=processes, threads=threads)
    for n, run in enumerate(finished, start=1):
        store.add(run)
        left = (time.perf_counter() - began) / n * (len(trials) - n)
        say(
            f"[{n}/{len(trials)}] {words(keys[run.configuration])}, repeat {run.repeat}: "
            f"{_outcome(run, request.ranking)}, {run.seconds:.1f} s"
            + (f"; about {duration(left)} to go" if n < len(trials) else "")
        )


def _outcome(run: Finished, ranking: Ranking) -> str:
    value = ranking.of(run)
    return (
        f"{run.state} ({run.why})"
        if value is None
        else f"{ranking.metric_in(run)} {measure(value)}"
    )


def _write(
    store: SweepFolder,
    wanted: Sequence[Configuration],
    found: Sequence[Ranked],
    ranking: Ranking,
) -> None:
    from fedstream.sweep.picture import draw

    if not found:
        return
    metric = found[0].metric
    store.write(results.TABLE, as_csv(found, metric))
    many, runs = counted(len(found), "configuration"), sum(len(one.runs) for one in found)
    title = f"{ranking.which.title()} {metric} of {many}, {counted(runs, 'run')}"
    draw(store.folder / results.PICTURE, title, found, ranking)
    best = found[0]
    if best.mean is None:
        return
    text = next(one.text for one in wanted if one.name == best.configuration)
    spread = f" ± {measure(best.deviation)}" if best.deviation is not None else ""
    head = (
        f"# The best of {many}: {ranking.which} {metric} "
        f"{measure(best.mean)}{spread} over {counted(len(best.values), 'simulated run')}.\n"
    )
    store.write(results.BEST, head + text)


def show(found: Sequence[Ranked], request: SweepRequest) -> None:
    """Print the table and the files."""
    keys = list(dict.fromkeys(key for one in found for key in one.keys))
    table = Table(box=None, pad_edge=False, header_style="bold")
    metric = found[0].metric if found else ""
    names = (metric, "deviation", "best", "at version", "runs", "updates", "seconds")
    for name in (*keys, *names):
        table.add_column(name, justify="left" if name in keys else "right")
    if any(one.reason for one in found[:_SHOWN]):
        table.add_column("reason")
    for one in found[:_SHOWN]:
        updates, _, seconds = one.means()
        table.add_row(
            *(cell(one.keys.get(key, "")) for key in keys),
            "failed" if one.mean is None else measure(one.mean),
            "" if one.deviation is None else measure(one.deviation),
            *((measure(one.best[0]), f"{one.best[1]:.0f}") if one.best else ("", "")),
            f"{len(one.runs)}" + (f", {one.failed} failed" if one.failed else ""),
            "" if updates is None else f"{updates:.0f}",
            "" if seconds is None else f"{seconds:.1f}",
            *([cell(one.reason)] if len(table.columns) > len(keys) + len(names) else []),
        )
    console().print(table)
    if len(found) > _SHOWN:
        line(f"and {len(found) - _SHOWN} more in {request.out / results.TABLE}")
    for name in (results.BEST, results.TABLE, results.PICTURE):
        if (request.out / name).exists():
            line(request.out / name)


def complain(found: Sequence[Ranked]) -> None:
    """Raise FedstreamError if every run failed, or if the task raised in one."""
    raised = [run for one in found for run in one.raised]
    if found and found[0].mean is None and not raised:
        raise FedstreamError(
            f"every run failed; the first one: {found[0].reason}: try smaller steps, or another "
            "metric"
        )
    if raised:
        runs = sum(len(one.runs) for one in found)
        raise FedstreamError(
            f"the task raised in {len(raised)} of {counted(runs, 'run')}; the first one: "
            f"{raised[0].why}: the same command tries them again"
        )


def as_json(found: Sequence[Ranked]) -> list[dict[str, Any]]:
    """The table as plain data, for JSON."""
    return [
        {
            "keys": one.keys,
            "metric": one.metric,
            "mean": one.mean,
            "deviation": one.deviation,
            "values": one.values,
            "best": [{"value": value, "version": version} for value, version in one.bests],
            "runs": len(one.runs),
            "failed": one.failed,
            "reason": one.reason,
            "configuration": one.configuration,
        }
        for one in found
    ]
