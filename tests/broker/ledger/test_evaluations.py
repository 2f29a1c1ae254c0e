"""Evaluations on the devices: scripts that open, answer and end them, one outcome a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS
from fedstream.broker.ledger.evaluator import OpenEvaluation
from fedstream.broker.streams import Group
from fedstream.core import reasons
from fedstream.core.messages import POOL, DevicesEvaluated, Evaluation, Measured, task_id
from tests.support import Hand

FIRST = task_id(1, bytes(10))
LATER = 4e9  # a deadline that no test reaches


async def begun(hand: Hand, *devices: int, id_: str = FIRST) -> OpenEvaluation:
    """An evaluation of the newest version on these devices."""
    head = await hand.ledger.head()
    assert head is not None
    how = await hand.ledger.open_evaluation(id_, head, devices, LATER, nbytes=hand.layout.nbytes)
    assert how == "begun"
    found = await hand.ledger.evaluation()
    assert found is not None
    return found


async def ask(hand: Hand, evaluation: OpenEvaluation, share: float = 1.0) -> list[Evaluation]:
    """Tasks for those that have none; returns all those that trainers have not taken."""
    tasks = [evaluation.task(task_id(device, bytes(10)), device) for device in evaluation.waiting]
    await hand.ledger.ask_devices(evaluation, share, tasks)
    await hand.tasks.ensure()
    entries = await hand.tasks.read(count=100, block_ms=0)
    return [Evaluation.decode(entry.data) for entry in entries]


async def say(
    hand: Hand, task: Evaluation, reason: str | None = None, *, site: str = POOL, **more: Any
) -> tuple[str, str]:
    """A device answers: what the coordinator makes of it."""
    about: dict[str, Any] = {
        "task": task.task,
        "attempt": "a1",
        "device": task.device,
        "trainer": "t",
        "version": task.version,
        "base": task.base,
        "sums": {"accuracy": (1.0, 2.0)},
        "reason": reason,
    }
    answer = Measured(**about | more)
    await hand.client.call("XADD", hand.keys.inbox(site), "*", "m", answer.encode())
    [entry] = await hand.heard(site)
    return await hand.ledger.admit_measured(site, entry, answer, trusted=site == POOL)


def result(evaluation: OpenEvaluation, **outcomes: int) -> DevicesEvaluated:
    return DevicesEvaluated(
        evaluation=evaluation.id,
        version=evaluation.version,
        base=evaluation.base,
        devices=len(evaluation.devices),
        outcomes=outcomes,
    )


async def counts(hand: Hand) -> dict[str, int]:
    found = (await hand.ledger.tally()).counts
    return {name: n for name, n in found.items() if name.startswith("evaluat")}


async def test_each_device_ends_with_one_outcome(hand: Hand) -> None:
    """Training's counts stay as they are."""
    await hand.create()
    await hand.announce("t")
    evaluation = await begun(hand, 2, 5, 7)
    tasks = [task for _ in range(3) for task in await ask(hand, evaluation, share=3.0)]
    assert [(task.device, task.version) for task in tasks] == [(2, 0), (5, 0), (7, 0)]
    assert await say(hand, tasks[0]) == ("evaluated", "measured")
    assert await say(hand, tasks[1], reasons.NO_TEST_DATA) == ("evaluated", "no test data")
    found = await hand.ledger.evaluation()
    assert found is not None
    assert (found.asked, found.answered) == ({7}, {2, 5})
    answers = await hand.ledger.answers()
    assert {d: one.outcome for d, one in answers.items()} == {2: "measured", 5: "no test data"}
    assert answers[2].measured is not None
    assert answers[2].measured.sums == {"accuracy": (1.0, 2.0)}
    assert await hand.ledger.end_evaluation(1, result(found)) == "more"  # one has answered since
    assert await hand.ledger.end_evaluation(2, result(found)) == "ended"
    assert await hand.ledger.end_evaluation(2, result(found)) == "over"
    assert await hand.ledger.evaluation() is None
    assert [message for _, message in await hand.queue()] == [result(found)]
    assert await hand.client.call("XLEN", hand.keys.tasks) == 2  # those that answered without lease
    assert await counts(hand) == {
        "evaluations": 3,
        "evaluated:measured": 1,
        "evaluated:no test data": 1,
        "evaluated:no answer in time": 1,
    }
    assert (await hand.ledger.tally()).issued == 0
    await hand.balanced()


