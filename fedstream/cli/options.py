"""Options shared by several commands, and helpers that process them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError
from fedstream.terminal import confirm, line

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.settings.config import Settings

T = TypeVar("T")

# Listed here so that help and completion load nothing; tests compare the lists with the code.
TRACKERS = ("tensorboard", "mlflow", "wandb")
TASKS = ("digits", "mnist", "cifar10-fedasync", "cifar10-afl", "wikitext2", "shakespeare")
STRATEGIES = (
    "fedasync",
    "fedavg",
    "fedbuff",
    "afa-cd",
    "afa-cs",
    "scaffold",
    "ca2fl",
    "aced",
    "fadas",
    "ringmaster",
    "ringleader",
    "basgd",
    "aflguard",
)
# Tables and keys for commands about a live run; none of them names a program.
_LIVE = (
    "run.name",
    "redis",
    "http.token",
    "http.token_file",
    "coordinator.sites",
    "coordinator.trusted_sites",
    "gateway.site",
    "journal.dir",
    "log",
)
OUTCOMES = ("applied", "buffered", "refused", "given_up", "dead")


def named(option: str, given: str, names: Collection[str]) -> str:
    """The name in ``names`` for ``given``, which may have spaces for underscores: 'given up'.

    Raises ConfigError, listing the names.
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
Flower = Annotated[
    str | None,
    typer.Option(
        metavar="APP",
        help="a Flower ClientApp instead of a task: package.module:attribute, or the folder of its "
        "pyproject.toml",
    ),
]
FlowerModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="the Flower app's model, package.module:Class; default: the only one in its module",
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
        "--trust-recorded-code",
        "--trust-recorded-task",
        help="load the task and other parts that only a file names, which runs their code",
    ),
]
ChangedRules = Annotated[
    bool,
    typer.Option(
        "--changed-rules",
        help="go on although the source of a strategy or staleness function isn't the recorded one",
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=one_of(STRATEGIES),
        help=f"one of {', '.join(STRATEGIES)}, an installed one, path/to/file.py:Name or "
        "package.module:Name; with --help, shows its keys",
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
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="START",
        help="begin with this model: DIR@VERSION of another run, DIR (its newest version), or "
        "FILE.safetensors",
    ),
]
Updates = Annotated[int | None, typer.Option(hidden=True)]  # deprecated name of --versions
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="folder for the results; default: runs/NAME-TIME")
]
DataRoot = Annotated[
    str | None, typer.Option(metavar="DIR", help="folder of data sets; default: FEDSTREAM_DATA")
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", min=1, metavar="J", help="number of processes; default: one per core"),
]
SummaryAsJson = Annotated[
    bool, typer.Option("--json", help="print only the summary, as JSON, at the end")
]
Url = Annotated[str | None, typer.Option("--redis", metavar="URL", help="overrides redis.url")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="overrides run.name")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        autocompletion=one_of(TRACKERS),
        help=f"write the run to a tracker: {', '.join(TRACKERS)}; repeatable",
    ),
]
ServiceName = Annotated[
    str | None,
    typer.Option(
        envvar="FEDSTREAM_NAME", help="unique among the replicas; default: the host's name"
    ),
]


def settings_of(
    path: Path | None,
    sets: list[str] | None = None,
    *,
    trusted: bool = True,
    track: Sequence[str] | None = None,
    **given: object,
) -> Settings:
    """Read the configuration. ``given``: the command's own options, by parameter name.

    ``trusted``: whether programs that the file names may run; if not, such names raise ConfigError.
    ``track``: trackers to add to the configured ones.
    """
    from fedstream.settings.config import options, read
    from fedstream.settings.recording import check_task

    if given.get("updates") is not None:
        if given.get("versions") is not None:
            raise ConfigError("--updates is the old name of --versions; use --versions alone")
        line("fedstream: --updates is deprecated; use --versions", err=True)
    settings = read(path, sets or (), options(**given), trusted=trusted)
    if not trusted and path is not None:
        check_task(settings, path, sets or (), given.get("task"))
    if not track:
        return settings
    from fedstream.sinks.settings import added

    more = options(**given, track=added(settings.sinks, track))
    return read(path, sets or (), more, trusted=trusted)


def live_settings(
    path: Path | None, *, redis: str | None, run: str | None, keys: Collection[str] = _LIVE
) -> Settings:
    """Read the settings for a command about a live run, without running the file's programs.

    ``redis``, ``run``: the command's own options. Both are always passed, because keys are checked
    together: a CA in the environment needs the URL of --redis.
    """
    from fedstream.settings.config import options, read

    return read(path, (), options(redis=redis, run=run), trusted=False, keys=keys)


def recorded_programs(folder: Path, *, trust: bool, changed: bool) -> AbstractContextManager[None]:
    """Inside the block, permit a recording's rules by the options or the user's answer."""
    from fedstream.settings.recording import its_programs

    return its_programs(
        folder, trusted=trust, changed=changed, ask=confirm if sys.stdin.isatty() else None
    )


def task_options(task: str | None, flower: str | None, model: str | None) -> dict[str, str | None]:
    """Options of :func:`settings_of` for --task, --flower and --model. Raises ConfigError."""
    if flower is None:
        return {"task": task, "model": model}
    if task is not None:
        raise ConfigError("--flower names the task: leave out --task")
    from fedstream.flower.apps import find

    name, folder = find(flower)
    return {"task": name, "flower": folder, "model": model}


def ask(
    path: Path | None,
    redis: str | None,
    run: str | None,
    question: Callable[[Client, Keys], Awaitable[T]],
) -> T:
    """Run a query against a run's Redis. Raises FedstreamError."""
    from fedstream.broker.client import Client
    from fedstream.settings.run_toml import refuse_ended

    settings = live_settings(path, redis=redis, run=run)
    refuse_ended(settings, path)

    async def asked() -> T:
        client = Client(settings.redis, "cli")
        try:
            return await question(client, Keys(settings.run.name))
        finally:
            await client.close()

    return asyncio.run(asked())
