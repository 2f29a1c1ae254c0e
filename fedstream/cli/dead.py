"""The commands of `fedstream dead`; fedstream/operate/dead.py does the work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.cli.options import AsJson, Config, RunName, Url, ask
from fedstream.terminal import confirm, line, verbatim

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.operate.dead import Letter
    from fedstream.operate.dead import Letters as Found

app = typer.Typer(help="What could not be processed: look at it, retry it, drop it.")


@app.command("list")
def dead_list(
    config: Config = None, redis: Url = None, run: RunName = None, as_json: AsJson = False
) -> None:
    """All of them, the oldest first."""
    from fedstream.observe import report
    from fedstream.operate import dead as page

    found = ask(config, redis, run, page.read)
    if as_json:
        letters = [page.plain(letter) for letter in found.letters]
        verbatim(report.as_json({"letters": letters, "lost": found.lost}) + "\n")
    else:
        page.show(found)


@app.command("show")
def dead_show(
    wanted: Annotated[str, typer.Argument(metavar="ID", help="of the letter, or of its task")],
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """What is in one."""
    from fedstream.observe import report
    from fedstream.operate import dead as page

    letters = ask(config, redis, run, page.read).find([wanted])
    if as_json:
        verbatim(report.as_json([page.plain(letter) for letter in letters]) + "\n")
    else:
        page.show_each(letters)


Letters = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="of letters, or of their tasks")
]
All = Annotated[bool, typer.Option("--all", help="all there are")]


@app.command("retry")
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
    from fedstream.operate import dead as page

    async def retry(client: Client, keys: Keys) -> int:
        failed = 0
        chosen = _chosen(await page.read(client, keys), wanted, everything)
        if not chosen:
            line("there are no dead letters")
        for letter in chosen:
            try:
                trigger = await page.retry(client, keys, letter)
            except FedstreamError as error:
                if error.retriable:
                    raise
                failed += 1
                line(f"fedstream: {letter.id} is not retried: {error}", err=True)
            else:
                line(f"{letter.id}: device {trigger.device} has task {trigger.task}")
        return failed

    if ask(config, redis, run, retry):
        raise typer.Exit(1)


@app.command("drop")
def dead_drop(
    wanted: Letters = None,
    everything: All = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="without asking")] = False,
) -> None:
    """Delete them. What they were about has ended as dead, and stays so."""
    from fedstream.operate import dead as page

    found = ask(config, redis, run, page.read)
    chosen = _chosen(found, wanted, everything)
    if chosen and not yes:
        confirm(f"Delete {len(chosen)} of {len(found.letters)} dead letters?")
    dropped = ask(config, redis, run, lambda client, keys: page.drop(client, keys, chosen))
    line(f"{dropped} dead letter{'' if dropped == 1 else 's'} deleted")


def _chosen(found: Found, wanted: list[str] | None, everything: bool) -> list[Letter]:
    """Letters chosen by id or --all.

    Raises ConfigError unless exactly one of the two is given, FedstreamError for an unknown id.
    """
    if bool(wanted) == everything:
        raise ConfigError("name letters by their ids, or take --all")
    return list(found.letters) if everything else found.find(wanted or ())
