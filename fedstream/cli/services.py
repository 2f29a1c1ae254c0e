"""Commands that run one service each."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from fedstream.broker.keys import check_name
from fedstream.cli.options import (
    ChangedRules,
    Config,
    Flower,
    FlowerModel,
    ServiceName,
    Sets,
    settings_of,
    task_options,
)
from fedstream.runtime import process

_OF_HELPER = ("helper", "http", "log", "tracing")  # tables that it reads: none names a program


def _serve(
    role: str,
    path: Path | None,
    sets: list[str] | None,
    name: str | None,
    **given: Any,
) -> None:
    with process.importing():
        from fedstream.runtime.process import PARENT_VARIABLE, end_with_parent
        from fedstream.settings.services import serve_role

    end_with_parent()
    settings = settings_of(path, sets, **given)
    if PARENT_VARIABLE not in os.environ:  # not started by `fedstream run`
        from fedstream.settings.run_toml import for_joining_trainer, refuse_ended

        refuse_ended(settings, path)
        if role == "trainer":
            settings = for_joining_trainer(settings, path)
    else:  # `fedstream run` has tried the task
        run = settings.run.model_copy(update={"dry_step": False})
        settings = settings.model_copy(update={"run": run})
    page = None
    if role == "coordinator":
        from fedstream.history.live.service import live_page

        page = live_page(settings)
    name = check_name("--name", name or socket.gethostname())
    raise typer.Exit(serve_role(role, settings, name, page))


def coordinator(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Turn triggers into tasks, admit answers, serve status, models and the live page over HTTP."""
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
    changed: ChangedRules = False,
) -> None:
    """Mix updates into the global model, journal them, and publish the versions."""
    adopted = ["journal.adopt=true"] if adopt else []
    accepted = ["journal.changed_rules=true"] if changed else []
    _serve("updater", config, [*(sets or ()), *adopted, *accepted], name)


def trainer(
    config: Config = None,
    sets: Sets = None,
    name: ServiceName = None,
    flower: Flower = None,
    model: FlowerModel = None,
) -> None:
    """Train on devices' data."""
    _serve("trainer", config, sets, name, **task_options(None, flower, model))


def evaluator(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Measure the model on the test data."""
    _serve("evaluator", config, sets, name)


def gateway(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Serve devices outside the cluster over HTTPS; the name must stay the same."""
    _serve("gateway", config, sets, name)


def helper(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Open sums of private updates, in another trust domain than the run. Needs no Redis.

    Runs no program that the configuration names.
    """
    with process.importing():
        from fedstream.runtime.process import end_with_parent
        from fedstream.settings.config import read
        from fedstream.settings.services import serve_role

    end_with_parent()
    settings = read(config, sets or (), trusted=False, keys=_OF_HELPER)
    name = check_name("--name", name or socket.gethostname())
    raise typer.Exit(serve_role("helper", settings, name))


def sinks(config: Config = None, sets: Sets = None, name: ServiceName = None) -> None:
    """Write the run to the trackers in \\[\\[sinks]]: TensorBoard, MLflow, Weights & Biases."""
    _serve("sinks", config, sets, name)
