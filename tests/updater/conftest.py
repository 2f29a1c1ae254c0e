"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from broker.client import RedisSettings
from broker.keys import Keys
from tests.support import Hand, model_of
from tests.updater.journalled import HALF
from updater.journal import JournalSettings
from updater.service import Updater, UpdaterSettings
from updater.strategies import FedAsyncSettings, FedAvgSettings


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "journal"


@pytest.fixture
def make(redis: RedisSettings, keys: Keys, hand: Hand, folder: Path) -> Any:
    """An updater that begins with zeros."""

    def make(
        strategy: FedAsyncSettings | FedAvgSettings = HALF,
        *,
        name: str = "updater-0",
        redis: RedisSettings = redis,
        lease_s: float = 5.0,
        versions: int = 1000,
        keep_versions: int = 16,
        **journal: Any,
    ) -> Updater:
        run = hand.run(strategy=strategy.name, versions=versions)
        settings = JournalSettings(**{"dir": str(folder), "sync": "always"} | journal)
        return Updater(
            UpdaterSettings(lease_s=lease_s, keep_versions=keep_versions), strategy, settings,
            keys=keys, redis=redis, name=name, found=lambda: (run, model_of(hand.layout)),
        )  # fmt: skip

    return make
