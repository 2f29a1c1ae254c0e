"""A task that the journal has counts as what it has, whoever ended it where Redis fell back.

There it is open again, and a coordinator may come before the updater finds out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from fedstream.broker.cleanup import ended_unlike
from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS
from fedstream.core.messages import CloseRound, Trigger, Upload, Withdraw
from fedstream.core.reasons import LOST_WITH_REDIS
from fedstream.core.records import End
from fedstream.operate import dead
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import backed_up, go_back

Ending = Callable[[Hand, Trigger, Upload], Awaitable[None]]


async def _withdrawn(hand: Hand, trigger: Trigger, _upload: Upload) -> None:
    await hand.ledger.ask(Withdraw(tasks=(trigger.task,), why="timed out"))
    assert await hand.dispatch() == ["withdrawn"]


async def _round_over(hand: Hand, trigger: Trigger, _upload: Upload) -> None:
    await hand.ledger.ask(CloseRound(version=0, tasks=(trigger.task,), why="enough"))
    assert await hand.dispatch() == ["closed"]


async def _refused(hand: Hand, _trigger: Trigger, upload: Upload) -> None:
    """Its base is of a version that this Redis does not know."""
    again = upload.model_copy(update={"base": "of a version that was lost"})
    assert await hand.admit(again) == [("refused", "unknown base")]


async def _buried(hand: Hand, trigger: Trigger, _upload: Upload) -> None:
    [(entry, task)] = await hand.take()
    assert task.task == trigger.task
    await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "crashed its trainers", task=task)


async def _applied_and_open_again(make: Any, hand: Hand, client: Client) -> tuple[Trigger, Upload]:
    """Version 1 is in the journal, and Redis as it was before its update was admitted."""
    async with running(make(), context()):
        await hand.join()
        [trigger] = await hand.open()
        upload = await hand.trained(trigger)
        backup = await backed_up(client)
        assert await hand.admit(upload) == [("admitted", "")]
        await hand.reaches(1)
        await wait_until(hand.queue_is_empty)
    await go_back(client, backup)
    return trigger, upload


@pytest.mark.parametrize("end", [_withdrawn, _round_over, _refused, _buried])
async def test_coordinators_conflicting_end_is_revoked(
    make: Any, hand: Hand, client: Client, end: Ending
) -> None:
    trigger, upload = await _applied_and_open_again(make, hand, client)
    await end(hand, trigger, upload)
    await hand.balanced()
    assert (await hand.ledger.look()).outcomes["applied"] == 0
    async with running(make(), context()):
        await hand.reaches(1)
        await _is_applied_alone(hand, trigger)


async def _is_applied_alone(hand: Hand, trigger: Trigger) -> None:
    view = await hand.ledger.look()
    assert {name: n for name, n in view.counts.items() if n} == {"issued": 1, "applied": 1} | {
        name: n for name, n in view.counts.items() if n and name == "dead_letters"
    }
    assert await hand.ledger.ends([trigger.task]) == ["applied"]
    await hand.balanced()
    *_, last = await hand.events()
    assert (last.task, last.outcome) == (trigger.task, "applied")
    assert last.text
    assert last.text.startswith("not ")


async def test_end_during_a_repair_is_revoked(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at what is open and the script."""
    trigger, upload = await _applied_and_open_again(make, hand, client)

    async def overtaken(*about: Any) -> list[End]:
        found = await ended_unlike(*about)
        assert [end.task for end in found] == [trigger.task]
        await _withdrawn(hand, trigger, upload)
        return found

    monkeypatch.setattr("fedstream.broker.ledger.updater.ended_unlike", overtaken)
    async with running(make(), context()):
        await hand.reaches(1)
        await _is_applied_alone(hand, trigger)


# the commit, where the newest version is not among what Redis lost


async def _given_up(hand: Hand) -> Trigger:
    await hand.create()
    [trigger] = await hand.open()
    await hand.ledger.ask(Withdraw(tasks=(trigger.task,), why="timed out"))
    assert await hand.dispatch() == ["withdrawn"]
    return trigger


async def test_commit_revokes_a_conflicting_end_once(hand: Hand) -> None:
    trigger = await _given_up(hand)
    for _ in range(2):  # the second time its reply was lost
        assert await hand.commit(1, ends=[End(trigger.task, "a1", "applied")]) == "done"
        await _is_applied_alone(hand, trigger)
    assert [event.outcome for event in await hand.events()] == ["given_up", "applied"]


async def test_only_the_reason_may_differ(hand: Hand) -> None:
    trigger = await _given_up(hand)
    end = End(trigger.task, "a1", "given_up", "run finished")
    assert await hand.commit(1, ends=[end]) == "done"
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["given_up"]) == (1, 1)
    assert {why: n for why, n in view.reasons("given_up").items() if n} == {"run finished": 1}


async def test_end_lost_by_the_journal_revokes_nothing(hand: Hand) -> None:
    """Who adopted Redis's model knows that these tasks ended, and not how."""
    await hand.create()
    [trigger] = await hand.open()
    assert await hand.commit(1, ends=[End(trigger.task, "a1", "applied")]) == "done"
    assert (
        await hand.commit(2, ends=[End(trigger.task, "a1", "given_up", LOST_WITH_REDIS)]) == "done"
    )
    assert await hand.ledger.ends([trigger.task]) == ["applied"]
    assert (await hand.ledger.look()).outcomes["given_up"] == 0


async def test_retried_letter_no_longer_counts_as_dead(hand: Hand) -> None:
    """Its retry is a task of its own."""
    await hand.create()
    [trigger] = await hand.open()
    await hand.dispatch()
    await _buried(hand, trigger, await hand.trained(trigger))
    [letter] = (await dead.read(hand.client, hand.keys)).letters
    await dead.retry(hand.client, hand.keys, letter)
    assert await hand.ledger.ends([trigger.task]) == ["retried"]
    assert await hand.commit(1, ends=[End(trigger.task, "a1", "applied")]) == "done"
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"], view.outcomes["dead"]) == (2, 1, 0)
    assert not any(view.reasons("dead").values())
    await hand.balanced()
