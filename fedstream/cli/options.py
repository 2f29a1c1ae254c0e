"""Options shared by several commands, and helpers that process them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import Keys
from fedstream.terminal import line

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.settings.config import Settings

T = TypeVar("T")

# Listed here so that help and completion load nothing; tests compare the lists with the real ones.
TASKS = ("digits", "mnist", "cifar10-fedasync", "cifar10-afl", "wikitext2", "shakespeare")
STRATEGIES = ("fedasync", "fedavg", "fedbuff", "afa-cd", "afa-cs", "scaffold")
OUTCOMES = ("applied", "buffered", "refused", "given_up", "dead")


def named(option: str, given: str, names: Collection[str]) -> str:
    """The one of ``names`` that was typed, with an underscore or a space: given_up or 'given up'.

    Raises ConfigError, which lists them.
    """
    name = given.replace(" ", "_")
    if name not in names:
        raise ConfigError(f"{option} {given}: must be one of {', '.join(names)}")
    return name


def one_of(names: Sequence[str]) -> Callable[[str], list[str]]:
    """Shell completion for ``names``."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        envvar="FEDSTREAM_CONFIG",
        metavar="FILE",
        help="configuration file (TOML)",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="set a configuration key, as in strategy.alpha=0.3; repeatable",
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        autocompletion=one_of(TASKS),
        help=f"a built-in task ({', '.join(TASKS)}), path/to/file.py:attribute or "
        "package.module:attribute",
    ),
]
MeasuredTask = Annotated[str | None, typer.Option(metavar="TASK", help="task to measure with")]
RecordedConfig = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="use this instead of the run's run.toml"),
]
TrustRecorded = Annotated[
    bool,
    typer.Option(
        "--trust-recorded-task",
        help="load the task named in the recording, which runs its code",
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", autocompletion=one_of(STRATEGIES), help=f"one of {', '.join(STRATEGIES)}"
    ),
]
Devices = Annotated[
    int | None, typer.Option(metavar="N", help="number of devices to split the data over")
]
Versions = Annotated[
    int | None,
    typer.Option(
        metavar="T", help="stop after this many versions; each is an update, a round or a batch"
    ),
]
Updates = Annotated[int | None, typer.Option(hidden=True)]  # deprecated name of --versions
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="folder for the results; default: runs/NAME-TIME")
]
DataRoot = Annotated[
    str | None, typer.Option(metavar="DIR", help="folder of data sets; default: FEDSTREAM_DATA")
]
SummaryAsJson = Annotated[
    bool, typer.Option("--json", help="print only the summary, as JSON, at the end")
]
Url = Annotated[str | None, typer.Option("--redis", metavar="URL", help="overrides redis.url")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="overrides run.name")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
ServiceName = Annotated[
    str | None,
    typer.Option(
        envvar="FEDSTREAM_NAME", help="unique among the replicas; default: the host's name"
    ),
]


def settings_of(path: Path | None, sets: list[str] | None = None, **given: object) -> Settings:
    """Read the configuration; ``given`` are the command's own options, by parameter name."""
    from fedstream.settings.config import options, read

    if given.get("updates") is not None:
        if given.get("versions") is not None:
            raise ConfigError("--updates is the old name of --versions; use --versions alone")
        line("fedstream: --updates is deprecated; use --versions", err=True)
    return read(path, sets or (), options(**given))


def ask(
    path: Path | None,
    redis: str | None,
    run: str | None,
    question: Callable[[Client, Keys], Awaitable[T]],
) -> T:
    """Run a query against a run's Redis. Raises FedstreamError."""
    from fedstream.broker.client import Client
    from fedstream.local.run_toml import refuse_ended

    settings = settings_of(path, redis=redis, run=run)
    refuse_ended(settings, path)

    async def asked() -> T:
        client = Client(settings.redis, "cli")
        try:
            return await question(client, Keys(settings.run.name))
        finally:
            await client.close()

    return asyncio.run(asked())
