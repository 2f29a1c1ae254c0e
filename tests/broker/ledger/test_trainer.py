"""A trainer answers once."""

from __future__ import annotations

from functools import partial

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.layout import Model
from tests.support import Hand, model_of


async def test_answer_is_sent_once_and_ends_the_lease(hand: Hand) -> None:
    await hand.create()
    await hand.open()
    await hand.dispatch()
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
    await hand.dispatch()
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
