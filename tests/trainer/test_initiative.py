"""Anarchic trainers ask for tasks of their own, if they and the device can."""

from __future__ import annotations

from fedstream.core.messages import Trigger
from fedstream.runtime.task_settings import FixedSteps, ParticipationGroup
from fedstream.trainer.settings import InitiativeSettings, TrainerSettings
from tests.support import Hand, Pauses, context, running, wait_until
from tests.trainer.adding import Cooldowns, Make
from tests.trainer.stepping import BY_TURNS, Course


async def served(hand: Hand) -> bool:
    """Whether a task was answered, once a coordinator has heard what there is."""
    await hand.attend()
    return len(await hand.answered()) >= 1


async def test_anarchic_trainer_triggers_its_own_tasks(hand: Hand, make: Make) -> None:
    await hand.create()
    initiative = InitiativeSettings(rate=200.0, steps=FixedSteps(n=7))
    settings = TrainerSettings(owns=(5,), anarchic=initiative)
    async with running(make("edge", settings=settings), context()):
        await wait_until(lambda: served(hand))
        view = await hand.ledger.look()
    assert {trigger.origin for trigger in view.open} == {"edge"}
    assert {(trigger.device, trigger.steps) for trigger in view.open} == {(5, 7)}


async def test_anarchic_trainer_uses_its_devices_rates_and_lengths(hand: Hand, make: Make) -> None:
    """At the usual rate it would decide once in half a year, and as often for the other one."""
    await hand.create()
    initiative = InitiativeSettings(rate=1e-7, steps=FixedSteps(n=7))
    settings = TrainerSettings(owns=(4, 5), anarchic=initiative)
    often = ParticipationGroup(devices=(5,), rate=1e10, steps=FixedSteps(n=2))
    async with running(make("edge", settings=settings, participation=(often,)), context()):
        await wait_until(lambda: served(hand))
        triggers = (await hand.ledger.look()).open
        said = await hand.answered()
    assert {one.device for one in said} == {5}
    assert {(trigger.device, trigger.steps) for trigger in triggers} == {(5, 2)}


async def test_anarchic_trainer_gets_only_tasks_of_its_own_devices(hand: Hand, make: Make) -> None:
    """Others are somebody else's, or the run has none of that number."""
    await hand.create()
    await hand.announce("other", 4)
    settings = TrainerSettings(owns=(4, 5, 70), anarchic=InitiativeSettings(rate=500.0))
    async with running(make("edge", settings=settings), context()):
        await wait_until(lambda: served(hand))
        asked = {trigger.device for trigger in (await hand.ledger.look()).open}
    # Only one that has no task asks: it may have asked for device 4 meanwhile, whose owner has it.
    assert asked <= {4, 5}
    assert {answer.device for answer in await hand.answered()} == {5}


async def test_pausing_anarchic_trainer_triggers_nothing(
    hand: Hand, make: Make, pauses: Pauses
) -> None:
    await hand.create()
    settings = TrainerSettings(owns=(9,), anarchic=InitiativeSettings(rate=200.0))
    trainer = make("edge", settings=settings, rests=Cooldowns(3600.0))
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


async def test_absent_device_triggers_nothing(hand: Hand, make: Make, course: Course) -> None:
    await hand.create()
    course.eligible = False
    settings = TrainerSettings(anarchic=InitiativeSettings(rate=500.0))
    async with running(make("t1", settings=settings, devices=BY_TURNS), context()):
        await wait_until(lambda: course.asked > 5)
        assert await hand.words(Trigger) == []
        course.eligible = True
        await wait_until(lambda: hand.words(Trigger))
