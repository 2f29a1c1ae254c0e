"""A device, and a gateway that fails when a test tells it to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestServer
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from fedstream.core.layout import Model
from fedstream.device.connection import Connection, GatewayAddress
from fedstream.device.gateway import OwnGateway
from fedstream.device.process import DeviceOptions
from fedstream.runtime.backoff import Backoff
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.solvers import Solvers
from fedstream.trainer.task import initial
from fedstream.trainer.vector import layout_of
from tests.device.fake import FakeGateway
from tests.trainer.stepping import SGD, Steps

Options = Callable[..., DeviceOptions]


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long between tries."""
    monkeypatch.setattr(Backoff, "next", lambda _self: 0.001)


@pytest.fixture
def task() -> Steps:
    """The device's task: seven hundred bytes of a model with dropout and a BatchNorm."""
    return Steps()


@pytest.fixture
def model(task: Steps) -> Model:
    """The newest version's."""
    return initial(task, 0)


@pytest.fixture
def gateway(task: Steps) -> FakeGateway:
    """The gateway that the device talks to."""
    return FakeGateway(layout_of(task.model()))


@pytest.fixture
async def server(gateway: FakeGateway) -> AsyncIterator[TestServer]:
    """It serves."""
    server = gateway.server()
    await server.start_server()
    yield server
    await server.close()


@pytest.fixture
def options(server: TestServer, gateway: FakeGateway, task: Steps, tmp_path: Path) -> Options:
    """Makes the options of device 7, with these changes."""

    def made(**changes: Any) -> DeviceOptions:
        about: dict[str, Any] = {
            "address": GatewayAddress(str(server.make_url("/"))),
            "key": tmp_path / "device.pem",
            "folder": tmp_path / "state",
            "load": lambda: task,
            "solvers": Solvers(SGD),
            "devices": DeviceSettings(),
            "invite": gateway.invite(7),
            "once": True,
        }
        return DeviceOptions(**about | changes)

    return made


@pytest.fixture
def said() -> list[str]:
    """The lines that the device printed."""
    return []


@pytest.fixture
async def own(
    server: TestServer, gateway: FakeGateway, said: list[str]
) -> AsyncIterator[OwnGateway]:
    """The gateway as device 7 sees it, which has enrolled."""
    key = generate_private_key(SECP256R1())
    gateway.keys[7] = key.public_key()
    async with Connection(GatewayAddress(str(server.make_url("/"))), said.append) as connection:
        yield OwnGateway(connection, key, 7)
