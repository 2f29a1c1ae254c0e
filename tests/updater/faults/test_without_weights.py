"""A journal without the updates' weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.core.errors import ConfigError
from fedstream.core.records import End as EndedTasks
from fedstream.core.records import Head
from fedstream.journal import segments
from fedstream.updater.loop import Loop
from fedstream.updater.recovery import Recovery
from fedstream.updater.state import Change, RunState
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.breaking import COMMIT, LATE, End, floats, loses_its_end, makes_more, tasks
from tests.updater.journalled import backed_up, fails, go_back, makes, reasons, records


async def test_without_weights_unpublished_updates_come_from_the_queue(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    async with (
        Proxy(redis) as proxy,
        running(make(redis=proxy.settings, weights=False), context()),
    ):
        await makes_more(hand, 4.0)
        proxy.refuse = lambda data: COMMIT in data
        await hand.admitted(8.0)
        await wait_until(lambda: len(records(folder)) == 2)
    async with running(make(weights=False), context()):
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    assert await floats(hand) == [5.0] * 4
    assert [record.version for record in records(folder)] == [1, 2]
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
async def test_without_weights_adopting_continues_from_redis_newer_version(
    make: Any, hand: Hand, end: End, folder: Path, idle_after: Callable[[int], None]
) -> None:
    about = {"weights": False, **LATE}
    async with running(make(**about), context()):
        [first] = await makes_more(hand, 4.0)
        end.begins()
        await makes_more(hand, 8.0)
    end.is_lost()
    idle_after(20)
    await fails(make(**about), ConfigError, "ends with version 1, .* has version 2, .*--adopt")
    async with running(make(adopt=True, **about), context()):
        await wait_until(hand.queue_is_empty)
        newest = segments(folder)[-1].standing
        assert (newest.why, newest.version, await hand.version()) == ("adopted", 2, 2)
        assert newest.sizes == ((8.0, 0.0, 0.0),)  # of the journal's one update: all 4 from 0
        await hand.slip_in(first)  # which the journal has
        await wait_until(hand.queue_is_empty)
        await hand.admitted(1.0, tau=1, base=await hand.ledger.digest(1))
        await wait_until(lambda: reasons(hand, "refused", {"too old": 1}))
        await hand.admitted(1.0)
        await hand.reaches(3)
    assert await floats(hand) == [3.0] * 4
    assert tasks(folder).count(first.task) == 1
    await makes(hand, make(**about), 1.0)
    await hand.balanced()


@pytest.mark.parametrize("remembered", [1, 100])
async def test_journalled_updates_are_not_recorded_again_after_adopting(
    make: Any, hand: Hand, end: End, folder: Path, remembered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was in memory or in the index."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", remembered)
    async with running(make(), context()):
        uploads = await makes_more(hand, 4.0, 4.0, 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), 4.0)
    end.is_lost()
    async with running(make(adopt=True), context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
        for upload in uploads:
            await hand.slip_in(upload)
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 4
    assert tasks(folder) == [one.task for one in uploads]
    assert len(segments(folder)[-1].standing.sizes) == 3
    await hand.balanced()


async def test_unjournalled_decisions_are_undone_by_adopting(
    make: Any, hand: Hand, end: End, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loses_its_end(make, hand, end, 4.0)
    updater = make(adopt=True)
    real, adopted = Recovery.adopt, list[RunState | None]()

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        state.ends.add(EndedTasks("found again", "1", "applied"))
        for task, record in (("found again", None), ("new", records(folder)[0])):
            end = EndedTasks(task, "1", "applied")
            updater._loop.unwritten.append(Change("1-0", record, (), state.progress, end=end))
            state.ends.decide(updater._loop.unwritten[-1])
        adopted.append(await real(recovery, state, ahead))
        return adopted[-1]

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(updater, context()):
        await wait_until(lambda: adopted)
        assert adopted[0] is not None
        assert adopted[0].ends.get("found again")
        assert not adopted[0].ends.get("new")
        assert updater._loop.unwritten == []


async def test_rediscovered_task_is_counted_once_despite_a_fallback(
    make: Any, hand: Hand, client: Client, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the journal, but nothing is written of its being found again."""
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings)
        real, found = Loop._decide, asyncio.Event()
        async with running(updater, context()):
            await hand.join()
            proxy.reading.clear()
            upload = await hand.admitted(4.0)
            backup = await backed_up(client)  # there it is open
            proxy.reading.set()
            await hand.reaches(1)
            await wait_until(hand.queue_is_empty)

            async def decide(loop: Loop) -> None:
                await real(loop)
                if loop.unwritten and not found.is_set():
                    assert [one.change.record for one in loop.unwritten] == [None]
                    await go_back(client, backup)
                    loop.state = loop.state.to_compare()  # as if the lease had been taken again
                    found.set()

            monkeypatch.setattr(Loop, "_decide", decide)
            await hand.slip_in(upload)
            await wait_until(found.is_set)
            await hand.reaches(1)
            await wait_until(hand.queue_is_empty)
            view = await hand.ledger.look()
            assert (view.issued, view.outcomes["applied"], view.open) == (1, 1, ())
