"""Benchmarks leave no processes behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
from pathlib import Path

import pytest

from benchmarks import chain, gateway_devices
from benchmarks.gateway_devices import ADMITTED
from fedstream.broker.client import RedisSettings
from fedstream.local.redis_server import RedisServer
from tests.coordinator.gateway.phones import INVITE, invite
from tests.coordinator.gateway.places import coordinating, owned_by, serving
from tests.support import Hand, wait_until

# A crowd that is told to stop while it forks; its members end by themselves, but later.
STOPPED = f"""
import os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from benchmarks import crowd

fork = os.fork

def forking():
    if pid := fork():
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = forking
crowd._serve = lambda words: time.sleep(60) or 0
sys.argv = ["crowd", "a", "b", "c"]
crowd.main()
"""


def test_crowd_that_is_told_to_stop_leaves_nobody(tmp_path: Path, python: Path) -> None:
    """Its members have its standard output, so that ends only with the last of them."""
    (tmp_path / "stopped.py").write_text(STOPPED)
    done = subprocess.run(
        [python, tmp_path / "stopped.py"],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr


@pytest.mark.process
def test_chain_passes_updates_on_and_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "UPDATES", 40)
    with RedisServer() as server:
        found = chain.chain(server.url, 4, digests=True)
    assert found["updates_per_s"] > 0
    assert multiprocessing.active_children() == []


async def test_devices_of_the_gateways_benchmark_do_tasks(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    events: list[tuple[str, float]] = []
    await hand.create()
    await invite(hand)
    async with coordinating(hand, redis), serving(hand, redis, identity=None) as at:
        device = asyncio.create_task(
            gateway_devices.live(
                gateway_devices.SharedTls(at.url),
                3,
                INVITE,
                tmp_path / "3",
                hand.layout,
                lambda *event: events.append(event),
            )
        )
        await owned_by(hand, 3, "gw-0")
        await hand.open(device=3)
        await wait_until(lambda: events)
        [(name, ms)] = events
        assert (name, ms > 0) == (ADMITTED, True)
        device.cancel()
        await asyncio.wait({device})
        assert device.cancelled()
