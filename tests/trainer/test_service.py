"""The trainer against a real Redis, everybody else played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.commands import Command
from fedstream.core.errors import ConfigError, FedstreamError, LayoutMismatch
from fedstream.core.messages import Presence, Upload
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.vector import layout_of
from tests.support import Hand, Proxy, context, counted, running, wait_until
from tests.trainer.adding import Adds, Make, Point, answers, pending
from tests.trainer.stepping import content


async def test_task_becomes_an_update_of_the_newest_version(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    async with running(make(), context()):
        [trigger] = await hand.open()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.task, upload.device, upload.trainer) == (trigger.task, trigger.device, "t1")
    assert (upload.tau, upload.steps, upload.samples, upload.loss) == (0, 1, 1, 0.5)
    assert upload.chunks == 1
    trained = await content(hand, upload)
    assert trained.floats.tolist() == [1, 1, 1, 1]
    assert await hand.client.call("PTTL", hand.keys.update(upload.blob)) > 0
    assert await pending(hand) == 0
    assert task.controls == [(None, None)]  # its strategy knows none


async def test_task_takes_two_exchanges_with_redis(hand: Hand, make: Make) -> None:
    """A small model's: it is read, and answered; the next one and its version come along."""
    await hand.create()
    trainer = make()
    asked: list[list[str]] = []

    def noting(send: Callable[..., Any]) -> Callable[..., Any]:
        def noted(commands: Sequence[Command], **how: Any) -> Any:
            names = [str(name) for name, *_ in commands]
            if names[0] not in ("XLEN", "XADD") and names != ["EVALSHA"]:  # announcements, claims
                asked.append(names)
            return send(commands, **how)

        return noted

    for name in ("pipeline", "start"):
        setattr(trainer._client, name, noting(getattr(trainer._client, name)))
    async with running(trainer, context()):
        for number in (1, 2):
            await hand.open()
            await answers(hand, number)
            await hand.commit(number)
    takes = ["XREADGROUP", "HGETALL"]
    one = [["HGET", "HGET"], ["MULTI", "HSET", "PEXPIRE", "EXEC", "EVALSHA", *takes]]
    done = asked[asked.index(one[0]) :]
    # If nothing comes within a second, it waits again.
    assert [names for names in done if names != takes] == [*one, *one]


@pytest.mark.usefixtures("pauses")
async def test_trainer_announces_its_number_of_answers(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await wait_until(lambda: hand.words(Presence))
        await hand.open()

        async def one_more() -> bool:
            return (await hand.words(Presence))[-1].answers == 1

        await wait_until(one_more)
        assert {one.answers for one in await hand.words(Presence)} == {0, 1}
    assert len(await hand.answered()) == 1


async def test_owner_serves_only_its_own_devices(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make("edge", settings=TrainerSettings(owns=(3,))), context()):

        async def owned() -> bool:
            await hand.attend()
            return await hand.ledger.owners() == {3: "edge"}

        await wait_until(owned)
        await hand.open(device=3)
        await hand.open(device=4)
        [upload] = await answers(hand)
        assert upload.device == 3
        assert await hand.client.call("XLEN", hand.keys.tasks) == 1  # device 4 waits for the pool


async def test_owner_takes_up_tasks_dispatched_before_it_joined(hand: Hand, make: Make) -> None:
    await hand.create()
    await hand.open(device=3)
    await hand.open(device=4)
    async with running(make("edge", settings=TrainerSettings(owns=(3,))), context()):
        await wait_until(lambda: hand.words(Presence))
        await hand.attend()
        [upload] = await answers(hand)
    assert upload.device == 3
    assert await hand.client.call("XLEN", hand.keys.tasks) == 1


async def test_trainer_with_another_model_exits_with_an_error(hand: Hand, make: Make) -> None:
    await hand.create()
    hand.layout = layout_of(Point(5))
    other = make(task=Adds(5))
    with pytest.raises(LayoutMismatch, match=r"has 5 parameters in 1 tensors, but run .* 4 param"):
        await asyncio.wait_for(other.run(context()), 60)


async def test_trainer_of_another_number_of_devices_exits_with_an_error(
    hand: Hand, make: Make
) -> None:
    """Its task would raise DataError for some, and split its data otherwise for all."""
    await hand.create()
    words = r"split over 7 devices, but run .* was made with 10: give every service the same number"
    joined: list[int] = []

    class Noting(Adds):
        devices = 7

        def joined(self, devices: int) -> None:
            joined.append(devices)

    task = Noting()
    with pytest.raises(ConfigError, match=words):
        await asyncio.wait_for(make(task=task).run(context()), 60)
    with pytest.raises(ConfigError, match=words):
        await asyncio.wait_for(make(run_devices=7).run(context()), 60)

    async def takes_part() -> bool:
        return any(not one.leaves for one in await hand.words(Presence))

    assert not await takes_part()
    assert joined == []
    async with running(make(task=task, run_devices=10), context()):  # the configuration decides
        await wait_until(takes_part)
    assert joined == [10]


async def test_trainer_may_exit_with_the_run(hand: Hand, make: Make) -> None:
    """As one that joined a run on this machine is: it did all that there was to do."""
    await hand.create()
    live = context()
    trainer = make(settings=TrainerSettings(ends_with_run=True))
    async with running(trainer, live) as service:
        await wait_until(lambda: hand.words(Presence))
        assert not live.stop.is_set()
        await hand.ledger.finish("by hand")
        await asyncio.wait({service}, timeout=30)
        assert service.done()
    assert live.stop.is_set()


async def test_trainer_may_exit_if_redis_is_gone_for_good(
    hand: Hand, make: Make, redis: RedisSettings
) -> None:
    """As one that joined a run on this machine is."""
    await hand.create()
    settings = TrainerSettings(redis_away_s=0.3)
    async with Proxy(redis) as proxy:
        trainer = make(settings=settings, redis=proxy.settings)
        async with running(trainer, context(), may_fail=True) as service:
            await hand.open()
            await answers(hand)
            proxy.refuse = lambda _: True
            proxy.cut()
            await asyncio.wait({service}, timeout=10)
            with pytest.raises(BaseExceptionGroup) as ended:
                await service
    assert ended.group_contains(
        FedstreamError, match=r"Redis has not served this trainer for 0\.3 s"
    )


async def test_exiting_trainer_reports_the_last_redis_error(hand: Hand, make: Make) -> None:
    await hand.create()
    trainer = make(settings=TrainerSettings(redis_away_s=0.3))
    async with running(trainer, context(), may_fail=True) as service:
        await wait_until(lambda: hand.words(Presence))
        await hand.client.call("CONFIG", "SET", "min-replicas-to-write", 1)
        try:
            await asyncio.wait({service}, timeout=10)
            with pytest.raises(BaseExceptionGroup) as ended:
                await service
        finally:
            await hand.client.call("CONFIG", "SET", "min-replicas-to-write", 0)
    assert ended.group_contains(FedstreamError, match="has not served .* NOREPLICAS .* is over")


async def test_trainer_waits_for_redis_indefinitely(
    hand: Hand, make: Make, redis: RedisSettings
) -> None:
    await hand.create()
    live = context()
    async with Proxy(redis) as proxy:
        trainer = make(redis=proxy.settings)
        async with running(trainer, live) as service:
            await wait_until(lambda: hand.words(Presence))
            proxy.refuse = lambda _: True
            proxy.cut()
            trainer._outage_limit.heard -= 1e6
            retries = "fedstream_retries_total"
            await wait_until(lambda: counted(live, retries, loop="heartbeat") > 2)
            assert not service.done()
            proxy.refuse = None
            await hand.open()
            await answers(hand)
