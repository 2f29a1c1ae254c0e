"""Every check can fail: a history that is right, and what is made of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.chaos.account import Account, Note, accounted
from tests.chaos.checks import ASTRAY, LOST, Facts, complaints
from tests.chaos.effects import Life, Told
from tests.chaos.history import replayed
from tests.chaos.pages import chain, counting
from tests.journals import Scribe

Notes = dict[tuple[str, int, str], Note]


def noted(folder: Path) -> Notes:
    """What trainers would have noted down who made a journal of whole models."""
    notes: Notes = {}
    for _, records in counting(chain(folder)):
        for record in records:
            upload = record.message.get("upload")
            if upload is None:
                continue
            notes[upload["task"], upload["tau"], upload["base"]] = {
                **{name: upload.get(name) for name in ("device", "steps", "samples", "lr", "seed")},
                "began": b"",
                "ended": record.payload,
                "known": None,
            }
    return notes


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Three updates were applied, one was refused."""
    scribe = Scribe(tmp_path)
    for _ in range(3):
        scribe.update()
    scribe.refuse()
    scribe.close()
    return tmp_path


@pytest.fixture
def right(journal: Path) -> Facts:
    """That, and one task is open."""
    known = accounted(journal, noted(journal))
    tasks = [record["upload"]["task"] for record in known.taken]
    outcomes = [(record["upload"]["task"], record["outcome"]) for record in known.taken]
    counts = {"issued": 5, "applied": 3, "refused": 1, "refused:not finite": 1}
    life = Life(
        counts=Counter(counts),
        counted=Counter(counts),
        ended=[{"task": task, "outcome": outcome} for task, outcome in outcomes],
        opened={*tasks, "open"},
        open={"open"},
        admitted={task: {"attempt"} for task in tasks},
        settled={f"{n}-0": {"k": "upload", "task": task} for n, task in enumerate(tasks)},
        told=[Told(version, digest, 1, "") for version, digest in known.made.items()],
    )
    return Facts(
        account=known,
        production=replayed(journal),
        lives=(life,),
        forged=frozenset(),
        counts=counts,
        open=1,
        queued=frozenset(),
        admitted=frozenset(),
        head=(known.version, known.model),
        model=known.model,
    )


def test_without_redis_files_the_journal_and_redis_are_compared(right: Facts) -> None:
    assert failed(replace(right, lives=())) == set()
    assert failed(replace(right, lives=(), open=0)) == {"balanced"}


def failed(facts: Facts) -> set[str]:
    """The checks that complain."""
    return {complaint.partition(":")[0] for complaint in complaints(facts)}


def living(facts: Facts, **changes: Any) -> Facts:
    """The same with another life of Redis."""
    return replace(facts, lives=(replace(facts.lives[0], **changes),))


def counting_as(facts: Facts, **changes: int) -> Facts:
    """The same with other counts in Redis."""
    return replace(facts, counts={**facts.counts, **changes})


def kept(facts: Facts, **changes: Any) -> Facts:
    """The same with another account of the journal."""
    return replace(facts, account=replace(facts.account, **changes))


def test_correct_history_passes(right: Facts) -> None:
    assert complaints(right) == []
    assert right.account.version == 3
    assert set(right.account.made) == {0, 1, 2, 3}


def test_task_without_an_outcome_is_found(right: Facts) -> None:
    assert failed(replace(right, open=0)) == {"balanced"}


def test_unreadable_entry_is_found(right: Facts) -> None:
    assert failed(counting_as(right, dead_letters=1)) == {"understood"}


def test_damaged_update_is_found(right: Facts) -> None:
    damaged = counting_as(right, **{"refused:not finite": 0, "refused:digest": 1})
    assert failed(damaged) == {"undamaged"}


def test_task_that_went_astray_is_found(right: Facts) -> None:
    counts = Counter(right.counts) + Counter({"given_up": 1, ASTRAY: 1})
    ended = [*right.lives[0].ended, {"task": "open", "outcome": "given_up"}]
    life = replace(right.lives[0], counts=counts, counted=counts, ended=ended, open=set())
    astray = replace(right, counts=counts, open=0, lives=(life,))
    assert failed(astray) == {"none_astray"}
    forgetful = replace(astray, lives=(life, replace(life, fell_back=True)))
    assert "none_astray" not in failed(forgetful)


