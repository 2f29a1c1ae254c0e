"""Asynchronous federated learning as a pipeline of services over Redis Streams."""

from __future__ import annotations

import asyncio
import atexit
import io
import os
import shlex
import socket
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeVar

import typer

from broker.errors import ConfigError, FedstreamError, NoRun, Unavailable
from broker.keys import Keys, check_name
from fedstream import __version__, journal

# What a command needs is imported in it: `--help` and `--version` answer at once.
if TYPE_CHECKING:
    from broker.client import Client
    from fedstream.config import Settings
    from fedstream.dead import Letter
    from fedstream.dead import Letters as Found

T = TypeVar("T")

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

_SERVICES = "One service"
_LOOKING = "Looking at a run"

app.add_typer(journal.app, name="journal", rich_help_panel=_LOOKING)
dead = typer.Typer(help="What could not be processed: look at it, retry it, drop it.")
app.add_typer(dead, name="dead", no_args_is_help=True, rich_help_panel=_LOOKING)

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="FEDSTREAM_CONFIG", metavar="FILE", help="TOML file"),
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="a configuration key, such as strategy.alpha=0.3"
    ),
]
TaskName = Annotated[
    str | None,
    typer.Option(
        metavar="TASK",
        help="a built-in one (digits, mnist, cifar10-fedasync, cifar10-afl, wikitext2, "
        "shakespeare), path/to/file.py:attribute or package.module:attribute",
    ),
]
StrategyName = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="fedasync, fedavg, fedbuff, afa-cd, afa-cs, scaffold"),
]
Devices = Annotated[
    int | None, typer.Option(metavar="N", help="devices that the data is split over")
]
Updates = Annotated[
    int | None,
    typer.Option(
        metavar="T",
        help="versions: the run ends with this one; each is an update, a round, or a batch",
    ),
]
Out = Annotated[
    Path | None, typer.Option(metavar="DIR", help="for results; runs/NAME-TIME if not given")
]
DataRoot = Annotated[
    str | None, typer.Option(metavar="DIR", help="of data sets; else FEDSTREAM_DATA")
]
SummaryAsJson = Annotated[
    bool, typer.Option("--json", help="no progress; the summary as JSON at the end")
]
Url = Annotated[str | None, typer.Option("--redis", metavar="URL", help="instead of redis.url")]
RunName = Annotated[str | None, typer.Option("--run", metavar="NAME", help="instead of run.name")]
AsJson = Annotated[bool, typer.Option("--json", help="for programs")]
Name = Annotated[
    str | None,
    typer.Option(
        envvar="FEDSTREAM_NAME", help="unique among the replicas; the host's name if not given"
    ),
]


def _settings(path: Path | None, sets: list[str] | None = None, **given: object) -> Settings:
    """The configuration; ``given`` are the command's own options, by their parameters' names."""
    from fedstream.config import options, read

    return read(path, sets or (), options(**given))


def _ask(
    path: Path | None,
    redis: str | None,
    run: str | None,
    question: Callable[[Client, Keys], Awaitable[T]],
) -> T:
    """Puts a question to the Redis of a run. Raises FedstreamError."""
    from broker.client import Client

    settings = _settings(path, redis=redis, run=run)

    async def asked() -> T:
        client = Client(settings.redis, "cli")
        try:
            return await question(client, Keys(settings.run.name))
        finally:
            await client.close()

    try:
        return asyncio.run(asked())
    except (NoRun, Unavailable) as error:
        from fedstream.report import SUMMARY

        if (
            settings.redis.is_named
            or path is None
            or not (summary := path.with_name(SUMMARY)).is_file()
        ):
            raise
        raise FedstreamError(
            f"{path} is of a run that is over, and its own Redis ended with it: its numbers are in "
            f"{summary} (redis.url is not given; {error})"
        ) from error


def _serve(role: str, path: Path | None, sets: list[str] | None, name: str | None) -> None:
    from fedstream.parent import VARIABLE, end_with_parent
    from fedstream.services import serve_role

    end_with_parent()
    settings = _settings(path, sets)
    if role == "trainer" and path is not None and VARIABLE not in os.environ:
        from fedstream.run import joining

        settings = joining(settings, path)
    _leave(serve_role(role, settings, check_name("--name", name or socket.gethostname())))


