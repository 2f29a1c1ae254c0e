"""Commands that run one service each."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from fedstream.broker.keys import check_name
from fedstream.cli.options import Config, ServiceName, Sets, settings_of


def _serve(role: str, path: Path | None, sets: list[str] | None, name: str | None) -> None:
    from fedstream.local.parent import VARIABLE, end_with_parent
    from fedstream.settings.services import serve_role

    end_with_parent()
    settings = settings_of(path, sets)
    if VARIABLE not in os.environ:  # not started by `fedstream run`
        from fedstream.local.run_toml import for_joining_trainer, refuse_ended

        refuse_ended(settings, path)
        if role == "trainer":
            settings = for_joining_trainer(settings, path)
    raise typer.Exit(serve_role(role, settings, check_name("--name", name or socket.gethostname())))


def coordinator(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Turn triggers into tasks, admit answers, serve status and models over HTTP."""
    _serve("coordinator", config, sets, name)


def scheduler(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Trigger training tasks."""
    _serve("scheduler", config, sets, name)


def updater(
    config: Config = None,
    sets: Sets = None,
    name: ServiceName = None,
    adopt: Annotated[
        bool,
        typer.Option(
            "--adopt", help="if the journal is lost, start a new one with Redis's newest model"
        ),
    ] = False,
) -> None:
    """Mix updates into the global model, journal them, and publish the versions."""
    adopted = ["journal.adopt=true"] if adopt else []
    _serve("updater", config, [*(sets or ()), *adopted], name)


def trainer(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Train on devices' data."""
    _serve("trainer", config, sets, name)


def evaluator(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Measure the model on the test data."""
    _serve("evaluator", config, sets, name)
