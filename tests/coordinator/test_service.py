"""The coordinator against a real Redis: triggers become tasks, answers enter the queue, and what a
crash, a poison or a silence leaves behind is cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import BrokerError
from fedstream.broker.keys import COORDINATORS, TRAINERS, Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.messages import Assignment, Dead, GiveUp, Trigger, Upload
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry, Group
from fedstream.coordinator.policies import InFlight
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.runtime.tasks import LeaseSettings
from tests.support import Hand, Proxy, context, counted, model_of, running, wait_until


@pytest.fixture
def make(redis: RedisSettings, keys: Keys) -> Any:
    """A coordinator."""

    def make(
        *, name: str = "coordinator-0", redis: RedisSettings = redis, lease_s: float = 15.0,
        anarchic: bool = False, **settings: Any,
    ) -> Coordinator:  # fmt: skip
        return Coordinator(
            CoordinatorSettings(**settings), LeaseSettings(seconds=lease_s),
            keys=keys, redis=redis, name=name, anarchic=anarchic,
        )  # fmt: skip

    return make


@pytest.fixture
async def run(hand: Hand) -> Hand:
    """A run that was created, in which others than the coordinator are played by hand."""
    await hand.create()
    await hand.tasks.ensure()
    return hand


async def tasks(hand: Hand, n: int) -> list[tuple[Entry, Assignment]]:
    """Waits for so many tasks, and takes them."""
    found: list[tuple[Entry, Assignment]] = []

    async def come() -> bool:
        found.extend(await hand.take())
        return len(found) >= n

    await wait_until(come, what=f"{n} tasks")
    assert len(found) == n
    return found


async def queued(hand: Hand, n: int) -> list[Upload]:
    """Waits until so many updates are in the queue."""

    async def come() -> bool:
        return len(await hand.queue()) == n

    await wait_until(come, what=f"{n} in the queue")
    return [message for _, message in await hand.queue() if isinstance(message, Upload)]


async def is_open(hand: Hand, n: int) -> bool:
    return len((await hand.ledger.look()).open) == n


async def dead(hand: Hand, n: int) -> list[Dead]:
    """Waits for so many dead letters."""

    async def come() -> bool:
        return (await hand.ledger.look()).dead == n

    await wait_until(come, what=f"{n} dead")
    rows = await hand.client.call("XRANGE", hand.keys.dead, "-", "+")
    return [Dead.decode(row[1][1]) for row in rows]


# the run of things


async def test_trigger_becomes_a_task_and_its_answer_is_queued(make: Any, run: Hand) -> None:
    watched = context()
    async with running(make(), watched):
        triggers = await run.request(2)
        (first, one), (second, two) = await tasks(run, 2)
        assert [one, two] == [Assignment.decode(trigger.assignment()) for trigger in triggers]
        upload = await run.trained(one)
        gone = GiveUp(
            task=two.task, attempt="1", device=two.device, trainer="t", reason="dropped out"
        )
        assert await run.outbox.answer(run.keys.tasks, first, upload)
        assert await run.outbox.answer(run.keys.tasks, second, gone)
        assert await queued(run, 1) == [upload]
        await wait_until(lambda: is_open(run, 1))
        view = await run.ledger.look(inboxes=True)
        assert view.reasons("given_up") == {"dropped out": 1}
        assert (view.triggers, view.inbox) == (0, 0)
        await run.balanced()
        answers, dispatched = "fedstream_answers_total", "fedstream_tasks_dispatched_total"
        for verdict, reason in (("admitted", ""), ("given_up", "dropped out")):
            labels = {"verdict": verdict, "reason": reason}
            await wait_until(lambda: counted(watched, answers, **labels) == 1)  # noqa: B023
        assert counted(watched, dispatched, verdict="sent") == 2


async def test_trainers_reasons_do_not_become_labels(make: Any, run: Hand) -> None:
    watched = context()
    async with running(make(), watched):
        await run.request(5)
        for n, (entry, task) in enumerate(await tasks(run, 5)):
            mood = GiveUp(
                task=task.task, attempt="1", device=task.device, trainer="t", reason=f"mood {n}"
            )
            assert await run.outbox.answer(run.keys.tasks, entry, mood)
        answers = "fedstream_answers_total"
        labels = {"verdict": "given_up", "reason": "another reason"}
        await wait_until(lambda: counted(watched, answers, **labels) == 5)
        ended = {"outcome": "given_up", "reason": "another reason"}
        await wait_until(lambda: counted(watched, "fedstream_run_tasks_total", **ended) == 5)
    assert b"mood" not in generate_latest(watched.registry)
    assert [event.text for event in await run.events()] == [f"mood {n}" for n in range(5)]


async def test_coordinator_may_start_before_the_run(make: Any, hand: Hand) -> None:
    async with running(make(), context()) as coordinator:
        await wait_until(lambda: groups(hand))
        assert not coordinator.done()
        await hand.create()
        await hand.request()
        await tasks(hand, 1)


async def groups(hand: Hand) -> bool:
    """Its consumer groups are there."""
    names = [hand.keys.triggers, hand.keys.inbox("pool")]
    return bool(await hand.client.call("EXISTS", *names) == 2)


async def test_replicas_share_the_work_without_duplicates(make: Any, run: Hand) -> None:
    async with (
        running(make(name="coordinator-0"), context()),
        running(make(name="coordinator-1"), context()),
    ):
        await run.request(40)
        found = await tasks(run, 40)
        assert len({task.task for _, task in found}) == 40
        for entry, task in found:
            upload = await run.trained(task)
            await run.outbox.answer(run.keys.tasks, entry, upload)
        assert len({upload.task for upload in await queued(run, 40)}) == 40
        await run.balanced()


async def test_size_limit_is_configurable(make: Any, run: Hand) -> None:
    async with running(make(max_update_bytes=run.layout.nbytes - 1), context()):
        await run.request()
        [(entry, task)] = await tasks(run, 1)
        await run.outbox.answer(run.keys.tasks, entry, await run.trained(task))
        await wait_until(lambda: is_open(run, 0))
        assert (await run.ledger.look()).reasons("refused") == {"too large": 1}


async def test_self_triggered_tasks_are_limited(make: Any, run: Hand) -> None:
    async with running(make(open_limit=2, anarchic=True), context()):
        for _ in range(4):
            await run.outbox.say(run.trigger(origin="ann"))
        await tasks(run, 2)
        await wait_until(lambda: strays(run, 2))


async def strays(hand: Hand, n: int) -> bool:
    return sum((await hand.ledger.look()).reasons("stray").values()) == n


# crashes


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
        "inbox:pool", "crashed its coordinators", 3
    )  # fmt: skip
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


async def test_recovers_when_redis_loses_the_scripts(make: Any, run: Hand, client: Client) -> None:
    async with running(make(), context()):
        for _ in range(2):
            await run.request()
            await tasks(run, 1)
            await client.call("SCRIPT", "FLUSH")


async def test_entries_read_together_are_decided_in_one_exchange(
    make: Any, run: Hand, redis: RedisSettings
) -> None:
    dispatch = Script("dispatch")._sha.encode()
    writes = 0

    def count(data: bytes) -> bool:
        nonlocal writes
        writes += dispatch in data
        return False

    async with Proxy(redis) as proxy:
        proxy.refuse = count
        await run.request(20)
        async with running(make(redis=proxy.settings), context()):
            await tasks(run, 20)
            assert 1 <= writes <= 2  # more than one only where the proxy saw it in parts


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


# bad input


@pytest.mark.parametrize("stream", ["triggers", "inbox:pool"])
async def test_junk_becomes_dead_letters_and_blocks_nothing(
    make: Any, run: Hand, stream: str
) -> None:
    await run.client.call("XADD", run.keys.prefix + stream, "*", "m", b"junk")
    await run.client.call("XADD", run.keys.prefix + stream, "*", "other", b"field")
    async with running(make(), context()):
        letters = await dead(run, 2)
        assert [(letter.stream, letter.data) for letter in letters] == [
            (stream, b"junk"), (stream, b"")
        ]  # fmt: skip
        assert all("not m" in letter.reason for letter in letters)
        await run.request()
        [(entry, task)] = await tasks(run, 1)
        await run.outbox.answer(run.keys.tasks, entry, await run.trained(task))
        await queued(run, 1)


async def test_task_that_crashes_its_trainers_becomes_a_dead_letter(make: Any, run: Hand) -> None:
    await run.request(2)
    await run.dispatch()
    [(poison, task), (good, _)] = await run.take()
    trainer = Group(run.client, run.keys.tasks, TRAINERS, "t")
    await trainer.claim(idle_ms=0, most=9, own=True, count=1)
    await trainer.claim(idle_ms=0, most=9, own=True, count=1)
    async with running(make(lease_s=0.05), context()):
        [letter] = await dead(run, 1)
        assert (letter.entry, letter.reason, letter.deliveries) == (
            poison.id, "crashed its trainers", 3
        )  # fmt: skip
        view = await run.ledger.look()
        assert view.reasons("dead") == {"crashed its trainers": 1}
        assert task.task not in {trigger.task for trigger in view.open}
        assert await trainer.renew(good)  # the other one is left alone
        await run.balanced()


async def test_owners_poison_task_becomes_a_dead_letter(make: Any, run: Hand) -> None:
    await poisoned(run, "owner", 3)
    async with running(make(lease_s=0.05), context()):
        [letter] = await dead(run, 1)
        assert letter.stream == "tasks:pool/owner"
        await run.balanced()


async def poisoned(run: Hand, name: str, device: int) -> None:
    """The device's owner was given its task three times."""
    await run.announce(name, device)
    await run.request(device=device)
    await run.dispatch()
    owner = Group(run.client, run.keys.tasks_of(name), TRAINERS, name)
    await owner.ensure()
    await owner.read()
    for _ in range(2):
        await owner.claim(idle_ms=0, most=9, own=True)


