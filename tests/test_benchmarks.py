"""Benchmarks leave no processes behind."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import chain, flat, gateway, gateway_devices
from benchmarks.gateway_devices import ADMITTED, LATE
from benchmarks.results import conditions, keep
from fedstream.broker.client import RedisSettings
from fedstream.local.redis_server import RedisServer
from tests.coordinator.gateway.phones import INVITE, invite
from tests.coordinator.gateway.places import coordinating, owned_by, serving
from tests.support import Hand, wait_until

# A crowd that is told to stop while it forks; its members end by themselves, but later.
STOPPED = """
import os, signal, sys, time
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


@pytest.mark.process
def test_crowd_that_is_told_to_stop_leaves_nobody() -> None:
    """Its members have its standard output, so that ends only with the last of them."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr


@pytest.mark.parametrize("fails_at", range(len(flat.SERVICES) + 1))
def test_deployment_that_cannot_start_is_stopped(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    started: list[str] = []
    ended: list[str] = []

    def start(command: list[str], **_: Any) -> SimpleNamespace:
        if len(started) == fails_at:
            raise OSError("no more processes")
        name = command[2]
        started.append(name)
        return SimpleNamespace(
            send_signal=lambda _: None, wait=lambda _: ended.append(name), stdout=None
        )

    server = SimpleNamespace(url="redis://127.0.0.1:1")
    monkeypatch.setattr(flat, "RedisServer", lambda: nullcontext(server))
    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        flat.measured(flat.CELLS[0], 1.0)
    assert (len(started), ended) == (fails_at, started)


@pytest.mark.process
def test_chain_passes_updates_on_and_leaves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "UPDATES", 40)
    with RedisServer() as server:
        found = chain.chain(server.url, 4, digests=True)
    assert found["updates_per_s"] > 0
    assert multiprocessing.active_children() == []


def test_chains_page_compares_what_was_measured_in_the_same_round() -> None:
    runs = [
        {"in_flight": 4, "round": number, "what": name, "updates_per_s": rate} | cost
        for number, bare in enumerate([100.0, 200.0, 400.0])
        for name, rate, cost in (
            ("bare loop", bare, {}),
            ("chain", bare / 2, {"cpu_ms": 2.0 + number}),
            ("chain with digests", bare / 4, {"cpu_ms": 3.0}),
            ("fedstream", 90.0, {"cpu_ms": 4.0}),
        )
    ]
    text = chain.page({"machine": {"cores": 2}, "runs": runs})
    assert "| 4 | chain | 100 | 0.50 | 0.50, 0.50, 0.50 | 3.00 |" in text
    assert "| 4 | fedstream | 90 | 0.45 | 0.90, 0.45, 0.23 | 4.00 |" in text


def test_most_devices_that_came_back_within_a_second() -> None:
    curve = [(0.0, 0.0), (0.5, 10.0), (1.0, 40.0), (1.5, 45.0), (2.0, 50.0)]
    assert gateway.most_per_s(curve) == 40  # 10 to 1.5 s: 35; 40 within the first
    assert gateway.most_per_s([(0.0, 7.0)]) == 7


def gateways(*, tasks: float) -> dict[str, Any]:
    """What the gateway's benchmark may find."""
    events = [(float(ms), name) for ms in range(101) for name in (ADMITTED, LATE)]
    return {
        "arrivals": {"ms": {"gateway": 4.0}},
        "idle": {
            "polls": 9900.0,
            "memory_mb": 500.0,
            "share": {"gateway": 0.04, "devices": 0.06},
        },
        "work": {
            "per_s": tasks,
            "memory_mb": 590.0,
            "ms": {"gateway": 2.0, "devices": 1.0},
            "events": gateway.summed(events),
        },
        "restart": {"half_s": 3.0, "all_s": None, "most_per_s": 900.0},
    }


def test_gateways_page_says_which_bounds_were_held() -> None:
    results = {
        "machine": {"cores": 2},
        "load": 0.1,
        "found": gateways(tasks=199.0),
        "asked": {"devices": 10_000, "parameters": 61_706, "in_flight": 16},
    }
    text = gateway.page(results)
    held = dict(re.findall(r"^ *(.+?): .*: (held|MISSED)$", text, re.MULTILINE))
    assert held == {
        "gateway's memory, MB": "held",
        "gateway's share of a core, idle": "held",
        "tasks per second": "MISSED",
    }
    # 3 ms a task, of which 0.1 of a core was for devices that wait; 1.9 cores are left.
    most = 1000 * 1.9 / (3.0 - 100 / 199)
    assert f"| tasks that would keep all cores busy, by what each cost | {most:.0f}/s |" in text
    assert "| after a restart: all devices are back | not within 60 s |" in text
    assert "| offer to receipt, p99 | 99.0 ms |" in text
    assert "| gateway | devices |\n|---|---|\n| 2.00 | 1.00 |" in text


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


def test_results_are_kept_as_figures_and_as_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    keep("gateway", {"machine": {"cores": 2}}, "# A page\n", folder)
    keep("devices", {"ratio": 3.9}, folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "devices.json",
        "gateway.json",
        "gateway.md",
    ]
    assert json.loads((folder / "gateway.json").read_text()) == {"machine": {"cores": 2}}
    assert (folder / "gateway.md").read_text() == "# A page\n"


def test_conditions_are_said_in_a_line() -> None:
    assert conditions({"cores": 2, "system": "Linux"}) == "cores 2, system Linux"
