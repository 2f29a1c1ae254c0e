"""What is found again, and a run that somebody ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.core.messages import CloseRound
from fedstream.journal import RoundClosed, Taken, segments
from fedstream.strategies import FedAvgSettings
from fedstream.updater.loop import Loop
from tests.support import Hand, Proxy, context, layout_of, model_of, running, wait_until
from tests.updater.breaking import LATE, Disk, floats, makes_more
from tests.updater.journalled import backed_up, forget_newest, go_back, held, makes, records

ROUNDS = FedAvgSettings(clients_per_round=3)


@pytest.mark.usefixtures("never_idle")
async def test_repeated_round_end_ends_no_other_round(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(ROUNDS, **LATE), context()):
        await hand.join()
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="nobody"))
        assert await hand.dispatch() == ["closed"]
        await wait_until(lambda: len(records(folder)) == 1)
        await hand.admitted(3.0)
        await wait_until(lambda: held(hand, 1))
    assert len(await hand.queue()) == 2
    idle_after(20)
    async with running(make(ROUNDS, **LATE), context()):
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 0
        assert await held(hand, 1)
        assert len(records(folder)) == 2


@pytest.mark.usefixtures("never_idle")
async def test_segment_remembers_earlier_round_ends(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(ROUNDS, segment_bytes=1, **LATE), context()):
        await hand.join()
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="nobody"))
        assert await hand.dispatch() == ["closed"]
        await wait_until(lambda: len(segments(folder)) == 2)
    assert len(await hand.queue()) == 1
    idle_after(20)
    async with running(make(ROUNDS, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    assert [type(record) for record in records(folder)] == [RoundClosed]


async def test_duplicate_updates_read_together_are_applied_once(
    make: Any, hand: Hand, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    first = await hand.admitted(8.0)
    second = await hand.trained(hand.trigger(task=first.task), 100.0, attempt="a2")
    await hand.slip_in(second)
    assert len(await hand.queue()) == 2
    updater = make()
    async with running(updater, context()):
        await wait_until(hand.queue_is_empty)
        # The second one's, begun before the first was decided on.
        assert updater._intake.arrived == {}
    assert await hand.version() == 2
    assert await floats(hand) == [5.0] * 4
    assert len(records(folder)) == 2
    await hand.balanced()


async def test_memory_stays_bounded_across_restarts(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 2)
    for _ in range(3):
        updater = make()
        await makes(hand, updater, 1.0, 1.0, 1.0)
        assert len(updater._loop.state.ends.done) == 2
        assert len(segments(folder)[-1].done()) <= 2
    async with running(make(), context()):
        await wait_until(lambda: len(segments(folder)) == 4)
        newest = segments(folder)[-1]
        assert (len(newest.done()), newest.standing.forgotten) == (2, 0)


async def test_prefetches_are_dropped_when_redis_falls_back(
    make: Any, hand: Hand, client: Client, disk: Disk, folder: Path
) -> None:
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    updater = make(lease_s=0.4)
    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        await client.pipeline(
            [
                ("MULTI",),
                ("HSET", hand.keys.head, "version", 0),
                ("HDEL", hand.keys.tokens, "updater"),
                ("DEL", hand.keys.leader("updater")),
                ("EXEC",),
            ]
        )
        await wait_until(lambda: updater._lease.number > 1)
        disk.full = False
        await hand.reaches(2)
        await makes_more(hand, 1.0, 1.0)
        await wait_until(hand.queue_is_empty)
        assert updater._intake.fetches == {}
    assert [record.version for record in records(folder)] == [1, 2, 3, 4]


async def test_update_lost_with_its_entry_is_not_refused(
    make: Any, hand: Hand, client: Client, disk: Disk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a fail-over to a replica that lags does it, before the updater had it."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    updater = make()
    read_new = updater._intake.read

    async def both_at_once(block_ms: int) -> bool:
        return len(await hand.queue()) == 3 and bool(await read_new(block_ms))

    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        with monkeypatch.context() as patched:
            patched.setattr(updater._intake, "read", both_at_once)
            patched.setattr(Loop, "_look", lambda self: None)
            await hand.admitted(3.0)
            lost = await hand.admitted(4.0)
            # Of which one is being fetched.
            await wait_until(lambda: len(updater._intake.backlog) == 2)
        await forget_newest(hand, lost)
        disk.full = False
        await hand.reaches(3)
        await blobs.write(
            client, hand.keys.update(lost.blob), model_of(hand.layout, 4.0), expire_s=60
        )
        assert await hand.admit(lost) == [("admitted", "")]  # it comes again
        await hand.reaches(4)
    taken = [record for record in records(folder) if isinstance(record, Taken)]
    assert [(one.upload.task == lost.task, one.outcome) for one in taken] == [
        (False, "applied"),
        (False, "applied"),
        (False, "applied"),
        (True, "applied"),
    ]
    await hand.balanced()


async def test_externally_finished_run_stays_finished_despite_a_fallback(
    make: Any, hand: Hand, client: Client, redis: RedisSettings, folder: Path
) -> None:
    """They say it again before the updater sees that Redis went back."""
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings)
        async with running(updater, context()):
            await hand.join()
            backup = await backed_up(client)
            await hand.admitted(4.0)
            await hand.reaches(1)
            proxy.reading.clear()
            await go_back(client, backup)
            await hand.ledger.finish("target")
            proxy.reading.set()
            await hand.reaches(1)
            await wait_until(lambda: updater._loop.state.finished)
            await wait_until(lambda: segments(folder)[-1].standing.finished == "target")
            run = await hand.ledger.run()
            assert (run.state, run.why) == ("finished", "target")


async def test_externally_finished_run_is_finished_again_if_redis_forgot(
    make: Any, hand: Hand, client: Client
) -> None:
    updater = make()
    async with running(updater, context()):
        await makes_more(hand, 4.0)
        await wait_until(hand.queue_is_empty)
        backup = await backed_up(client)
        await hand.ledger.finish("target")
        await wait_until(lambda: updater._loop.state.finished)
        await go_back(client, backup)

        async def ended() -> bool:
            run = await hand.ledger.run()
            return (run.state, run.why) == ("finished", "target")

        await wait_until(ended)
        assert await hand.version() == 1
