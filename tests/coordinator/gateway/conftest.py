"""Fixtures for a gateway's tests: its authentication, a device, and a device that sends updates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.broker.client import RedisSettings
from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.coordinator import sweep
from fedstream.coordinator.gateway import registry, service, upload_state
from fedstream.coordinator.gateway.auth import Auth
from fedstream.coordinator.gateway.settings import GatewaySettings
from tests.coordinator.gateway.phones import (
    NAME,
    SITE,
    Phone,
    Replica,
    answering,
    invite,
)
from tests.coordinator.gateway.uploading import Scene
from tests.support import Hand, layout_of


@pytest.fixture
async def replica(hand: Hand) -> AsyncIterator[Replica]:
    """Starts replicas of a gateway for a run of ten devices."""
    await hand.create()
    clients: list[TestClient[web.Request, web.Application]] = []

    async def start(
        site: str = SITE, secret: str | None = None, names: Sequence[str] = (NAME,), **about: Any
    ) -> Phone:
        ledger = GatewayLedger(hand.client, about.pop("keys", hand.keys), "gateway-0", site)
        settings = GatewaySettings.model_validate(
            {
                "site": site,
                "secret": secret,
                "body_s": 0.2,
                "names": names,
                "attestation": about.pop("attestation", {"kind": "none"}),
                "device_rate": about.pop("device_rate", 20.0),
            }
        )
        auth = Auth(ledger, settings, None, **about)

        async def who(request: web.Request) -> web.Response:
            return web.json_response(await auth.device_of(request))

        app = web.Application(middlewares=[answering])
        app.add_routes([*auth.routes(), web.get("/who", who)])
        clients.append(TestClient(TestServer(app)))
        await clients[-1].start_server()
        return Phone(clients[-1])

    yield start
    for one in clients:
        await one.close()


@pytest.fixture
async def phone(replica: Replica, hand: Hand) -> Phone:
    """A device with an invite, at a gateway."""
    found: Phone = await replica()
    await invite(hand)
    return found


@pytest.fixture
def make(hand: Hand) -> Callable[..., Any]:
    """Makes a run of a model of so many parameters."""

    async def make(parameters: int = 64, **run: Any) -> Hand:
        hand.layout = layout_of(parameters)
        await hand.create(**run)
        await hand.ledger.prepare(["pool", SITE])
        return hand

    return make


@pytest.fixture
def scene(hand: Hand, redis: RedisSettings) -> Scene:
    return Scene(hand, redis)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways and coordinators read changes more often than once a second."""
    monkeypatch.setattr(service, "_LOOK_S", 0.2)
    monkeypatch.setattr(sweep, "_SWEEP_S", 0.2)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways that don't wait long for a decision."""
    monkeypatch.setattr(upload_state, "WAIT_S", 0.2)


@pytest.fixture
def alert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways that notice a revocation sooner than after two seconds."""
    monkeypatch.setattr(registry, "LOOK_S", 0.2)