async def test_sweeps_cover_every_owner_in_turn(
    make: Any, run: Hand, client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.broker.custody._AT_ONCE", 3)
    for device in (0, 1, 3, 4, 5):
        await run.announce(f"o{device}", device)
    await poisoned(run, "o2", 2)
    await poisoned(run, "o6", 6)
    await client.call("SET", keys.tasks_of("o5"), "x")
    await client.call("HSET", keys.owners, 7, "ghost", 8, "o-ghost", 9, "z-ghost")
    async with running(make(lease_s=0.05), context()):
        letters = await dead(run, 2)
        assert {letter.stream for letter in letters} == {"tasks:pool/o2", "tasks:pool/o6"}

        async def mended() -> bool:
            aside = await client.call("EXISTS", keys.quarantine(keys.tasks_of("o5")))
            return bool(aside) and sorted(await run.ledger.owners()) == list(range(7))

        await wait_until(mended)
    await run.balanced()


async def test_sweep_needs_no_exchange_per_owner(
    make: Any, run: Hand, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.sweep._SWEEP_S", 0.0)
    said = dict.fromkeys(("claim", "measure"), 0)

    def count(data: bytes) -> bool:
        for name in said:
            said[name] += Script(name)._sha.encode() in data
        return False

    for device in range(10):
        await run.announce(f"o{device}", device)
    async with Proxy(redis) as proxy:
        proxy.refuse = count
        async with running(make(redis=proxy.settings), context()):
            await wait_until(lambda: said["measure"] > 5)
    # Its two groups, at each sweep and at the start.
    assert said["claim"] <= 2 * (said["measure"] + 2)


# trainers


async def silent(hand: Hand, name: str, seconds: int = 60) -> None:
    """It was heard so long ago; below zero: it will not be silent for that much longer."""
    await hand.client.call("ZINCRBY", hand.keys.alive, -seconds, name)


@pytest.fixture
def long_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator has listened for ever: whoever is silent now was not heard."""
    monkeypatch.setattr("fedstream.coordinator.sweep._DEAF_S", float("inf"))


@pytest.mark.usefixtures("long_there")
async def test_silent_trainer_is_removed_with_its_consumer(
    make: Any, run: Hand, client: Client
) -> None:
    for name in ("ann", "bob", "cat"):
        await run.announce(name)
        await client.call("XGROUP", "CREATECONSUMER", run.keys.tasks, TRAINERS, name)
    await run.request()
    await run.dispatch()
    await Group(client, run.keys.tasks, TRAINERS, "cat").read()
    await silent(run, "ann")
    for name in ("bob", "cat"):
        await silent(run, name, -3600)
    async with running(make(trainer_silence_s=2.0), context()):
        await wait_until(lambda: consumers(client, run.keys, {"cat"}))  # cat is at work
        await wait_until(lambda: texts(run, "ann was not heard from for 2 s"))
        assert list(await run.ledger.trainers()) == ["bob", "cat"]


async def test_junk_in_the_register_is_removed(make: Any, run: Hand, client: Client) -> None:
    """Any trainer's user may write there."""
    await client.call("ZADD", run.keys.alive, 0, b"\xfe", 1, b"\xff")

    async def none_left() -> bool:
        return bool(await client.call("ZCARD", run.keys.alive) == 0)

    with capture_logs() as logs:
        async with running(make(trainer_silence_s=0.5), context()):
            await wait_until(none_left)
            await wait_until(lambda: "trainer lost" in [line["event"] for line in logs])
    [lost] = [line for line in logs if line["event"] == "trainer lost"]
    assert lost["trainer"] == "\ufffd"


async def test_trainers_are_not_removed_before_they_could_be_heard(
    make: Any, run: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.announce("ann")
    await silent(run, "ann")
    watched = context()

    async def swept() -> bool:
        return counted(watched, "fedstream_run_trainers") == 1

    async with running(make(trainer_silence_s=30.0), watched):  # it has just come itself
        await wait_until(swept)
        assert list(await run.ledger.trainers()) == ["ann"]
    monkeypatch.setattr(
        "fedstream.coordinator.sweep._DEAF_S", 0.0
    )  # as if every sweep followed an outage
    watched = context()
    async with running(make(trainer_silence_s=0.001), watched):
        await wait_until(swept)
        await run.client.call("XADD", run.keys.queue, "*", "m", b"junk")
        await wait_until(lambda: counted(watched, "fedstream_run_queue") == 1)  # a second sweep
        assert list(await run.ledger.trainers()) == ["ann"]


async def texts(hand: Hand, last: str) -> bool:
    return [event.text for event in await hand.events("trainer")][-1] == last


async def test_idle_consumer_is_not_reaped(make: Any, run: Hand, client: Client) -> None:
    await client.call("XGROUP", "CREATECONSUMER", run.keys.tasks, TRAINERS, "t")
    coordinator = make(trainer_silence_s=3600.0)
    watched = context()
    async with running(coordinator, watched):
        await wait_until(lambda: counted(watched, "fedstream_run_looked_timestamp_seconds"))
    assert await consumers(client, run.keys, {"t"})


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


async def consumers(client: Client, keys: Keys, expected: set[str]) -> bool:
    rows = await client.call("XINFO", "CONSUMERS", keys.tasks, TRAINERS)
    return {row[1].decode() for row in rows} == expected


@pytest.mark.usefixtures("long_there")
async def test_tasks_of_a_silent_owner_are_given_up(make: Any, run: Hand) -> None:
    await run.announce("owner", 3, 4)
    await run.announce("ann")  # serves the pool: nothing there is given up
    await silent(run, "ann", -3600)
    async with running(make(trainer_silence_s=30.0), context()):
        await run.request(device=3)
        await run.request(device=5)
        await tasks(run, 1)
        await wait_until(lambda: routed(run, 1))
        await silent(run, "owner")
        await wait_until(lambda: gone(run, "owner"))
        await wait_until(lambda: is_open(run, 1))
        view = await run.ledger.look()
        assert view.reasons("given_up") == {"owner gone": 1}
        assert view.owned == ()
        assert not await routed(run, 1)
        await run.balanced()


async def gone(hand: Hand, name: str) -> bool:
    return name not in await hand.ledger.trainers()


async def routed(hand: Hand, n: int) -> bool:
    return int(await hand.client.call("XLEN", hand.keys.tasks_of("owner"))) == n


async def test_admitted_update_does_not_expire(make: Any, run: Hand, client: Client) -> None:
    async with running(make(), context()):
        await run.request()
        [(entry, task)] = await tasks(run, 1)
        upload = await run.trained(task, write=False)
        key = run.keys.update(upload.blob)
        await blobs.write(client, key, model_of(run.layout, 1.0), expire_s=60)
        await run.outbox.answer(run.keys.tasks, entry, upload)
        await queued(run, 1)
        assert await client.call("PTTL", run.keys.queued(upload.blob)) == -1


# owners, with a scheduler


async def all_is_heard(hand: Hand) -> bool:
    return (await hand.ledger.look(inboxes=True)).inbox == 0


async def test_run_served_only_by_owners_survives_a_restart(
    make: Any, run: Hand, redis: RedisSettings, client: Client
) -> None:
    await run.scheduler.release()
    scheduler = Scheduler(
        SchedulerSettings(), InFlight(n=4), keys=run.keys, redis=redis, name="scheduler-0", seed=1
    )
    served: dict[str, list[int]] = {"ann": [], "bob": []}

    async def serve(name: str, devices: list[int]) -> None:
        """A trainer that owns devices, and gives up what it is asked."""
        group = Group(client, run.keys.tasks_of(name), TRAINERS, name)
        await group.ensure()
        while True:
            await run.outbox.announce(name, devices)
            for entry in await group.read(block_ms=50):
                task = Assignment.decode(entry.data)
                served[name].append(task.device)
                tired = GiveUp(
                    task=task.task,
                    attempt="1",
                    device=task.device,
                    trainer=name,
                    reason="dropped out",
                )
                await run.outbox.answer(group.stream, entry, tired)

    @asynccontextmanager
    async def serving(name: str, devices: list[int]) -> AsyncIterator[None]:
        serving = asyncio.create_task(serve(name, devices))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait({serving})

    async with running(scheduler, context()), running(make(), context()):
        # Without a trainer one task is drawn for the pool, then ann comes: hers, or nobody's.
        await wait_until(lambda: is_open(run, 4))
        async with serving("bob", [5, 6, 7]):
            async with serving("ann", [0, 1, 2]):
                await wait_until(lambda: len(served["ann"]) > 20 and len(served["bob"]) > 20)
            await wait_until(lambda: all_is_heard(run))  # else she is back by her last words
            await run.ledger.leave(b"ann")  # her tasks are given up, bob goes on
            bobs = len(served["bob"])
            await wait_until(lambda: len(served["bob"]) > bobs + 10)
            served["ann"].clear()
            async with serving("ann", [1, 2]):
                await wait_until(lambda: len(served["ann"]) > 20)
                assert set(served["ann"]) == {1, 2}
                assert await run.ledger.owners() == dict.fromkeys((1, 2), "ann") | dict.fromkeys(
                    (5, 6, 7), "bob"
                )

                async def pool_is_empty() -> bool:
                    return int(await client.call("XLEN", run.keys.tasks)) == 0

                await wait_until(pool_is_empty)
    assert set(served["bob"]) == {5, 6, 7}
    await run.balanced()
