"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.digest import DigestAlgorithm
from fedstream.core.formats import format_of
from fedstream.journal import JournalSettings
from fedstream.private.settings import PrivateSettings
from fedstream.strategies import Strategy
from fedstream.updater.service import Updater, UpdaterSettings
from tests.support import Hand, model_of
from tests.updater.journalled import HALF

JOURNAL = set(JournalSettings.model_fields) - set(UpdaterSettings.model_fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "journal"


@pytest.fixture
def make(redis: RedisSettings, keys: Keys, hand: Hand, folder: Path) -> Any:
    """An updater of the run, that begins with zeros; further settings are its or the journal's."""

    def make(
        strategy: Strategy = HALF,
        *,
        name: str = "updater-0",
        redis: RedisSettings = redis,
        lease_s: float = 5.0,
        versions: int = 1000,
        goal: int = 0,
        start: str = "",
        published_as: str = "f32",
        digests: DigestAlgorithm = "sha256",
        private: PrivateSettings | None = None,
        **settings: Any,
    ) -> Updater:
        rule = strategy.build()
        run = hand.run(
            strategy=strategy.name,
            versions=versions,
            max_staleness=rule.max_staleness,
            start=start,
            sends=rule.sends,
            policy=rule.policy,
        )
        # A commit deletes its own entry from the queue, unless a test wants it otherwise.
        journal: dict[str, Any] = {"dir": str(folder), "sync": "always"}
        journal |= {key: settings.pop(key) for key in [*settings] if key in JOURNAL}
        return Updater(
            UpdaterSettings(lease_s=lease_s, **settings),
            strategy,
            JournalSettings(**journal),
            keys=keys,
            redis=redis,
            name=name,
            create_run=lambda: (run, model_of(hand.layout)),
            versions=goal,
            published_as=format_of(published_as),
            digests=digests,
            private=private,
        )

    return make
