"""The devices of `benchmarks.gateway`: the client of `fedstream device`, training left out.

    python -m benchmarks.gateway_devices --url URL --ca FILE --invites FILE [--part 0/1]

All of them share this process. Each has a key, a folder and connections of its own, and sends back
the model that it was offered with its values moved a little. Until SIGTERM, each event is a line on
standard output: when (seconds of the monotonic clock), how long it took (ms), and its name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import ssl
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks import echo
from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.device.connection import Connection, GatewayAddress
from fedstream.device.folder import DeviceFolder
from fedstream.device.gateway import OwnGateway
from fedstream.device.training import LocalTraining
from fedstream.device.worker import DeviceWorker
from fedstream.protocol.messages import CheckIn, Enrolment, EvaluationOffer, Offer
from fedstream.protocol.signatures import pem_of
from fedstream.runtime.process import allow_files
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.learner import Learned
from fedstream.trainer.solvers import Trained
from fedstream.trainer.vector import layout_of

if TYPE_CHECKING:
    from fedstream.core.layout import Floats, Layout
    from fedstream.core.messages import Sum
    from fedstream.device.training import Halt
    from fedstream.trainer.workspace import Start

Tell: TypeAlias = Callable[[str, float], None]  # gets an event's name and its milliseconds

# Names of events.
ADMITTED = "admitted"  # a task, from its offer to its receipt
LATE = "late"  # this process, by which a timer of its loop was late

_LOOK_S = 1.0  # between two looks at this process's lateness
_OTHER_FILES = 64


class SharedTls(GatewayAddress):
    """An address whose TLS context all devices of the process share."""

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return super().tls()

    def tls(self) -> ssl.SSLContext:
        """The context."""
        return self._context


class TimedGateway(OwnGateway):
    """A gateway that notes when it made an offer."""

    offered = 0.0  # when it made the last one, monotonic seconds

    async def check_in(self, asks: CheckIn) -> Offer | EvaluationOffer | float:
        """Ask for a task."""
        found = await super().check_in(asks)
        self.offered = time.monotonic()
        return found


class NoTraining(LocalTraining):
    """A stand-in for training, which moves all values of the model a little, and for metrics."""

    def __init__(self, device: int) -> None:
        """Without learner, thread and folder. ``device``: its values differ from the others'."""
        self._rng = np.random.default_rng(device)

    def interrupted(self, task: str, layout: Layout) -> Start | None:
        """None: nothing is ever interrupted."""
        return None

    def again(self) -> None:
        """Forget nothing."""

    async def measured(
        self, model: Model, local: Model | None, device: int
    ) -> tuple[int, dict[str, Sum]]:
        """One number of the model."""
        return 1, {"first": (float(model.floats[0]), 1.0)}

    async def learned(
        self, offer: Offer, start: Start, memory: Floats | None, halt: Halt
    ) -> tuple[Learned | None, float]:
        """The update, a float32 model, and its learning rate."""
        update = Model(start.model.layout)
        np.add(start.model.floats, self._rng.normal(scale=1e-3), out=update.floats)
        return Learned(Trained(1, 1, 0.0), update, update.digest_like(start.digest)), 0.1


async def live(
    address: GatewayAddress, device: int, invite: str, folder: Path, layout: Layout, tell: Tell
) -> None:
    """Enrol and work until cancelled."""

    def say(text: str) -> None:
        if text.startswith("task ") and ": admitted" in text:
            tell(ADMITTED, 1000 * (time.monotonic() - gateway.offered))
        else:
            tell(" ".join(text.split()), 0.0)

    key, own = Ed25519PrivateKey.generate(), DeviceFolder(folder)
    own.models.mkdir(parents=True)
    try:
        async with Connection(address, say) as connection:
            gateway = TimedGateway(connection, key, None)
            await gateway.enrol(Enrolment(invite=invite, public_key=pem_of(key.public_key())))
            await DeviceWorker(
                gateway,
                own,
                NoTraining(device),
                layout,
                run_devices=None,
                devices=DeviceSettings(),
                say=say,
                show=lambda _: None,
            ).work()
    except FedstreamError as error:
        tell(f"ended: {error}", 0.0)


async def crowd(
    address: GatewayAddress, invites: Sequence[tuple[int, str]], folder: Path, per_s: float
) -> None:
    """All devices, of which ``per_s`` arrive per second. Cancel it to end it."""
    layout = layout_of(echo.task.model())

    def tell(name: str, ms: float) -> None:
        print(f"{time.monotonic():.3f} {ms:.1f} {name}")

    async def arrives(number: int, device: int, invite: str) -> None:
        await asyncio.sleep(number / per_s)
        await live(address, device, invite, folder / str(device), layout, tell)

    async with asyncio.TaskGroup() as group:
        for number, (device, invite) in enumerate(invites):
            group.create_task(arrives(number, device, invite))
        while True:
            began = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            tell(LATE, 1000 * (time.monotonic() - began - _LOOK_S))
            print(end="", flush=True)


def main() -> None:
    """Be a part of the devices until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the gateway")
    parser.add_argument("--ca", type=Path, help="that signed its certificate (PEM)")
    parser.add_argument(
        "--invites", type=Path, required=True, help="of `fedstream devices invite --json`"
    )
    parser.add_argument("--part", default="0/1", help="which devices of how many parts: 0/2, 1/2")
    parser.add_argument("--arrivals", type=float, default=100.0, help="devices per second")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    invites = json.loads(options.invites.read_text())["invites"]
    mine = [(int(device), invite) for device, invite in invites.items()][part::parts]
    allow_files(len(mine) + _OTHER_FILES)

    async def until_told(folder: Path) -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await crowd(SharedTls(options.url, options.ca), mine, folder, options.arrivals)

    with tempfile.TemporaryDirectory() as folder, suppress(asyncio.CancelledError):
        asyncio.run(until_told(Path(folder)))


if __name__ == "__main__":
    main()
