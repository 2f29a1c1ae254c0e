"""The scheduler against a real Redis: the other services' parts are played by hand."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.encoded import Encoded
from fedstream.broker.errors import ConfigError, Fenced, Unavailable
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.broker.messages import Assignment, CloseRound, GiveUp, RoundEnd, Trigger, Withdraw
from fedstream.broker.records import Changes, Commit, End, Head, Run, Tally
from fedstream.coordinator.mirror import Mirror
from fedstream.coordinator.policies import Anarchic, InFlight, Poisson, Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings, kept, vectors
from fedstream.runtime.leading import lead
from fedstream.settings.config import read
from fedstream.settings.services import _BUILDERS
from fedstream.trainer.devices import eligible
from tests.support import (
    Clock,
    Hand,
    Pauses,
    Proxy,
    awaits_news,
    context,
    counted,
    layout_of,
    running,
    wait_until,
)


@pytest.fixture
def make(redis: RedisSettings, keys: Keys) -> Any:
    """A scheduler."""

    def make(
        policy: Policy | Rounds,
        *,
        name: str = "scheduler-0",
        redis: RedisSettings = redis,
        **settings: Any,
    ) -> Scheduler:
        return Scheduler(
            SchedulerSettings(**settings), policy, keys=keys, redis=redis, name=name, seed=7
        )

    return make


@pytest.fixture
async def run(hand: Hand) -> Hand:
    """A run, whose scheduler is still to come."""
    await hand.create()
    await hand.scheduler.release()
    return hand


async def are_open(hand: Hand, n: int) -> tuple[Trigger, ...]:
    """Waits until exactly so many tasks are open."""

    async def there() -> bool:
        return len((await hand.ledger.look()).open) == n

    await wait_until(there, what=f"{n} open")
    return (await hand.ledger.look()).open


async def give_up(hand: Hand, *triggers: Trigger) -> None:
    for t in triggers:
        answer = GiveUp(
            task=t.task, attempt="1", device=t.device, trainer="t", reason="dropped out"
        )
        assert await hand.admit(answer) == [("given_up", "dropped out")]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for news longer than any test: what it does then, news have it do."""
    monkeypatch.setattr("fedstream.coordinator.scheduler.BLOCK_MS", 3_600_000)


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