async def test_few_are_asked_at_a_time(hand: Hand) -> None:
    """At most a share of the workers and of the tasks in flight, and at least one."""
    await hand.create()
    await hand.announce("gw", 1, 2, 3, 4, concurrent=True)
    evaluation = await begun(hand, 1, 2, 3, 4)
    tasks = [evaluation.task(task_id(n, bytes(10)), n) for n in (1, 2, 3, 4)]
    assert await hand.ledger.ask_devices(evaluation, 0.1, tasks) == (1, 1)
    assert await hand.ledger.ask_devices(evaluation, 0.5, tasks) == (2, 2)
    assert await hand.client.call("XLEN", hand.keys.tasks_of("gw")) == 2
    again = await hand.ledger.ask_devices(evaluation, 0.5, tasks)
    assert again == (2, 2), "no device is asked twice"
    await hand.open(device=4)
    assert await hand.ledger.ask_devices(evaluation, 0.75, tasks) == (3, 3)
    assert await hand.ledger.ask_devices(evaluation, 0.5, tasks) == (3, 1)
    assert await hand.ledger.ask_devices(evaluation, 1.0, tasks) == (4, 4)


async def test_devices_that_were_not_asked_in_time_count_too(hand: Hand) -> None:
    """Otherwise the counts would differ from the outcomes in the journal."""
    await hand.create()
    await hand.announce("gw", 1, 2, 3, 4, concurrent=True)
    evaluation = await begun(hand, 1, 2, 3, 4)
    task = evaluation.task(task_id(1, bytes(10)), 1)
    assert await hand.ledger.ask_devices(evaluation, 0.1, [task]) == (1, 1)
    assert await say(hand, task) == ("evaluated", "measured")
    task = evaluation.task(task_id(2, bytes(10)), 2)
    assert await hand.ledger.ask_devices(evaluation, 0.1, [task]) == (1, 1)
    assert await hand.ledger.end_evaluation(1, result(evaluation)) == "ended"
    assert await counts(hand) == {
        "evaluations": 4,
        "evaluated:measured": 1,
        "evaluated:no answer in time": 3,
    }
    assert await hand.ledger.ask_devices(evaluation, 0.1, [task]) == (0, 0)


async def test_tasks_go_to_the_owner(hand: Hand) -> None:
    await hand.create()
    await hand.announce("owner", 3, site="north")
    await hand.announce("t")
    evaluation = await begun(hand, 3, 4)
    [task] = await ask(hand, evaluation)  # of the pool
    assert task.device == 4
    stream = hand.keys.tasks_of("north/owner")
    group = Group(hand.client, stream, TRAINERS, "owner")
    await group.ensure()
    [entry] = await group.read(count=5, block_ms=0)
    owned = Evaluation.decode(entry.data)
    assert await say(hand, owned) == ("stray", "another site's task")
    assert await say(hand, owned, site="north") == ("evaluated", "measured")
    found = (await hand.ledger.tally()).reasons("stray")
    assert found == {"another site's task": 1}


async def test_no_site_says_of_itself_that_it_is_trusted(hand: Hand) -> None:
    """Nor that the answer came through another's inbox."""
    await hand.create()
    await hand.announce("owner", 3, site="north")
    evaluation = await begun(hand, 3)
    task = evaluation.task(task_id(3, bytes(10)), 3)
    await hand.ledger.ask_devices(evaluation, 1.0, [task])
    answer = Measured(
        task=task.task,
        attempt="a",
        device=3,
        trainer="owner",
        version=0,
        base=task.base,
        sums={"loss": (1.0, 2.0)},
        site=POOL,
        trusted=True,
    )
    await hand.client.call("XADD", hand.keys.inbox("north"), "*", "m", answer.encode())
    [entry] = await hand.heard("north")
    done = await hand.ledger.admit_measured("north", entry, answer, trusted=False)
    assert done == ("evaluated", "measured")
    stored = (await hand.ledger.answers())[3].measured
    assert stored is not None
    assert (stored.site, stored.trusted, stored.trainer) == ("north", False, "north/owner")


