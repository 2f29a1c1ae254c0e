"""The command line: `fedstream run` for everything on this machine, and each service by itself."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from broker.errors import ConfigError, FedstreamError
from broker.keys import check_name
from fedstream import config

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", envvar="FEDSTREAM_CONFIG", help="TOML file")
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="a configuration key, such as strategy.alpha=0.3"
    ),
]
Url = Annotated[str | None, typer.Option("--redis", metavar="URL", help="instead of redis.url")]
RunName = Annotated[str | None, typer.Option("--run", help="instead of run.name")]
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]
Name = Annotated[
    str | None,
    typer.Option(
        envvar="FEDSTREAM_NAME", help="unique among the replicas; the host's name if not given"
    ),
]


def _settings(path: Path | None, sets: list[str] | None, **given: object) -> config.Settings:
    """The configuration with the command line's own options last."""
    last = [
        f"{key.replace('__', '.')}={value}" for key, value in given.items() if value is not None
    ]
    return config.read(path, [*(sets or ()), *last])


def _serve(role: str, path: Path | None, sets: list[str] | None, name: str | None) -> None:
    from fedstream.services import serve_role

    settings = _settings(path, sets)
    raise typer.Exit(serve_role(role, settings, check_name("--name", name or socket.gethostname())))


@app.command()
def coordinator(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Turns triggers into tasks, admits answers, serves status and models over HTTP."""
    _serve("coordinator", config, sets, name)


@app.command()
def scheduler(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Triggers training tasks."""
    _serve("scheduler", config, sets, name)


@app.command()
def updater(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Mixes updates into the global model and publishes its versions."""
    _serve("updater", config, sets, name)


@app.command()
def trainer(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Trains on devices' data."""
    _serve("trainer", config, sets, name)


@app.command()
def evaluator(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Measures the model on the test data."""
    _serve("evaluator", config, sets, name)


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 a wrong configuration or command line."""
    try:
        app()
    except ConfigError as error:
        typer.echo(f"fedstream: {error}", err=True)
        sys.exit(2)
    except FedstreamError as error:
        typer.echo(f"fedstream: {error}", err=True)
        sys.exit(1)
