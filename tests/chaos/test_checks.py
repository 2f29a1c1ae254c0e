"""Every check can fail: a history that is right, and what is made of it."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.strategies.fedasync import FedAsyncSettings
from tests.chaos import disk
from tests.chaos.account import Note, accounted
from tests.chaos.checks import ASTRAY, CHECKS, LOST, Facts, complaints
from tests.chaos.effects import Life, Told
from tests.chaos.history import replayed
from tests.chaos.pages import chain, counting
from tests.journals import Scribe

Notes = dict[tuple[str, int, str], Note]


def noted(folder: Path) -> Notes:
    """The notes of trainers that made a journal of whole models."""
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
    """The facts of that journal, with one more task that is open."""
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
    assert set(right.account.made) == {0, 1, 2, 3}
    assert failed(replace(right, lives=())) == set(), "without Redis's files"


WRONG: dict[str, Callable[[Facts], Facts]] = {
    "balanced": lambda facts: replace(facts, open=0),
    "at_any_moment": lambda facts: living(facts, wrong=["issued 1, but 2"]),
    "counted": lambda facts: counting_as(facts, applied=2, refused=2, **{"refused:not finite": 2}),
    "told_as_counted": lambda facts: living(
        facts, counted=facts.lives[0].counted + Counter(applied=1)
    ),
    "lost_once": lambda facts: counting_as(facts, given_up=2, **{LOST: 2}),
    "once": lambda facts: kept(facts, records=[*facts.account.records, facts.account.records[0]]),
    "none_lost": lambda facts: replace(facts, admitted=frozenset({"open"})),
    "none_astray": lambda facts: counting_as(facts, **{ASTRAY: 1}),
    "undamaged": lambda facts: counting_as(facts, **{"refused:digest": 1}),
    "same_arithmetic": lambda facts: kept(facts, wrong=["other bits"]),
    "same_bits": lambda facts: replace(facts, model="0" * 64),
    "same_vectors": lambda facts: kept(facts, devices={1: "new"}),
    "same_feedback": lambda facts: replace(facts, unsent=("lost",)),
    "same_quarantines": lambda facts: kept(facts, quarantines=1, barred={3}),
    "same_step": lambda facts: replace(facts, scale=0.5),
    "one_digest": lambda facts: living(facts, told=[*facts.lives[0].told, Told(2, "other", 1, "")]),
    "understood": lambda facts: counting_as(facts, dead_letters=1),
    "as_expected": lambda facts: replace(facts, findings=("scheduler exited with 70",)),
}


def test_every_check_is_tried() -> None:
    assert set(WRONG) == {check.__name__ for check in CHECKS}


@pytest.mark.parametrize("check", WRONG)
def test_wrong_history_is_found(right: Facts, check: str) -> None:
    assert check in failed(WRONG[check](right))


def test_outcome_may_change_only_if_redis_falls_back_later(right: Facts) -> None:
    """The task is open again, and another attempt is answered; or a coordinator gives it up there,
    before the updater comes.
    """
    first, *rest = right.lives[0].ended
    given_up = {"task": first["task"], "outcome": "given_up", "service": "coordinator"}
    counted = right.lives[0].counted - Counter(applied=1) + Counter(given_up=1)
    life = replace(right.lives[0], ended=[*rest, given_up], counted=counted, fell_back=True)
    last = replace(right.lives[0], fell_back=True)
    assert failed(replace(right, lives=(right.lives[0], life, last))) == set()
    assert failed(replace(right, lives=(right.lives[0], life))) == {"told_as_counted"}
    forgotten = replace(life, fell_back=False)
    assert failed(replace(right, lives=(forgotten, last))) == set()
    assert failed(replace(right, lives=(forgotten,))) == {"told_as_counted"}
    by_updater = replace(life, ended=[*rest, {**given_up, "service": "updater-1"}])
    assert failed(replace(right, lives=(right.lives[0], by_updater, last))) == {"told_as_counted"}


# the account of a journal


def wrong(journal: Path, notes: Notes) -> str:
    """The complaints of an account, in one text."""
    return "\n".join(accounted(journal, notes).wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "no trainer made this update"),
        ({"ended": np.ones(4, np.float32).tobytes()}, "not the bytes that the trainer sent"),
        ({"began": bytes(16)}, "began with another model"),
        ({"steps": 99}, "the trainer's was 99"),
    ],
)
def test_update_that_differs_from_its_trainers_note_is_found(
    journal: Path, changes: dict[str, Any] | None, said: str
) -> None:
    notes = noted(journal)
    first = next(iter(notes))
    note = notes.pop(first)
    if changes is not None:
        notes[first] = {**note, **changes}
    assert said in wrong(journal, notes)


def test_wrong_weight_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_byte_that_was_wrong_for_a_while_does_not_come_back_with_a_power_cut(
    tmp_path: Path,
) -> None:
    folder, place = tmp_path / "journal", tmp_path / "platter"
    folder.mkdir()
    segment = folder / "1.journal"
    segment.write_bytes(bytes(10_000))

    def synced() -> None:  # by a process that wrote nothing
        for path in (segment, folder):
            file = os.open(path, os.O_RDONLY)
            disk.Platter(folder, place).syncing(file)()
            os.close(file)

    synced()
    disk.flip(segment, 5000)
    synced()
    disk.unflip(segment, place, 5000)
    assert disk.fail(folder, place, random.Random(1)) == 0
    assert segment.read_bytes() == bytes(10_000)
