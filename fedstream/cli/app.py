"""Asynchronous federated learning as a pipeline of services over Redis Streams."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from fedstream import __version__
from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.cli import (
    dead,
    device,
    devices,
    journal,
    load,
    looking,
    plan,
    runs,
    services,
    training,
)
from fedstream.cli.plugins import plugins
from fedstream.cli.rule_help import RuleHelp
from fedstream.cli.sweep import sweep
from fedstream.terminal import line

_NOBODY_ELSE = 0o077  # the mode bits of group and others

app = typer.Typer(
    help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def _add(panel: str | None, *commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(rich_help_panel=panel)(command)


app.command(cls=RuleHelp)(training.run)
app.command(cls=RuleHelp)(training.simulate)
_add(None, sweep, training.reproduce, plugins)
_add("Inspect a run", looking.status, looking.top)
app.command(cls=RuleHelp, rich_help_panel="Inspect a run")(looking.replay)
_add(
    "Inspect a run",
    looking.doctor, looking.purge, looking.acl,
)  # fmt: skip
for name, command in (
    ("list", runs.list_runs), ("ui", runs.ui), ("compare", runs.compare),
    ("report", runs.report_run), ("track", runs.track),
):  # fmt: skip
    app.command(name, rich_help_panel="Inspect a run")(command)
app.add_typer(journal.app, name="journal", rich_help_panel="Inspect a run")
app.add_typer(devices.app, name="devices", no_args_is_help=True, rich_help_panel="Inspect a run")
app.add_typer(dead.app, name="dead", no_args_is_help=True, rich_help_panel="Inspect a run")
_add(
    "Run one service",
    services.coordinator, services.scheduler, services.updater, services.trainer,
    services.evaluator, services.sinks, services.gateway,
)  # fmt: skip
_add("Take part in a run", device.device, load.load, plan.plan)


def _version(wanted: bool) -> None:
    if wanted:
        line(f"fedstream {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="print the version and exit"
        ),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, or ``arguments`` in its place.

    Exit codes: 0 done, 1 failed, 2 wrong configuration or command line.
    """
    # Updates and models reveal something about people's data, so only this user may read our files.
    os.umask(os.umask(_NOBODY_ELSE) | _NOBODY_ELSE)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  (open until exit)
    # Paths and log lines may hold undecodable bytes, and the terminal may lack our characters.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app(arguments, prog_name=None if arguments is None else "fedstream")
        finally:
            sys.stdout.flush()  # here, where a failure is reported
    except ConfigError as error:
        line(f"fedstream: {error}", err=True)
        sys.exit(2)
    except FedstreamError as error:
        line(f"fedstream: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a full disk, or a file or folder without permission
        where = "" if error.filename is None else f"{error.filename}: "
        line(f"fedstream: {where}{error.strerror or error}", err=True)
        try:
            sys.stdout.flush()
        except OSError:  # Python flushes again at exit, which would fail the same way
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
