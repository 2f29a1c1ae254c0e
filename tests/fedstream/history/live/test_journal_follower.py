"""Reading along in a journal: the figures are those of a replay, however it grows."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.history.live import journal_follower
from fedstream.history.live.journal_follower import JournalFollower
from fedstream.history.live.snapshot import SeenPushes
from fedstream.history.model_stats import AHEAD
from fedstream.history.table import RowArray
from fedstream.journal import opened
from fedstream.journal.contributions import stats
from fedstream.journal.rebuild import Rebuild
from fedstream.strategies import FedAsyncSettings, FedBuffSettings, Strategy
from tests.journals import GOLDEN, Scribe

NO_TIME = 0.0  # for one record


@pytest.fixture
def scribe(tmp_path: Path) -> Iterator[Scribe]:
    with closing(Scribe(tmp_path / "journal", FedAsyncSettings(alpha=0.5))) as found:
        yield found


def all_of(follower: JournalFollower) -> SeenPushes:
    """All that there is to read by now."""
    return follower.look(60.0)


def of(rows: RowArray, device: int, name: str) -> list[float]:
    found: list[float] = rows[name][rows["device"] == device].tolist()
    return found


def agree(rows: RowArray, journal: Path) -> None:
    """What was read is what a replay of the whole journal says, update by update."""
    with opened(journal) as chain:
        shares = stats(chain, AHEAD)
    assert sorted(set(rows["device"].tolist())) == [
        n for n, one in shares.items() if one.norm.count
    ]
    for device, share in shares.items():
        assert of(rows, device, "norm") == share.norm.values.tolist()
        assert of(rows, device, "distance") == share.distance.values.tolist()
        cosines = [one for one in of(rows, device, "cosine") if not np.isnan(one)]
        assert cosines == share.cosine.values.tolist()


def test_figures_by_hand(scribe: Scribe) -> None:
    """Against numpy alone: fedasync mixes x + 0.5 (x_new - x)."""
    models, sent = [scribe.progress.state.model.copy()], []
    for _ in range(AHEAD + 2):
        drawn = np.random.default_rng()
        drawn.bit_generator.state = scribe.rng.bit_generator.state
        scribe.update()
        update = Model(scribe.layout)
        update.floats[:] = drawn.standard_normal(scribe.layout.floats)
        sent.append(update)
        models.append(scribe.progress.state.model.copy())
    rows = all_of(JournalFollower(scribe.folder)).rows
    assert rows["norm"] == pytest.approx([np.linalg.norm(one.floats) for one in sent])
    pushes = [new.parameters - x.parameters for new, x in zip(sent, models, strict=False)]
    assert rows["distance"] == pytest.approx([np.linalg.norm(one) for one in pushes])
    for n in range(2):
        way = models[n + 1 + AHEAD].parameters - models[n + 1].parameters
        cosine = way @ pushes[n] / np.linalg.norm(way) / np.linalg.norm(pushes[n])
        assert rows["cosine"][n] == pytest.approx(cosine, abs=1e-6)
    assert np.isnan(rows["cosine"][2:]).all()


@pytest.mark.parametrize("name", ["fedavg", "afa-cd", "quarantine", "wire-scaffold", "models-int8"])
def test_every_kind_of_recording_is_followed(name: str, tmp_path: Path) -> None:
    for packed in (GOLDEN / name).glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    found = all_of(JournalFollower(tmp_path))
    assert found.problem == ""
    assert len(found.rows)


@pytest.mark.parametrize(
    "rule", [FedAsyncSettings(alpha=0.5), FedBuffSettings(buffer_size=3)], ids=["models", "deltas"]
)
def test_it_goes_on_where_it_was_from_segment_to_segment(tmp_path: Path, rule: Strategy) -> None:
    follower = JournalFollower(tmp_path / "journal")
    with closing(Scribe(tmp_path / "journal", rule)) as scribe:
        for n in range(60):
            scribe.update()
            if n % 7 == 0:
                scribe.refuse()
            if n in (20, 40):
                scribe.segment()
            follower.look(NO_TIME if n % 2 else 60.0)
        found = all_of(follower)
        assert (found.version, found.problem) == (scribe.version, "")
    agree(found.rows, tmp_path / "journal")


def test_without_time_a_look_reads_one_record(scribe: Scribe) -> None:
    for _ in range(3):
        scribe.update()
    follower = JournalFollower(scribe.folder)
    assert [len(follower.look(NO_TIME).rows) for _ in range(4)] == [1, 2, 3, 3]


def test_far_behind_it_leaves_out_what_lies_between(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_follower, "_STRETCH", 2)
    follower = JournalFollower(scribe.folder)
    for _ in range(3):
        scribe.update()
        follower.look(NO_TIME)
    for _ in range(2):
        scribe.segment()
        for _ in range(5):
            scribe.update(7)
    found = follower.look(NO_TIME)
    assert (found.version, found.rows["device"].tolist()) == (9, [0, 1, 2, 7])
    assert all_of(follower).version == scribe.version


def test_it_begins_with_the_newest_checkpoint(scribe: Scribe) -> None:
    for _ in range(4):
        scribe.update()
    scribe.segment()
    scribe.update(9)
    assert all_of(JournalFollower(scribe.folder)).rows["device"].tolist() == [9]


def test_records_that_turn_out_not_to_count_end_the_course(scribe: Scribe) -> None:
    """A fenced writer went on after the place where its successor began."""
    follower = JournalFollower(scribe.folder)
    scribe.update(1)
    all_of(follower)
    scribe.segment(epoch=2)
    before = max(scribe.folder.glob("*.journal"))
    scribe.update(2)
    all_of(follower)
    scribe.adopt()
    scribe.update(3)
    found = all_of(follower)
    assert before.exists()
    assert (found.problem, found.rows["device"].tolist()) == ("", [1, 2, 3])
    assert found.version == scribe.version


def test_damage_is_told_and_a_later_segment_read_on(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_follower, "_PATIENCE", 1)
    follower = JournalFollower(scribe.folder)
    scribe.update(1)
    all_of(follower)
    path = scribe.writer.path
    scribe.segment()
    scribe.update(2)
    path.rename(path.with_suffix(".gone"))
    scribe.writer.path.write_bytes(b"nonsense" * 1000)
    found = all_of(follower)
    assert "is not a journal segment" in found.problem
    assert found.rows["device"].tolist() == [1]
    assert all_of(follower).problem == found.problem  # it is not looked at each time
    scribe.writer.path.unlink()
    assert "can't be read from here" in all_of(follower).problem


def test_no_journal_and_no_weights(tmp_path: Path) -> None:
    follower = JournalFollower(tmp_path / "journal")
    assert follower.look(1.0).problem == "the journal can't be read from here"
    with closing(Scribe(tmp_path / "journal")) as scribe:
        scribe.update()
        assert len(all_of(follower).rows) == 1
    assert all_of(JournalFollower(tmp_path / "journal", weights=False)).problem == (
        "updates are recorded without their weights"
    )


def test_what_takes_too_much_memory_is_left_alone(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(AHEAD + 1):
        scribe.update()
    monkeypatch.setattr(journal_follower, "_KEPT_BYTES", 0)
    rows = all_of(JournalFollower(scribe.folder)).rows
    assert np.isnan(rows["cosine"]).all()
    assert not np.isnan(rows["distance"]).any()
    monkeypatch.setattr(journal_follower, "_MOST_BYTES", 4)
    assert "too large" in all_of(JournalFollower(scribe.folder)).problem


def test_what_goes_wrong_again_and_again_takes_no_more_files(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each open file counts towards the coordinator's limit."""
    scribe.update()

    def unknown(_segment: object) -> None:
        raise FedstreamError("no such rule")

    monkeypatch.setattr(journal_follower, "rule_of", unknown)
    monkeypatch.setattr(journal_follower, "_PATIENCE", 0)
    follower = JournalFollower(scribe.folder)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        assert all_of(follower).problem == "no such rule"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_what_is_read_again_counts_once(scribe: Scribe, monkeypatch: pytest.MonkeyPatch) -> None:
    """After damage, the segment is read anew from its beginning."""
    for device in (1, 2, 3):
        scribe.update(device=device)
    monkeypatch.setattr(journal_follower, "_PATIENCE", 0)
    follower = JournalFollower(scribe.folder)
    assert all_of(follower).rows["device"].tolist() == [1, 2, 3]

    def damaged(_entry: object) -> bool:
        raise FedstreamError("it is damaged")

    scribe.update(device=4)
    with monkeypatch.context() as patched:
        patched.setattr(journal_follower, "is_used", damaged)
        assert all_of(follower).problem == "it is damaged"
    found = all_of(follower)
    assert (found.problem, found.rows["device"].tolist()) == ("", [1, 2, 3, 4])


