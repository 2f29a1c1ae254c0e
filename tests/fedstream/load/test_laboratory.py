"""The laboratory at a real gateway with a real Redis: what it counts is what Redis counts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import structlog
import trustme

from fedstream.broker.client import RedisSettings
from fedstream.broker.digest import digest_of
from fedstream.broker.errors import ConfigError
from fedstream.coordinator.gateway.invites import new_invite
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.device.address import GatewayAddress
from fedstream.load import report
from fedstream.load.habits import Habits
from fedstream.load.laboratory import LoadOptions, check, load
from fedstream.runtime.crowd import Crowd
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.tasks import LeaseSettings
from fedstream.wire import F32
from tests.coordinator.gateway.places import SITE, coordinating, owned_by
from tests.support import Hand, context, running, wait_until

DEVICES, TASKS = 10, 40
UNRULY = Habits(
    drop_outs=0.2, vanishes=0.2, away_s=(0.05, 0.2), cuts=0.4, slow=0.2, slow_rate=10_000.0,
    skewed=0.3, think_s=(0.0, 0.05),
)  # fmt: skip


@asynccontextmanager
async def gateway(hand: Hand, redis: RedisSettings) -> AsyncIterator[tuple[Gateway, str]]:
    """A gateway that trusts nobody, and its URL."""
    settings = GatewaySettings(retry_s=(1.0, 1.0))
    service = Gateway(settings, LeaseSettings(), keys=hand.keys, redis=redis, name="gw", update=F32)
    its = context()
    app = application(service.routes(), its.stop.is_set)
    async with (
        listening(app, HttpSettings(), 0, Crowd(100), structlog.get_logger(), None) as port,
        running(service, its),
    ):
        yield service, f"http://127.0.0.1:{port}"


async def test_unruly_devices_lose_nothing_and_the_counts_agree(
    hand: Hand, redis: RedisSettings
) -> None:
    await hand.create(devices=DEVICES)
    await hand.ledger.prepare(["pool", SITE])
    invites = {device: new_invite(device) for device in range(DEVICES)}
    digests = {device: digest_of(one.encode()) for device, one in invites.items()}
    assert (await hand.ledger.invite(SITE, digests, seconds=60))[0] == "invited"
    stop = asyncio.Event()
    async with gateway(hand, redis) as (service, url), coordinating(hand, redis):
        options = LoadOptions(
            GatewayAddress(url), invites, 100.0, wait_s=50.0, habits=UNRULY, seed=3
        )
        running_ = asyncio.create_task(load(options, stop))
        for device in range(DEVICES):
            await owned_by(hand, device, "gw")
        await hand.open(TASKS)

        async def is_over() -> bool:
            given_up = (await hand.ledger.tally()).reasons("given_up").get("dropped out", 0)
            return len(await hand.queue()) + given_up == TASKS

        await wait_until(is_over, what="all tasks answered")
        await wait_until(lambda: service._desk.polls == DEVICES, what="all devices waiting again")
        stop.set()
        found = await running_
    tally = found.tally
    assert tally.receipts == {"admitted": len(await hand.queue())}
    assert tally.events["tasks given up"] == TASKS - len(await hand.queue()) > 0
    assert tally.events["tasks left without a word"] > 0
    assert tally.events["requests cut off"] > 0
    assert tally.events["clocks set"] == tally.refusals["clock"] > 0
    assert {*tally.refusals} == {"clock"}
    assert tally.ended == {}
    await hand.balanced()
    plain = report.plain(found)
    assert plain["answers"]["enrol"] == {"201": DEVICES, "401": tally.refusals["clock"]}


async def test_load_of_a_gateway_that_is_not_trusted_ends_at_once() -> None:
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(served)

    async def nobody(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nobody, "127.0.0.1", 0, ssl=served)
    async with server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        loads = LoadOptions(
            GatewayAddress(f"https://127.0.0.1:{port}"),
            {device: new_invite(device) for device in range(3)}, 1000.0,
        )  # fmt: skip
        with pytest.raises(ConfigError, match="is not trusted"):
            await load(loads, asyncio.Event())


def options(
    url: str = "https://127.0.0.1:1", devices: int = 1, seconds: float = 1.0
) -> LoadOptions:
    return LoadOptions(GatewayAddress(url), dict.fromkeys(range(devices), ""), seconds)


@pytest.mark.parametrize("host", ["gateway.example", "10.0.0.1", "[2001:db8::1]"])
def test_other_machines_are_loaded_only_with_consent(host: str) -> None:
    with pytest.raises(ConfigError, match="--yes-elsewhere"):
        check(options(f"https://{host}"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.8.8"])
def test_this_machine_may_be_loaded(host: str) -> None:
    check(options(f"https://{host}"))


def test_more_devices_than_open_files_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"open files: raise that"):
        check(options(devices=10_000_000))


def test_a_load_has_devices_and_a_length() -> None:
    with pytest.raises(ConfigError, match="no device"):
        check(options(devices=0))
    with pytest.raises(ConfigError, match="--seconds"):
        check(options(seconds=0))
