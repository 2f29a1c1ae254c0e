"""`fedstream replay --redis`: live services make of recorded updates what was made of them."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.errors import FedstreamError
from fedstream.core.records import Run
from fedstream.journal import JournalSettings
from fedstream.operate import feed
from fedstream.operate.feed import Feeder
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.strategies import FedAsyncSettings, FedAvgSettings
from fedstream.updater.service import Updater, UpdaterSettings
from tests.journals import LAYOUT, Scribe
from tests.private.journalled import private_run
from tests.support import Hand, Proxy, context, model_of, running, wait_until


@pytest.fixture
def live(redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path) -> Any:
    """Coordinator and updater of a run that begins with a journal's version 0."""

    def live(scribe: Scribe, begin: np.ndarray[Any, Any], **run: Any) -> tuple[Any, Any]:
        hand.layout = scribe.layout
        model = model_of(scribe.layout, *begin.tolist())
        about: Run = hand.run(
            strategy=scribe.strategy.name,
            max_staleness=scribe.strategy.build().max_staleness,
            **run,
        )
        coordinator = Coordinator(
            CoordinatorSettings(), LeaseSettings(), keys=keys, redis=redis, name="coordinator-0"
        )
        updater = Updater(
            UpdaterSettings(),
            scribe.strategy,
            JournalSettings(dir=str(tmp_path / "live"), sync="always"),
            keys=keys,
            redis=redis,
            name="updater-0",
            create_run=lambda: (about, model),
        )
        return coordinator, updater

    return live


def recorded_run(folder: Path, rule: Any, *formats: str) -> tuple[Scribe, np.ndarray[Any, Any]]:
    """A run with updates of every staleness, in two segments; and its version 0.

    ``formats``: of the updates, by turns; none: f32.
    """
    scribe = Scribe(folder, rule, layout=LAYOUT)
    begin = scribe.progress.state.model.floats.copy()
    for n in range(24):
        scribe.update(
            late=n % 4 if isinstance(rule, FedAsyncSettings) else 0,
            format=formats[n % len(formats)] if formats else "f32",
        )
        if n == 10:
            scribe.refuse()
            scribe.segment(epoch=2)
        if n == 13:
            scribe.close_round()
    scribe.close()
    return scribe, begin


@pytest.mark.parametrize(
    ("rule", "formats"),
    [
        (FedAvgSettings(clients_per_round=4), ()),
        (FedAsyncSettings(), ("int8", "f32", "bf16+zstd")),
    ],
)
async def test_live_updater_makes_the_same_versions(
    rule: Any,
    formats: tuple[str, ...],
    live: Any,
    redis: RedisSettings,
    keys: Keys,
    hand: Hand,
    tmp_path: Path,
) -> None:
    scribe, begin = recorded_run(tmp_path / "journal", rule, *formats)
    coordinator, updater = live(scribe, begin)
    feeder = Feeder(redis, keys, tmp_path / "journal", speed=1000)
    async with running(coordinator, context()), running(updater, context()):
        await feeder.run(context())
        await wait_until(hand.queue_is_empty)
        head = await hand.ledger.head()
        await hand.balanced()
    assert head
    assert (head.version, head.digest) == (scribe.version, scribe.digests[scribe.version])
    live_ends = {name: count for name, count in feeder.live.items() if count}
    assert live_ends == dict(feeder.recorded)
    assert sum(live_ends.values()) == 24


@pytest.fixture
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not hear of what it waits for waits longer than any slow machine takes."""
    monkeypatch.setattr(feed, "_LOOK_S", 30.0)


@pytest.mark.usefixtures("slow_looks")
async def test_feeding_is_no_faster_than_asked_or_the_services(
    live: Any, redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path
) -> None:
    scribe, begin = recorded_run(tmp_path / "journal", FedAsyncSettings())
    coordinator, updater = live(scribe, begin)
    took = []
    async with running(coordinator, context()), running(updater, context()):
        for speed in (20.0, 1e6):  # 27 records, one and a half seconds apart
            started = time.monotonic()
            feeder = Feeder(redis, keys, tmp_path / "journal", speed=speed)
            await feeder.run(context())
            took.append(time.monotonic() - started)
            assert feeder.live["applied"] == 24
    assert took[0] > 1.5 * 24 / 20
    assert took[1] < 30, "no look was waited for"


async def test_feeding_survives_outages_and_ends_with_the_run(
    live: Any, redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path
) -> None:
    scribe, begin = recorded_run(tmp_path / "journal", FedAsyncSettings())
    coordinator, updater = live(scribe, begin, versions=20)
    async with (
        Proxy(redis) as proxy,
        running(coordinator, context()),
        running(updater, context()),
    ):
        feeder = Feeder(proxy.settings, keys, tmp_path / "journal", speed=20)
        feeding = asyncio.create_task(feeder.run(context()))
        for version in (3, 6, 9, 12):
            await wait_until(partial(_reached, hand, version), what=f"version {version}")
            proxy.cut()
        await feeding
        head = await hand.ledger.head()
    assert head
    assert (head.version, head.digest) == (20, scribe.digests[20])


async def _reached(hand: Hand, version: int) -> bool:
    return await hand.version() >= version


@pytest.mark.usefixtures("slow_looks")
async def test_feeding_stops_on_request(
    live: Any, redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path
) -> None:
    scribe, begin = recorded_run(tmp_path / "journal", FedAsyncSettings())
    coordinator, updater = live(scribe, begin)
    told = context()
    async with running(coordinator, context()), running(updater, context()):
        feeder = Feeder(redis, keys, tmp_path / "journal", speed=1.5)  # an update a second
        feeding = asyncio.create_task(feeder.run(told))
        await wait_until(partial(_reached, hand, 1), what="version 1")
        told.stop.set()
        await feeding
        assert feeder.live["applied"] == sum(feeder.recorded.values()) < 12
        assert await hand.scheduler.acquire()


async def test_foreign_task_ends_the_feeding(
    live: Any, redis: RedisSettings, keys: Keys, hand: Hand, client: Client, tmp_path: Path
) -> None:
    scribe, begin = recorded_run(tmp_path / "journal", FedAsyncSettings())
    coordinator, updater = live(scribe, begin)
    async with running(coordinator, context()), running(updater, context()):
        await hand.join()
        await hand.open(device=1)
        await hand.scheduler.release()
        with pytest.raises(BaseExceptionGroup) as failed:
            await Feeder(redis, keys, tmp_path / "journal", speed=1000).run(context())
    assert failed.group_contains(FedstreamError, match="that the replay did not open")


def test_private_updates_are_for_one_run(redis: RedisSettings, keys: Keys, tmp_path: Path) -> None:
    private_run(tmp_path)
    with pytest.raises(FedstreamError, match=r"sealed for it alone, .* without --redis"):
        Feeder(redis, keys, tmp_path, 1.0)
