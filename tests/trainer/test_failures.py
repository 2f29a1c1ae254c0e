"""Tasks that raise: given up, reported, and followed by a rest."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedstream.broker.messages import Event, GiveUp, Upload
from tests.support import Hand, Pauses, context, running, wait_until
from tests.trainer.adding import Adds, Make, Rests, answers


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


async def test_training_without_a_result_is_a_task_error(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    monkeypatch.setattr(task, "train", lambda *_: None)
    async with running(make(), context()):
        await hand.open()
        [answer] = await answers(hand)
    assert isinstance(answer, GiveUp)
    [error] = await hand.words(Event)
    assert "train() must return Trained(...), not NoneType" in (error.text or "")


@pytest.mark.parametrize("length", [{"epochs": None}, {"steps": 3, "epochs": 2}])
async def test_task_without_exactly_one_length_is_given_up(
    hand: Hand, make: Make, task: Adds, length: dict[str, Any]
) -> None:
    await hand.create()
    async with running(make(), context()):
        await hand.open(**length)
        await hand.open()
        given_up, upload = await answers(hand, 2)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason == "raised ConfigError"
    assert isinstance(upload, Upload)
    [error] = await hand.words(Event)
    assert "give exactly one of them" in (error.text or "")


async def test_trainer_pauses_after_each_raising_task(hand: Hand, make: Make) -> None:
    await hand.create()
    rests = Rests(0.0)
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
    async with running(make(rests=Rests(3600.0)), live) as service:
        await hand.open(device=9)
        await hand.open(device=1)
        await wait_until(lambda: 3600.0 in pauses.asked_s)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert [device for device, _ in task.seen] == [9]
    async with running(make("t2"), context()):
        _, upload = await answers(hand, 2)
    assert isinstance(upload, Upload)