def test_models_that_are_too_large_are_not_tried_again(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe.update()
    monkeypatch.setattr(journal_follower, "_PATIENCE", 0)
    follower = JournalFollower(scribe.folder)
    with monkeypatch.context() as patched:
        patched.setattr(journal_follower, "_MOST_BYTES", 4)
        assert "too large" in all_of(follower).problem
    found = all_of(follower)
    assert (len(found.rows), "too large" in found.problem) == (0, True)


def test_an_update_that_cannot_be_applied_is_no_figure(
    scribe: Scribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe.update(1)
    follower = JournalFollower(scribe.folder)
    all_of(follower)
    scribe.update(2)

    def refusing(*_: object) -> None:
        raise FedstreamError("no rule makes this")

    with monkeypatch.context() as patched:
        patched.setattr(Rebuild, "take", refusing)
        found = all_of(follower)
    assert (found.problem, found.rows["device"].tolist()) == ("no rule makes this", [1])


def test_a_device_may_have_a_number_that_no_column_holds(scribe: Scribe) -> None:
    scribe.update(device=(1 << 63) + 5)
    found = all_of(JournalFollower(scribe.folder))
    assert (found.problem, found.rows["device"].tolist()) == ("", [(1 << 63) - 1])


def test_rows_have_the_version_that_an_update_made(scribe: Scribe) -> None:
    for device in (4, 5):
        scribe.update(device)
    assert all_of(JournalFollower(scribe.folder)).rows["version"].tolist() == [1, 2]
