"""Every check can fail: a history that is right, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.checks import Facts, complaints
from tests.chaos.history import journalled
from tests.journals import Scribe
from tests.support import layout_of
from updater.journal import RoundClosed, Taken
from updater.strategies import ScaffoldSettings


@pytest.fixture
def right(tmp_path: Path) -> Facts:
    """Three updates were applied, one was refused, one task is open."""
    scribe = Scribe(tmp_path)
    for _ in range(3):
        scribe.update()
    scribe.refuse()
    scribe.close()
    journal = journalled(tmp_path)
    tasks = [r.upload.task for r in journal.records if isinstance(r, Taken)]
    return Facts(
        journal=journal, published=frozenset(scribe.digests.items()),
        seen=dict.fromkeys(tasks, 1), life=1, queued=frozenset(), admitted=frozenset(),
        counts={"issued": 5, "applied": 3, "refused": 1}, open=1,
        head=journal.replayed, model=journal.replayed[1],
    )  # fmt: skip


def failed(facts: Facts) -> set[str]:
    """The checks that complain."""
    return {complaint.partition(":")[0] for complaint in complaints(facts)}


def recorded(facts: Facts, *records: Taken | RoundClosed) -> Facts:
    """The same with other records in the journal."""
    return replace(facts, journal=replace(facts.journal, records=records))


def test_a_history_that_is_right_passes(right: Facts) -> None:
    assert complaints(right) == []
    assert right.journal.replayed[0] == 3


def test_a_task_without_an_outcome_is_found(right: Facts) -> None:
    assert failed(replace(right, open=0)) == {"balanced"}


def test_an_outcome_counted_twice_is_found(right: Facts) -> None:
    assert failed(replace(right, counts={**right.counts, "applied": 4})) == {"balanced"}


def test_a_task_that_was_taken_twice_is_found(right: Facts) -> None:
    refused_too = right.taken[-1].model_copy(update={"upload": right.taken[0].upload})
    assert "once" in failed(recorded(right, *right.taken, refused_too))


def test_a_version_that_was_taken_back_is_found(right: Facts) -> None:
    one, two, *rest = right.journal.records
    assert "forward" in failed(recorded(right, one, two, two, *rest))


def test_a_version_left_out_is_found(right: Facts) -> None:
    one, _, *rest = right.journal.records
    assert "forward" in failed(recorded(right, one, *rest))


def test_a_version_behind_the_last_is_found(right: Facts) -> None:
    one, *rest = right.journal.records
    over = one.model_copy(update={"finished": "version 1 reached"})
    assert failed(recorded(right, over, *rest)) == {"forward"}


def test_an_update_that_vanished_is_found(right: Facts) -> None:
    assert failed(replace(right, seen={**right.seen, "gone": 1})) == {"none_lost"}


def test_an_update_that_waits_is_not_lost(right: Facts) -> None:
    waits = replace(right, seen={**right.seen, "waits": 1}, queued=frozenset({"waits"}))
    assert failed(waits) == set()
    assert waits.lost_with_redis == 0


def test_an_update_that_went_with_redis_is_counted(right: Facts) -> None:
    gone = replace(right, seen={**right.seen, "gone": 1}, life=2)
    assert failed(gone) == set()
    assert gone.lost_with_redis == 1


def test_an_admitted_task_without_its_entry_is_found(right: Facts) -> None:
    assert failed(replace(right, admitted=frozenset({"open"}))) == {"none_lost"}


def test_a_replay_that_diverges_is_found(right: Facts) -> None:
    diverged = replace(right.journal, diverged="version 2: other bits")
    assert failed(replace(right, journal=diverged)) == {"same_bits"}


def test_another_head_than_the_journals_is_found(right: Facts) -> None:
    assert failed(replace(right, head=(2, right.head[1]))) == {"same_bits"}


def test_another_model_than_the_heads_is_found(right: Facts) -> None:
    assert failed(replace(right, model="0" * 64)) == {"same_bits"}


@pytest.fixture
def vectors(tmp_path: Path) -> Facts:
    """A run by SCAFFOLD, of which two devices were heard, one of them before the checkpoint."""
    layout = layout_of(4).with_controls()
    scribe = Scribe(tmp_path, ScaffoldSettings(buffer_size=2), layout=layout)
    scribe.update(1, sends="delta")
    scribe.update(2, sends="delta")
    scribe.segment()
    scribe.update(2, sends="delta")
    scribe.update(2, sends="delta")
    scribe.close()
    journal = replace(journalled(tmp_path), drift=0.0)  # by hand it begins with a c of its own
    return Facts(
        journal=journal, published=frozenset(scribe.digests.items()), seen={}, life=1,
        queued=frozenset(), admitted=frozenset(), counts={"issued": 4, "buffered": 2, "applied": 2},
        open=0, head=journal.replayed, model=journal.replayed[1], handed_out=journal.vectors,
    )  # fmt: skip


def test_what_is_remembered_of_devices_is_the_same_by_all_ways(vectors: Facts) -> None:
    assert complaints(vectors) == []
    assert vectors.journal.vectors.keys() == {1, 2}
    assert vectors.journal.vectors == vectors.journal.recovered


def test_another_vector_in_redis_is_found(vectors: Facts) -> None:
    assert failed(replace(vectors, handed_out={**vectors.journal.vectors, 2: "old"})) == {
        "same_vectors"
    }


def test_a_vector_that_was_never_handed_out_is_found(vectors: Facts) -> None:
    assert failed(replace(vectors, handed_out={1: vectors.journal.vectors[1]})) == {"same_vectors"}


def test_another_vector_after_a_restart_is_found(vectors: Facts) -> None:
    other = replace(vectors.journal, recovered={**vectors.journal.vectors, 1: "old"})
    assert failed(replace(vectors, journal=other)) == {"same_vectors"}


def test_a_c_that_is_not_the_mean_is_found(vectors: Facts, tmp_path: Path) -> None:
    assert failed(replace(vectors, journal=journalled(tmp_path))) == {"same_vectors"}


def test_two_models_under_one_number_are_found(right: Facts) -> None:
    assert failed(replace(right, published=right.published | {(2, "other")})) == {"one_digest"}


def test_a_version_that_is_not_in_the_journal_is_found(right: Facts) -> None:
    assert failed(replace(right, published=right.published | {(4, "more")})) == {"one_digest"}


def test_what_was_found_on_the_way_is_told(right: Facts) -> None:
    assert complaints(replace(right, findings=("scheduler exited with 70",))) == [
        "as_expected: scheduler exited with 70"
    ]


def test_damage_in_the_journal_is_found(right: Facts, tmp_path: Path) -> None:
    [segment] = tmp_path.glob("*.journal")
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    assert "same_bits" in failed(replace(right, journal=journalled(tmp_path)))
