"""Models made again on demand, and what they say of a version."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from fedstream.core.layout import Layout, Tensor
from fedstream.history.index import columns_of
from fedstream.history.model_stats import AHEAD, VersionStatsCache
from fedstream.history.models import JournalModels, Unwanted
from fedstream.history.recorded_run import RecordedRun
from fedstream.journal import JournalError, NotRecorded, opened
from fedstream.journal.contributions import stats
from fedstream.journal.inspection import model_at
from fedstream.strategies import FedAsyncSettings, FedBuffSettings
from tests.fedstream.history.conftest import VERSIONS
from tests.fedstream.history.scribes import FIRST, By, flip
from tests.journals import Scribe
from tests.support import model_of


def test_any_version_in_any_order_is_the_recorded_one(recorded: Path) -> None:
    """With copies left behind on the way, with room for few of them, and with none."""
    for memory in (1 << 20, 100, 0):
        with (
            opened(recorded) as chain,
            JournalModels(recorded / "journal", memory=memory) as models,
        ):
            for version in (50, 49, 17, 0, 16, 20, 40, 41, 60, 33):
                wanted, digest = model_at(chain, version)
                assert models.model(version).digest() == digest == wanted.digest(), version


def test_the_next_look_begins_where_the_last_one_was(recorded: Path) -> None:
    def looked(models: JournalModels, version: int) -> int:
        count = 0

        def look() -> bool:
            nonlocal count
            count += 1
            return True

        models.model(version, look)
        return count

    with JournalModels(recorded / "journal") as models:
        assert looked(models, 19) > 16
        assert looked(models, 19) < 8


def test_copies_everywhere_make_every_look_short(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where segments end; who asks meanwhile interrupts it, and it goes on where it was."""
    monkeypatch.setattr("fedstream.history.models._STRIDE", 16)
    looks, patience = 0, 25

    def look() -> bool:
        nonlocal looks
        looks += 1
        return looks % patience != 0

    with JournalModels(recorded / "journal") as models:
        for _ in range(20):
            with suppress(Unwanted):
                models.fill(30, look)
        assert 60 < looks < 200  # 65 records, and some twice
        done, patience = looks, 10**6
        models.fill(5, look)
        assert looks == done
        with opened(recorded) as chain:
            for version in (17, 31, 39, 59):
                before = looks
                assert models.model(version, look).digest() == model_at(chain, version)[1]
                assert looks - before <= 18


