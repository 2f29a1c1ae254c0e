"""The commands of `fedstream devices`; fedstream/operate/devices.py does the work."""

from __future__ import annotations

from typing import Annotated

import typer

from fedstream.cli.options import AsJson, Config, RunName, Url, ask
from fedstream.terminal import verbatim

app = typer.Typer(help="List devices, put them into quarantine, or release them.")

DeviceNumbers = Annotated[
    list[int], typer.Argument(metavar="DEVICE", min=0, help="numbers of devices")
]
Wait = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="how long to wait for the updater to take it"),
]


@app.command("list")
def devices_list(
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    quarantined: Annotated[
        bool, typer.Option("--quarantined", help="only those in quarantine")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the devices in quarantine, and what the run's newest events say of all devices."""
    from fedstream.observe import report
    from fedstream.operate import devices as page

    found = ask(config, redis, run, page.read)
    if quarantined:
        found = found.in_quarantine()
    if as_json:
        verbatim(report.as_json(page.plain(found)) + "\n")
    else:
        page.show(found)


@app.command("quarantine")
def devices_quarantine(
    devices: DeviceNumbers,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="why, for the journal and for `list`")
    ] = "",
    wait: Wait = 10.0,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Refuse all later updates of these devices, until they are released.

    Updates that were applied or buffered before stay in the model. Exit codes: 0 the updater has
    taken it, 1 it has not yet.
    """
    _set(devices, config, redis, run, release=False, reason=reason, wait=wait)


@app.command("release")
def devices_release(
    devices: DeviceNumbers,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="why, for the journal")] = "",
    wait: Wait = 10.0,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Take these devices' updates again.

    Exit codes: 0 the updater has taken it, 1 it has not yet.
    """
    _set(devices, config, redis, run, release=True, reason=reason, wait=wait)


def _set(
    devices: list[int],
    config: Config,
    redis: Url,
    run: RunName,
    *,
    release: bool,
    reason: str,
    wait: float,
) -> None:
    from fedstream.operate import devices as page

    answer = ask(
        config, redis, run,
        lambda client, keys: page.ask(
            client, keys, devices, release=release, why=reason, wait_s=wait
        ),
    )  # fmt: skip
    if not page.tell(answer):
        raise typer.Exit(1)
