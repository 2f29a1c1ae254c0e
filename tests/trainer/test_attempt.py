"""From a task to its answer: drop-outs, simulated time, rounds and deadlines."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import TRAINERS
from fedstream.broker.streams import Group
from fedstream.core.messages import GiveUp, Presence, Upload, decode
from fedstream.runtime.backoff import pause
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.trainer.attempt import Newest
from fedstream.trainer.devices import DeviceSettings, FixedLatency
from tests.support import Clock, Hand, Proxy, context, counted, running, wait_until
from tests.trainer.adding import Adds, Make, answers, pending


async def test_device_that_drops_out_gives_up_its_task(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(devices=DeviceSettings(dropout=1.0)), context()):
        await hand.open()
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    assert answer.reason == "dropped out"


async def test_stopped_trainer_hands_back_a_dropped_out_devices_task(
    hand: Hand, make: Make
) -> None:
    """Whoever has the task next sees it drop out as well: that much is drawn with the task."""
    await hand.create()
    gone = DeviceSettings(latency=FixedLatency(mean_s=600.0), dropout=1.0)
    live = context()
    trainer = make(devices=gone)
    async with running(trainer, live) as service:
        await hand.open()
        started = {"part": "download"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **started))
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert len(await hand.answered()) == 0
    assert counted(live, "fedstream_trainer_tasks_total", end="handed back") == 1


async def test_stopped_trainer_answers_without_waiting_for_the_latency(
    hand: Hand, make: Make, task: Adds
) -> None:
    """What it has trained would be lost."""
    await hand.create()
    slow = DeviceSettings(latency=FixedLatency(mean_s=600.0))
    live = context()
    trainer = make(devices=slow)
    async with running(trainer, live) as service:
        [trigger] = await hand.open()
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        assert len(await hand.answered()) == 0  # it waits
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.task, len(task.seen)) == (trigger.task, 1)
    assert await pending(hand) == 0
    assert counted(live, "fedstream_trainer_tasks_total", end="upload") == 1


async def test_trainer_that_loses_its_lease_during_the_latency_sends_nothing(
    hand: Hand, make: Make
) -> None:
    await hand.create()
    slow = DeviceSettings(latency=FixedLatency(mean_s=600.0))
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(devices=slow, lease=LeaseSettings(seconds=0.2)), live):
        await hand.open()
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        assert len((await other.claim(idle_ms=0, most=9))[0]) == 1
        await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", end="lease lost"))
    assert len(await hand.answered()) == 0


async def test_task_of_a_finished_round_is_not_trained(hand: Hand, make: Make, task: Adds) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(version=7)
        await hand.open(deadline=1.0)
        said = await answers(hand, 2)
    assert [a.reason for a in said if isinstance(a, GiveUp)] == ["round over", "deadline passed"]
    assert task.seen == []


async def test_task_is_abandoned_at_its_deadline(
    hand: Hand, make: Make, task: Adds, clock: Clock
) -> None:
    """No answer counts any more, and the trainer is wanted for the next round."""
    await hand.create()
    task.gate.clear()
    async with running(make("t1"), context()):
        await hand.open(version=0, deadline=clock.time() + 600.0)
        await wait_until(lambda: task.seen)
        clock.ahead_s = 601.0
        [first] = await answers(hand)
    task.gate.set()
    live, slow = context(), DeviceSettings(latency=FixedLatency(mean_s=6000.0))
    async with running(make("t2", devices=slow), live):
        await hand.open(version=0, deadline=clock.time() + 600.0)
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        clock.ahead_s = 1202.0
        _, second = await answers(hand, 2)
    for name, said in (("t1", first), ("t2", second)):
        assert isinstance(said, GiveUp)
        assert (said.reason, said.trainer) == ("deadline passed", name)
    assert [version for _, version in task.seen] == [0, 0]
    assert await pending(hand) == 0


async def test_training_stops_once_its_update_would_be_too_stale(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device trains from the newest version at once, instead of in vain to the end."""
    looks: list[int] = []
    version = Newest.version

    async def noted(newest: Newest) -> int:
        looks.append(await version(newest))
        return looks[-1]

    monkeypatch.setattr(Newest, "version", noted)
    await hand.create(max_staleness=2, cancel_stale=True)
    task.gate.clear()
    async with running(make(), context()):
        await hand.open(2)
        await wait_until(lambda: task.seen)
        await hand.commit(1)
        await hand.commit(2)
        await wait_until(lambda: looks[-2:] == [2, 2])
        assert len(task.seen) == 1, "an update of staleness 2 is used"
        await hand.commit(3)
        await wait_until(lambda: len(task.seen) == 2)
        task.gate.set()
        first, second = await answers(hand, 2)
    assert [since for _, since in task.seen] == [0, 3]
    assert isinstance(first, GiveUp)
    assert first.reason == "became too stale"
    assert isinstance(second, Upload)


async def test_trainer_asks_for_no_version_unless_stale_tasks_are_cancelled(
    hand: Hand, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.trainer.attempt._STALE_S", 0.001)
    monkeypatch.delattr(Newest, "version")
    await hand.create(max_staleness=0)
    async with running(make(devices=DeviceSettings(latency=FixedLatency(mean_s=0.1))), context()):
        await hand.open()
        [answer] = await answers(hand)
    assert isinstance(answer, Upload)


async def test_a_simulated_device_stops_working_once_it_is_too_stale(
    hand: Hand, make: Make
) -> None:
    await hand.create(max_staleness=0, cancel_stale=True)
    live, slow = context(), DeviceSettings(latency=FixedLatency(mean_s=600.0))
    async with running(make(devices=slow), live):
        await hand.open()
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        await hand.commit(1)
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    assert answer.reason == "became too stale"


# delivery of the answer


async def test_answer_survives_a_lost_connection_without_retraining(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings
) -> None:
    await hand.create()
    async with Proxy(redis) as proxy:
        trainer = make(redis=proxy.settings)
        async with running(trainer, context()):
            await hand.open()
            task.gate.clear()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: proxy.cut_replies)
            [upload] = await answers(hand)
            await hand.open()
            assert len(await answers(hand, 2)) == 2  # nothing was said twice
    assert isinstance(upload, Upload)
    assert len(task.seen) == 2


async def test_resent_answer_does_not_rewrite_its_update(
    hand: Hand, make: Make, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply was lost: the trainer can't know that it was heard, and the update taken away."""
    admitted: list[tuple[str, str]] = []
    async with Proxy(redis) as proxy:

        async def admits(stop: asyncio.Event, seconds: float) -> bool:
            """Before the trainer tries again, a coordinator hears what it said."""
            if proxy.cut_replies and not admitted:
                heard = [(one, decode(one.data, Upload, Presence)) for one in await hand.heard()]
                [(entry, said)] = [(one, said) for one, said in heard if isinstance(said, Upload)]
                admitted.append(await hand.ledger.admit(entry, said, size_limit=1 << 20))
            return await pause(stop, seconds)

        monkeypatch.setattr("fedstream.trainer.leases.pause", admits)
        await hand.create()
        async with running(make(redis=proxy.settings), context()):
            await hand.open()
            task.gate.clear()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: admitted)
            await hand.open()  # the first answer has been said again when it is at the second
            await wait_until(lambda: len(task.seen) == 2)
    assert admitted == [("admitted", "")]
    [(_, upload)] = await hand.queue()
    assert isinstance(upload, Upload)
    assert not await hand.client.call("EXISTS", hand.keys.update(upload.blob))