def test_miscounted_outcome_is_found(right: Facts) -> None:
    swapped = counting_as(right, applied=2, refused=2, **{"refused:not finite": 2})
    assert failed(swapped) == {"counted"}


def test_temporarily_wrong_sums_are_found(right: Facts) -> None:
    assert failed(living(right, wrong=["issued 1, but 2"])) == {"at_any_moment"}


def test_outcome_may_change_only_if_redis_falls_back_again(right: Facts) -> None:
    """It is open there, and a coordinator may give it up before the updater is there."""
    first, *rest = right.lives[0].ended
    given_up = {"task": first["task"], "outcome": "given_up", "service": "coordinator"}
    counted = right.lives[0].counted - Counter(applied=1) + Counter(given_up=1)
    life = replace(right.lives[0], ended=[*rest, given_up], counted=counted, fell_back=True)
    last = replace(right.lives[0], fell_back=True)
    assert failed(replace(right, lives=(right.lives[0], life, last))) == set()
    assert failed(replace(right, lives=(right.lives[0], life))) == {"told_as_counted"}
    assert failed(replace(right, lives=(replace(life, fell_back=False), last))) == {
        "told_as_counted"
    }
    by_updater = replace(life, ended=[*rest, {**given_up, "service": "updater-1"}])
    assert failed(replace(right, lives=(right.lives[0], by_updater, last))) == {"told_as_counted"}


def test_task_counted_under_two_outcomes_is_found(right: Facts) -> None:
    """As what a coordinator said where Redis fell back, and as what the journal has."""
    given_up = {"task": right.lives[0].ended[0]["task"], "outcome": "given_up"}
    life = replace(right.lives[0], ended=[*right.lives[0].ended, given_up], fell_back=True)
    both = counting_as(right, issued=6, given_up=1, **{"given_up:round over": 1})
    assert "counted" in failed(replace(both, lives=(right.lives[0], life, right.lives[0])))


def test_outcome_is_revoked_only_if_redis_fell_back(right: Facts) -> None:
    given_up = {"task": right.lives[0].ended[0]["task"], "outcome": "given_up"}
    life = replace(right.lives[0], taken_back=[given_up])
    assert failed(replace(right, lives=(life,))) == {"told_as_counted"}
    assert failed(replace(right, lives=(right.lives[0], replace(life, fell_back=True)))) == set()


def test_task_that_ended_twice_is_found(right: Facts) -> None:
    ended = [*right.lives[0].ended, right.lives[0].ended[0]]
    counted = right.lives[0].counted + Counter(applied=1)
    assert failed(living(right, ended=ended, counted=counted)) == {"told_as_counted"}


def test_tasks_counted_as_lost_twice_are_found(right: Facts) -> None:
    lost = counting_as(right, given_up=2, **{LOST: 2})
    assert "lost_once" in failed(living(lost, opened={*right.opened, "gone"}))


def test_task_taken_twice_is_found(right: Facts) -> None:
    records = right.account.records
    assert "once" in failed(kept(right, records=[*records, records[0]]))


def test_second_queued_answer_is_found(right: Facts) -> None:
    task = right.account.taken[0]["upload"]["task"]
    two = {**right.lives[0].admitted, task: {"attempt", "again"}}
    assert failed(living(right, admitted=two)) == {"once"}
    alone = {**right.lives[0].admitted, task: {"again"}}
    forged = replace(living(right, admitted=alone), forged=frozenset({(task, "again")}))
    assert failed(forged) == {"once"}


def test_update_dequeued_without_a_record_is_found(right: Facts) -> None:
    settled = {**right.lives[0].settled, "9-0": {"k": "upload", "task": "gone"}}
    assert failed(living(right, settled=settled)) == {"none_lost"}


def test_vanished_update_is_found(right: Facts) -> None:
    seen = living(right, admitted={**right.lives[0].admitted, "gone": {"a"}})
    assert failed(seen) == {"none_lost"}
    assert seen.lost_with_redis == 1
    waits = replace(seen, queued=frozenset({"gone"}))
    assert failed(waits) == set()
    assert waits.lost_with_redis == 0


def test_diverging_replay_is_found(right: Facts) -> None:
    diverged = replace(right.production, diverged="version 2: other bits")
    assert failed(replace(right, production=diverged)) == {"same_bits"}


