"""`fedstream dead`: looking at dead letters, retrying what can be retried, dropping the rest."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, TRAINERS
from fedstream.broker.streams import Group
from fedstream.core.errors import FedstreamError, OutOfMemory
from fedstream.core.messages import (
    Assignment,
    CloseRound,
    Dead,
    GiveUp,
    Measured,
    RoundEnd,
    Trigger,
    Withdraw,
    task_id,
)
from fedstream.operate import dead
from tests.fedstream.operate.conftest import Command
from tests.support import Hand, full, snapshot


async def crashing(hand: Hand, **changes: Any) -> Trigger:
    """A task that crashed its trainers: its entry is in ``dead``."""
    [trigger] = await hand.open(**changes)
    [(entry, _)] = await hand.take()
    task = Assignment.decode(trigger.assignment())
    reason = "crashed its trainers"
    assert await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, reason, task=task, deliveries=3)
    return trigger


async def bury(hand: Hand, data: bytes, stream: str = "triggers", **about: Any) -> None:
    """Puts an entry on a stream, and moves it to ``dead`` as a coordinator would."""
    group = Group(hand.client, hand.keys.prefix + stream, COORDINATORS, "c")
    await group.ensure()
    await hand.client.call("XADD", group.stream, "*", "m", data)
    entries = await group.read(count=100)
    assert await hand.ledger.bury(group.stream, COORDINATORS, entries[-1], "tried", **about)


async def only(hand: Hand) -> dead.Letter:
    [letter] = (await dead.read(hand.client, hand.keys)).letters
    return letter


async def test_task_that_crashed_its_trainers_is_retried_as_a_new_task(
    hand: Hand, command: Command
) -> None:
    await hand.create()
    before = await crashing(hand, steps=7, epochs=None)
    code, shown, _ = await command("dead", "list")
    assert code == 0
    for expected in (before.task, "crashed its trainers", "dead", "tasks"):
        assert expected in shown
    code, shown, _ = await command("dead", "show", before.task)
    assert code == 0
    assert all(text in shown for text in ("steps", "7", "message", "task", "deliveries"))
    letter = await only(hand)
    code, said, wrong = await command("dead", "retry", letter.id)
    assert (code, wrong) == (0, "")
    view = await hand.ledger.look()
    [again] = view.open
    assert again.task in said
    assert again.task != before.task
    assert again.why == f"retry of {before.task}"
    same = {"device", "seed", "steps", "epochs"}
    assert again.model_dump(include=same) == before.model_dump(include=same)
    assert (view.issued, view.outcomes["dead"], view.dead) == (2, 1, 0)
    await hand.balanced()
    assert await hand.dispatch() == ["sent"]  # and goes the way of every task
    [(_, task)] = await hand.take()
    assert task.task == again.task
    upload = await hand.trained(again)
    assert await hand.admit(upload) == [("admitted", "")]
    await hand.commit(1, upload)
    assert (await hand.ledger.look()).outcomes["applied"] == 1
    await hand.balanced()


async def test_letter_is_retried_once(hand: Hand, command: Command) -> None:
    await hand.create()
    await crashing(hand)
    letter = await only(hand)
    await dead.retry(hand.client, hand.keys, letter)
    with pytest.raises(FedstreamError, match="no longer exists"):
        await dead.retry(hand.client, hand.keys, letter)  # by somebody who saw it, too
    assert (await hand.ledger.look()).issued == 2
    code, _, wrong = await command("dead", "retry", letter.id)
    assert (code, wrong.count("\n")) == (1, 1)
    assert f"there is no dead letter '{letter.id}'" in wrong


async def test_task_with_two_letters_is_retried_once(hand: Hand, command: Command) -> None:
    """It crashed its trainers, one of which had answered: that crashed the coordinators."""
    await hand.create()
    before = await crashing(hand)
    answer = await hand.trained(before, attempt="late", write=False)
    await bury(hand, answer.encode(), "uploads", task=before)
    first, second = (await dead.read(hand.client, hand.keys)).letters
    again = await dead.retry(hand.client, hand.keys, first)
    code, _, wrong = await command("dead", "retry", second.id)
    assert (code, wrong.count("\n")) == (1, 1)
    why = f"its task was already retried as task {again.task}, from another letter"
    assert wrong == f"fedstream: {second.id} not retried: {why}\n"
    await hand.dispatch()
    upload = await hand.trained(again)
    await hand.admit(upload)
    await hand.commit(1, upload)  # nor when that one is done
    assert (await command("dead", "retry", before.task))[0] == 1
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"], view.open) == (2, 1, ())
    await hand.balanced()
    assert (await only(hand)).ended == "retried"
    assert "retried" in (await command("dead", "list"))[1]


async def test_failed_retry_is_retried_by_its_own_letter(hand: Hand) -> None:
    await hand.create()
    await crashing(hand)
    again = await dead.retry(hand.client, hand.keys, await only(hand))
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "crashed its trainers", task=task)
    third = await dead.retry(hand.client, hand.keys, await only(hand))
    assert third.why == f"retry of {again.task}"
    assert (await hand.ledger.look()).issued == 3


async def test_task_with_a_forgotten_end_is_not_retried(hand: Hand) -> None:
    """It may have been applied: another answer may have been admitted before this one crashed."""
    await hand.create()
    before = await crashing(hand)
    ended = hand.keys.ended
    assert await hand.client.call("ZREM", ended, f"{before.task}||dead|crashed its trainers") == 1
    later = [task_id(1000 + n, bytes(10)) for n in range(20_000)]
    await hand.client.call("ZADD", ended, *(x for one in later for x in (0, f"{one}|a|applied|")))
    with pytest.raises(FedstreamError, match="no longer known how its task ended"):
        await dead.retry(hand.client, hand.keys, await only(hand))
    assert (await hand.ledger.look()).issued == 1


async def test_upload_that_crashed_coordinators_is_trained_again(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    await hand.take()
    upload = await hand.trained(trigger, steps=12, seed=99)
    await bury(hand, upload.encode(), "uploads", task=upload)
    again = await dead.retry(hand.client, hand.keys, await only(hand))
    assert (again.device, again.steps, again.seed) == (trigger.device, 12, 99)
    assert again.task != trigger.task
    await hand.balanced()
    await hand.client.call("UNLINK", hand.keys.update(upload.blob))


async def test_self_triggered_task_is_retried_by_the_operator(hand: Hand) -> None:
    await hand.create()
    wish = hand.trigger(origin="ann", why="own initiative")
    await bury(hand, wish.encode(), task=wish)
    letter = await only(hand)
    assert letter.ended == ""  # it never was a task
    again = await dead.retry(hand.client, hand.keys, letter)
    assert again.origin == "scheduler"  # not held to ann's rate
    assert await hand.dispatch() == ["sent"]
    await hand.balanced()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"junk", "it is unreadable (not msgpack"),
        (b"", "it is unreadable"),
        (CloseRound(version=1, tasks=(), why="over").encode(), "it only ends a round"),
        (RoundEnd(version=1).encode(), "it only ends a round"),
        (Withdraw(tasks=("a",), why="timed out").encode(), "only gives up overdue tasks"),
        (
            Measured(task="a", attempt="1", device=1, trainer="t", version=0, base="d").encode(),
            "it is of an evaluation on the devices",
        ),
        (
            GiveUp(task="a", attempt="1", device=1, trainer="t", reason="tired").encode(),
            "its device gave up",
        ),
        (
            Assignment(task="a", device=1, seed=1, steps=1, version=0, deadline=5.0).encode(),
            "deadline",
        ),
    ],
)
async def test_unretriable_letter_says_why_and_stays(
    hand: Hand, command: Command, message: bytes, why: str
) -> None:
    await hand.create()
    await bury(hand, message)
    before = await snapshot(hand.client, hand.keys)
    letter = await only(hand)
    code, said, wrong = await command("dead", "retry", "--all")
    assert (code, said, wrong.count("\n")) == (1, "", 1)
    assert wrong.startswith(f"fedstream: {letter.id} not retried: ")
    assert why in wrong
    assert await snapshot(hand.client, hand.keys) == before
    assert (await command("dead", "show", letter.id))[0] == 0  # whatever it is, it can be looked at
    assert (await command("dead", "list"))[0] == 0


async def test_task_ended_by_another_answer_is_not_retried(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    await bury(hand, upload.model_copy(update={"attempt": "2"}).encode(), "uploads", task=upload)
    with pytest.raises(FedstreamError, match="its task is still open"):
        await dead.retry(hand.client, hand.keys, await only(hand))
    await hand.commit(1, upload)
    assert (await only(hand)).ended == "applied"
    with pytest.raises(FedstreamError, match="ended as applied"):
        await dead.retry(hand.client, hand.keys, await only(hand))
    assert (await hand.ledger.look()).issued == 1


async def test_a_device_has_one_task_at_a_time(hand: Hand) -> None:
    await hand.create()
    crashed = await crashing(hand)
    [busy] = await hand.open(device=crashed.device)
    with pytest.raises(FedstreamError, match=f"has another task, {busy.task}"):
        await dead.retry(hand.client, hand.keys, await only(hand))
    await hand.dispatch()
    upload = await hand.trained(busy)
    await hand.admit(upload)
    await hand.commit(1, upload, held=(crashed.device,))
    with pytest.raises(FedstreamError, match="is waiting in the batch"):
        await dead.retry(hand.client, hand.keys, await only(hand))
    await hand.commit(2)
    await dead.retry(hand.client, hand.keys, await only(hand))


async def test_finished_round_is_not_restarted(hand: Hand) -> None:
    await hand.create()
    deadline = time.time() + 600
    crashed = await crashing(hand, version=0, deadline=deadline)
    letter = await only(hand)
    again = dead.again(letter, time.time())
    assert (again.version, again.deadline) == (0, deadline)
    await hand.commit(1)
    with pytest.raises(FedstreamError, match="the round that it belongs to is over"):
        await dead.retry(hand.client, hand.keys, letter)
    assert crashed.task not in {trigger.task for trigger in (await hand.ledger.look()).open}


async def test_finished_run_accepts_no_retries(hand: Hand) -> None:
    await hand.create()
    await crashing(hand)
    await hand.ledger.finish("by hand")
    with pytest.raises(FedstreamError, match="the run is finished"):
        await dead.retry(hand.client, hand.keys, await only(hand))


async def test_retry_is_atomic_when_redis_is_full(hand: Hand, client: Client) -> None:
    await hand.create()
    await crashing(hand)
    letter = await only(hand)
    before = await snapshot(hand.client, hand.keys)
    async with full(client):
        with pytest.raises(OutOfMemory):
            await dead.retry(hand.client, hand.keys, letter)
        assert await snapshot(hand.client, hand.keys) == before
        assert await dead.drop(hand.client, hand.keys, [letter]) == 1  # which frees


async def test_dropping_asks_first(hand: Hand, command: Command) -> None:
    await hand.create()
    for _ in range(3):
        await crashing(hand)
    letters = (await dead.read(hand.client, hand.keys)).letters
    assert (await command("dead", "drop", "--all", said="n"))[0] == 1
    assert (await hand.ledger.look()).dead == 3
    code, said, _ = await command("dead", "drop", letters[0].id, letters[1].task or "", said="y")
    assert (code, said) == (0, "2 dead letters deleted\n")
    assert (await only(hand)).id == letters[2].id
    code, said, _ = await command("dead", "drop", "--all", "--yes")
    assert (code, said) == (0, "1 dead letter deleted\n")
    view = await hand.ledger.look()
    assert (view.dead, view.outcomes["dead"]) == (0, 3)  # they stay counted
    assert (await command("dead", "list"))[1] == "no dead letters\n"


async def test_programs_get_json(hand: Hand, command: Command) -> None:
    await hand.create()
    crashed = await crashing(hand)
    await bury(hand, b"\xff")
    code, said, _ = await command("dead", "list", "--json")
    assert code == 0
    found = json.loads(said)
    assert found["lost"] == 0
    task, junk = found["letters"]
    assert (task["task"], task["outcome"], task["kind"]) == (crashed.task, "dead", "task")
    assert task["message"]["device"] == crashed.device
    assert (junk["data"], junk["message"]) == ("ff", None)
    assert "not a message" in junk["unreadable"]
    code, said, _ = await command("dead", "show", task["id"], "--json")
    assert json.loads(said) == [task]


async def test_deleted_letters_are_reported(hand: Hand, command: Command) -> None:
    await hand.create()
    await hand.client.call("HSET", hand.keys.counts, "dead_letters_lost", 4)
    assert "4 older ones were deleted" in (await command("dead", "list"))[1]


async def test_letter_of_another_release_can_be_listed_and_dropped(
    hand: Hand, command: Command
) -> None:
    await hand.create()
    letter = Dead(stream="tasks", entry="1-1", reason="r", time=1.0).encode()
    await hand.client.call(
        "XADD", hand.keys.dead, "*", "m", letter.replace(b"\xa1v\x01", b"\xa1v\x09")
    )
    code, shown, _ = await command("dead", "list")
    assert code == 0
    assert "schema 9" in shown
    code, _, wrong = await command("dead", "retry", "--all")
    assert code == 1
    assert "the letter itself can't be read" in wrong
    assert (await command("dead", "drop", "--all", "--yes"))[0] == 0


async def test_letters_are_chosen_by_id_or_all(hand: Hand, command: Command) -> None:
    await hand.create()
    for words in (("retry",), ("drop", "--all", "1-1")):
        code, _, wrong = await command("dead", *words)
        assert (code, wrong) == (2, "fedstream: give either the ids of letters or --all\n")