@pytest.mark.parametrize("most", [0, 1 << 30])
def test_copies_are_left_before_anybody_asks_for_a_version(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr("fedstream.history.models._STRIDE", 4)
    monkeypatch.setattr("fedstream.history.recorded_run._UNASKED", most)
    run, looks = RecordedRun(recorded), 0

    def look() -> bool:
        nonlocal looks
        looks += 1
        return True

    run.prepare_neighbours(run.newest, None, lambda: True)
    assert run.version_stats.known(run.newest) is not None
    run.models.model(19, look)
    assert looks <= 4 if most else looks > 16
    run.close()


def test_damage_on_the_way_is_told_with_its_place(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the way models are only compared now and then: what differs is then looked for."""
    monkeypatch.setattr("fedstream.history.models._STRIDE", 16)
    shutil.copytree(recorded / "journal", tmp_path / "journal")
    offsets = columns_of(recorded / "journal").updates["offset"]
    flip(tmp_path / "journal" / FIRST, int(offsets[5]) + 4096 + 3)  # an update's first weight
    with JournalModels(tmp_path / "journal") as models:
        assert models.model(4)
        damaged = f"{FIRST} at byte {offsets[5]}: the update does not match its digest"
        for _ in range(2):
            with pytest.raises(JournalError, match=damaged):
                models.model(12)
        with pytest.raises(JournalError):
            models.fill(12, lambda: True)
        assert models.model(22)  # after the next checkpoint


def test_neighbours_are_looked_at_ahead(recorded: Path) -> None:
    run = RecordedRun(recorded)
    run.version_stats.of(30)
    assert run.version_stats.known(31) is None
    run.prepare_neighbours(30, -1, lambda: True)
    assert all(run.version_stats.known(version) for version in range(1, 60))
    assert run.version_stats.known(33) == RecordedRun(recorded).version_stats.of(33)


def test_who_leaves_is_not_worked_for(recorded: Path) -> None:
    waiting: Iterator[bool] = iter([True, True, False])
    with JournalModels(recorded / "journal") as models, pytest.raises(Unwanted):
        models.model(15, lambda: next(waiting))


def test_directions_are_those_of_journal_stats(recorded: Path) -> None:
    with opened(recorded) as chain:
        shares = stats(chain, AHEAD)
    run = RecordedRun(recorded)
    cosines: dict[int, list[float]] = {}
    norms: dict[int, list[float]] = {}
    distances: dict[int, list[float]] = {}
    for version in range(1, VERSIONS + 1):
        found = run.version_stats.of(version)
        [push] = found.pushes
        device = version_device(run, version)
        norms.setdefault(device, []).append(push.norm)
        distances.setdefault(device, []).append(push.distance)
        if found.ahead == AHEAD and push.cosine is not None:
            cosines.setdefault(device, []).append(push.cosine)
    assert len(norms) == 10
    for device, share in shares.items():
        assert fmean(norms[device]) == pytest.approx(share.norm.mean)
        assert fmean(distances[device]) == pytest.approx(share.distance.mean)
        assert fmean(cosines[device]) == pytest.approx(share.cosine.mean, abs=1e-6)


def version_device(run: RecordedRun, version: int) -> int:
    [place] = np.flatnonzero(run.columns.contained == version)
    return int(run.columns.updates["device"][place])


def test_layers_by_hand(tmp_path: Path) -> None:
    layout = Layout(
        (Tensor("w", (2,), "float32", "parameter"), Tensor("b", (), "float32", "parameter"))
    )
    scribe = By(tmp_path, model_of(layout, 0.0, 0.0, 1.0), strategy=FedAsyncSettings(alpha=0.5))
    scribe.brings(1, 6.0, 8.0, 1.0)  # x: (3, 4), 1
    scribe.brings(2, 3.0, 4.0, 3.0)  # x: (3, 4), 2
    scribe.close()
    with JournalModels(tmp_path) as models:
        version_stats = VersionStatsCache(models, [0, 1, 2])
        begun, first, second = (version_stats.of(version) for version in (0, 1, 2))
        gaps = version_stats.gap(2, 0)
    assert [(one.name, one.shape, one.norm, one.moved) for one in begun.layers] == [
        ("w", (2,), 0.0, None),
        ("b", (), 1.0, None),
    ]
    assert [(one.norm, one.moved, one.drift) for one in first.layers] == [(5, 5, 5), (1, 0, 0)]
    assert [(one.norm, one.moved, one.drift) for one in second.layers] == [(5, 0, 5), (2, 1, 1)]
    assert [(one.name, one.distance, one.relative) for one in gaps] == [("w", 5, 1), ("b", 1, 0.5)]
    assert [push.distance for push in first.pushes] == [10.0]
    assert (first.ahead, second.ahead) == (1, 0)
    assert second.pushes[0].cosine is None  # nobody knows yet where the model goes


def test_all_updates_of_a_version_are_compared_with_the_model_they_met(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedBuffSettings(buffer_size=3))
    for _ in range(9):
        scribe.update()
    scribe.close()
    with JournalModels(tmp_path) as models:
        found = VersionStatsCache(models, [0, 1, 2, 3]).of(2)
    assert len(found.pushes) == 3
    assert all(push.norm == pytest.approx(push.distance) for push in found.pushes)  # deltas


def test_figures_do_not_reach_across_an_adopted_model(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.adopt()
    scribe.update()
    scribe.close()
    run = RecordedRun(tmp_path)
    assert [run.version_stats.of(version).ahead for version in (0, 1, 4, 5)] == [0, 0, 1, 0]


def test_without_weights_there_are_no_figures(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, weights=False)
    scribe.update()
    scribe.close()
    with JournalModels(tmp_path) as models, pytest.raises(NotRecorded, match=r"journal\.weights"):
        VersionStatsCache(models, [0, 1]).of(1)


def test_a_version_that_does_not_exist_is_named(recorded: Path) -> None:
    told = pytest.raises(JournalError, match="version 61 is not in the journal")
    with JournalModels(recorded / "journal") as models, told:
        models.model(61)
