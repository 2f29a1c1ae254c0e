"""The coordinator against a real Redis: trainers that fall silent are removed, and the tasks of a
silent owner are given up."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.streams import Group
from tests.coordinator.waiting import is_open, tasks
from tests.support import Hand, context, counted, running, wait_until


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