def test_head_that_differs_from_the_journal_is_found(right: Facts) -> None:
    assert failed(replace(right, head=(2, right.head[1]))) == {"same_bits"}


@pytest.mark.parametrize("told", [(0, frozenset[int]()), (2, frozenset({3})), (1, frozenset({4}))])
def test_quarantines_that_differ_from_the_journal_are_found(
    right: Facts, told: tuple[int, frozenset[int]]
) -> None:
    barred = replace(right, account=replace(right.account, quarantines=1, barred={3}))
    assert failed(replace(barred, quarantines=(1, frozenset({3})))) == set()
    assert failed(replace(barred, quarantines=told)) == {"same_quarantines"}


def test_model_that_differs_from_the_head_is_found(right: Facts) -> None:
    assert failed(replace(right, model="0" * 64)) == {"same_bits"}


def test_vector_that_differs_after_a_restart_or_in_redis_is_found(right: Facts) -> None:
    heard = kept(right, devices={1: "new"})
    assert failed(heard) == {"same_vectors"}
    both = replace(heard, production=replace(heard.production, recovered={1: "new"}))
    assert failed(both) == set()
    assert failed(replace(both, handed_out={1: "old"})) == {"same_vectors"}
    assert failed(replace(both, handed_out={1: "new"})) == set()


def test_control_that_is_not_the_mean_is_found(right: Facts) -> None:
    assert failed(kept(right, drift=0.1)) == {"same_vectors"}


def test_two_models_with_one_version_number_are_found(right: Facts) -> None:
    told = [*right.lives[0].told, Told(2, "other", 1, "")]
    assert failed(living(right, told=told)) == {"one_digest"}


# the account of a journal


def wrong(journal: Path, notes: Notes) -> str:
    """What an account complains of, in one text."""
    return "\n".join(accounted(journal, notes).wrong)


@pytest.mark.parametrize("extended", [False, True])
def test_version_behind_the_end_is_found_unless_the_run_was_extended(
    tmp_path: Path, extended: bool
) -> None:
    scribe = Scribe(tmp_path, versions=2)
    scribe.update()
    scribe.update()
    if extended:
        scribe.head = scribe.head.model_copy(update={"versions": 3})
    scribe.segment()
    scribe.update()
    scribe.close()
    said = wrong(tmp_path, noted(tmp_path))
    assert ("version 3 was made behind: version 2 reached" in said) != extended


def test_update_that_no_trainer_made_is_found(journal: Path) -> None:
    notes = noted(journal)
    del notes[next(iter(notes))]
    assert "no trainer made this update" in wrong(journal, notes)


def test_update_with_other_bytes_is_found(journal: Path) -> None:
    notes = noted(journal)
    first = next(iter(notes))
    other = np.frombuffer(notes[first]["ended"], np.float32) + np.float32(1)
    notes[first] = {**notes[first], "ended": other.tobytes()}
    said = wrong(journal, notes)
    assert "not the bytes that the trainer sent" in said
    assert "worked out as" in said


def test_wrong_base_model_is_found(journal: Path) -> None:
    notes = noted(journal)
    first = next(iter(notes))
    notes[first] = {**notes[first], "began": bytes(16)}
    assert "began with another model" in wrong(journal, notes)


def test_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstream.strategies.fedasync import FedAsyncSettings

    weigh = FedAsyncSettings.weigh
    monkeypatch.setattr(FedAsyncSettings, "weigh", lambda self, *about: 0.5 * weigh(self, *about))
    scribe = Scribe(tmp_path)
    scribe.update()
    scribe.close()
    assert replayed(tmp_path).diverged == "", "the project's own replay believes it"
    assert "the rule gives 0.4" in wrong(tmp_path, noted(tmp_path))


def test_damage_in_the_journal_is_found(journal: Path) -> None:
    notes = noted(journal)
    [segment] = journal.glob("*.journal")
    data = bytearray(segment.read_bytes())
    data[8192 + 100] ^= 1  # of the standing
    segment.write_bytes(data)
    assert "does not begin with" in wrong(journal, notes)
    assert replayed(journal).diverged


def test_missing_journal_is_found(tmp_path: Path) -> None:
    assert "there is no journal" in wrong(tmp_path, {})
    assert isinstance(accounted(tmp_path, {}), Account)