@pytest.mark.parametrize(
    ("about", "outcome"),
    [
        ({"reason": "raised ValueError"}, "raised ValueError"),
        ({"reason": "raised Ours"}, "raised another error"),
        ({"reason": "tired"}, "another reason"),
        ({"reason": "no test data"}, "no test data"),
        ({"sums": {}}, "metrics not finite"),
        ({"sums": {"loss": (float("nan"), 1.0)}}, "metrics not finite"),
        ({"sums": {"loss": (1.0, float("inf"))}}, "metrics not finite"),
        ({"sums": {"loss": (-1e31, 1.0)}}, "metrics not finite"),  # their squares overflow
        ({"sums": {"loss": (1.0, 1e-300)}}, "metrics not finite"),
    ],
)
async def test_outcomes_are_a_closed_set(hand: Hand, about: dict[str, Any], outcome: str) -> None:
    await hand.create()
    await hand.announce("t")
    [task] = await ask(hand, await begun(hand, 2))
    assert await say(hand, task, **about) == ("evaluated", outcome)
    assert (await hand.ledger.answers())[2].measured is None


async def test_an_answer_counts_once(hand: Hand) -> None:
    await hand.create()
    await hand.announce("t")
    evaluation = await begun(hand, 2)
    [task] = await ask(hand, evaluation)
    assert await say(hand, task) == ("evaluated", "measured")
    assert await say(hand, task) == ("evaluated", "measured")  # the same one again
    assert await say(hand, task, attempt="a2") == ("stray", "answered twice")
    assert await hand.ledger.end_evaluation(1, result(evaluation)) == "ended"
    assert await say(hand, task) == ("stray", "late")
    assert await counts(hand) == {"evaluations": 1, "evaluated:measured": 1}


@pytest.mark.parametrize("wrong", [{"version": 1}, {"base": "other"}])
async def test_an_answer_about_another_version_does_not_count(
    hand: Hand, wrong: dict[str, Any]
) -> None:
    await hand.create()
    await hand.announce("t")
    [task] = await ask(hand, await begun(hand, 2))
    assert await say(hand, task, **wrong) == ("evaluated", "not as asked")
    assert (await hand.ledger.answers())[2].measured is None


async def test_one_evaluation_is_open_at_a_time(hand: Hand) -> None:
    await hand.create()
    first = await begun(hand, 2)
    head = await hand.ledger.head()
    assert head is not None
    opened = (head, [3], LATER)
    nbytes = hand.layout.nbytes
    assert await hand.ledger.open_evaluation(first.id, *opened, nbytes=nbytes) == "begun"
    other = task_id(2, bytes(10))
    assert await hand.ledger.open_evaluation(other, *opened, nbytes=nbytes) == "other"
    await hand.ledger.end_evaluation(0, result(first))
    assert await hand.commit(1, await hand.admitted()) == "done"
    assert await hand.ledger.open_evaluation(other, *opened, nbytes=nbytes) == "moved"


async def test_an_evaluated_model_outlives_its_version(hand: Hand, client: Client) -> None:
    """It is spared until the evaluation ends; others are deleted at once."""
    first = await hand.create()
    evaluation = await begun(hand, 2)
    assert evaluation.task(FIRST, 2).blob == first.blob
    upload = await hand.admitted()
    assert await hand.commit(1, upload, retired=[first.blob]) == "done"
    assert await hand.model(first)
    assert await client.call("PTTL", hand.keys.model(first.blob)) == -1
    [second] = [one for one in await hand.published() if one.version == 1]
    assert await hand.commit(2, await hand.admitted(), retired=[second.blob]) == "done"
    assert not await client.call("EXISTS", hand.keys.model(second.blob))
    await hand.ledger.end_evaluation(0, result(evaluation))
    [(entry, _)] = await hand.queue()
    assert (
        await hand.commit(3, await hand.admitted(), entries=[entry], retired=[first.blob]) == "done"
    )
    assert not await client.call("EXISTS", hand.keys.model(first.blob))


@pytest.mark.parametrize(
    ("owners", "pool", "present"),
    [((), (), ()), ((), ("t",), range(10)), ((3, 8, 12), (), (3, 8)), ((3,), ("t",), range(10))],
)
async def test_devices_that_somebody_serves_are_present(
    hand: Hand, owners: Sequence[int], pool: Sequence[str], present: Sequence[int]
) -> None:
    await hand.create()
    for name in pool:
        await hand.announce(name)
    if owners:
        await hand.announce("owner", *owners)
    assert [*await hand.ledger.present(10)] == [*present]
