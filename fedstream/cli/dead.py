"""The commands of `fedstream dead`; fedstream/operate/dead.py does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedstream.cli.options import AsJson, Config, RunName, Url, ask
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.terminal import confirm, line, verbatim

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.operate.dead import DeadLetters, Letter

app = typer.Typer(
    help="Inspect, retry or drop entries that could not be processed.", no_args_is_help=True
)


@app.command("list")
def dead_list(
    config: Config = None, redis: Url = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """List the dead letters, oldest first."""
    from fedstream.history import report
    from fedstream.operate import dead as page

    found = ask(config, redis, run, page.read)
    if as_json:
        letters = [page.plain(letter) for letter in found.letters]
        verbatim(report.as_json({"letters": letters, "lost": found.lost}) + "\n")
    else:
        page.show(found)


@app.command("show")
def dead_show(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="id of the letter or of its task")],
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Show everything in a dead letter."""
    from fedstream.history import report
    from fedstream.operate import dead as page

    letters = ask(config, redis, run, page.read).find([wanted])
    if as_json:
        verbatim(report.as_json([page.plain(letter) for letter in letters]) + "\n")
    else:
        page.show_each(letters)


LetterIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="ids of letters or of their tasks")
]
All = Annotated[bool, typer.Option("--all", help="all dead letters")]


@app.command("retry")
def dead_retry(
    wanted: LetterIds = None,
    everything: All = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Trigger the work again as a new task of the same device, and delete the letter.

    Exit codes: 0 all were retried, 1 at least one could not be and was kept.
    """
    from fedstream.operate import dead as page

    async def retry(client: Client, keys: Keys) -> int:
        failed = 0
        letters = _selected(await page.read(client, keys), wanted, everything)
        if not letters:
            line("there are no dead letters")
        for letter in letters:
            try:
                trigger = await page.retry(client, keys, letter)
            except FedstreamError as error:
                if error.retriable:
                    raise
                failed += 1
                line(f"fedstream: {letter.id} not retried: {error}", err=True)
            else:
                line(f"{letter.id}: retried as task {trigger.task} of device {trigger.device}")
        return failed

    if ask(config, redis, run, retry):
        raise typer.Exit(1)


@app.command("drop")
def dead_drop(
    wanted: LetterIds = None,
    everything: All = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="don't ask for confirmation")] = False,
) -> None:
    """Delete dead letters. Their tasks have ended as dead and stay so."""
    from fedstream.operate import dead as page

    found = ask(config, redis, run, page.read)
    letters = _selected(found, wanted, everything)
    if letters and not yes:
        confirm(f"Delete {len(letters)} of {len(found.letters)} dead letters?")
    dropped = ask(config, redis, run, lambda client, keys: page.drop(client, keys, letters))
    line(f"{dropped} dead letter{'' if dropped == 1 else 's'} deleted")


def _selected(found: DeadLetters, wanted: list[str] | None, everything: bool) -> list[Letter]:
    """Letters chosen by id or --all.

    Raises ConfigError unless exactly one of the two is given, FedstreamError for an unknown id.
    """
    if bool(wanted) == everything:
        raise ConfigError("give either the ids of letters or --all")
    return list(found.letters) if everything else found.find(wanted or ())