def _leave(code: int) -> NoReturn:
    """Ends this process without tearing the interpreter down: with torch that takes a second."""
    atexit._run_exitfuncs()  # noqa: SLF001  (a user's task may have registered some)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedstream {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="and exit")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    config: Config = None,
    task: TaskName = None,
    strategy: StrategyName = None,
    trainers: Annotated[int, typer.Option(min=1, metavar="N", help="trainer processes")] = 2,
    devices: Devices = None,
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
    as_json: SummaryAsJson = False,
) -> None:
    """Train: every service as a process on this machine, with a Redis of its own.

    It ends with the last version, at run.target_accuracy, or on Ctrl-C, and leaves a summary, the
    metrics as a table, the model, curves, logs and its configuration in a folder.

    Exit codes: 0 finished, 130 interrupted, 1 failed, 2 a wrong configuration.
    """
    from fedstream import display, report
    from fedstream import run as local

    if resume:
        if out is None:
            raise ConfigError("--resume goes on with the run in --out DIR, which is not given")
        if config is None:
            with local.usable(out):
                config = left if (left := out / local.CONFIG).is_file() else None
    settings = _settings(
        config, sets,
        task=task, strategy=strategy, devices=devices, updates=updates, redis=redis,
        data_root=data_root,
    )  # fmt: skip
    plan = local.Plan(
        local.without_lost_redis(settings, config),
        out=out or local.default_out(settings.run.name, datetime.now().astimezone()),
        trainers=trainers,
        port=port,
        resume=resume,
    )
    code, numbers = local.run(plan, display.choose(as_json=as_json))
    if as_json:
        typer.echo(report.as_json(numbers))
    _leave(code)


@app.command()
def simulate(
    config: Config = None,
    task: TaskName = None,
    strategy: StrategyName = None,
    devices: Devices = None,
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
    from fedstream import report
    from fedstream import simulate as page
    from fedstream.run import default_out

    settings = _settings(
        config, sets,
        task=task, strategy=strategy, devices=devices, updates=updates, data_root=data_root,
    )  # fmt: skip
    folder = out or default_out(settings.run.name, datetime.now().astimezone())
    code, numbers = page.run(settings, folder, journal=journal, quiet=as_json)
    if as_json:
        typer.echo(report.as_json(numbers))
    _leave(code)


@app.command()
def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME...", help="of experiments: see --list")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="R", help="of every cell; as many as it says if not given"),
    ] = None,
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
    from fedstream import reproduce as page

    if listed:
        typer.echo("\n".join(page.listed()))
        return
    try:
        page.reproduce(
            names or (), repeats=repeats, scale=scale, data_root=data_root, processes=jobs,
            out=out, again=again, command=shlex.join(["fedstream", *sys.argv[1:]]), say=typer.echo,
        )  # fmt: skip
    except KeyboardInterrupt:
        _leave(130)


@app.command(rich_help_panel=_LOOKING)
def status(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="ask a coordinator's HTTP there, and not Redis"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """How a run is now."""
    from fedstream import report
    from fedstream import status as page

    if url is None:
        about = _ask(config, redis, run, page.read)
    elif redis is not None:
        raise ConfigError("--url asks a coordinator, --redis asks Redis: one of the two")
    else:
        about = page.fetch(url, run or _settings(config).run.name)
    if as_json:
        typer.echo(report.as_json(about))
    else:
        page.show(about)


@app.command(rich_help_panel=_LOOKING)
def top(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="print one picture and end")] = False,
) -> None:
    """Watch a run: rate, staleness, queue, trainers, accuracy. Ctrl-C ends it."""
    from fedstream.top import watch

    _ask(config, redis, run, lambda client, keys: watch(client, keys, once=once))


