"""The scheduler against a real Redis: the other services' parts are played by hand."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.coordinator.policies import Anarchic, InFlight, Poisson
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings, kept, vectors
from fedstream.coordinator.scheduling import HELD_BY
from fedstream.core.errors import ConfigError
from fedstream.core.messages import Encoded, Trigger, Withdraw
from fedstream.core.records import Changes, Head, Run, Tally
from fedstream.settings.config import read
from fedstream.settings.services import _BUILDERS
from fedstream.trainer.devices import eligible
from tests.coordinator.waiting import are_open, asked, give_up, has_issued
from tests.support import (
    Clock,
    Hand,
    awaits_news,
    context,
    counted,
    layout_of,
    running,
    wait_until,
    with_frozen,
)


@pytest.mark.usefixtures("patient")
async def test_it_keeps_n_tasks_open(make: Any, run: Hand) -> None:
    watched = context()
    async with running(make(InFlight(n=3)), watched):
        first = await are_open(run, 3)
        assert len({trigger.device for trigger in first}) == 3
        await give_up(run, *first[:2])
        await has_issued(run, 5)
        assert len(await are_open(run, 3)) == 3
        await run.balanced()
        await run.announce("ann")  # what it opened it counts when its wait is over
        await wait_until(lambda: counted(watched, "fedstream_tasks_triggered_total") == 5)


async def test_device_that_has_rested_is_asked_again(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.scheduler.BLOCK_MS", 50)
    await run.announce("own", 3)
    async with running(make(InFlight(n=1), rest_s=0.5), context()):
        begun = time.monotonic()
        for n in range(1, 4):
            await has_issued(run, n)
            await give_up(run, *await are_open(run, 1))
        assert time.monotonic() - begun >= 2 * 0.5


async def test_it_looks_at_everything_once(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After that at what changed, for there may be very many tasks and devices."""
    whole: list[bool] = []
    look = SchedulerLedger._changes

    def watched(
        self: SchedulerLedger, reply: Any, own: Mapping[str, Trigger]
    ) -> tuple[Tally, Changes]:
        tally, changes = look(self, reply, own)
        whole.append(changes.all_tasks or changes.all_devices)
        return tally, changes

    monkeypatch.setattr(SchedulerLedger, "_changes", watched)
    await run.announce("own", 1, 2, 3)
    async with running(make(InFlight(n=2)), context()):
        for n in range(2, 8):
            await has_issued(run, n)
            await give_up(run, (await are_open(run, 2))[0])
        await run.announce("own", 1, 2)
        await wait_until(lambda: len(whole) > 8)
    assert whole == [True] + [False] * (len(whole) - 1)


