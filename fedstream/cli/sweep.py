"""The command that searches configurations: sweep."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedstream.cli.options import (
    Config,
    DataRoot,
    Devices,
    Jobs,
    Sets,
    StrategyName,
    TaskName,
    Versions,
)
from fedstream.runtime.process import INTERRUPTED
from fedstream.terminal import line, verbatim

if TYPE_CHECKING:
    from fedstream.runtime.config import Option
    from fedstream.settings.config import Settings


def sweep(
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES",
            help="a key to vary, as in strategy.alpha=0.2,0.4 or, with --random, "
            "solver.lr=0.001..1:log; repeatable",
        ),
    ] = None,
    config: Config = None,
    task: TaskName = None,
    strategy: StrategyName = None,
    devices: Devices = None,
    versions: Versions = None,
    data_root: DataRoot = None,
    sets: Sets = None,
    random: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="draw N configurations; default: the whole grid"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="S", help="seed of --random")] = 0,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="R", help="runs of each configuration")
    ] = 3,
    metric: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="what to compare; default: the run's main metric"),
    ] = None,
    goal: Annotated[
        Literal["max", "min"] | None,
        typer.Option(
            help="default: as the task declares it (Task.goal), or as the metric is well known"
        ),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="compare each run's best measurement, not its last")
    ] = False,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="folder for the results; default: sweeps/NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the table as JSON")] = False,
) -> None:
    """Simulate many configurations on all cores and find the best.

    Each configuration is run several times with different seeds. The same command with more values,
    a larger N or more repeats runs only the missing runs, so an interrupted sweep continues where
    it stopped.

    A configuration whose task raises is recorded as failed, and the others go on; the same command
    tries it again.

    Exit codes: 0 done, 130 interrupted, 1 the task raised or every run failed, 2 wrong
    configuration or command line.
    """
    from fedstream.history import report
    from fedstream.settings.config import options, read
    from fedstream.sweep import command as page
    from fedstream.sweep.results import Ranking

    given = options(
        task=task, strategy=strategy, devices=devices, versions=versions, data_root=data_root
    )

    def reading(changed: Sequence[Option]) -> Settings:
        return read(config, sets or (), [*given, *changed])

    request = page.SweepRequest(
        over=over or (),
        out=out or Path("sweeps") / reading(()).run.name,
        ranking=Ranking(metric, goal, which="best" if best else "last"),
        repeats=repeats,
        random=random,
        seed=seed,
        processes=jobs,
    )
    say = (lambda _: None) if as_json else line
    try:
        with report.usable(request.out), redirect_stdout(sys.stderr if as_json else sys.stdout):
            found = page.sweep(request, reading, say)
    except KeyboardInterrupt:
        line(f"interrupted: the same command continues, in {request.out}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        verbatim(report.as_json(page.as_json(found)) + "\n")
    else:
        page.show(found, request)
    page.complain(found)
