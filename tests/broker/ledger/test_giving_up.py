"""A coordinator gives tasks up: at the end of a round, or because they take too long."""

from __future__ import annotations

from fedstream.core.messages import CloseRound, RoundEnd, Withdraw
from tests.support import Hand

# rounds


async def test_round_end_gives_up_unanswered_tasks_and_is_queued_last(hand: Hand) -> None:
    await hand.create()
    answered, open_one = await hand.open(2)
    upload = await hand.trained(answered)
    assert await hand.admit(upload) == [("admitted", "")]
    closing = CloseRound(version=0, tasks=(answered.task, open_one.task), why="time is up")
    await hand.ledger.ask(closing)
    assert await hand.dispatch() == ["closed"]
    assert [message for _, message in await hand.queue()] == [
        upload,
        RoundEnd(version=0, why="time is up"),
    ]
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"round over": 1}
    assert [trigger.task for trigger in view.open] == [answered.task]
    await hand.balanced()


async def test_round_is_closed_once_per_entry(hand: Hand) -> None:
    await hand.create()
    closing = CloseRound(version=0, tasks=("gone",), why="time is up")
    await hand.ledger.ask(closing)
    await hand.triggers.ensure()
    [entry] = await hand.triggers.read()
    assert await hand.ledger.close_round(entry, closing) == "closed"
    assert await hand.ledger.close_round(entry, closing) == "repeated"
    assert len(await hand.queue()) == 1


# tasks that take too long


async def test_withdrawn_task_is_given_up_and_loses_its_lease(hand: Hand) -> None:
    await hand.create()
    hung, waiting, answered, other = await hand.open(4)
    taken = {task.task: entry for entry, task in await hand.take(3)}
    assert await hand.admit(await hand.trained(answered)) == [("admitted", "")]
    overdue = tuple(trigger.task for trigger in (hung, waiting, answered))
    await hand.ledger.ask(Withdraw(tasks=overdue, why="timed out"))
    assert await hand.dispatch() == ["withdrawn"]
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"timed out": 2}
    assert {trigger.task for trigger in view.open} == {answered.task, other.task}
    assert not await hand.tasks.renew(taken[hung.task])
    late = await hand.trained(hung)
    said = await hand.outbox.answer(hand.keys.tasks, taken[hung.task], late)
    assert said == "over"
    assert {task.task for _, task in await hand.take()} == {other.task}
    # An answer that was on its way by then comes too late.
    assert await hand.admit(late) == [("stray", "late")]
    await hand.balanced()


async def test_an_owners_task_is_withdrawn_from_its_own_stream(hand: Hand) -> None:
    await hand.create()
    await hand.announce("owner", 3)
    [trigger] = await hand.open(device=3)
    stream = hand.keys.tasks_of("owner")
    assert await hand.client.call("XLEN", stream) == 1
    wish = Withdraw(tasks=(trigger.task, "gone"), why="deadline passed")
    for verdict in ("withdrawn", "repeated"):
        if verdict == "withdrawn":
            await hand.ledger.ask(wish)
            await hand.triggers.ensure()
            [entry] = await hand.triggers.read()
        assert await hand.ledger.withdraw(entry, wish) == verdict
        assert (await hand.ledger.look()).reasons("given_up") == {"deadline passed": 1}
        assert await hand.client.call("XLEN", stream) == 0
    await hand.balanced()
