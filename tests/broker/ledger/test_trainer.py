"""A trainer takes a task, and answers once."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS
from fedstream.broker.ledger.trainer import TrainerLedger
from fedstream.broker.streams import Group
from fedstream.core.errors import BrokerError
from fedstream.core.layout import Model
from fedstream.core.messages import Assignment
from tests.support import Hand, model_of, wait_until


async def blocked(client: Client) -> bool:
    """Whether anybody waits for an entry."""
    return b"flags=b" in await client.call("CLIENT", "LIST")


async def test_task_comes_with_the_version_that_is_newest_when_it_is_delivered(
    hand: Hand, redis: RedisSettings
) -> None:
    """Not when the trainer began to wait for it."""
    await hand.create()
    await hand.tasks.ensure()
    trainer = Client(redis, "trainer")
    ledger = TrainerLedger(trainer, hand.keys, "trainer")
    group = Group(trainer, hand.keys.tasks, TRAINERS, "trainer")
    assert await ledger.take(group, block_ms=1) is None
    taking = asyncio.create_task(ledger.take(group, block_ms=20_000))
    await wait_until(lambda: blocked(hand.client))
    assert await hand.commit(1) == "done"
    [trigger] = await hand.open()
    taken = await taking
    assert taken is not None
    assert Assignment.decode(taken.entry.data).task == trigger.task
    assert taken.newest == await hand.ledger.head()
    assert (await hand.version(), taken.again) == (1, False)
    await trainer.close()


async def test_group_of_trainers_lost_by_redis_is_recreated(hand: Hand) -> None:
    ledger = TrainerLedger(hand.client, hand.keys, "trainer")
    assert await ledger.take(hand.tasks) is None
    await hand.client.call("XADD", hand.keys.tasks, "*", "m", "x")
    taken = await ledger.take(hand.tasks)
    assert taken is not None
    assert (taken.entry.data, taken.newest) == (b"x", None)  # there is no version either


async def test_foreign_value_instead_of_tasks_is_no_lost_group(hand: Hand) -> None:
    await hand.client.call("SET", hand.keys.tasks, "no stream")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await TrainerLedger(hand.client, hand.keys, "trainer").take(hand.tasks)


async def test_answer_is_sent_once_and_ends_the_lease(hand: Hand) -> None:
    await hand.create()
    await hand.open()
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task)
    keys = hand.keys
    assert await hand.outbox.answer(keys.tasks, entry, upload) == "said"
    assert await hand.outbox.answer(keys.tasks, entry, upload) == "over"
    view = await hand.ledger.look(inboxes=True)
    assert (view.inbox, len(view.open)) == (1, 1)
    assert not await hand.tasks.renew(entry)


async def test_answer_waits_for_its_update_and_renews_its_expiry(
    hand: Hand, client: Client
) -> None:
    await hand.create()
    await hand.open()
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task, write=False)
    update, model = hand.keys.update(upload.blob), model_of(hand.layout, 1.0)
    answer = partial(hand.outbox.answer, hand.keys.tasks, entry, upload, expire_s=500)
    assert await answer() == "unwritten"
    assert (await hand.ledger.look(inboxes=True)).inbox == 0
    ahead = await blobs.prepare(client, update, model, expire_s=60)
    assert await answer(ahead=ahead) == "said"
    assert await client.call("PTTL", update) > 400_000
    await blobs.read(client, update, Model(hand.layout), digest=upload.digest, chunks=None)
