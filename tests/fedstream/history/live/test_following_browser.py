"""Norm, distance and cosine on the live page, in a browser, of a journal that grows meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.layout import Model
from fedstream.history.model_stats import AHEAD
from fedstream.strategies import FedAsyncSettings
from tests.fedstream.history.browsing import Tab
from tests.fedstream.history.live.stage import Stage, every
from tests.integration.command import TEST_GUARD_S
from tests.journals import Scribe

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]
_numbers = itertools.count()


class Sender:
    """A device's updates, and what numpy says of them: fedasync mixes x + 0.5 (x_new - x)."""

    def __init__(self, folder: Path) -> None:
        self.scribe = Scribe(folder, FedAsyncSettings(alpha=0.5))
        self.models = [self.scribe.progress.state.model.parameters.copy()]
        self.sent: list[Any] = []

    def close(self) -> None:
        self.scribe.close()

    def send(self, device: int) -> None:
        """An update comes into the journal."""
        drawn = np.random.default_rng()
        drawn.bit_generator.state = self.scribe.rng.bit_generator.state
        self.scribe.update(device)
        update = Model(self.scribe.layout)
        update.floats[:] = drawn.standard_normal(self.scribe.layout.floats)
        self.sent.append(update)
        self.models.append(self.scribe.progress.state.model.parameters.copy())

    def means(self) -> dict[str, float]:
        """Of all updates; the cosines of those that are followed by enough versions."""
        pushes = [new.parameters - x for new, x in zip(self.sent, self.models, strict=False)]
        cosines = []
        for n, push in enumerate(pushes[: -AHEAD or None]):
            way = self.models[n + 1 + AHEAD] - self.models[n + 1]
            cosines.append(way @ push / np.linalg.norm(way) / np.linalg.norm(push))
        return {
            "sent": float(np.mean([np.linalg.norm(one.floats) for one in self.sent])),
            "norm": float(np.mean([np.linalg.norm(one) for one in pushes])),
            "cosine": float(np.mean(cosines)),
        }


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    with closing(Sender(tmp_path / "journal")) as found:
        yield found


def figures(page: Any, device: int) -> dict[str, float]:
    """A device's row in the table of devices, by the column's key."""
    keys = page.eval_on_selector_all(".devices thead th", "all => all.map(one => one.dataset.key)")
    row = page.locator(".devices tbody tr", has=page.locator(f"th[data-value='{device}']"))
    values = row.locator("th, td").evaluate_all("all => all.map(one => one.dataset.value)")
    return {key: float(text) for key, text in zip(keys, values, strict=True) if text}


def test_figures_appear_and_follow_the_journal(
    browser: Any, any_redis: RedisSettings, sender: Sender, tmp_path: Path
) -> None:
    run, journal = f"followed-{next(_numbers)}", f"journal.dir={tmp_path / 'journal'}"
    with every(0.05), Stage(any_redis, run, journal) as stage:
        stage.do(stage.create())
        stage.do(stage.update(1))
        (device,) = stage.do(stage.devices())
        tab = Tab(browser, stage.address)
        page = tab.go("/")
        page.locator(".devices tbody th").wait_for()
        assert page.locator('[data-key="cosine"]').count() == 0  # nothing is in the journal yet
        for updates in (AHEAD + 1, AHEAD + 15):
            while len(sender.sent) < updates:
                sender.send(device)
            page.get_by_text(f"in the journal, up to version {updates}").wait_for()
            found = figures(page, device)
            for key, value in sender.means().items():
                assert found[key] == pytest.approx(value, abs=1e-6)
        assert tab.wrong == []
        tab.context.close()


def test_without_a_journal_the_page_says_so(
    browser: Any, any_redis: RedisSettings, tmp_path: Path
) -> None:
    nowhere = f"journal.dir={tmp_path / 'nowhere'}"
    with every(0.05), Stage(any_redis, f"followed-{next(_numbers)}", nowhere) as stage:
        stage.do(stage.create())
        stage.do(stage.update(1))
        tab = Tab(browser, stage.address)
        page = tab.go("/")
        page.get_by_text("No norms, distances and cosines: the journal can't be read").wait_for()
        assert tab.wrong == []
        tab.context.close()