@app.command(rich_help_panel=_LOOKING)
def replay(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of a run, or its journal")],
    begin: Annotated[
        int | None,
        typer.Option("--from", min=0, metavar="V", help="only what came after version V"),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=0, metavar="V", help="stop at this version")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="another rule: strategy.alpha=0.3"),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(metavar="device=N", help="leave a device's updates out"),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="measure every N-th version and the last; 0: none. If not given: none, or about "
            "10 if another rule is replayed",
        ),
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="TASK", help="instead of the run's, to measure by")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="instead of the run's own run.toml"),
    ] = None,
    data_root: DataRoot = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="for table and picture; DIR/replay-N if not given"),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(metavar="URL", help="feed the updates to coordinator and updater there"),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="NAME", help="with --redis: the run there, not run.name"),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            min=1e-3,
            metavar="X",
            help="with --redis: at most X times as fast as it was; 1 if not given",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a run's versions again from its journal, and compare them bit for bit.

    With --set or --without: by another rule on the same updates, beside the recorded one. Nobody is
    trained again: --without keeps what the other devices' recorded updates inherited from the one
    that is left out.

    With --redis: the recorded updates go through live services, which have no scheduler and no
    trainers.

    Exit codes: 0 identical, 1 not identical or damaged, 2 a wrong command line.
    """
    from fedstream import replay as page
    from fedstream import report

    if redis is not None:
        from fedstream import feed
        from updater.inspection import journal_of

        others = {
            "--from": begin, "--until": until, "--set": sets, "--without": without, "--out": out,
            "--evaluate-every": evaluate_every, "--task": task, "--data-root": data_root,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value not in (None, [])]:
            raise ConfigError(
                f"--redis feeds all updates as they were, to live services: without {given[0]}"
            )
        settings = _settings(config, redis=redis, run=run)
        fed = feed.feed(settings, journal_of(folder), 1.0 if speed is None else speed)
        if as_json:
            typer.echo(report.as_json(feed.numbers(fed)))
        else:
            feed.show(fed)
        return
    for option, value in (("--run", run), ("--speed", speed)):
        if value is not None:
            raise ConfigError(f"{option} is for --redis URL, which is not given")
    code = page.replay(
        folder, begin=begin, until=until, every=evaluate_every, sets=sets or (),
        without=without or (), config=config,
        task=task, data_root=data_root, out=out, as_json=as_json,
    )  # fmt: skip
    _leave(code)


@dead.command("list")
def dead_list(
    config: Config = None, redis: Url = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """All of them, the oldest first."""
    from fedstream import dead as page
    from fedstream import report

    found = _ask(config, redis, run, page.read)
    if as_json:
        letters = [page.plain(letter) for letter in found.letters]
        typer.echo(report.as_json({"letters": letters, "lost": found.lost}))
    else:
        page.show(found)


@dead.command("show")
def dead_show(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="of the letter, or of its task")],
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """What is in one."""
    from fedstream import dead as page
    from fedstream import report

    letters = _ask(config, redis, run, page.read).find([wanted])
    if as_json:
        typer.echo(report.as_json([page.plain(letter) for letter in letters]))
    else:
        page.show_each(letters)


Letters = Annotated[
    list[str] | None, typer.Argument(metavar="ID...", help="of letters, or of their tasks")
]
All = Annotated[bool, typer.Option("--all", help="all there are")]


@dead.command("retry")
def dead_retry(
    wanted: Letters = None,
    everything: All = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Trigger the work again, as a new task of the same device, and delete the letter.

    Exit codes: 0 all were retried, 1 at least one could not be, and is still there.
    """
    from fedstream import dead as page

    async def retry(client: Client, keys: Keys) -> int:
        failed = 0
        chosen = _chosen(await page.read(client, keys), wanted, everything)
        if not chosen:
            typer.echo("there are no dead letters")
        for letter in chosen:
            try:
                trigger = await page.retry(client, keys, letter)
            except FedstreamError as error:
                if error.retriable:
                    raise
                failed += 1
                typer.echo(f"fedstream: {letter.id} is not retried: {error}", err=True)
            else:
                typer.echo(f"{letter.id}: device {trigger.device} has task {trigger.task}")
        return failed

    if _ask(config, redis, run, retry):
        raise typer.Exit(1)


@dead.command("drop")
def dead_drop(
    wanted: Letters = None,
    everything: All = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="without asking")] = False,
) -> None:
    """Delete them. What they were about has ended as dead, and stays so."""
    from fedstream import dead as page

    found = _ask(config, redis, run, page.read)
    chosen = _chosen(found, wanted, everything)
    if chosen and not yes:
        typer.confirm(f"Delete {len(chosen)} of {len(found.letters)} dead letters?", abort=True)
    dropped = _ask(config, redis, run, lambda client, keys: page.drop(client, keys, chosen))
    typer.echo(f"{dropped} dead letter{'' if dropped == 1 else 's'} deleted")


