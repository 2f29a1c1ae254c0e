"""Tasks that raise: given up, reported, and followed by a rest."""

from __future__ import annotations

import asyncio
import random

import pytest

from fedstream.core import reasons
from fedstream.core.messages import Event, GiveUp, Upload
from fedstream.runtime.backoff import Backoff
from fedstream.trainer.failures import Failures
from tests.support import Hand, Pauses, context, running, wait_until
from tests.trainer.adding import Adds, Cooldowns, Make, answers


async def test_raising_task_is_given_up_with_its_traceback(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(device=9)
        await hand.open(device=1)
        given_up, upload = await answers(hand, 2)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason == "raised ValueError"
    assert isinstance(upload, Upload)  # and life goes on
    [error] = await hand.words(Event)
    assert (error.device, error.version) == (9, 0)
    first, frame, *_, last = (error.text or "").splitlines()
    assert first == "Traceback (most recent call last):"
    assert "adding.py" in frame, "the user's first frame"
    assert "device 9 is broken" in last


async def test_exception_in_a_group_is_the_one_that_is_shown(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: object) -> None:
        raise ExceptionGroup("unhandled", [ValueError("no\nsuch layer"), KeyError("b")])

    await hand.create()
    monkeypatch.setattr(task, "train", train)
    async with running(make(), context()):
        await hand.open()
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    assert answer.reason == "raised ValueError"
    [error] = await hand.words(Event)
    assert (error.text or "").endswith("ValueError: no such layer")


async def test_trainer_pauses_after_each_raising_task(hand: Hand, make: Make) -> None:
    await hand.create()
    rests = Cooldowns(0.0)
    async with running(make(rests=rests), context()):
        for count, device in enumerate((9, 10, 1, 11), 1):
            await hand.open(device=device)
            await answers(hand, count)
    assert rests.told == ["raised", "raised", "trained", "raised"]


async def test_pausing_trainer_stops_without_taking_a_task(
    hand: Hand, make: Make, task: Adds, pauses: Pauses
) -> None:
    await hand.create()
    pauses.most_s = 3600.0
    live = context()
    async with running(make(rests=Cooldowns(3600.0)), live) as service:
        await hand.open(device=9)
        await hand.open(device=1)
        await wait_until(lambda: 3600.0 in pauses.asked_s)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert [device for device, _ in task.seen] == [9]
    async with running(make("t2"), context()):
        _, upload = await answers(hand, 2)
    assert isinstance(upload, Upload)


@pytest.mark.parametrize(
    ("devices", "failing"),
    [
        ((9, 9, 9, 9), [0, 0, 0, 0]),  # it may be the device's fault
        ((9, 10, 11, 11), [0, 0, 3, 4]),
        ((9, 10, 1, 11, 12), [0, 0, None, 0, 0]),
    ],
)
async def test_trainer_says_that_it_fails_on_every_device(
    hand: Hand, make: Make, devices: tuple[int, ...], failing: list[int | None]
) -> None:
    await hand.create()
    async with running(make(rests=Cooldowns(0.0)), context()):
        for count, device in enumerate(devices, 1):
            await hand.open(device=device)
            found = await answers(hand, count)
    assert [one.failing if isinstance(one, GiveUp) else None for one in found] == failing


def test_trainer_that_has_trained_is_not_blamed_for_a_few_devices() -> None:
    failures = Failures(context(), None, "t", Cooldowns(0.0))  # type: ignore[arg-type]
    failures.trained()
    for n in range(1, 20):
        failures.gave_up(n % 3, "deadline passed")
    assert failures.in_a_row == 0, "only these may be left in the round"
    failures.gave_up(3, "deadline passed")
    assert failures.in_a_row == 20
    failures.trained()
    assert failures.in_a_row == 0


@pytest.mark.parametrize("reason", [reasons.DROPPED_OUT, *sorted(reasons.OF_THE_RUN)])
def test_trainer_is_not_blamed_for_what_is_the_devices_or_the_runs(reason: str) -> None:
    failures = Failures(context(), None, "t", Cooldowns(1.0))  # type: ignore[arg-type]
    for device in range(20):
        failures.gave_up(device, reason)
    assert (failures.in_a_row, failures.rests) == (0, False)


def test_trainer_rests_after_a_deadline() -> None:
    failures = Failures(context(), None, "t", Backoff(1.0, 2.0, rng=random.Random(1)))  # type: ignore[arg-type]
    failures.gave_up(1, reasons.DEADLINE_PASSED)
    assert failures.rests
