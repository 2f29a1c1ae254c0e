"""`fedstream load`: many devices against a gateway."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.cli.options import AsJson, Config, RunName, Url, ask, live_settings
from fedstream.runtime.signals import INTERRUPTED, Stop
from fedstream.terminal import counted, line, verbatim

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.load.laboratory import LoadOptions, LoadReport

_INVITES_S = 3600.0


def load(
    url: Annotated[str, typer.Option(metavar="URL", help="the gateway: https://HOST:PORT")],
    devices: Annotated[
        int, typer.Option(metavar="N", min=1, help="how many; of an invites file, the first N")
    ],
    invites: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="what `fedstream devices invite` printed; default: invite devices 0 to N-1, as "
            "the run's operator",
        ),
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="trust the certificates in this file (PEM) instead of the system's authorities",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="the certificate (PEM) that all devices show, for gateways that ask for one",
        ),
    ] = None,
    cert_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="its private key (PEM); default: in the same file"),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="how long it is counted")] = 60.0,
    warm_up: Annotated[
        float, typer.Option(metavar="S", help="how long before that it is not counted")
    ] = 0.0,
    arrivals: Annotated[
        float, typer.Option(metavar="RATE", help="devices per second that arrive at first")
    ] = 100.0,
    wait: Annotated[
        float, typer.Option(metavar="S", min=0, max=50, help="how long a check-in may wait")
    ] = 50.0,
    models: Annotated[
        bool, typer.Option("--models/--no-models", help="download each new model, or none")
    ] = True,
    changes: Annotated[
        bool,
        typer.Option(
            "--changes/--no-changes",
            help="download what changed since the model that a device has, or always the model",
        ),
    ] = True,
    think: Annotated[
        tuple[float, float],
        typer.Option(metavar="MIN MAX", help="seconds from an offer to the upload, in between"),
    ] = (0.0, 0.0),
    drop_outs: Annotated[
        float, typer.Option(metavar="SHARE", help="of tasks: the device gives them up")
    ] = 0.0,
    vanishes: Annotated[
        float, typer.Option(metavar="SHARE", help="of tasks: the device leaves without a word")
    ] = 0.0,
    away: Annotated[
        tuple[float, float],
        typer.Option(metavar="MIN MAX", help="seconds after which it comes back, in between"),
    ] = (5.0, 30.0),
    cuts: Annotated[
        float,
        typer.Option(
            metavar="SHARE", help="of uploads and check-ins: the connection is cut in the middle"
        ),
    ] = 0.0,
    slow: Annotated[
        float, typer.Option(metavar="SHARE", help="of devices: their link is slow")
    ] = 0.0,
    slow_rate: Annotated[
        float, typer.Option(metavar="BYTES", help="bytes per second of a slow link, either way")
    ] = 50_000.0,
    skewed: Annotated[
        float,
        typer.Option(metavar="SHARE", help="of devices: their clock is wrong until they are told"),
    ] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", help="of everything that is drawn")] = 0,
    yes_elsewhere: Annotated[
        bool, typer.Option("--yes-elsewhere", help="the gateway may be on another machine")
    ] = False,
    yes_enrolled: Annotated[
        bool,
        typer.Option(
            "--yes-enrolled", help="devices that have enrolled may be replaced: their keys end"
        ),
    ] = False,
    config: Config = None,
    redis: Url = None,
    run: RunName = None,
    as_json: AsJson = False,
) -> None:
    """Load a gateway with many devices that keep the protocol, and train nothing.

    Their updates are made up, so the run is good for nothing else. At the end, tasks in hand are
    given up. Exit codes: 0 done, 130 interrupted (which reports all the same), 1 failed, 2 wrong
    command line.
    """
    for needed in ("cryptography", "httptools"):
        if find_spec(needed) is None:
            raise ConfigError(
                f"{needed} is not installed: pip install 'fedstream[load]' adds what a load needs"
            )
    from fedstream.device.address import GatewayAddress
    from fedstream.load import report as page
    from fedstream.load.habits import Habits
    from fedstream.load.laboratory import LoadOptions, check
    from fedstream.observe import report

    habits = Habits(
        think_s=think, drop_outs=drop_outs, vanishes=vanishes, away_s=away, cuts=cuts, slow=slow,
        slow_rate=slow_rate, skewed=skewed,
    )  # fmt: skip
    options = LoadOptions(
        GatewayAddress(url, ca, cert, cert_key), dict.fromkeys(range(devices), ""), seconds,
        warm_up_s=warm_up, arrivals=arrivals, wait_s=wait, models=models, changes=changes,
        habits=habits, seed=seed, elsewhere=yes_elsewhere,
    )  # fmt: skip
    check(options)  # before anybody is invited
    if invites is not None:
        taking_part = _from_file(invites, devices)
    else:
        site = live_settings(config, redis=redis, run=run).gateway.site
        taking_part = ask(
            config, redis, run,
            lambda client, keys: invited(client, keys, site, devices, replace=yes_enrolled),
        )  # fmt: skip
    with Stop() as stop:
        found = _loaded(replace(options, invites=taking_part), stop)
    told = page.plain(found)
    if as_json:
        verbatim(report.as_json(told) + "\n")
    else:
        page.show(told)
    if stop.name is not None:
        raise typer.Exit(INTERRUPTED)


async def invited(
    client: Client, keys: Keys, site: str, devices: int, *, replace: bool
) -> Mapping[int, str]:
    """Invite devices 0 to ``devices`` - 1. ``replace``: also those that have enrolled.

    Raises FedstreamError: an invite that is used ends the key that the device had.
    """
    from fedstream.operate import enrolment

    known = await enrolment.read(client, keys, site)
    there = [one.device for one in known if one.enrolled is not None and one.device < devices]
    if there and not replace:
        raise FedstreamError(
            f"{counted(len(there), 'device')} of 0 to {devices - 1} enrolled before, and would be "
            "shut out by a load: use a run that has no other devices; if these are of an earlier "
            "load, say --yes-enrolled"
        )
    made = await enrolment.invite(client, keys, site, range(devices), seconds=_INVITES_S)
    return made.invites


def _from_file(file: Path, devices: int) -> Mapping[int, str]:
    """The first invites of a file. Raises ConfigError if there are too few."""
    from fedstream.load.invites import read_invites

    found = read_invites(file)
    if len(found) < devices:
        raise ConfigError(f"--invites {file}: {len(found)} invites for {devices} devices")
    return {device: found[device] for device in sorted(found)[:devices]}


def _loaded(options: LoadOptions, stop: Stop) -> LoadReport:
    """Load until it is over, or until a signal comes."""
    import uvloop

    from fedstream.load.laboratory import load as loaded

    async def live() -> LoadReport:
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def signalled(name: str) -> None:
            line(f"{name}: ending; a second signal ends this process at once", err=True)
            over.set()

        stop.listen(lambda name: loop.call_soon_threadsafe(signalled, name))
        try:
            return await loaded(options, over)
        finally:
            stop.listen(None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(live())
