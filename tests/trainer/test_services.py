"""The trainer and the evaluator against a real Redis, everybody else played by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.broker.errors import FedstreamError, LayoutMismatch
from fedstream.broker.keys import TRAINERS
from fedstream.broker.layout import Model
from fedstream.broker.messages import Event, GiveUp, Presence, Trigger, Upload
from fedstream.broker.records import Commit
from fedstream.broker.streams import Group
from fedstream.runtime.participation import ParticipationGroup
from fedstream.runtime.steps import FixedSteps
from fedstream.runtime.tasks import LeaseSettings
from fedstream.trainer.answer import as_sent
from fedstream.trainer.compression import NoCompression
from fedstream.trainer.devices import DeviceSettings, FixedLatency
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings
from fedstream.trainer.service import Initiative, Trainer, TrainerSettings
from fedstream.trainer.solvers import Cancelled, Sgd, Trained, Work
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.support import Clock, Hand, Pauses, Proxy, context, counted, running, wait_until


class Point(nn.Module):
    """A model of four numbers."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Adds(Task):
    """Training adds one to every parameter; the test can hold it up."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.seen: list[tuple[int, int]] = []
        self.controls: list[tuple[object, object]] = []  # the server's and the device's
        self.gate = threading.Event()
        self.gate.set()

    def model(self) -> nn.Module:
        return Point(self.size)

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.tensor([device]))

    def test_data(self) -> Dataset[Any]:
        return TensorDataset(torch.tensor([0]))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"accuracy": next(model.parameters())[0].item() / 10}

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        self.seen.append((work.device, work.version))
        self.controls.append((work.control, work.device_control))
        while not self.gate.wait(0.005):
            if work.cancelled():
                raise Cancelled
        if work.device >= 9:
            raise ValueError(f"device {work.device} is broken")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return Trained(steps=1, samples=1, loss=0.5)


Make = Callable[..., Trainer]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """The trainer's, of a fiftieth of a second at most."""
    pauses = Pauses(0.02)
    monkeypatch.setattr("fedstream.trainer.service.pause", pauses)
    return pauses


@pytest.fixture
def task() -> Iterator[Adds]:
    task = Adds()
    yield task
    task.gate.set()  # no thread is left in it


@pytest.fixture
def make(hand: Hand, redis: RedisSettings, task: Adds) -> Make:
    """Makes a trainer of the task, with these settings."""
    hand.layout = layout_of(Point())

    def trainer(name: str = "t1", **changes: Any) -> Trainer:
        parts: dict[str, Any] = {
            "settings": TrainerSettings(), "solver": Sgd(lr=0.1),
            "devices": DeviceSettings(), "lease": LeaseSettings(seconds=60), "redis": redis,
        }  # fmt: skip
        parts |= changes
        return Trainer(
            parts["settings"], parts["solver"], parts["devices"], parts["lease"],
            keys=hand.keys, redis=parts["redis"], name=name, load=lambda: task,
            participation=parts.get("participation", ()),
        )  # fmt: skip

    return trainer


async def answers(hand: Hand, count: int = 1) -> list[Upload | GiveUp]:
    """The answers in `uploads`, once there are so many."""

    async def there() -> bool:
        return len(await hand.answered()) >= count

    await wait_until(there, what=f"{count} answers")
    return await hand.answered()


async def pending(hand: Hand) -> int:
    return int((await hand.client.call("XPENDING", hand.keys.tasks, TRAINERS))[0])


async def test_a_task_becomes_an_update_of_the_newest_version(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    async with running(make(), context()):
        [trigger] = await hand.open()
        await hand.dispatch()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.task, upload.device, upload.trainer) == (trigger.task, trigger.device, "t1")
    assert (upload.tau, upload.steps, upload.samples, upload.loss) == (0, 1, 1, 0.5)
    assert upload.chunks == 1
    trained = Model(hand.layout)
    await blobs.read(
        hand.client,
        hand.keys.update(upload.blob),
        trained,
        digest=upload.digest,
        chunks=upload.chunks,
    )
    assert trained.floats.tolist() == [1, 1, 1, 1]
    assert await hand.client.call("PTTL", hand.keys.update(upload.blob)) > 0
    assert await pending(hand) == 0
    assert task.controls == [(None, None)]  # its strategy knows none


