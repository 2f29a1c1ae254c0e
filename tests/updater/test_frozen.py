"""Frozen parameters: once on disk, once in Redis, and in no version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.published import with_unshared
from fedstream.core.errors import Unavailable
from fedstream.core.layout import Layout
from fedstream.core.records import head_of
from fedstream.journal import JournalDamaged, segments
from tests.support import Hand, context, running, wait_until, with_frozen
from tests.updater.journalled import fails, makes

VALUES = tuple(float(n) for n in range(2000))


@pytest.fixture
def layout(hand: Hand) -> Layout:
    """The run's: four trained parameters, and 2,000 frozen ones."""
    hand.layout = with_frozen(hand.layout, *VALUES)
    return hand.layout


def key_of(hand: Hand, layout: Layout) -> str:
    assert layout.unshared is not None
    return hand.keys.model(head_of(layout.unshared).blob)


def files(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def file_in(folder: Path) -> Path:
    """The only one with frozen values."""
    [name] = (name for name in files(folder) if name.endswith(".unshared"))
    return folder / name


async def read(hand: Hand) -> list[float]:
    """What any service reads from Redis."""
    whole = await with_unshared(hand.client, hand.keys, (await hand.ledger.run()).layout)
    assert whole.unshared is not None
    values: list[float] = whole.unshared.model().floats.tolist()
    return values


async def test_frozen_values_are_kept_once(
    make: Any, hand: Hand, layout: Layout, folder: Path
) -> None:
    async with running(make(segment_versions=2), context()):
        await hand.join()
        for version in range(1, 6):
            await hand.admitted(4.0)
            await hand.reaches(version)
        assert await read(hand) == [*VALUES]
        key = key_of(hand, layout)
        assert await hand.client.call("TTL", key) == -1
        assert len(await hand.client.call("KEYS", f"{hand.keys.prefix}model:unshared*")) == 1
    chain = segments(folder)
    assert len(chain) > 2
    assert {segment.head.needs for segment in chain} == {("unshared tensors",)}
    assert chain[-1].layout.unshared is not None
    assert chain[-1].layout.unshared.model().floats.tolist() == [*VALUES]
    assert file_in(folder).stat().st_mode & 0o077 == 0
    assert not {one for one in files(folder) if one.endswith(".tmp")}


async def test_emptied_redis_gets_the_frozen_values_from_the_journal(
    make: Any, hand: Hand, client: Client, layout: Layout
) -> None:
    await makes(hand, make(), 4.0)
    await client.call("FLUSHALL")
    async with running(make(), context()):  # another process, which never draws the model
        await hand.reaches(1)
        assert await read(hand) == [*VALUES]
        await client.call("UNLINK", key_of(hand, layout))
        with pytest.raises(Unavailable, match="frozen or local parameters are gone from Redis"):
            await read(hand)
        await wait_until(lambda: client.call("EXISTS", key_of(hand, layout)))
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(2)
        assert await read(hand) == [*VALUES]


async def test_damaged_frozen_values_are_reported_with_their_file(
    make: Any, hand: Hand, client: Client, layout: Layout, folder: Path
) -> None:
    """Neither Redis nor a device gets them."""
    await makes(hand, make(), 4.0)
    await client.call("FLUSHALL")
    file = file_in(folder)
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"x")
    await fails(
        make(), JournalDamaged, rf"{file.name}: the frozen or local parameters do not match"
    )
    file.write_bytes(whole)
    async with running(make(), context()):
        await hand.reaches(1)
        assert await read(hand) == [*VALUES]


async def test_adopted_run_takes_frozen_values_from_redis(
    make: Any, hand: Hand, layout: Layout, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    for name in files(folder):
        (folder / name).unlink()
    await makes(hand, make(adopt=True), 4.0)
    assert file_in(folder).stat().st_size == 8000
