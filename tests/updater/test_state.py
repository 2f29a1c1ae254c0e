"""The state of a run, its transitions, and what it remembers of ended tasks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedstream.core.records import End, Head
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.updater.state import Change, Ends
from tests.updater.states import applied, closed, refused, run_of, state_of

# transitions


def test_applied_update_becomes_the_newest_version() -> None:
    before, change = state_of(5, journalled={"applied": 3}), applied("a", 6)
    after = before.after(change)
    assert after.progress is change.after
    assert (after.version, after.digest, after.time) == (6, "digest 6", 16.0)
    assert [one.task for one in after.made] == ["a"]
    assert after.journalled == {"applied": 4}
    assert not after.finished
    assert (before.version, before.digest, before.journalled) == (5, "digest 5", {"applied": 3})


def test_refused_update_keeps_the_version_and_is_counted_by_reason() -> None:
    before = replace(state_of(5), made=applied("a", 5).version.updates)  # type: ignore[union-attr]
    after = before.after(refused("b", 5))
    assert (after.digest, after.time, after.made) == (before.digest, before.time, before.made)
    assert after.journalled == {"refused": 1, "refused:digest": 1}


def test_change_without_a_record_is_not_counted_again() -> None:
    state, change = state_of(5), refused("a", 5)
    assert state.after(replace(change, record=None)).journalled == {}


def test_counts_add_the_journals_ends_to_the_others_in_redis() -> None:
    state = state_of(5, journalled={"applied": 3})
    # Two of the three were committed when Redis counted.
    state = state.counted({"issued": 9, "applied": 2, "given_up": 1}, {"applied": 2})
    assert state.besides == {"issued": 9, "given_up": 1}
    assert state.counts == {"issued": 9, "given_up": 1, "applied": 3}


def test_finished_run_is_not_over_while_lost_versions_are_remade() -> None:
    ahead = Head(7, "digest 7", "7.1.x", 2.5, 1)
    over = state_of(6).ended(run_of(state="finished", why="target"))
    assert over.is_over
    assert not over.behind(ahead).is_over
    assert over.behind(ahead).after(applied("a", 7)).is_over
    assert over.behind(ahead).caught_up().is_over
    assert not state_of(6).is_over


def test_segment_is_sealed_if_the_run_is_finished() -> None:
    running = state_of(5, forgotten=1)
    assert not running.in_segment(3).sealed
    assert running.in_segment(3).forgotten == 3
    assert running.ended(run_of(state="finished")).in_segment(3).sealed


# ends


@pytest.fixture
def index(tmp_path: Path) -> EndedTasks:
    """An index that is closed: it keeps what it is given in memory."""
    return EndedTasks(tmp_path)


def test_decided_ends_are_known_before_they_are_journalled(index: EndedTasks) -> None:
    ends, change, round_ = Ends(index), refused("a", 5), closed("7-0", 5)
    for one in (change, round_):
        ends.decide(one)
    assert ends.get("a") == change.end
    assert ends.obeyed("7-0")
    assert (ends.done, ends.controls) == ((), ())
    assert ends.copy().get("a") is None  # an adoption must not take it for ended
    assert not ends.copy().obeyed("7-0")
    for one in (change, round_):
        ends.journal(one)
    assert (ends.done, ends.controls) == ((change.end,), ("7-0",))
    assert ends.copy().get("a") == ends.get("a") == change.end
    assert ends.copy().obeyed("7-0")


def test_update_found_again_keeps_its_first_end(index: EndedTasks) -> None:
    first, again = End("a", "a1", "applied", weight=0.5), refused("a", 5)
    ends = Ends(index, [first])
    found = Change("8-0", None, (), again.after, end=again.end)
    ends.decide(found)
    ends.journal(found)
    assert ends.get("a") == first


def test_oldest_ends_move_to_the_index_when_others_are_decided(
    index: EndedTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when those are journalled: nothing may fail after that."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 2)
    ends = Ends(index, [End(task, "a1", "applied") for task in ("a", "b")])
    change = refused("c", 5)
    ends.decide(change)
    assert [end.task for end in ends.done] == ["b"]
    assert index.get("a") is not None
    monkeypatch.setattr(index, "add", None)  # no more calls
    ends.journal(change)
    assert [end.task for end in ends.done] == ["b", "c"]
    assert ends.get("a") is not None


def test_journalled_ends_are_no_longer_held_as_decided(
    index: EndedTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the place of ends that must be remembered."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 2)
    ends = Ends(index)
    for n in range(4):
        for change in (closed(f"{n}-0", 5), refused(f"task {n}", 5)):
            ends.decide(change)
            ends.journal(change)
    assert [end.task for end in ends.done] == ["task 2", "task 3"]


def test_oldest_rounds_are_forgotten(index: EndedTasks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.state._CONTROLS_REMEMBERED", 2)
    ends = Ends(index)
    for entry in ("1-0", "2-0", "3-0"):
        ends.decide(closed(entry, 5))
        ends.journal(closed(entry, 5))
    assert ends.controls == ("2-0", "3-0")
