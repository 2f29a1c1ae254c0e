"""Many devices that wait: the memory of each, and that all of them are served."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
from contextlib import ExitStack

import psutil
import pytest

from fedstream.broker.client import RedisSettings
from tests.coordinator.gateway.places import Place, coordinating, ends, owned_by, serving
from tests.support import Hand, wait_until

DEVICES = 400


def check_in(device: int, wait_s: float = 50) -> bytes:
    body = json.dumps({"nonce": f"{device:022}", "wait_s": wait_s}).encode()
    head = f"POST /v1/check-in HTTP/1.1\r\nHost: here\r\nDevice: {device}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def wait(stack: ExitStack, place: Place, devices: range) -> None:
    """Check-ins that wait, with next to nothing on the devices' side."""
    host, _, port = place.url.removeprefix("http://").partition(":")
    loop = asyncio.get_running_loop()
    for device in devices:
        one = stack.enter_context(socket.socket())
        one.setblocking(False)
        await loop.sock_connect(one, (host, int(port)))
        await loop.sock_sendall(one, check_in(device))
    await wait_until(lambda: place.gateway.replica.sessions.polls == devices.stop)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory")
async def test_device_that_waits_costs_little(redis: RedisSettings, hand: Hand) -> None:
    await hand.create(devices=2 * DEVICES)
    loop = asyncio.get_running_loop()
    process = psutil.Process()

    def timers() -> int:
        scheduled = loop._scheduled  # type: ignore[attr-defined]
        return sum(not handle.cancelled() for handle in scheduled)

    async with serving(hand, redis, address_rate=1e6) as place:
        sessions = place.gateway.replica.sessions
        with ExitStack() as stack:
            await wait(stack, place, range(DEVICES))  # what is grown once is there from now on
            gc.collect()
            before, timers_before = process.memory_info().rss, timers()
            await wait(stack, place, range(DEVICES, 2 * DEVICES))
            gc.collect()
            grown = (process.memory_info().rss - before) / DEVICES
            assert grown < 30_000, f"{grown:.0f} bytes a device"
            # One for the wait, and aiohttp's for the connection.
            assert timers() - timers_before <= 2 * DEVICES + 5
            # Nothing was said to anybody yet, and a stop tells all of them.
            place.context.stop.set()
            await wait_until(lambda: sessions.polls == 0)


async def test_crowd_gets_its_tasks(redis: RedisSettings, hand: Hand) -> None:
    """All of a crowd's tasks at once: read, offered, given up, and counted."""
    connection_limit = 150
    await hand.create(devices=connection_limit)
    async with (
        coordinating(hand, redis),
        serving(hand, redis, address_rate=1e6, device_rate=1e6) as place,
    ):
        checks = [
            asyncio.create_task(place.check_in(n, wait_s=50)) for n in range(connection_limit)
        ]
        for device in (0, connection_limit - 1):
            await owned_by(hand, device, "gw-0")
        await wait_until(lambda: place.gateway.replica.sessions.polls == connection_limit)

        async def all_owned() -> bool:
            return len(await hand.ledger.owners()) == connection_limit

        await wait_until(all_owned)
        for device in range(connection_limit):
            await hand.open(device=device)
        offers = [answer.offer for answer in await asyncio.gather(*checks)]
        assert sorted(offer.task.device for offer in offers) == list(range(connection_limit))
        assert len({offer.task.id for offer in offers}) == connection_limit
        await asyncio.gather(*(place.give_up(one.task.device, one) for one in offers))
        await ends(hand, "given_up", "dropped out", connection_limit)


async def test_devices_that_were_sent_away_together_come_back_apart(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis, retry_s=(1.0, 30.0), device_rate=1e6) as place:
        told = [int((await place.check_in(3)).headers["Retry-After"]) for _ in range(200)]
        assert min(told) >= 1
        assert max(told) <= 30
        assert len(set(told)) > 20
        assert max(told.count(one) for one in told) < 30
