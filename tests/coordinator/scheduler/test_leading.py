"""The scheduler against a real Redis: its lease, who comes after it, and outages."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.coordinator.policies import InFlight
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings
from fedstream.core.errors import Fenced, Unavailable
from fedstream.core.messages import Assignment
from fedstream.core.records import Run, Tally
from fedstream.runtime.service import lead
from tests.coordinator.waiting import are_open, give_up, has_issued
from tests.support import Hand, Pauses, Proxy, context, running, wait_until


async def test_lease_is_renewed_while_waiting_for_eligible_devices(
    run: Hand, redis: RedisSettings, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them take a while."""
    pauses = Pauses(0.02)
    monkeypatch.setattr("fedstream.runtime.service.pause", pauses)
    looking, found = threading.Event(), threading.Event()
    waited: list[bool] = []

    def is_eligible(_of: Run, _device: int, _now: float) -> bool:
        looking.set()
        waited.append(found.wait(0 if False in waited else 60))
        return True

    scheduler = Scheduler(
        SchedulerSettings(lease_s=20.0),
        InFlight(n=1),
        keys=keys,
        redis=redis,
        name="scheduler-0",
        seed=7,
        is_eligible=is_eligible,
    )
    left_ms: list[int] = []

    async def renewals() -> int:
        left_ms.append(await run.client.call("PTTL", keys.leader("scheduler")))
        assert left_ms[-1] > 0
        return sum(later > earlier for earlier, later in pairwise(left_ms))

    async def goes_on() -> bool:
        return await renewals() >= 3

    async with running(scheduler, context()):
        await wait_until(looking.is_set)
        await wait_until(goes_on)
        found.set()
        await are_open(run, 1)
    assert all(waited)
    assert set(pauses.asked_s) == {5.0}  # a quarter of the lease


async def test_decisions_after_an_outage_use_fresh_state(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tally] = []
    decide = Scheduler._decide

    async def failing(self: Scheduler, view: Tally) -> Tally:
        seen.append(view)
        if len(seen) == 2:
            await run.announce("ann")  # since it looked
            raise Unavailable("for a moment")
        return await decide(self, view)

    monkeypatch.setattr(Scheduler, "_decide", failing)
    async with running(make(InFlight(n=1)), context()):
        await wait_until(lambda: len(seen) > 2)
    assert [view.trainers for view in seen[1:3]] == [0, 1]


async def test_standby_continues_the_leaders_draws(make: Any, run: Hand, client: Client) -> None:
    async def chosen() -> list[tuple[int, int]]:
        rows = await client.call("XRANGE", run.keys.tasks, "-", "+")
        return [(t.device, t.seed) for t in (Assignment.decode(row[1][1]) for row in rows)]

    async with running(make(InFlight(n=6)), context()):
        await are_open(run, 6)
        whole = await chosen()

    async def took_over() -> bool:
        holder = await client.call("GET", run.keys.leader("scheduler")) or b""
        if holder.startswith(b"scheduler-1|"):
            return True
        await client.call("DEL", run.keys.leader("scheduler"))  # as often as the first renews it
        return False

    await client.call("DEL", run.keys.tasks, run.keys.open, run.keys.counts)
    async with running(make(InFlight(n=3)), context(), may_fail=True):  # once it is replaced
        await are_open(run, 3)
        standby = make(InFlight(n=6), name="scheduler-1", lease_s=0.2)
        async with running(standby, context()) as next_one:
            assert not next_one.done()
            await wait_until(took_over)
            await are_open(run, 6)
    assert await chosen() == whole


async def test_replaced_scheduler_exits(make: Any, run: Hand) -> None:
    async with running(make(InFlight(n=1)), context(), may_fail=True) as deposed:
        first = await are_open(run, 1)

        async def replaced() -> bool:
            await run.client.call("DEL", run.keys.leader("scheduler"))
            return await run.scheduler.acquire()  # not if it was renewed in between

        await wait_until(replaced)
        await give_up(run, *first)
        await wait_until(deposed.done)
        assert isinstance(error := deposed.exception(), BaseExceptionGroup)
        assert error.subgroup(Fenced)
        assert (await run.ledger.look()).issued == 1


async def test_lost_replies_open_no_task_twice(make: Any, run: Hand, redis: RedisSettings) -> None:
    async with Proxy(redis) as proxy, running(make(InFlight(n=2), redis=proxy.settings), context()):
        first = await are_open(run, 2)
        for n in range(3, 10):
            proxy.cut_reply_to = lambda _: True
            await give_up(run, first[0])
            first = await are_open(run, 2)
            await has_issued(run, n)
        assert proxy.cut_replies > 2
        await run.balanced()


async def test_recovers_after_redis_was_emptied(make: Any, run: Hand, client: Client) -> None:
    async with running(make(InFlight(n=2), lease_s=0.2), context()):
        await are_open(run, 2)
        await client.call("FLUSHALL")
        await run.updater.acquire()
        version = await run.publish(0)
        await run.ledger.create(run.updater.token, run.run(), version)
        await are_open(run, 2)
        assert (await run.ledger.look()).issued == 2


async def test_long_lease_is_renewed_often_enough(
    run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.runtime.service._PAUSE_S", 0.02)
    lease, watched = Lease(run.client, run.keys, "scheduler", "s", seconds=3600), context()
    working = asyncio.Event()
    held = 0
    hold = lease.hold

    async def counting() -> bool:
        nonlocal held
        held += 1
        return await hold()

    monkeypatch.setattr(lease, "hold", counting)

    async def work() -> None:
        working.set()
        await watched.stop.wait()

    leading = asyncio.create_task(lead(watched, lease, work))
    await working.wait()
    await wait_until(lambda: held > 3)
    watched.stop.set()
    await leading
