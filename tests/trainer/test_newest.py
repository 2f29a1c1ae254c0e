"""Where training starts: the newest version, read once and never in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.core.errors import BlobMissing
from fedstream.core.formats import format_of
from fedstream.core.given import given, room_for
from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Encoded, Upload, Version
from fedstream.core.records import Commit, head_of
from fedstream.trainer.learner import Learner
from fedstream.trainer.solvers import Work
from fedstream.trainer.task import initial
from fedstream.trainer.vector import layout_of
from fedstream.trainer.workspace import Start
from tests.support import Hand, context, model_of, running, wait_until
from tests.trainer.adding import Adds, Make, answers
from tests.trainer.stepping import SGD, Adapted, content


async def test_model_is_read_once_per_version(hand: Hand, make: Make, task: Adds) -> None:
    first = await hand.create()
    async with running(make(), context()):
        await hand.open()
        await answers(hand)
        await hand.client.call("DEL", hand.keys.model(first.blob))  # who reads again, fails
        await hand.open(2)
        assert {answer.device for answer in await answers(hand, 3)} == {1, 2, 3}
        assert await hand.commit(1) == "done"
        await hand.open()
        last = (await answers(hand, 4))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1
    assert [version for _, version in task.seen] == [0, 0, 0, 1]


async def test_version_with_the_same_bits_is_another_version(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open()
        await answers(hand)
        model = await hand.publish(1, 0.0)
        commit = Commit(versions=[model], held=(), mean_staleness=0.0)
        assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
        await hand.open()
        last = (await answers(hand, 2))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1


async def published(hand: Hand, number: int, name: str, *floats: float) -> Version:
    """A version is published in a format."""
    one = given(
        model_of(hand.layout, *floats),
        format_of(name),
        version=number,
        sends="model",
        digests="sha256",
    )
    assert one.encoded is not None
    version = (await hand.publish(number, *floats, write=False)).model_copy(
        update={"format": name, "given": one.digest, "size": one.encoded.size}
    )
    key = hand.keys.model(version.blob)
    await blobs.write(hand.client, key, one.payload, expire_s=60, encoded=one.encoded)
    commit = Commit(versions=[version], held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
    return version


@pytest.mark.parametrize("name", ["bf16", "int8", "int8+zstd"])
async def test_device_trains_from_the_copy_that_it_was_given(
    hand: Hand, make: Make, name: str
) -> None:
    await hand.create()
    values = [1.23 - n / 7 for n in range(hand.layout.floats)]
    version = await published(hand, 1, name, *values)
    async with running(make(), context()):
        await hand.open()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.tau, upload.base) == (1, version.given)
    assert upload.base == await hand.ledger.given(1) != version.digest
    copy, trained = await hand.model(version), await content(hand, upload)
    assert 0 < np.abs(copy.floats - values).max() < 0.02
    assert trained.floats.tolist() == (copy.floats + np.float32(1)).tolist()  # as Adds does


async def test_unknown_format_is_waited_for(
    hand: Hand, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a later release: this one trains again from the next version that it can read."""
    tried: list[str] = []

    def noted(encoded: Encoded, layout: Layout) -> Payload:
        tried.append(encoded.format)
        return room_for(encoded, layout)

    monkeypatch.setattr("fedstream.broker.published.room_for", noted)
    await hand.create()
    strange = await hand.publish(1, 2.0)
    strange = strange.model_copy(update={"format": "fp4", "given": "unknown"})
    assert strange.encoded is not None
    await hand.client.call("HSET", hand.keys.model(strange.blob), "encoded", strange.encoded.text)
    commit = Commit(versions=[strange], held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
    async with running(make(), context()) as trainer:
        await hand.open()
        await wait_until(lambda: len(tried) > 1)
        assert not trainer.done()
        assert set(tried) == {"fp4"}
        await hand.commit(2)
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert upload.tau == 2


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

    monkeypatch.setattr("fedstream.trainer.attempt.blobs.read", noted)
    hand.layout = layout_of(task.model())
    await hand.create()
    async with running(make(task=task), context()):
        await hand.open()
        await answers(hand)
        half = await hand.publish(1, 5.0)
        assert await hand.client.call("HDEL", hand.keys.model(half.blob), 1)
        assert await hand.commit(1, write=False, versions=[half]) == "done"
        await hand.open()
        await wait_until(lambda: missing)
        again = await hand.publish(2, 0.0)
        assert await hand.commit(2, write=False, versions=[again]) == "done"
        _, upload = await answers(hand, 2)
    assert isinstance(upload, Upload)
    trained = await content(hand, upload)
    assert (upload.tau, set(trained.floats.tolist())) == (2, {1.0})


async def test_trainer_takes_the_runs_frozen_parameters(hand: Hand, make: Make) -> None:
    """Its own base is another one; the update contains neither."""
    task = Adapted()
    model = initial(task, 1)
    hand.layout, unshared = model.layout, model.layout.unshared
    trainer = make(task=task)
    hand.layout = model.layout
    assert unshared is not None
    await hand.create()
    async with running(trainer, context()):
        await hand.open(steps=3, epochs=None)
        await wait_until(lambda: trainer._run is None)
        head = head_of(unshared)
        key = hand.keys.model(head.blob)
        await blobs.write(hand.client, key, unshared.model(), expire_s=60, encoded=head.encoded)
        [answer] = await answers(hand)
    assert isinstance(answer, Upload)
    assert answer.size == model.layout.nbytes
    start, into = model_of(model.layout), Model(model.layout)
    work = Work(answer.device, answer.task, 0, answer.seed or 0, 3, None, SGD, lambda: False)
    Learner(lambda: task, 1, "cpu").train(Start(0, start.digest(), start), work, into, "model")
    assert answer.digest == into.digest()