@pytest.mark.usefixtures("pauses")
async def test_a_trainer_says_how_many_answers_it_has_given(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await wait_until(lambda: hand.words(Presence))
        await hand.open()
        await hand.dispatch()

        async def one_more() -> bool:
            return (await hand.words(Presence))[-1].answers == 1

        await wait_until(one_more)
        assert {one.answers for one in await hand.words(Presence)} == {0, 1}
    assert len(await hand.answered()) == 1


async def test_a_model_is_read_once_for_all_tasks_of_a_version(
    hand: Hand, make: Make, task: Adds
) -> None:
    first = await hand.create()
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        await answers(hand)
        await hand.client.call("DEL", hand.keys.model(first.blob))  # who reads again, fails
        await hand.open(2)
        await hand.dispatch()
        assert {answer.device for answer in await answers(hand, 3)} == {1, 2, 3}
        assert await hand.commit(1) == "done"
        await hand.open()
        await hand.dispatch()
        last = (await answers(hand, 4))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1
    assert [version for _, version in task.seen] == [0, 0, 0, 1]


async def test_the_lease_is_renewed_while_training_goes_on(
    hand: Hand, make: Make, task: Adds, pauses: Pauses
) -> None:
    await hand.create()
    task.gate.clear()
    idle_ms: list[int] = []

    async def renewals() -> int:
        [(_, holder, idle, deliveries)] = await hand.client.call(
            "XPENDING", hand.keys.tasks, TRAINERS, "-", "+", 9
        )
        assert (holder, deliveries) == (b"t1", 1)
        idle_ms.append(idle)
        return sum(later < earlier for earlier, later in pairwise(idle_ms))

    async def goes_on() -> bool:
        return await renewals() >= 3

    async with running(make(lease=LeaseSettings(seconds=40)), context()):
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: task.seen)
        await wait_until(goes_on)
        task.gate.set()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert max(pauses.asked_s) == 10.0  # a quarter of the lease


async def test_what_ends_the_renewal_of_a_lease_is_not_swallowed(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    task.gate.clear()

    async def broken(_group: Group, _entry: object) -> bool:
        task.gate.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Group, "renew", broken)
    trainer = make(lease=LeaseSettings(seconds=0.2))
    async with running(trainer, context(), may_fail=True) as service:
        await hand.open()
        await hand.dispatch()
        await asyncio.wait({service}, timeout=10)
        with pytest.raises(BaseExceptionGroup) as ended:
            await service
    assert ended.group_contains(RuntimeError, match="a bug")


async def test_a_trainer_that_lost_its_lease_stops_and_says_nothing(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(lease=LeaseSettings(seconds=0.2)), live):
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: task.seen)
        taken, _ = await other.claim(idle_ms=0, most=9)
        assert len(taken) == 1
        await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", end="lease lost"))
    assert len(await hand.answered()) == 0
    assert await pending(hand) == 1  # the other's


async def test_a_stopped_trainer_hands_its_task_back_at_once(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(), live) as service:
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: task.seen)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
        taken, _ = await other.claim(idle_ms=60_000, most=9)
        assert len(taken) == 1
    await hand.attend()
    assert await hand.ledger.left() == [b"t1"]  # a coordinator strikes it off


async def test_a_trainer_that_crashed_finds_its_task_again(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: task.seen)  # and here it is cut off
    task.gate.set()
    async with running(make(), context()):
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert len(task.seen) == 2


async def test_an_owner_serves_its_own_devices_and_nobody_elses(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make("edge", settings=TrainerSettings(owns=(3,))), context()):

        async def owned() -> bool:
            await hand.attend()
            return await hand.ledger.owners() == {3: "edge"}

        await wait_until(owned)
        await hand.open(device=3)
        await hand.open(device=4)
        assert await hand.dispatch() == ["sent", "sent"]
        [upload] = await answers(hand)
        assert upload.device == 3
        assert await hand.client.call("XLEN", hand.keys.tasks) == 1  # device 4 waits for the pool


