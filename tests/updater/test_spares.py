"""Memory for models, updates and published copies is used again, and never too early."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.core.layout import Model, Payload
from fedstream.updater.buffers import BufferPool
from tests.support import Hand, context, layout_of, running

LAYOUT = layout_of(10)


def test_room_is_used_again_for_as_many_bytes() -> None:
    spares = BufferPool()
    small, large = spares.room(10), spares.room(20)
    spares.give_back(small)
    spares.give_back(large)
    assert spares.room(10) is small
    assert spares.room(10) is not small
    assert spares.room(20) is large


def test_models_and_encoded_ones_are_kept_apart() -> None:
    spares, model = BufferPool(), Model(LAYOUT)
    spares.give_back(model)
    spares.give_back(Payload.empty(5))
    assert spares.room(LAYOUT.nbytes) is not model
    assert spares.model(LAYOUT) is model
    assert isinstance(spares.model(LAYOUT), Model)


def test_only_the_last_encoded_ones_are_kept() -> None:
    """Updates in top-k differ in size: what none fits into must not stay."""
    spares = BufferPool()
    given = [spares.room(size) for size in range(1, 10)]
    for one in given:
        spares.give_back(one)
    assert spares.encoded == given[-4:]


def test_what_is_in_use_is_left_alone_and_the_rest_kept_once() -> None:
    spares, busy, free, sent = BufferPool(), Model(LAYOUT), Model(LAYOUT), Payload.empty(3)
    spares.take_back([busy, free, sent, free, sent], in_use=[busy])
    assert spares.models == [free]
    assert spares.encoded == [sent]


@pytest.mark.parametrize("name", ["bf16", "int8"])
async def test_published_copies_take_no_new_memory(
    make: Any, hand: Hand, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones are written to Redis while the next is decided on."""
    hand.layout = layout_of(600_000)
    taken: list[int] = []
    empty = Payload.empty

    def counted(size: int) -> Payload:
        taken.append(size)
        return empty(size)

    async with running(make(published_as=name, keep_versions=20), context()):
        await hand.join()
        monkeypatch.setattr(Payload, "empty", counted)
        for burst in range(3):
            for n in range(1, 5):
                await hand.admitted(10.0 * burst + n)
            await hand.reaches(4 * burst + 4)
        assert 1 <= len(taken) <= 3
    published = await hand.published()
    assert len(published) == 13
    for version in published:
        await hand.model(version)  # checks the digest: nothing was written over too early
