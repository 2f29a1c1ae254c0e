"""A journal that lost its end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.journal import JournalError, Taken, segments
from fedstream.strategies import FedAvgSettings
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.breaking import (
    COMMIT,
    CREATE,
    LATE,
    End,
    digests,
    floats,
    loses_its_end,
    makes_more,
    told,
)
from tests.updater.journalled import fails, makes, records

ROUNDS = FedAvgSettings(clients_per_round=3)


@pytest.mark.usefixtures("never_idle")
async def test_lost_end_of_a_finished_run_is_remade_from_the_queue(
    make: Any, hand: Hand, end: End, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(versions=3, **LATE), context()):
        await makes_more(hand, 4.0)
        end.begins()
        await makes_more(hand, 8.0, 0.0)
    end.is_lost()
    before = await hand.published()
    assert len(await hand.queue()) == 3
    idle_after(20)
    async with running(make(versions=3, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    made = [record for record in records(folder) if isinstance(record, Taken)]
    assert [(record.outcome, record.version) for record in made] == [
        ("applied", 1),
        ("applied", 2),
        ("applied", 3),
    ]
    assert made[-1].finished == "version 3 reached"
    assert await hand.published() == before
    assert await told(hand) == {0: before[0].digest} | digests(folder)
    view = await hand.ledger.look()
    assert (view.outcomes["applied"], view.outcomes["given_up"]) == (3, 0)
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
async def test_new_updates_behind_those_of_a_lost_end_are_published(
    make: Any, hand: Hand, end: End, folder: Path, idle_after: Callable[[int], None]
) -> None:
    """All are read together, but Redis has the versions of the first ones only."""
    async with running(make(**LATE), context()):
        await makes_more(hand, 4.0)
        end.begins()
        await makes_more(hand, 8.0, 0.0)
    end.is_lost()
    await hand.admitted(2.0)
    await hand.admitted(1.0)
    idle_after(20)
    async with running(make(**LATE), context()):
        await wait_until(hand.queue_is_empty)
    published = await hand.published()
    assert [(one.version, one.epoch) for one in published] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
    ]
    assert await told(hand) == {0: published[0].digest} | digests(folder)
    await hand.model(published[-1])  # checks the digest
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
async def test_adopting_uses_exactly_the_unfinished_updates(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(**LATE), context()):
        await makes_more(hand, 4.0)
    waiting = await hand.admitted(8.0)
    assert len(await hand.queue()) == 2
    shutil.rmtree(folder)
    idle_after(20)
    async with running(make(adopt=True, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    assert await hand.version() == 2
    assert [update.task for update in (await hand.published())[-1].updates] == [waiting.task]
    assert await floats(hand) == [5.0] * 4
    assert (await hand.ledger.look()).outcomes["applied"] == 2
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("base", [None, 1], ids=["on-the-newest", "on-what-the-journal-has"])
async def test_published_version_is_never_remade_differently(
    make: Any,
    hand: Hand,
    end: End,
    folder: Path,
    idle_after: Callable[[int], None],
    base: int | None,
) -> None:
    """Of versions 2 to 4 that the journal lost, the queue has only the last two updates."""
    await makes(hand, make(), 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), 8.0)
    about = {} if base is None else {"tau": base, "base": await hand.ledger.digest(base)}
    async with running(make(name="updater-2", **LATE), context()):
        for version, value in ((3, 2.0), (4, 16.0)):
            await hand.admitted(value, **about)
            await hand.reaches(version)
    end.is_lost()
    assert len(await hand.queue()) == 2
    idle_after(20)
    await fails(make(**LATE), JournalError, "ends with version 1, .* has 4, .*--adopt")
    assert list(digests(folder)) == [1]
    assert len(records(folder)) == 1
    model = (await floats(hand))[0]
    async with running(make(adopt=True, **LATE), context()):
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 4
    await makes(hand, make(), 0.0)  # an update on version 4, whatever that is
    await makes(hand, make(), 0.0)
    assert await floats(hand) == [model / 4] * 4
    published = await told(hand)
    made = digests(folder)
    assert made == {version: published[version] for version in (1, 5, 6)}
    await hand.balanced()


async def test_redis_emptied_while_remaking_follows_the_journal(
    make: Any, hand: Hand, client: Client, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loses_its_end(make, hand, end, 8.0, 8.0)
    updater = make(lease_s=0.4)
    emptied = False

    async def flush() -> None:
        nonlocal emptied
        if updater._loop.state.ahead is not None and not emptied:
            await client.call("FLUSHALL")
            emptied = True

    monkeypatch.setattr(updater._recorder, "flush", flush)
    async with running(updater, context()):
        await wait_until(lambda: emptied)
        await makes_more(hand, 4.0)
    assert await floats(hand) == [3.0] * 4
    assert await hand.version() == 2


@pytest.mark.usefixtures("never_idle")
async def test_update_counts_once_in_a_remade_round(
    make: Any,
    hand: Hand,
    redis: RedisSettings,
    end: End,
    folder: Path,
    idle_after: Callable[[int], None],
) -> None:
    async with running(make(ROUNDS, **LATE), context()):
        await hand.join()
        await hand.reaches(0)
        end.begins()
        for value in (4.0, 8.0, 0.0):
            await hand.admitted(value)
        await hand.reaches(1)
    end.is_lost()
    published = await told(hand)
    idle_after(20)
    asked = 0

    def refuse(data: bytes) -> bool:
        nonlocal asked
        asked += hand.keys.lineage.encode() in data
        return hand.keys.lineage.encode() in data and asked in (1, 4)

    async with Proxy(redis) as proxy:
        proxy.refuse = refuse
        async with running(make(ROUNDS, redis=proxy.settings, **LATE), context()):
            await wait_until(lambda: digests(folder))
        assert asked > 1
    assert published == {0: published[0]} | digests(folder)
    assert [record.outcome for record in records(folder) if isinstance(record, Taken)] == [
        "buffered",
        "buffered",
        "applied",
    ]


async def test_interrupted_adoption_is_completed(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    shutil.rmtree(folder)
    async with Proxy(redis) as proxy:
        proxy.refuse = lambda data: CREATE in data or COMMIT in data
        async with running(make(redis=proxy.settings, adopt=True), context()):
            await wait_until(lambda: segments(folder))
    await makes(hand, make(adopt=True), 4.0)
    await makes(hand, make(), 4.0)
    lineage = (await hand.ledger.run()).lineage
    assert {segment.head.lineage for segment in segments(folder)} == {lineage}