def _chosen(found: Found, wanted: list[str] | None, everything: bool) -> list[Letter]:
    """The letters that were named. Raises FedstreamError, and ConfigError if none was."""
    if bool(wanted) == everything:
        raise ConfigError("name letters by their ids, or take --all")
    return list(found.letters) if everything else found.find(wanted or ())


@app.command(rich_help_panel=_LOOKING)
def doctor(
    config: Config = None, redis: Url = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """Look at Redis, the run in it, the journal's volume, the task and its data: what to change.

    Exit codes: 0 nothing is wrong, warnings aside; 1 there are problems; 2 a wrong configuration.
    """
    from fedstream import doctor as page
    from fedstream import report

    settings = _settings(config, redis=redis, run=run)
    # Where Redis is, and which run it is about: that says nothing of how the run should be.
    configured = config is not None or bool(settings.model_fields_set - {"redis", "run"})
    findings = asyncio.run(page.examine(settings, configured=configured))
    if as_json:
        typer.echo(report.as_json(page.summary(findings)))
    else:
        page.show(findings)
    _leave(page.exit_code(findings))


@app.command(rich_help_panel=_LOOKING)
def purge(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="without asking")] = False,
    force: Annotated[bool, typer.Option("--force", help="even while services are alive")] = False,
) -> None:
    """Delete everything that a run has in Redis."""
    from fedstream import presence

    name = run or _settings(config).run.name
    if not yes:
        typer.confirm(f"Delete run {name!r}?", abort=True)
    deleted = _ask(
        config, redis, run, lambda client, keys: presence.purge(client, keys, force=force)
    )
    typer.echo(f"{deleted} keys of run {name!r} deleted")


@app.command(rich_help_panel=_LOOKING)
def acl(
    config: Config = None,
    run: RunName = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="instead of printing it")] = None,
) -> None:
    """Make Redis's ACL file: a user for every role, with only the keys and commands it needs.

    Passwords come from the environment: FEDSTREAM_PASSWORD_COORDINATOR, and so on for SCHEDULER,
    UPDATER, EVALUATOR, TRAINER and OPERATOR; the file holds their hashes. Redis 7 or later.
    """
    from fedstream import acl as page

    name = check_name("--run", run) if run else _settings(config).run.name
    text = page.file_of(name, os.environ)
    if out is None:
        typer.echo(text, nl=False)
    else:
        page.write(out, text)


@app.command(rich_help_panel=_SERVICES)
def coordinator(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Turns triggers into tasks, admits answers, serves status and models over HTTP."""
    _serve("coordinator", config, sets, name)


@app.command(rich_help_panel=_SERVICES)
def scheduler(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Triggers training tasks."""
    _serve("scheduler", config, sets, name)


@app.command(rich_help_panel=_SERVICES)
def updater(
    config: Config = None,
    sets: Sets = None,
    name: Name = None,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="begin a lost journal anew with Redis's newest model")
    ] = False,
) -> None:
    """Mixes updates into the global model, journals them, and publishes its versions."""
    adopted = ["journal.adopt=true"] if adopt else []
    _serve("updater", config, [*(sets or ()), *adopted], name)


@app.command(rich_help_panel=_SERVICES)
def trainer(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Trains on devices' data."""
    _serve("trainer", config, sets, name)


@app.command(rich_help_panel=_SERVICES)
def evaluator(config: Config = None, sets: Sets = None, name: Name = None) -> None:
    """Measures the model on the test data."""
    _serve("evaluator", config, sets, name)


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 a wrong configuration or command line."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: nobody wants to hear it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115  (as long as we live)
    # A path or the last words of a process may be no text, and a terminal may not know our signs.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except ConfigError as error:
        typer.echo(f"fedstream: {error}", err=True)
        sys.exit(2)
    except FedstreamError as error:
        typer.echo(f"fedstream: {error}", err=True)
        sys.exit(1)
    except OSError as error:  # a disk that is full, a file or folder that is not ours
        where = "" if error.filename is None else f"{error.filename}: "
        typer.echo(f"fedstream: {where}{error.strerror or error}", err=True)
        try:
            sys.stdout.flush()
        except OSError:  # and again when Python ends, unless it goes elsewhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