async def test_an_owner_takes_up_what_was_dispatched_before_it_came(hand: Hand, make: Make) -> None:
    await hand.create()
    await hand.open(device=3)
    await hand.open(device=4)
    assert await hand.dispatch() == ["sent", "sent"]
    async with running(make("edge", settings=TrainerSettings(owns=(3,))), context()):
        await wait_until(lambda: hand.words(Presence))
        await hand.attend()
        [upload] = await answers(hand)
    assert upload.device == 3
    assert await hand.client.call("XLEN", hand.keys.tasks) == 1


async def test_a_version_of_the_same_bits_is_another_version(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        await answers(hand)
        model = await hand.publish(1, 0.0)
        commit = Commit(version=model, held=(), mean_staleness=0.0)
        assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
        await hand.open()
        await hand.dispatch()
        last = (await answers(hand, 2))[-1]
    assert isinstance(last, Upload)
    assert last.tau == 1


class Rests:
    """In place of back-off: what it was told, and waits of the test's choice."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.told: list[str] = []

    def next(self) -> float:
        self.told.append("raised")
        return self.seconds

    def reset(self) -> None:
        self.told.append("trained")


async def test_a_trainer_rests_after_each_task_that_raises(
    hand: Hand, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    trainer, rests = make(), Rests(0.0)
    monkeypatch.setattr(trainer, "_rests", rests)
    async with running(trainer, context()):
        for count, device in enumerate((9, 10, 1, 11), 1):
            await hand.open(device=device)
            await hand.dispatch()
            await answers(hand, count)
    assert rests.told == ["raised", "raised", "trained", "raised"]


async def test_a_trainer_that_rests_ends_when_told_and_leaves_the_next_task_to_others(
    hand: Hand, make: Make, task: Adds, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    trainer = make()
    monkeypatch.setattr(trainer, "_rests", Rests(3600.0))
    pauses.most_s = 3600.0
    live = context()
    async with running(trainer, live) as service:
        await hand.open(device=9)
        await hand.open(device=1)
        await hand.dispatch()
        await wait_until(lambda: 3600.0 in pauses.asked_s)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert [device for device, _ in task.seen] == [9]
    async with running(make("t2"), context()):
        _, upload = await answers(hand, 2)
    assert isinstance(upload, Upload)


async def test_an_anarchic_trainer_asks_for_nothing_while_it_rests(
    hand: Hand, make: Make, pauses: Pauses, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    settings = TrainerSettings(owns=(9,), anarchic=Initiative(rate=200.0))
    trainer = make("edge", settings=settings)
    monkeypatch.setattr(trainer, "_rests", Rests(3600.0))
    pauses.most_s = 3600.0

    async def asked() -> int:
        return len(await hand.words(Trigger))

    async with running(trainer, context()):
        await wait_until(asked)
        await hand.attend()
        await wait_until(lambda: 3600.0 in pauses.asked_s)
        # One that it had begun to ask for may come yet; then it has often thought of it in vain.
        passes = len(pauses.asked_s)
        await wait_until(lambda: len(pauses.asked_s) > passes + 5)
        before, passes = await asked(), len(pauses.asked_s)
        await wait_until(lambda: len(pauses.asked_s) > passes + 20)
        assert await asked() == before


async def test_training_that_returns_nothing_is_the_tasks_mistake(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    monkeypatch.setattr(task, "train", lambda *_: None)
    async with running(make(), context()):
        await hand.open()
        await hand.dispatch()
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    [error] = await hand.words(Event)
    assert "train() must return Trained(...), not NoneType" in (error.text or "")


async def test_an_anarchic_trainer_asks_for_tasks_of_its_own(hand: Hand, make: Make) -> None:
    await hand.create()
    initiative = Initiative(rate=200.0, steps=FixedSteps(n=7))
    settings = TrainerSettings(owns=(5,), anarchic=initiative)
    async with running(make("edge", settings=settings), context()):

        async def served() -> bool:
            await hand.attend()
            return len(await hand.answered()) >= 1

        await wait_until(served)
        view = await hand.ledger.look()
    assert {trigger.origin for trigger in view.open} == {"edge"}
    assert {(trigger.device, trigger.steps) for trigger in view.open} == {(5, 7)}


async def test_an_anarchic_trainer_decides_at_its_devices_own_rates_and_for_how_long(
    hand: Hand, make: Make
) -> None:
    """At the usual rate it would decide once in half a year, and as often for the other one."""
    await hand.create()
    initiative = Initiative(rate=1e-7, steps=FixedSteps(n=7))
    settings = TrainerSettings(owns=(4, 5), anarchic=initiative)
    often = ParticipationGroup(devices=(5,), rate=1e10, steps=FixedSteps(n=2))
    async with running(make("edge", settings=settings, participation=(often,)), context()):

        async def served() -> bool:
            await hand.attend()
            return len(await hand.answered()) >= 1

        await wait_until(served)
        triggers = (await hand.ledger.look()).open
        said = await hand.answered()
    assert {one.device for one in said} == {5}
    assert {(trigger.device, trigger.steps) for trigger in triggers} == {(5, 2)}


async def test_a_task_that_raises_is_given_up_and_told_with_its_traceback(
    hand: Hand, make: Make
) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(device=9)
        await hand.open(device=1)
        await hand.dispatch()
        given_up, upload = await answers(hand, 2)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason == "raised ValueError"
    assert isinstance(upload, Upload)  # and life goes on
    [error] = await hand.words(Event)
    assert (error.device, error.version) == (9, 0)
    assert "Traceback" in (error.text or "")
    assert "device 9 is broken" in (error.text or "")


async def test_a_device_that_drops_out_gives_its_task_up(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(devices=DeviceSettings(dropout=1.0)), context()):
        await hand.open()
        await hand.dispatch()
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    assert answer.reason == "dropped out"


async def test_a_simulated_device_takes_its_time(hand: Hand, make: Make) -> None:
    await hand.create()
    slow = DeviceSettings(latency=FixedLatency(mean_s=0.3))
    async with running(make(devices=slow), context()):
        await hand.open()
        await hand.dispatch()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert upload.seconds >= 0.3


async def test_a_trainer_stopped_while_its_device_takes_its_time_answers_at_once(
    hand: Hand, make: Make, task: Adds
) -> None:
    """What it has trained would be lost."""
    await hand.create()
    slow = DeviceSettings(latency=FixedLatency(mean_s=600.0))
    live = context()
    trainer = make(devices=slow)
    async with running(trainer, live) as service:
        [trigger] = await hand.open()
        await hand.dispatch()
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


async def test_a_trainer_that_loses_its_lease_while_its_device_takes_its_time_says_nothing(
    hand: Hand, make: Make
) -> None:
    await hand.create()
    slow = DeviceSettings(latency=FixedLatency(mean_s=600.0))
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(devices=slow, lease=LeaseSettings(seconds=0.2)), live):
        await hand.open()
        await hand.dispatch()
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        assert len((await other.claim(idle_ms=0, most=9))[0]) == 1
        await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", end="lease lost"))
    assert len(await hand.answered()) == 0


async def test_a_device_that_drops_out_is_given_back_by_a_trainer_that_is_stopped(
    hand: Hand, make: Make
) -> None:
    """Whoever has the task next sees it drop out as well: that much is drawn with the task."""
    await hand.create()
    gone = DeviceSettings(latency=FixedLatency(mean_s=600.0), dropout=1.0)
    live = context()
    trainer = make(devices=gone)
    async with running(trainer, live) as service:
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: trainer._now)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert len(await hand.answered()) == 0
    assert counted(live, "fedstream_trainer_tasks_total", end="handed back") == 1


@pytest.mark.parametrize("length", [{"epochs": None}, {"steps": 3, "epochs": 2}])
async def test_a_task_of_no_length_or_of_two_is_given_up_and_ends_no_trainer(
    hand: Hand, make: Make, task: Adds, length: dict[str, Any]
) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(**length)
        await hand.open()
        await hand.dispatch()
        given_up, upload = await answers(hand, 2)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason == "raised ConfigError"
    assert isinstance(upload, Upload)
    [error] = await hand.words(Event)
    assert "exactly one of them is to be given" in (error.text or "")


async def test_an_anarchic_trainer_gets_only_tasks_of_devices_that_are_its_own(
    hand: Hand, make: Make
) -> None:
    """Others are somebody else's, or the run has none of that number."""
    await hand.create()
    await hand.announce("other", 4)
    settings = TrainerSettings(owns=(4, 5, 70), anarchic=Initiative(rate=500.0))
    async with running(make("edge", settings=settings), context()):

        async def served() -> bool:
            await hand.attend()
            return len(await hand.answered()) >= 1

        await wait_until(served)
        asked = {trigger.device for trigger in (await hand.ledger.look()).open}
    # Only one that has no task asks: it may have asked for device 4 meanwhile, whose owner has it.
    assert asked <= {4, 5}
    assert {answer.device for answer in await hand.answered()} == {5}


async def test_a_trainer_may_be_told_to_end_when_redis_is_gone_for_good(
    hand: Hand, make: Make, redis: RedisSettings
) -> None:
    """As one that joined a run on this machine is."""
    await hand.create()
    settings = TrainerSettings(redis_away_s=0.3)
    async with Proxy(redis) as proxy:
        trainer = make(settings=settings, redis=proxy.settings)
        async with running(trainer, context(), may_fail=True) as service:
            await hand.open()
            await hand.dispatch()
            await answers(hand)
            proxy.refuse = lambda _: True
            proxy.cut()
            await asyncio.wait({service}, timeout=10)
            with pytest.raises(BaseExceptionGroup) as ended:
                await service
    assert ended.group_contains(
        FedstreamError, match=r"for 0\.3 s \(trainer\.redis_away_s\) Redis has not served"
    )


async def test_a_trainer_may_be_told_to_end_with_the_run(hand: Hand, make: Make) -> None:
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


async def test_a_trainer_that_ends_though_redis_answers_says_what_it_answered(
    hand: Hand, make: Make
) -> None:
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


async def test_a_trainer_waits_for_redis_as_long_as_it_takes(
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
            trainer._patience.heard -= 1e6
            retries = "fedstream_retries_total"
            await wait_until(lambda: counted(live, retries, loop="heartbeat") > 2)
            assert not service.done()
            proxy.refuse = None
            await hand.open()
            await hand.dispatch()
            await answers(hand)


async def test_a_round_that_is_over_is_not_trained_for(hand: Hand, make: Make, task: Adds) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(version=7)
        await hand.open(deadline=1.0)
        await hand.dispatch()
        said = await answers(hand, 2)
    assert [a.reason for a in said if isinstance(a, GiveUp)] == ["round over", "deadline passed"]
    assert task.seen == []


async def test_at_its_deadline_a_task_is_left_by_whoever_trains_or_waits_for_it(
    hand: Hand, make: Make, task: Adds, clock: Clock
) -> None:
    """No answer counts any more, and the trainer is wanted for the next round."""
    await hand.create()
    task.gate.clear()
    async with running(make("t1"), context()):
        await hand.open(version=0, deadline=clock.time() + 600.0)
        await hand.dispatch()
        await wait_until(lambda: task.seen)
        clock.ahead_s = 601.0
        [first] = await answers(hand)
    task.gate.set()
    live, slow = context(), DeviceSettings(latency=FixedLatency(mean_s=6000.0))
    async with running(make("t2", devices=slow), live):
        await hand.open(version=0, deadline=clock.time() + 600.0)
        await hand.dispatch()
        trained = {"part": "training"}
        await wait_until(lambda: counted(live, "fedstream_task_seconds_count", **trained))
        clock.ahead_s = 1202.0
        _, second = await answers(hand, 2)
    for name, said in (("t1", first), ("t2", second)):
        assert isinstance(said, GiveUp)
        assert (said.reason, said.trainer) == ("deadline passed", name)
    assert [version for _, version in task.seen] == [0, 0]
    assert await pending(hand) == 0


async def test_a_trainer_of_another_model_says_so_and_ends(hand: Hand, make: Make) -> None:
    await hand.create()
    hand.layout = layout_of(Point(5))
    other = make()
    other._load = lambda: Adds(5)
    with pytest.raises(LayoutMismatch, match=r"5 parameters in 1 tensors, run .* 4 in 1"):
        await asyncio.wait_for(other.run(context()), 60)


async def test_an_answer_survives_a_cut_connection_without_new_training(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings
) -> None:
    await hand.create()
    async with Proxy(redis) as proxy:
        trainer = make(redis=proxy.settings)
        async with running(trainer, context()):
            await hand.open()
            task.gate.clear()
            await hand.dispatch()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: proxy.cut_replies)
            [upload] = await answers(hand)
            await hand.open()
            await hand.dispatch()
            assert len(await answers(hand, 2)) == 2  # nothing was said twice
    assert isinstance(upload, Upload)
    assert len(task.seen) == 2


async def test_the_evaluator_measures_when_it_is_due_and_ends_the_run_at_its_target(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()
    evaluator = Evaluator(
        EvaluatorSettings(every=2), keys=hand.keys, redis=redis, name="evaluator",
        load=lambda: task, target=0.35,
    )  # fmt: skip

    async def measured() -> list[int | None]:
        return [event.version for event in await hand.events("evaluation")]

    async def seen(*versions: int) -> bool:
        return await measured() == list(versions)

    async with running(evaluator, context()):
        await wait_until(lambda: seen(0))
        for number in (1, 2):
            assert await hand.commit(number, await hand.admitted()) == "done"
        await wait_until(lambda: seen(0, 2))
        for number in (3, 4):
            assert await hand.commit(number, await hand.admitted()) == "done"
        await wait_until(lambda: seen(0, 2, 4))

        async def finished() -> bool:
            return (await hand.ledger.run()).state == "finished"

        await wait_until(finished)
    assert (await hand.ledger.run()).why == "accuracy 0.4000 at version 4"
    assert [event.metrics for event in await hand.events("evaluation")] == [
        {"accuracy": 0.0},
        {"accuracy": pytest.approx(0.2)},
        {"accuracy": pytest.approx(0.4)},
    ]


async def test_metrics_that_raise_are_told_and_the_run_goes_on(
    hand: Hand, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()

    def broken(*_: object) -> dict[str, float]:
        raise KeyError("accuracy")

    monkeypatch.setattr(task, "metrics", broken)
    evaluator = Evaluator(
        EvaluatorSettings(every=1), keys=hand.keys, redis=redis, name="evaluator",
        load=lambda: task, target=None,
    )  # fmt: skip

    async def told() -> list[int | None]:
        return [event.version for event in await hand.events("error")]

    async def first() -> bool:
        return await told() == [0]

    async def second() -> bool:
        return await told() == [0, 1]

    async with running(evaluator, context()):
        await wait_until(first)
        assert await hand.commit(1) == "done"
        await wait_until(second)
    [error, _] = await hand.events("error")
    assert (error.device, error.reason) == (None, "metrics: KeyError")
    assert "Traceback" in (error.text or "")


# what a device sends


@pytest.mark.parametrize(
    ("trained", "error", "said"),
    [
        (None, TypeError, "not NoneType"),
        (Trained(1, 1, 0.5), TypeError, "control="),
        (Trained(-1, 1, 0.5), ValueError, "at least zero"),
    ],
)
def test_what_train_must_return(trained: object, error: type[Exception], said: str) -> None:
    layout = layout_of(Point()).with_controls()
    with pytest.raises(error, match=said):
        as_sent(trained, Model(layout), Model(layout), None, "delta", NoCompression())


@pytest.mark.parametrize("known", [None, 0.5])
def test_what_is_sent_is_a_difference_from_what_was_there(known: float | None) -> None:
    layout = layout_of(Point()).with_controls()
    base, into = Model(layout), Model(layout)
    base.floats[:], into.floats[:] = 1.0, 3.0
    control = np.full(4, 2.0, np.float32)
    device_control = None if known is None else np.full(4, known, np.float32)
    some: Any = np.int64(2)  # numpy's numbers are no JSON
    trained = Trained(some, some, 0.5, control)
    took = as_sent(trained, into, base, device_control, "delta", NoCompression())
    assert into.parameters.tolist() == [2.0] * 4
    assert into.controls.tolist() == [2.0 - (known or 0.0)] * 4
    assert (took, type(took.steps)) == (Trained(2, 2, 0.5), int)