async def test_opened_tasks_count_even_if_the_look_after_them_fails(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it can if the mirror must look at everything again."""
    follow, look = Mirror.follow, SchedulerLedger.changes
    followed, looked = [True, False], [True, False]  # at the start, and after tasks were opened

    def follows(self: Mirror, *seen: Any) -> bool:
        return follow(self, *seen) and (not followed or followed.pop(0))

    async def looks(self: SchedulerLedger, *place: Any) -> tuple[Tally, Changes]:
        if looked and not looked.pop(0):
            raise Unavailable("cut off")
        return await look(self, *place)

    monkeypatch.setattr(Mirror, "follow", follows)
    monkeypatch.setattr(SchedulerLedger, "changes", looks)
    about = context()
    async with running(make(InFlight(n=3)), about):
        await are_open(run, 3)
        await wait_until(lambda: not looked)
        await give_up(run, (await run.ledger.look()).open[0])
        await wait_until(lambda: counted(about, "fedstream_tasks_triggered_total") >= 1)
        await are_open(run, 3)
        await run.announce("ann")  # what it opened it counts when its wait is over
        await wait_until(lambda: counted(about, "fedstream_tasks_triggered_total") == 4)


@pytest.mark.parametrize("policy", [InFlight(n=9, mean_delay_s=0.5), Poisson(rate=2.0)])
async def test_clock_set_back_does_not_delay_the_next_task(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch, policy: Policy | Rounds
) -> None:
    """A delay begins when the clock is set back, and not anew with every look."""
    clock = Clock(monkeypatch, "fedstream.coordinator.scheduler")
    clock.ahead_s = 3600.0

    async def open_now() -> int:
        return len((await run.ledger.look()).open)

    async with running(make(policy), context()):
        before: int = await wait_until(open_now)
        clock.ahead_s = 0.0

        async def one_more() -> bool:
            return await open_now() > before + 1  # one may have been decided on

        await wait_until(one_more)


async def issued(hand: Hand, n: int) -> bool:
    return (await hand.ledger.look()).issued == n


async def has_issued(hand: Hand, n: int) -> None:
    await wait_until(lambda: issued(hand, n), what=f"{n} issued")


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


async def test_only_owned_devices_are_asked(make: Any, run: Hand) -> None:
    await run.announce("owner", 3, 8)
    async with running(make(InFlight(n=5)), context()):
        assert {trigger.device for trigger in await are_open(run, 2)} == {3, 8}


async def test_pool_is_asked_for_unowned_devices(make: Any, run: Hand) -> None:
    await run.announce("owner", 3, 8)
    await run.announce("ann")
    async with running(make(InFlight(n=10)), context()):
        assert {trigger.device for trigger in await are_open(run, 10)} == set(range(10))


async def test_devices_are_asked_once_eligible(run: Hand, redis: RedisSettings, keys: Keys) -> None:
    there = {2}
    scheduler = Scheduler(
        SchedulerSettings(), InFlight(n=3), keys=keys, redis=redis, name="scheduler-0", seed=7,
        is_eligible=lambda of, device, now: (
            device in there and now > of.created and of.devices == 10
        ),
    )  # fmt: skip
    async with running(scheduler, context()):
        [first] = await are_open(run, 1)
        assert first.device == 2
        there |= {4, 8}  # of which nobody tells it
        assert {trigger.device for trigger in await are_open(run, 3)} == {2, 4, 8}


async def test_lease_is_renewed_while_waiting_for_eligible_devices(
    run: Hand, redis: RedisSettings, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them take a while."""
    pauses = Pauses(0.02)
    monkeypatch.setattr("fedstream.runtime.leading.pause", pauses)
    looking, found = threading.Event(), threading.Event()
    waited: list[bool] = []

    def is_eligible(_of: Run, _device: int, _now: float) -> bool:
        looking.set()
        waited.append(found.wait(0 if False in waited else 60))
        return True

    scheduler = Scheduler(
        SchedulerSettings(lease_s=20.0), InFlight(n=1), keys=keys, redis=redis,
        name="scheduler-0", seed=7, is_eligible=is_eligible,
    )  # fmt: skip
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
    await client.pipeline([("XADD", run.keys.queue, "*", "m", b"x") for _ in range(4)])
    async with running(make(InFlight(n=3), max_queue=4), context()):
        await are_open(run, 1)
        await client.call("XTRIM", run.keys.queue, "MAXLEN", 1)
        await run.announce("ann")
        await are_open(run, 3)


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


def big_layout(nbytes: int) -> bytes:
    return layout_of(nbytes // 4).encode()


# rounds


async def test_rounds_follow_versions_and_close_old_tasks(make: Any, run: Hand) -> None:
    async with running(make(Rounds(k=3)), context()):
        first = await are_open(run, 3)
        assert {trigger.version for trigger in first} == {0}
        answered, *late = first
        upload = await run.trained(answered)
        assert await run.admit(upload) == [("admitted", "")]
        assert await run.commit(1, upload) == "done"
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["closed"]
        second = await wait_until(lambda: of_version(run, 1, 3))
        assert {t.task for t in second}.isdisjoint({t.task for t in late})
        assert (await run.ledger.look()).reasons("given_up") == {"round over": 2}
        [(_, end)] = await run.queue()
        assert end == RoundEnd(version=0, why="round over")
        await run.balanced()


async def asked(hand: Hand) -> bool:
    return int(await hand.client.call("XLEN", hand.keys.triggers)) > 0


async def of_version(hand: Hand, version: int, n: int) -> tuple[Trigger, ...]:
    found = (await hand.ledger.look()).open
    mine = tuple(trigger for trigger in found if trigger.version == version)
    return mine if len(mine) == n else ()


async def test_given_up_tasks_of_a_round_are_replaced(make: Any, run: Hand) -> None:
    async with running(make(Rounds(k=3)), context()):
        first = await are_open(run, 3)
        await give_up(run, first[0])
        await has_issued(run, 4)
        now = await are_open(run, 3)
        assert {trigger.version for trigger in now} == {0}


@pytest.mark.usefixtures("patient")
async def test_timed_out_round_ends_with_its_arrivals(make: Any, run: Hand, clock: Clock) -> None:
    async with running(make(Rounds(k=3, timeout_s=600.0)), context()):
        first = await are_open(run, 3)
        upload = await run.trained(first[0])
        assert await run.admit(upload) == [("admitted", "")]
        clock.ahead_s = 601.0
        await run.announce("bob")  # an event, which it looks at
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        # The updater is slow: what is in the queue is counted before anything is decided.
        await run.announce("ann")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert (await run.ledger.look()).issued == 3
        buffered = End(task=upload.task, attempt=upload.attempt, outcome="buffered")
        commit = Commit(held=[upload.device], retained=1, mean_staleness=0.0, ends=[buffered])
        assert (await run.ledger.commit(run.updater.token, commit)).what == "done"
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["closed"]
        [(_, queued), (_, end)] = await run.queue()
        assert (queued, end) == (upload, RoundEnd(version=0, why="round over"))
        await run.announce("cat")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert (await run.ledger.look()).issued == 3, "nor until the end of the round is seen"
        entries = [id_ for id_, _ in await run.queue()]
        assert await run.commit(1, entries=entries, updates=[upload.blob]) == "done"
        # A version wakes it, though no task ended with it.
        second = await wait_until(lambda: of_version(run, 1, 3))
        assert all(t.deadline and t.deadline > time.time() + 601.0 for t in second)


async def test_timed_out_round_without_arrivals_restarts(
    make: Any, run: Hand, client: Client, clock: Clock
) -> None:
    async with running(make(Rounds(k=2, timeout_s=600.0)), context()):
        await are_open(run, 2)
        clock.ahead_s = 601.0
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        await has_issued(run, 4)
        again = await are_open(run, 2)
        assert all(t.version == 0 and t.deadline and t.deadline > clock.time() for t in again)
        assert (await run.ledger.look()).reasons("given_up") == {"deadline passed": 2}
        assert await run.queue() == []
        await run.balanced()


@pytest.mark.usefixtures("patient")
async def test_round_with_too_few_answers_keeps_them_and_asks_others(
    make: Any, run: Hand, clock: Clock
) -> None:
    watched = context()
    async with running(make(Rounds(k=3, min_answers=2, timeout_s=600.0)), watched):
        first, *late = await are_open(run, 3)
        upload = await run.trained(first)
        assert await run.admit(upload) == [("admitted", "")]
        held = Commit(
            held=[upload.device], mean_staleness=0.0,
            ends=[End(task=upload.task, attempt=upload.attempt, outcome="buffered")],
            entries=[entry for entry, _ in await run.queue()], updates=[upload.blob],
        )  # fmt: skip
        assert (await run.ledger.commit(run.updater.token, held)).what == "done"
        clock.ahead_s = 601.0
        await run.announce("bob")  # an event, which it looks at
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        await has_issued(run, 5)
        again = await are_open(run, 2)
        assert first.device not in {t.device for t in again}
        assert {t.task for t in again}.isdisjoint({t.task for t in late})
        assert all(t.version == 0 and t.deadline and t.deadline > clock.time() for t in again)
        assert await run.queue() == [], "no end of the round"
        await wait_until(lambda: counted(watched, "fedstream_rounds_again_total") == 1)
        await run.balanced()


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


# leading


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


async def test_closing_a_round_is_requested_once(make: Any, run: Hand, client: Client) -> None:
    await one_is_held(run)
    async with running(make(Rounds(k=2, timeout_s=0.1)), context()):
        await wait_until(lambda: asked_to_close(run, 1))
        for _ in range(3):  # events, at which it looks again
            await run.announce("ann")
            await run.ledger.leave(b"ann")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert await asked_to_close(run, 1)


async def one_is_held(hand: Hand) -> None:
    """A device has answered: the round can end with that."""
    head = Commit(held=[0], mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, head)).what == "done"


async def asked_to_close(hand: Hand, n: int) -> bool:
    rows = await hand.client.call("XRANGE", hand.keys.triggers, "-", "+")
    return sum(CloseRound.kind.encode() in row[1][1] for row in rows) == n


async def test_lost_round_end_is_requested_again(
    make: Any, run: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.scheduler._ASK_AGAIN_S", 0.5)
    await one_is_held(run)
    async with running(make(Rounds(k=2, timeout_s=0.1)), context()):
        await wait_until(lambda: asked_to_close(run, 1))
        await client.call("DEL", run.keys.triggers)
        await wait_until(lambda: asked_to_close(run, 1))
        await run.dispatch()
        assert [type(message) for _, message in await run.queue()] == [RoundEnd]


async def test_device_that_answered_does_not_replace_one_that_gave_up(
    make: Any, run: Hand, client: Client
) -> None:
    await client.call("HSET", run.keys.run, "devices", 3)
    async with running(make(Rounds(k=2)), context()):
        first, second = await are_open(run, 2)
        upload = await run.trained(first)
        assert await run.admit(upload) == [("admitted", "")]
        buffered = End(task=upload.task, attempt=upload.attempt, outcome="buffered")
        commit = Commit(held=[upload.device], retained=1, mean_staleness=0.0, ends=[buffered])
        assert (await run.ledger.commit(run.updater.token, commit)).what == "done"
        for n in range(3, 12):
            await give_up(run, second)
            await has_issued(run, n)
            [second] = await are_open(run, 1)
            assert second.device != first.device


async def test_long_lease_is_renewed_often_enough(
    run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.runtime.leading._PAUSE_S", 0.02)
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


def test_versions_take_as_much_memory_as_was_published() -> None:
    head = Head(version=7, digest="d", blob="7.1", time=1.0, epoch=1)
    run = Run(layout_of(1000), "fedasync", "digits", 10, 100, 0, 1.5)
    seen = Tally(
        run=run, head=head, counts={}, tasks=0, admitted=0, queue=0, triggers=0, inbox=0,
        trainers=1, workers=1, kept=5, dead=0, owners=0, pool=True, now=1.0,
    )  # fmt: skip
    assert kept(seen) == 5
    small = replace(head, encoded=Encoded("int8", 1016, "d"))
    assert kept(replace(seen, head=small)) == 2  # 5,080 bytes, in models of 4,000


def test_device_vectors_count_twice_in_memory() -> None:
    """What was handed out, and the copy of the site that has the device."""
    layout = layout_of(1000)
    assert vectors(layout, 10) == 0
    assert vectors(layout.with_controls(), 10) * layout.with_controls().nbytes == 10 * 2 * 4000
