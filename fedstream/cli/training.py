"""Commands that train: init, run, simulate."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

import fedstream
from fedstream.cli.options import (
    ChangedRules,
    Config,
    DataRoot,
    Devices,
    Flower,
    FlowerModel,
    From,
    Out,
    Sets,
    StrategyName,
    SummaryAsJson,
    TaskName,
    Track,
    TrustRecorded,
    Updates,
    Versions,
    settings_of,
    task_options,
)
from fedstream.core.errors import ConfigError
from fedstream.runtime import process
from fedstream.terminal import confirm, line, verbatim


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="where to write; the default is here")
    ] = Path(),
) -> None:
    """Write my_task.py and fedstream.toml, with comments, to start a task of your own from."""
    starter = Path(fedstream.__file__).parent / "starter"
    sources = [starter / name for name in ("my_task.py", "fedstream.toml")]
    for source in sources:
        if (folder / source.name).exists():
            raise ConfigError(f"{folder / source.name} exists already: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            (folder / source.name).write_bytes(source.read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    line(f"wrote {' and '.join(str(folder / source.name) for source in sources)}")
    where = "" if folder == Path() else f"cd {shlex.quote(str(folder))}; "
    line(f"next: {where}fedstream run --config fedstream.toml")


def run(
    config: Config = None,
    task: TaskName = None,
    flower: Flower = None,
    model: FlowerModel = None,
    strategy: StrategyName = None,
    trainers: Annotated[
        int, typer.Option(min=1, metavar="N", help="number of trainer processes")
    ] = 2,
    over_http: Annotated[
        int,
        typer.Option(
            "--devices-over-http",
            min=0,
            metavar="N",
            help="instead of trainers: a gateway, and devices 0 to N - 1 as processes that come "
            "to it over HTTPS",
        ),
    ] = 0,
    devices: Devices = None,
    versions: Versions = None,
    start: From = None,
    updates: Updates = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Redis to use; by default the run starts its own"),
    ] = None,
    out: Out = None,
    data_root: DataRoot = None,
    sets: Sets = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="P",
            help="port of the coordinator's HTTP server; default: any free port",
        ),
    ] = None,
    track: Track = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue the unfinished run in --out")
    ] = False,
    private: Annotated[
        bool,
        typer.Option(
            "--private",
            help="show the server only sums of updates: with a privacy policy made from "
            "private.terms, and a helper as one more process",
        ),
    ] = False,
    trust: TrustRecorded = False,
    changed: ChangedRules = False,
    as_json: SummaryAsJson = False,
) -> None:
    """Train with all services as processes on this machine, and a Redis of their own.

    The run ends at the last version, at run.stop, or on Ctrl-C. Its folder then contains
    a summary, a table of metrics, the model, curves, logs and the configuration.

    Exit codes: 0 finished, 130 interrupted, 1 failed, 2 wrong configuration.
    """
    with process.importing():
        from fedstream.history import display, report
        from fedstream.local.request import RunRequest
        from fedstream.local.run import run as run_here
        from fedstream.settings import recording, run_toml

    recorded: Path | None = None
    if resume:
        if start is not None:
            raise ConfigError(
                "--from begins a new run with another run's model, and --resume continues one: "
                "give either"
            )
        if out is None:
            raise ConfigError("--resume needs --out DIR, the folder of the run to continue")
        if config is None:
            with report.usable(out):
                left = out / recording.CONFIG
                config = recorded = left if recording.is_left(left) else None
    named = task_options(task, flower, model)
    settings = settings_of(
        config,
        sets,
        trusted=recorded is None or trust,
        **named,
        strategy=strategy,
        devices=devices,
        versions=versions,
        updates=updates,
        redis=redis,
        data_root=data_root,
        track=track,
        **{"from": start},
    )
    if resume and out is not None and not changed:
        changed = recording.resumable(out, settings, confirm if sys.stdin.isatty() else None)
    request = RunRequest(
        run_toml.without_private_redis(settings, config),
        out=out or report.default_out(settings.run.name, datetime.now().astimezone()),
        trainers=0 if over_http else trainers,
        devices_over_http=over_http,
        port=port,
        resume=resume,
        private=private,
        changed_rules=changed,
    )
    code, numbers = run_here(request, display.choose(as_json=as_json))
    if as_json:
        verbatim(report.as_json(numbers) + "\n")
    raise typer.Exit(code)


def simulate(
    config: Config = None,
    task: TaskName = None,
    flower: Flower = None,
    model: FlowerModel = None,
    strategy: StrategyName = None,
    devices: Devices = None,
    versions: Versions = None,
    start: From = None,
    updates: Updates = None,
    out: Out = None,
    data_root: DataRoot = None,
    sets: Sets = None,
    track: Track = None,
    journal: Annotated[
        bool, typer.Option("--journal/--no-journal", help="record a journal for `fedstream replay`")
    ] = True,
    as_json: SummaryAsJson = False,
) -> None:
    """Train in virtual time: in this process, without Redis and without waiting for devices.

    The table \\[simulation] of the configuration sets where staleness comes from and in which order
    devices arrive. The same configuration gives the same run.

    Exit codes: 0 finished, 130 interrupted, 1 failed, 2 wrong configuration.
    """
    from fedstream.history import report
    from fedstream.simulation import run as page

    settings = settings_of(
        config,
        sets,
        trusted=True,
        track=track,
        **task_options(task, flower, model),
        strategy=strategy,
        devices=devices,
        versions=versions,
        updates=updates,
        data_root=data_root,
        **{"from": start},
    )
    folder = out or report.default_out(settings.run.name, datetime.now().astimezone())
    code, numbers = page.run(settings, folder, journal=journal, quiet=as_json)
    if as_json:
        verbatim(report.as_json(numbers) + "\n")
    raise typer.Exit(code)
