"""Commands that train: run, simulate, reproduce."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from fedstream.broker.errors import ConfigError
from fedstream.cli.options import (
    Config,
    DataRoot,
    Devices,
    Out,
    Sets,
    StrategyName,
    SummaryAsJson,
    TaskName,
    TrustRecorded,
    Updates,
    Versions,
    leave,
    settings_of,
)
from fedstream.runtime.signals import INTERRUPTED
from fedstream.terminal import line, verbatim


def run(
    config: Config = None,
    task: TaskName = None,
    strategy: StrategyName = None,
    trainers: Annotated[int, typer.Option(min=1, metavar="N", help="trainer processes")] = 2,
    devices: Devices = None,
    versions: Versions = None,
    updates: Updates = None,
    redis: Annotated[
        str | None, typer.Option(metavar="URL", help="without it the run starts its own")
    ] = None,
    out: Out = None,
    data_root: DataRoot = None,
    sets: Sets = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="P", help="of the coordinator's HTTP; any if not given"
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="go on with the unfinished run that --out holds")
    ] = False,
    trust: TrustRecorded = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Train: every service as a process on this machine, with a Redis of its own.

    It ends with the last version, at run.target_accuracy, or on Ctrl-C, and leaves a summary, the
    metrics as a table, the model, curves, logs and its configuration in a folder.

    Exit codes: 0 finished, 130 interrupted, 1 failed, 2 a wrong configuration.
    """
    from fedstream.local import own_redis
    from fedstream.local import run as local
    from fedstream.observe import display, report
    from fedstream.settings import recording

    recorded: Path | None = None
    if resume:
        if out is None:
            raise ConfigError("--resume goes on with the run in --out DIR, which is not given")
        if config is None:
            with report.usable(out):
                left = out / recording.CONFIG
                config = recorded = left if left.is_file() else None
    settings = settings_of(
        config, sets,
        task=task, strategy=strategy, devices=devices, versions=versions,
        updates=updates, redis=redis, data_root=data_root,
    )  # fmt: skip
    if recorded is not None and not trust:
        recording.check_task(settings, recorded, sets or (), task)
    plan = local.Plan(
        own_redis.without_lost(settings, config),
        out=out or local.default_out(settings.run.name, datetime.now().astimezone()),
        trainers=trainers,
        port=port,
        resume=resume,
    )
    code, numbers = local.run(plan, display.choose(as_json=as_json))
    if as_json:
        verbatim(report.as_json(numbers) + "\n")
    leave(code)


def simulate(
    config: Config = None,
    task: TaskName = None,
    strategy: StrategyName = None,
    devices: Devices = None,
    versions: Versions = None,
    updates: Updates = None,
    out: Out = None,
    data_root: DataRoot = None,
    sets: Sets = None,
    journal: Annotated[
        bool, typer.Option("--journal/--no-journal", help="keep what `fedstream replay` reads")
    ] = True,
    as_json: SummaryAsJson = False,
) -> None:
    """Train in virtual time: in this process, without Redis and without waiting for devices.

    The table \\[simulation] says where staleness comes from and in which order devices arrive. The
    same configuration gives the same run again.

    Exit codes: 0 finished, 130 interrupted, 1 failed, 2 a wrong configuration.
    """
    from fedstream.local.run import default_out
    from fedstream.observe import report
    from fedstream.simulation import run as page

    settings = settings_of(
        config, sets,
        task=task, strategy=strategy, devices=devices, versions=versions,
        updates=updates, data_root=data_root,
    )  # fmt: skip
    folder = out or default_out(settings.run.name, datetime.now().astimezone())
    code, numbers = page.run(settings, folder, journal=journal, quiet=as_json)
    if as_json:
        verbatim(report.as_json(numbers) + "\n")
    leave(code)


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="of experiments: see --list")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="R", help="of every cell; as many as it says if not given"),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="this cell alone, or those like 'p = 1, *'; repeatable"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="of the first repeat; the next has N + 1")
    ] = 0,
    scale: Annotated[
        float, typer.Option(min=1.0, metavar="S", help="divide the number of versions by it")
    ] = 1.0,
    data_root: DataRoot = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, metavar="J", help="processes; one for each core")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="experiments/results/NAME if not given")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="also what is there already, which is replaced")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="the experiments, and end")] = False,
) -> None:
    """Repeat a paper's experiment: raw results, table, pictures, and what held of its claims.

    What is there already is not run again: a command that was interrupted goes on where it was.

    Exit codes: 0 done, 130 interrupted, 1 failed, 2 a wrong command line.
    """
    from fedstream.experiments import command as page

    if listed:
        line("\n".join(page.listed()))
        return
    try:
        page.reproduce(
            names or (), repeats=repeats, cells=cell or (), seed=seed, scale=scale,
            data_root=data_root, processes=jobs, out=out, again=again,
            command=shlex.join(["fedstream", *sys.argv[1:]]), say=line,
        )  # fmt: skip
    except KeyboardInterrupt:
        leave(INTERRUPTED)
