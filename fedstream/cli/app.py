"""Asynchronous federated learning as a pipeline of services over Redis Streams."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer

from fedstream.core import __version__
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.runtime import process
from fedstream.terminal import line

_SIGPIPE = 141  # exit code: 128 + the signal's number
# Click's error, or the one of typer's own copy of Click.
_UsageError: Any
(_UsageError,) = [one for one in typer.BadParameter.__mro__ if one.__name__ == "UsageError"]
_NUMBERS = {"int_parsing": "must be a whole number", "float_parsing": "must be a number"}
_NOBODY_ELSE = 0o077  # the mode bits of group and others

_COMMANDS = {
    None: {
        "init": "training:init",
        "run": "training:run",
        "simulate": "training:simulate",
        "sweep": "sweep:sweep",
        "plugins": "operations:plugins",
        "agree": "agreement:agree",
    },
    "Inspect a run": {
        "status": "operations:status",
        "top": "operations:top",
        "replay": "operations:replay",
        "doctor": "operations:doctor",
        "purge": "operations:purge",
        "acl": "operations:acl",
        "list": "runs:list_runs",
        "ui": "runs:ui",
        "compare": "runs:compare",
        "report": "runs:report_run",
        "privacy": "runs:privacy",
        "track": "runs:track",
        "journal": "journal:app",
        "devices": "devices:app",
        "dead": "dead:app",
    },
    "Run one service": {
        "coordinator": "services:coordinator",
        "scheduler": "services:scheduler",
        "updater": "services:updater",
        "trainer": "services:trainer",
        "evaluator": "services:evaluator",
        "sinks": "services:sinks",
        "gateway": "services:gateway",
        "helper": "services:helper",
    },
    "Take part in a run": {"device": "device:device"},
}
"""By panel of the help and name of the command: its module in this folder, and its name there."""
_WITH_RULES = ("run", "simulate", "replay")  # their help has a strategy's keys


def application(wanted: str | None = None) -> typer.Typer:
    """The command line. ``wanted``: the only command to load, if known; None: all.

    Building all takes more than half of the start-up time.
    """
    app = typer.Typer(
        help=__doc__,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_main)
    is_known = any(wanted in commands for commands in _COMMANDS.values())
    for panel, commands in _COMMANDS.items():
        for name, place in commands.items():
            if not is_known or name == wanted:
                _add(app, name, place, panel)
    return app


def _add(app: typer.Typer, name: str, place: str, panel: str | None) -> None:
    module, _, attribute = place.partition(":")
    found = getattr(import_module(f"fedstream.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name, rich_help_panel=panel)
    elif name in _WITH_RULES:
        from fedstream.cli.rule_help import RuleHelp

        app.command(name, cls=RuleHelp, rich_help_panel=panel)(found)
    else:
        app.command(name, rich_help_panel=panel)(found)


def _version(wanted: bool) -> None:
    if wanted:
        line(f"fedstream {__version__}")
        raise typer.Exit


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

    Exit codes: 0 done, 1 failed, 2 wrong configuration or command line, 141 nobody reads stdout.
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
        typed = sys.argv[1:] if arguments is None else arguments
        try:
            with process.importing():
                command = typer.main.get_command(application(typed[0] if typed else None))
            called = None if arguments is None else "fedstream"
            sys.exit(command(arguments, prog_name=called, standalone_mode=False) or 0)
        finally:
            sys.stdout.flush()  # here, where a failure is reported
    except _UsageError as error:
        if text := _in_words(error):  # else the help has been printed
            where = f" (see {error.ctx.command_path} -h)" if error.ctx else ""
            line(f"fedstream: {text.rstrip('.')}{where}", err=True)
        sys.exit(2)
    except typer.Abort:
        line("fedstream: aborted", err=True)
        sys.exit(1)
    except FedstreamError as error:
        if error.trace:
            line(error.trace, err=True)
        line(f"fedstream: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:
        _leave_closed_pipe()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer makes it an exit with 1
            _leave_closed_pipe()
        raise
    except OSError as error:  # a full disk, or a file or folder without permission
        where = "" if error.filename is None else f"{error.filename}: "
        line(f"fedstream: {where}{error.strerror or error}", err=True)
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        sys.exit(1)


def _in_words(error: Any) -> str:
    """The error in the command line in our words; '' if the help has been printed.

    Newer releases of typer raise pydantic's errors, whose text this changes.
    """
    cause, parameter = error.__cause__, getattr(error, "param", None)
    if parameter is None or not hasattr(cause, "errors"):
        return str(error.format_message())
    wrong = cause.errors()[0]
    text = re.sub(r"^Input should ", "must ", wrong["msg"])
    if " is not one of " in text:
        choices = re.findall(r"'([^']*)'", text.partition(" is not one of ")[2])
        text = f"must be {' or '.join(choices)}"
    text = _NUMBERS.get(wrong["type"], text)
    return f"{parameter.opts[0]} {wrong['input']}: {text}"


def _leave_closed_pipe() -> NoReturn:
    """Exit silently, like programs ended by SIGPIPE, for example in front of `head`."""
    _drop_output()
    sys.exit(_SIGPIPE)


def _drop_output() -> None:
    """Redirect stdout to nowhere, as Python's flush at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
