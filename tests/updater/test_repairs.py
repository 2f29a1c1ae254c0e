"""What an updater mends of its own in Redis, and what it says when nothing comes any more."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import structlog

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from tests.support import Hand, at_rest, context, counted, layout_of, running, wait_until
from tests.updater.breaking import Disk, makes_more
from tests.updater.journalled import forget_newest


@pytest.fixture(autouse=True)
def often_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks around whenever nothing has come for so long."""
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def _delete(client: Client, key: str) -> None:
    await client.call("UNLINK", key)


async def _lose_a_chunk(client: Client, key: str) -> None:
    await client.call("HDEL", key, 1)


async def _replace(client: Client, key: str) -> None:
    await client.call("UNLINK", key)
    await client.call("SET", key, b"no blob")


@pytest.mark.parametrize("damage", [_delete, _lose_a_chunk, _replace])
async def test_missing_newest_model_is_rewritten(
    make: Any, hand: Hand, client: Client, damage: Any
) -> None:
    """Nobody could begin a task any more, and a restart would find head and digest as they were."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 10)  # two chunks
    about = context()
    async with running(make(), about):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        before = await hand.ledger.look()
        await damage(client, hand.keys.model((await hand.published())[-1].blob))
        await wait_until(lambda: counted(about, "fedstream_models_repaired_total") == 1)

        async def there() -> bool:
            head = await hand.ledger.head()
            assert head
            key = hand.keys.model(head.blob)
            return await blobs.keep(client, key, hand.layout.nbytes, chunks=head.chunks)

        await wait_until(there)
        head = await hand.ledger.head()
        assert head
        assert (head.version, head.digest) == (1, before.head.digest)
        assert await client.call("PTTL", hand.keys.model(head.blob)) == -1
        assert (await hand.ledger.look()).counts == before.counts
        await hand.admitted(8.0)
        await hand.reaches(2)
        await hand.balanced()
    assert counted(about, "fedstream_models_repaired_total") == 1


async def test_restart_checks_the_newest_model(make: Any, hand: Hand, client: Client) -> None:
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
    [*_, newest] = await hand.published()
    await client.call("UNLINK", hand.keys.model(newest.blob))
    async with running(make(), context()):

        async def again() -> bool:
            [*_, told] = await hand.published()
            return (told.version, told.blob) != (1, newest.blob) and told.version == 1

        await wait_until(again)
        assert (await hand.model((await hand.published())[-1])).floats.tolist() == [2.0] * 4


async def test_late_expiry_is_removed_from_the_newest_model(
    make: Any, hand: Hand, client: Client
) -> None:
    """A request that its sender gave up may arrive when the model is published."""
    about = context()
    async with running(make(), about):
        await hand.reaches(0)
        [version] = await hand.published()
        key = hand.keys.model(version.blob)
        await client.call("PEXPIRE", key, 600_000)

        async def stays() -> bool:
            return bool(await client.call("PTTL", key) == -1)

        await wait_until(stays)
    assert counted(about, "fedstream_models_repaired_total") == 0
    assert len(await hand.published()) == 1


async def test_late_duplicate_commit_keeps_the_model(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """What rides ahead of it gives the published model an expiry again."""
    await hand.create()
    assert await hand.commit(1) == "done"
    [*_, version] = await hand.published()
    assert await client.call("PEXPIRE", keys.model(version.blob), 600_000) == 1
    assert await hand.commit(1, write=False) == "done"
    assert await client.call("PTTL", keys.model(version.blob)) == -1


async def test_stalled_run_is_logged(make: Any, hand: Hand) -> None:
    with structlog.testing.capture_logs() as logs:

        def told() -> list[Any]:
            return [one for one in logs if "no version is made" in one["event"]]

        updater = make()
        async with running(updater, context()):
            await hand.join()
            updater._loop.upkeep.heard = -math.inf
            await wait_until(lambda: updater._loop.upkeep.heard > 0)
            assert told() == []  # no task is open
            await hand.open(2)
            updater._loop.upkeep.heard -= 1000
            await wait_until(told)
            await hand.admitted(4.0)
            await hand.reaches(1)
    [one] = told()
    assert (one["log_level"], one["open"]) == ("error", 2)
    assert one["seconds"] >= 1000


async def test_purge_under_running_services_keeps_counts_right(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys go at once, also those that are not there while it looks."""
    async with running(make(), context()):
        await hand.join()
        for n in range(3):
            await hand.admitted(4.0)
            await hand.reaches(n + 1)
        asked: list[tuple[Any, ...]] = []
        real = client.call

        async def call(*command: Any, **options: Any) -> Any:
            asked.append(command)
            return await real(*command, **options)

        with monkeypatch.context() as heard:
            heard.setattr(hand.ledger._client, "call", call)
            await hand.ledger.purge()
        [unlinked] = [command for command in asked if command[0] == "UNLINK"]
        core = {hand.keys.counts, hand.keys.open, hand.keys.head, hand.keys.queue}
        assert {name.encode() for name in core} <= set(unlinked[1:])
        await hand.reaches(3)
        assert (await hand.ledger.look()).counts["applied"] == 3
        await hand.balanced()
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(4)
        assert (await hand.ledger.look()).counts["applied"] == 4
        await hand.balanced()


# a queue that stays empty


async def test_older_models_are_freed_even_when_idle(make: Any, hand: Hand, client: Client) -> None:
    """Trainers can't write their updates, and so nothing comes that would have them freed."""
    hand.layout = layout_of(250_000)
    async with running(make(), context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        await wait_until(hand.queue_is_empty)
        await client.call("CONFIG", "SET", "maxmemory", await at_rest(hand) + 500_000)

        async def freed() -> bool:
            return list((await hand.ledger.kept()).values()) == [4]

        await wait_until(freed)


async def test_stale_prefetches_are_dropped(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its model, and the one place there is for an update that is read ahead."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    updater = make()
    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        lost = await hand.admitted(3.0)
        await wait_until(lambda: updater._intake.fetches)
        await forget_newest(hand, lost, ("HSET", hand.keys.head, "version", 0))
        updater._intake.backlog.clear()  # or it would be taken before the rest is known
        disk.full = False
        await hand.reaches(2)
        await wait_until(lambda: not updater._intake.fetches)
