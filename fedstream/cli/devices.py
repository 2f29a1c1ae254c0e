"""The commands of `fedstream devices`.

fedstream/operate/devices.py and fedstream/operate/enrolment.py do the work.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fedstream.broker.keys import check_name
from fedstream.cli.options import AsJson, Config, RunName, Url, ask, live_settings
from fedstream.terminal import verbatim

app = typer.Typer(
    help="List devices, put them into quarantine, and say which may come to a gateway.",
    no_args_is_help=True,
)

DeviceNumbers = Annotated[
    list[int], typer.Argument(metavar="DEVICE", min=0, help="numbers of devices")
]
Wait = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="how long to wait for the updater to take it"),
]
GatewaySite = Annotated[
    str | None,
    typer.Option("--site", metavar="NAME", help="the gateway's site; default: gateway.site"),
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
    from fedstream.history import report
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
    processed the command, 1 it has not yet.
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

    Exit codes: 0 the updater has processed the command, 1 it has not yet.
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
        config,
        redis,
        run,
        lambda client, keys: page.ask(
            client, keys, devices, release=release, why=reason, wait_s=wait
        ),
    )
    if not page.tell(answer):
        raise typer.Exit(1)


# access to a gateway


@app.command("invite")
def devices_invite(
    devices: DeviceNumbers,
    expires: Annotated[
        str, typer.Option(metavar="DURATION", help="how long the invites hold: 30m, 12h, 7d")
    ] = "7d",
    site: GatewaySite = None,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Let devices enrol at the gateway: one invite for each, shown only now.

    A new invite replaces an unused one. A device that has enrolled may do so again with a new
    invite; its old key then ends.
    """
    from fedstream.history import report
    from fedstream.operate import enrolment as page

    seconds, at = page.seconds_of(expires), _site(site, config, redis, run)
    made = ask(
        config,
        redis,
        run,
        lambda client, keys: page.invite(client, keys, at, devices, seconds=seconds),
    )
    if as_json:
        verbatim(report.as_json({"until": made.till, "invites": made.invites}) + "\n")
    else:
        page.tell_invites(made)


@app.command("enrolled")
def devices_enrolled(
    site: GatewaySite = None,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """List the devices that have enrolled at the gateway, are invited, or are revoked."""
    from fedstream.history import report
    from fedstream.operate import enrolment as page

    at = _site(site, config, redis, run)
    found = ask(config, redis, run, lambda client, keys: page.read(client, keys, at))
    if as_json:
        verbatim(report.as_json(page.plain(found)) + "\n")
    else:
        page.show(found)


@app.command("revoke")
def devices_revoke(
    devices: DeviceNumbers,
    site: GatewaySite = None,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Turn devices away at the gateway, and withdraw their invites, until `admit`.

    Within about three seconds their tokens end, and their tasks are given up. Updates that they
    sent before count: to refuse those as well, use `quarantine`.
    """
    _set_access(devices, site, config, redis, run, admit=False)


@app.command("admit")
def devices_admit(
    devices: DeviceNumbers,
    site: GatewaySite = None,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
) -> None:
    """Admit revoked devices again, with the keys that they enrolled with."""
    _set_access(devices, site, config, redis, run, admit=True)


def _set_access(
    devices: list[int], site: str | None, config: Config, redis: Url, run: RunName, *, admit: bool
) -> None:
    from fedstream.operate import enrolment as page

    at = _site(site, config, redis, run)
    changed = ask(
        config,
        redis,
        run,
        lambda client, keys: page.set_access(client, keys, at, devices, admit=admit),
    )
    page.tell_access(devices, changed, admit=admit)


def _site(given: str | None, config: Config, redis: Url, run: RunName) -> str:
    if given is not None:
        return check_name("--site", given)
    return live_settings(config, redis=redis, run=run).gateway.site
