"""Where training starts: the newest version, read once and never in part."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.errors import BlobMissing
from fedstream.broker.layout import Model
from fedstream.broker.messages import Upload
from fedstream.broker.records import Commit
from fedstream.trainer.vector import layout_of
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Adds, Make, answers


async def test_model_is_read_once_per_version(hand: Hand, make: Make, task: Adds) -> None:
    first = await hand.create()
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        await answers(hand)
        await hand.client.call("DEL", hand.keys.model(first.blob))  # who reads again, fails
        await hand.open(2)
        await hand.dispatch()
        assert {answer.device for answer in await answers(hand, 3)} == {1, 2, 3}
        assert await hand.commit(1) == "done"
        await hand.open()
        await hand.dispatch()
        last = (await answers(hand, 4))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1
    assert [version for _, version in task.seen] == [0, 0, 0, 1]


async def test_version_with_the_same_bits_is_another_version(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        await answers(hand)
        model = await hand.publish(1, 0.0)
        commit = Commit(version=model, held=(), mean_staleness=0.0)
        assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
        await hand.open()
        await hand.dispatch()
        last = (await answers(hand, 2))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1


async def test_partially_read_model_is_never_trained_on(
    hand: Hand, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read over the one before, which is no more, though a version has its bits again."""
    task, read, missing = Adds(size=300_000), blobs.read, []

    async def noted(client: Client, key: str, into: Model, **about: Any) -> None:
        try:
            await read(client, key, into, **about)
        except BlobMissing:
            missing.append(key)
            raise

    monkeypatch.setattr("fedstream.trainer.start.blobs.read", noted)
    hand.layout = layout_of(task.model())
    await hand.create()
    async with running(make(task=task), context()):
        await hand.open()
        await hand.dispatch()
        await answers(hand)
        half = await hand.publish(1, 5.0)
        assert await hand.client.call("HDEL", hand.keys.model(half.blob), 1)
        assert await hand.commit(1, write=False, version=half) == "done"
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: missing)
        again = await hand.publish(2, 0.0)
        assert await hand.commit(2, write=False, version=again) == "done"
        _, upload = await answers(hand, 2)
    assert isinstance(upload, Upload)
    trained = Model(hand.layout)
    await read(
        hand.client,
        hand.keys.update(upload.blob),
        trained,
        digest=upload.digest,
        chunks=upload.chunks,
    )
    assert (upload.tau, set(trained.floats.tolist())) == (2, {1.0})
