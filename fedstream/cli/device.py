"""`fedstream device`: takes part in a run over HTTPS."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedstream import private
from fedstream.cli.options import Config, DataRoot, Sets, TaskName, settings_of
from fedstream.core.errors import ConfigError
from fedstream.runtime import process
from fedstream.runtime.process import INTERRUPTED, Stop
from fedstream.terminal import doing, line

if TYPE_CHECKING:
    from fedstream.device.process import DeviceOptions
    from fedstream.private.policy import PrivacyPolicy


def device(
    url: Annotated[
        str, typer.Option(metavar="URL", help="the gateway: https://HOST or https://HOST:PORT")
    ],
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="the device's private key (PEM), of P-256 or Ed25519; made on first use",
        ),
    ],
    task: TaskName = None,
    invite: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            envvar="FEDSTREAM_INVITE",
            help="from the run's operator; needed once, to enrol",
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
            metavar="FILE", help="the device's certificate (PEM), for gateways that ask for one"
        ),
    ] = None,
    cert_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="its private key (PEM); default: in the same file"),
    ] = None,
    attestation: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT:FILE",
            help="what to show when the device enrols, for gateways that ask for more than an "
            "invite",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="take part under this privacy policy alone, now and ever after; needs "
            "--policy-owner",
        ),
    ] = None,
    policy_owner: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="the Ed25519 public key that signs the policy"),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            help="what the device remembers; default: beside the key, named KEY.state",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="stop after one answered task")] = False,
    config: Config = None,
    data_root: DataRoot = None,
    sets: Sets = None,
) -> None:
    """Take part in a run over HTTPS, as a device of a gateway. Needs no Redis.

    Model and training are the task's, on this machine; the gateway sends numbers only. Settings of
    the solver must be those of the run. On Ctrl-C, the device gives its task up.

    Exit codes: 0 the run is over (or --once: a task was answered), 130 interrupted, 1 failed, 2
    wrong configuration.
    """
    if find_spec("cryptography") is None:
        raise ConfigError(
            "cryptography is not installed: pip install 'fedstream[device]' adds what devices need"
        )
    with process.importing():
        from fedstream.device.connection import GatewayAddress
        from fedstream.device.process import DeviceOptions, attestation_in
        from fedstream.runtime.process import end_with_parent
        from fedstream.settings.services import loaded
        from fedstream.trainer.solvers import Solvers

    end_with_parent()
    settings = settings_of(config, sets, task=task, data_root=data_root)
    options = DeviceOptions(
        GatewayAddress(url, ca, cert, cert_key),
        key,
        folder or key.with_name(f"{key.name}.state"),
        load=partial(loaded, settings.task),
        solvers=Solvers(settings.solver, settings.solvers),
        devices=settings.devices,
        run_devices=settings.task.devices,
        threads=settings.trainer.threads,
        place=settings.trainer.device,
        invite=invite,
        attestation=attestation_in(attestation),
        once=once,
        policy=_policy_of(policy, policy_owner),
    )
    with Stop() as stop:
        asyncio.run(_run_until_signal(options, stop))
    if stop.name is not None:
        raise typer.Exit(INTERRUPTED)


def _policy_of(file: Path | None, owner: str | None) -> PrivacyPolicy | None:
    """The policy under which the device takes part. Raises ConfigError."""
    if file is None and owner is None:
        return None
    if file is None or owner is None:
        raise ConfigError("--policy and --policy-owner go together: give both or none")
    with private.importing("--policy"):
        from fedstream.device.privacy import policy_in
    return policy_in(file, owner)


async def _run_until_signal(options: DeviceOptions, stop: Stop) -> None:
    """Run the device until a signal stops it in order."""
    from fedstream.device.process import run_device

    loop = asyncio.get_running_loop()
    with doing() as show:
        running = asyncio.create_task(run_device(options, line, show))

        def signalled(name: str) -> None:
            line(f"{name}: leaving; a second signal ends this process at once")
            running.cancel()

        stop.listen(lambda name: loop.call_soon_threadsafe(signalled, name))
        try:
            await running
        except asyncio.CancelledError:
            if stop.name is None:
                raise
        finally:
            stop.listen(None)
