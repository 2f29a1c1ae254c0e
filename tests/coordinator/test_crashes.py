"""The coordinator against a real Redis: what crashes, outages and lost connections leave
unfinished is finished, by the same coordinator or another one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import COORDINATORS, Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry, Group
from fedstream.core.errors import BrokerError
from fedstream.core.messages import Trigger, Upload
from tests.coordinator.waiting import dead, queued, tasks
from tests.support import Hand, Proxy, context, counted, running, wait_until


async def given_to(hand: Hand, name: str) -> tuple[Trigger, Upload]:
    """A trigger and an upload are delivered to a coordinator that crashes before it is done."""
    [known, new] = await hand.request(2)
    await hand.dispatch()
    upload = await hand.trained(known)
    await hand.client.call("XADD", hand.keys.triggers, "*", "m", new.encode())
    await hand.client.call("XADD", hand.keys.inbox("pool"), "*", "m", upload.encode())
    for stream in (hand.keys.triggers, hand.keys.inbox("pool")):
        group = Group(hand.client, stream, COORDINATORS, name)
        await group.ensure()
        assert len(await group.read()) == 1
    return new, upload


async def test_restarted_coordinator_finishes_its_work(make: Any, run: Hand) -> None:
    new, upload = await given_to(run, "coordinator-0")
    async with running(make(name="coordinator-0"), context()):
        assert await queued(run, 1) == [upload]
        found = await tasks(run, 3)  # two were there before
        assert found[-1][1].task == new.task
        await run.balanced()


async def test_another_coordinator_takes_over_unfinished_work(make: Any, run: Hand) -> None:
    _, upload = await given_to(run, "coordinator-0")
    async with running(make(name="coordinator-1", redeliver_s=0.05), context()):
        assert await queued(run, 1) == [upload]
        await tasks(run, 3)


async def test_entry_that_crashes_coordinators_becomes_a_dead_letter(make: Any, run: Hand) -> None:
    _, upload = await given_to(run, "coordinator-0")
    crashing = Group(run.client, run.keys.inbox("pool"), COORDINATORS, "coordinator-0")
    for _ in range(2):
        await crashing.claim(idle_ms=0, most=9, own=True)
    async with running(make(name="coordinator-0"), context()):
        [letter] = await dead(run, 1)
    assert (letter.stream, letter.reason, letter.deliveries) == (
        "inbox:pool",
        "crashed its coordinators",
        3,
    )
    assert Upload.decode(letter.data) == upload
    view = await run.ledger.look()
    assert upload.task not in {trigger.task for trigger in view.open}
    assert view.reasons("dead") == {"crashed its coordinators": 1}
    assert await run.queue() == []
    await run.balanced()


async def test_redis_outage_does_not_count_as_a_crash(
    make: Any, run: Hand, redis: RedisSettings
) -> None:
    admit = Script("admit")._sha.encode()
    [trigger] = await run.request()
    watched = context()
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), watched):
        proxy.refuse = lambda data: admit in data
        upload = await run.trained(trigger)
        await run.client.call("XADD", run.keys.inbox("pool"), "*", "m", upload.encode())
        retries = "fedstream_retries_total"
        await wait_until(lambda: counted(watched, retries, loop="entries") > 4)
        proxy.refuse = None
        await queued(run, 1)
        assert (await run.ledger.look()).dead == 0


async def test_lost_connections_neither_lose_nor_repeat_work(
    make: Any, run: Hand, redis: RedisSettings
) -> None:
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()):
        for n in range(1, 13):
            proxy.cut_reply_to = lambda data: b"EVALSHA" in data or b"XREADGROUP" in data
            [trigger] = await run.request()
            [(entry, task)] = await tasks(run, 1)
            assert task.task == trigger.task
            upload = await run.trained(task)
            await run.outbox.answer(run.keys.tasks, entry, upload)
            assert len(await queued(run, n)) == n
        assert proxy.cut_replies > 5
        view = await run.ledger.look()
        assert (view.dead, view.issued, view.admitted) == (0, 12, 12)
        await run.balanced()


async def test_recovers_after_redis_was_emptied(make: Any, run: Hand, client: Client) -> None:
    async with running(make(), context()):
        await run.request()
        await tasks(run, 1)
        await client.call("FLUSHALL")
        await run.scheduler.acquire()
        await run.updater.acquire()
        await run.ledger.create(run.updater.token, run.run(), await run.publish(0))
        await run.request()
        await tasks(run, 1)


async def test_entries_read_while_stopping_are_processed(
    make: Any, run: Hand, client: Client
) -> None:
    watched = context()
    async with running(make(), watched) as coordinator:
        await run.request()
        await tasks(run, 1)
        await wait_until(lambda: waits(client))
        watched.stop.set()
        await run.request()
        await coordinator
    pending = await client.call("XPENDING", run.keys.triggers, COORDINATORS)
    assert pending[0] == 0
    await run.balanced()


async def waits(client: Client) -> bool:
    """The coordinator blocks on its streams."""
    lines = (await client.call("CLIENT", "LIST")).splitlines()
    return any(b"name=coordinator-0" in line and b"flags=b" in line for line in lines)


async def test_repeatedly_crashing_entry_affects_no_other(
    make: Any, run: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    triggers = await run.request(3)
    given = Group(client, run.keys.triggers, COORDINATORS, "coordinator-0")
    await given.ensure()
    assert len(await given.read(count=3)) == 3
    dispatching = CoordinatorLedger.dispatch

    def dispatch(self: CoordinatorLedger, entry: Entry, trigger: Trigger, **limits: Any) -> Any:
        if trigger.task == triggers[1].task:
            raise RuntimeError("a bug")
        return dispatching(self, entry, trigger, **limits)

    monkeypatch.setattr(CoordinatorLedger, "dispatch", dispatch)
    for times in (2, 3):
        async with running(make(), context(), may_fail=True) as crashing:
            await wait_until(crashing.done)
        rows = await client.call("XPENDING", run.keys.triggers, COORDINATORS, "-", "+", 9)
        assert [row[3] for row in rows] == [times, 1]
    async with running(make(), context()):
        [letter] = await dead(run, 1)
        assert Trigger.decode(letter.data).task == triggers[1].task
        await tasks(run, 2)


async def long_ago(client: Client, keys: Keys) -> None:
    """What was given to the coordinator that crashed was given to it long ago."""
    for stream in (keys.triggers, keys.inbox("pool")):
        [(id_, *_)] = await client.call("XPENDING", stream, COORDINATORS, "-", "+", 1)
        idle = ("IDLE", 3_600_000, "JUSTID")
        await client.call("XCLAIM", stream, COORDINATORS, "crashed", 0, id_, *idle)


async def test_own_entries_are_recovered_before_claiming_others(
    make: Any, run: Hand, client: Client, redis: RedisSettings
) -> None:
    _, upload = await given_to(run, "crashed")
    await long_ago(client, run.keys)
    await run.announce("ann")
    watched = context()
    async with Proxy(redis) as proxy:
        proxy.refuse = lambda data: b"LOAD" in data  # with which it begins to find out
        async with running(make(redis=proxy.settings), watched):
            await wait_until(lambda: counted(watched, "fedstream_run_trainers") == 1)  # a sweep
            [(_, consumer, *_)] = await client.call(
                "XPENDING", run.keys.inbox("pool"), COORDINATORS, "-", "+", 9
            )
            assert consumer == b"crashed"
            proxy.refuse = None
            assert await queued(run, 1) == [upload]


async def test_failed_sweep_leaves_nothing_pending(
    make: Any, run: Hand, client: Client, redis: RedisSettings
) -> None:
    new, upload = await given_to(run, "crashed")
    await long_ago(client, run.keys)
    admit = Script("admit")._sha.encode()
    watched = context()
    async with Proxy(redis) as proxy:
        proxy.refuse = lambda data: admit in data
        async with running(make(redis=proxy.settings, redeliver_s=1800.0), watched):
            await wait_until(lambda: counted(watched, "fedstream_retries_total", loop="sweep") > 0)
            proxy.refuse = None
            assert await queued(run, 1) == [upload]  # and not half an hour later
            assert new.task in {task.task for _, task in await tasks(run, 3)}


async def test_permanent_error_while_reading_ends_it(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make()
    pipeline = coordinator._client.pipeline

    async def denied(commands: Any, **about: Any) -> Any:
        if any(command[0] == "XREADGROUP" for command in commands):
            raise BrokerError("Redis does not let us read")
        return await pipeline(commands, **about)

    monkeypatch.setattr(coordinator._client, "pipeline", denied)
    async with running(coordinator, context(), may_fail=True) as service:
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(service, 60)
    assert ended.group_contains(BrokerError, match="does not let us read")