async def test_what_the_log_does_not_tell_is_found_in_time(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier release ended one task and opened another: the number is the same."""
    monkeypatch.setattr("fedstream.coordinator.scheduler._WHOLE_S", 0.1)
    monkeypatch.setattr("fedstream.coordinator.scheduler.BLOCK_MS", 50)
    scheduler = make(InFlight(n=1))

    def known() -> list[str]:
        return [trigger.task for trigger in scheduler._mirror.tasks]

    async with running(scheduler, context()):
        [before] = await are_open(run, 1)
        await wait_until(lambda: known() == [before.task])
        after = run.trigger(device=before.device)
        call, key = run.client.call, run.keys.open
        script = ("HSET", key, after.task, after.encode()), ("HDEL", key, before.task)
        await run.client.pipeline([("MULTI",), *script, ("EXEC",)])
        await wait_until(lambda: known() == [after.task])
        assert await call("HLEN", key) == 1


async def test_clock_set_back_does_not_delay_the_next_task(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delay begins when the clock is set back, and not anew with every look."""
    clock = Clock(monkeypatch)
    clock.ahead_s = 3600.0

    async def open_now() -> int:
        return len((await run.ledger.look()).open)

    async with running(make(Poisson(rate=2.0)), context()):
        before: int = await wait_until(open_now)
        clock.ahead_s = 0.0

        async def one_more() -> bool:
            return await open_now() > before + 1  # one may have been decided on

        await wait_until(one_more)


async def test_it_follows_the_live_trainers(make: Any, run: Hand) -> None:
    async with running(make(InFlight()), context()):
        await are_open(run, 1)
        for name in ("ann", "bob", "cat"):
            await run.announce(name)
        await are_open(run, 3)


async def test_it_waits_for_a_run_and_rests_after_it(make: Any, hand: Hand) -> None:
    async with running(make(InFlight(n=2)), context()) as scheduler:
        await wait_until(lambda: awaits_news(hand.client, "scheduler-0"))
        assert not scheduler.done()
        hand.scheduler.number = 1  # not by hand here
        await hand.create()
        first = await are_open(hand, 2)
        await hand.ledger.finish("enough")
        await give_up(hand, *first)
        assert (await hand.ledger.look()).issued == 2
        assert not scheduler.done()


async def test_devices_are_asked_once_eligible(run: Hand, redis: RedisSettings, keys: Keys) -> None:
    there = {2}
    scheduler = Scheduler(
        SchedulerSettings(),
        InFlight(n=3),
        keys=keys,
        redis=redis,
        name="scheduler-0",
        seed=7,
        is_eligible=lambda of, device, now: (
            device in there and now > of.created and of.devices == 10
        ),
    )
    async with running(scheduler, context()):
        [first] = await are_open(run, 1)
        assert first.device == 2
        there |= {4, 8}  # of which nobody tells it
        assert {trigger.device for trigger in await are_open(run, 3)} == {2, 4, 8}


async def test_simulated_devices_are_asked_when_eligible(
    run: Hand, redis: RedisSettings, keys: Keys
) -> None:
    where = (f"redis.url={redis.url}", f"run.name={keys.name}")
    a_long_day = "devices.availability={kind='diurnal', period_s=1e12, share=0.5}"
    settings = read(None, [*where, "scheduler.policy={kind='in_flight', n=10}", a_long_day])
    scheduler, _ = _BUILDERS["scheduler"](settings, keys, "scheduler-0")
    of, at = run.run(), time.time()
    there = {
        device
        for device in range(of.devices)
        if eligible(settings.devices.availability, device, of.seed, at - of.created)
    }
    assert 0 < len(there) < of.devices
    async with running(scheduler, context()):
        opened = await are_open(run, len(there))
    assert {trigger.device for trigger in opened} == there


@pytest.mark.parametrize(
    ("steps", "key"),
    [
        ("{kind='fixed', n=100_000_000_000}", "n"),
        ("{kind='uniform', c=100_000_000_000}", "c"),
        ("{kind='epochs', n=100_000_000_000}", "n"),
    ],
)
def test_impossible_step_counts_are_rejected(steps: str, key: str) -> None:
    said = rf"^scheduler\.steps\.{key} = 100000000000 .*less than or equal to 1000000000$"
    with pytest.raises(ConfigError, match=said):
        read(None, [f"scheduler.steps={steps}"])


async def test_no_triggers_under_the_anarchic_policy(make: Any, run: Hand) -> None:
    async with running(make(Anarchic()), context()):
        await run.announce("ann")  # an event, which it looks at
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert (await run.ledger.look()).issued == 0


async def test_full_queue_holds_the_scheduler_back(make: Any, run: Hand, client: Client) -> None:
    """And its metrics show the reason for as long as it applies."""
    watched = context()

    def shown() -> dict[str, float | None]:
        value = watched.registry.get_sample_value
        return {by: value("fedstream_held_back", {"by": by}) for by in HELD_BY}

    free = dict.fromkeys(HELD_BY, 0.0)
    await client.pipeline([("XADD", run.keys.queue, "*", "m", b"x") for _ in range(4)])
    async with running(make(InFlight(n=3), max_queue=4), watched):
        await are_open(run, 1)
        await wait_until(lambda: shown() == free | {"queue": 1.0})
        await client.call("XTRIM", run.keys.queue, "MAXLEN", 1)
        await run.announce("ann")  # an event, at which it looks
        await are_open(run, 3)
        await wait_until(lambda: shown() == free)


async def test_redis_memory_holds_the_scheduler_back(
    make: Any, run: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.scheduler._BUDGET_HOLDS_S", 0.0)
    info = await client.call("INFO", "memory")
    used = int(info.split(b"used_memory:")[1].split()[0])
    limit = max(4 * used, 1 << 24)
    await client.call("CONFIG", "SET", "maxmemory", limit)
    # A model so large that 0.8 of maxmemory has room for five: two tasks, version 0, and 2.
    await client.call("HSET", run.keys.run, "tensors", big_layout(int(0.8 * limit / 5.5)))
    async with running(make(InFlight(n=9)), context()):
        await are_open(run, 2)
        await client.call("CONFIG", "SET", "maxmemory", 2 * limit)  # an operator gives it more
        await are_open(run, 8)


async def test_configured_budget_overrides_redis_memory(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has no limit here: nothing would be held back."""
    monkeypatch.setattr("fedstream.coordinator.scheduler._BUDGET_HOLDS_S", 0.0)
    await run.client.call("HSET", run.keys.run, "tensors", big_layout(1 << 20))
    async with running(make(InFlight(n=9), memory_budget=11 << 19), context()):
        first, _ = await are_open(run, 2)  # there is room for five: version 0, and 2
        await give_up(run, first)
        await has_issued(run, 3)
        assert len((await run.ledger.look()).open) == 2


def big_layout(nbytes: int) -> bytes:
    return layout_of(nbytes // 4).encode()


# tasks that take too long


@pytest.mark.usefixtures("patient")
async def test_task_that_never_ends_loses_its_slot(make: Any, run: Hand, clock: Clock) -> None:
    """Its trainer hangs and renews the lease for ever."""
    async with running(make(InFlight(n=2), task_timeout_s=900.0), context()):
        hung, other = await are_open(run, 2)
        assert await run.admit(await run.trained(other)) == [("admitted", "")]
        clock.ahead_s = 899.0
        await run.announce("ann")  # an event, which it looks at
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert not await asked(run)
        clock.ahead_s = 901.0
        await run.announce("bob")
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        await has_issued(run, 3)
        opened = await are_open(run, 2)
        assert hung.task not in {t.task for t in opened}
        assert other.task in {t.task for t in opened}, "its answer is in the queue"
        assert (await run.ledger.look()).reasons("given_up") == {"timed out": 1}
        for name in ("cat", "dan"):
            await run.announce(name)
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert "withdrawn" not in await run.dispatch(), "said once"
        await run.balanced()


@pytest.mark.usefixtures("patient")
async def test_scheduler_wakes_when_a_task_times_out(make: Any, run: Hand) -> None:
    async def withdrawn() -> bool:
        rows = await run.client.call("XRANGE", run.keys.triggers, "-", "+")
        return any(Withdraw.kind.encode() in row[1][1] for row in rows)

    async with running(make(InFlight(n=1), task_timeout_s=1.0), context()):
        await are_open(run, 1)
        await run.announce("ann")  # it looks, and plans its next waking
        await wait_until(withdrawn)


def test_versions_take_as_much_memory_as_was_published() -> None:
    head = Head(version=7, digest="d", blob="7.1", time=1.0, epoch=1)
    run = Run(layout_of(1000), "fedasync", "digits", 10, 100, 0, 1.5)
    seen = Tally(
        run=run,
        head=head,
        counts={},
        tasks=0,
        admitted=0,
        queue=0,
        triggers=0,
        inbox=0,
        trainers=1,
        workers=1,
        kept=5,
        dead=0,
        owners=0,
        pool=True,
        now=1.0,
    )
    assert kept(seen) == 5
    small = replace(head, encoded=Encoded("int8", 1016, "d"))
    assert kept(replace(seen, head=small)) == 2  # 5,080 bytes, in models of 4,000
    adapted = replace(seen.run, layout=with_frozen(seen.run.layout, *range(2500)))
    assert kept(replace(seen, run=adapted)) == 8  # 10,000 bytes more


def test_device_vectors_count_twice_in_memory() -> None:
    """What was handed out, and the copy of the site that has the device."""
    layout = layout_of(1000)
    assert vectors(layout, 10) == 0
    assert vectors(layout.with_controls(), 10) * layout.with_controls().nbytes == 10 * 2 * 4000
