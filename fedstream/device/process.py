"""A device's process: loads key, folder and task, enrols, and works until the end of the run."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from fedstream.core.errors import ConfigError
from fedstream.device.connection import Connection, GatewayAddress, TurnedAway
from fedstream.device.folder import DeviceFolder, Identity
from fedstream.device.gateway import UNKNOWN, OwnGateway, RunOver
from fedstream.device.key import own_key
from fedstream.device.training import LocalTraining
from fedstream.device.worker import DeviceWorker
from fedstream.protocol.messages import ATTESTATION, Attestation, Enrolment
from fedstream.protocol.signatures import pem_of
from fedstream.trainer.devices import DeviceSettings

if TYPE_CHECKING:
    from fedstream.core.layout import Layout
    from fedstream.device.privacy import PrivateTasks
    from fedstream.private.policy import PrivacyPolicy
    from fedstream.protocol.signatures import PrivateKey
    from fedstream.trainer.data import Processor
    from fedstream.trainer.learner import Learner
    from fedstream.trainer.solvers import Solvers
    from fedstream.trainer.task import Task


def attestation_in(named: str | None) -> Attestation | None:
    """Read the attestation named by ``FORMAT:FILE``. Raises ConfigError."""
    if named is None:
        return None
    format_, _, file = named.partition(":")
    if not file:
        raise ConfigError(f"--attestation {named}: expected FORMAT:FILE, as in tpm:device.quote")
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"--attestation {named}: {error.strerror}") from error
    if len(data) > ATTESTATION:
        raise ConfigError(f"--attestation {named}: {len(data)} bytes: at most {ATTESTATION}")
    try:
        return Attestation(format=format_, data=base64.b64encode(data).decode())
    except ValidationError:
        raise ConfigError(
            f"--attestation {named}: the format's name has letters, digits and ._+-, at most 40"
        ) from None


@dataclass(frozen=True)
class DeviceOptions:
    """A device's gateway, identity and training."""

    address: GatewayAddress
    key: Path
    folder: Path
    load: Callable[[], Task]  # called once, in the thread that trains
    solvers: Solvers
    devices: DeviceSettings  # simulated latency, drop-outs and availability
    run_devices: int | None = None  # task.devices; None: decided by the task
    threads: int = 1  # of torch
    place: Processor = "cpu"
    invite: str | None = None  # None: it has enrolled before
    attestation: Attestation | None = None  # shown with the invite
    once: bool = False  # end after one answered task
    policy: PrivacyPolicy | None = None  # under which alone it takes part; None: in any run
    save_s: float = 30.0  # between two saves of training's state


async def run_device(
    options: DeviceOptions, say: Callable[[str], None], show: Callable[[str], None]
) -> None:
    """Work until the run is over, or until one task is answered if ``options.once``.

    To stop the device, cancel this call: the device then gives its task up. ``say``: called with a
    line about an event, ``show``: with a short status. Raises FedstreamError.
    """
    connection = Connection(options.address, say)
    policy, folder = options.policy, DeviceFolder(options.folder)
    key = own_key(options.key, ed25519=policy is not None)
    # One thread, as the learner must always be used by the same one.
    thread = ThreadPoolExecutor(1, "training")
    try:
        with folder.occupied():
            folder.pin(None if policy is None else policy.digest)
            show("loading the task")
            loop = asyncio.get_running_loop()
            learner = await loop.run_in_executor(thread, _loaded, options, say)
            private = _private(policy, key, learner.layout)
            async with connection:
                gateway = await _enrolled(connection, key, folder, options, say)
                training = LocalTraining(
                    learner, options.solvers, thread, folder, private, save_s=options.save_s
                )
                worker = DeviceWorker(
                    gateway,
                    folder,
                    training,
                    learner.layout,
                    private,
                    run_devices=options.run_devices or learner.task.run_devices,
                    devices=options.devices,
                    say=say,
                    show=show,
                    once=options.once,
                )
                await worker.work()
    except RunOver as over:
        say(str(over))
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


def _private(policy: PrivacyPolicy | None, key: PrivateKey, layout: Layout) -> PrivateTasks | None:
    """The device's tasks under its policy; None: without a policy. Raises ConfigError."""
    if policy is None:
        return None
    from fedstream.device.privacy import PrivateTasks

    return PrivateTasks(policy, key, layout)


def _loaded(options: DeviceOptions, say: Callable[[str], None]) -> Learner:
    """Load torch and the task. Runs in the training thread."""
    from fedstream.trainer.learner import Learner

    return Learner(options.load, options.threads, options.place, say)


async def _enrolled(
    connection: Connection,
    key: PrivateKey,
    folder: DeviceFolder,
    options: DeviceOptions,
    say: Callable[[str], None],
) -> OwnGateway:
    """Enrol the device if necessary; return its gateway. Raises ConfigError without an invite."""
    known, pem, url = folder.identity(), pem_of(key.public_key()), str(connection.base)
    if known is not None and known.key == pem:
        gateway = OwnGateway(connection, key, known.device)
        try:
            await connection.answered(gateway.token)
        except TurnedAway as refusal:
            if refusal.reason != UNKNOWN or options.invite is None:
                raise
        else:
            if known.url != url:  # perhaps another run's gateway
                folder.enrolled(replace(known, url=url))
            say(f"device {known.device} of run {known.run}")
            return gateway
    if options.invite is None:
        raise ConfigError(
            f"the key {options.key} is not enrolled at {url}: pass the invite that its operator "
            "gave you with --invite TOKEN"
        )
    gateway = OwnGateway(connection, key, None)
    try:
        asks = Enrolment(invite=options.invite, public_key=pem, attestation=options.attestation)
    except ValidationError:
        raise ConfigError(
            "--invite: that is not an invite: copy all of it, and nothing else"
        ) from None
    enrolled = await gateway.enrol(asks)
    folder.enrolled(Identity(enrolled.device, enrolled.run, url, pem))
    say(f"enrolled as device {enrolled.device} of run {enrolled.run}")
    return gateway
