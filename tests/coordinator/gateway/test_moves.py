"""Two replicas of one gateway, and devices that move from one to the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import TRAINERS, member
from fedstream.coordinator.gateway.handover import GREET_S, OtherReplicas
from fedstream.core import reasons
from fedstream.core.messages import ArrivedDevices, HandOver
from fedstream.core.records import NO_QUARANTINES
from tests.coordinator.gateway.places import (
    SITE,
    Place,
    coordinating,
    ends,
    given_task,
    joined,
    owned_by,
    serving,
)
from tests.coordinator.gateway.uploading import SEVERAL, Scene, trained
from tests.support import Hand, Proxy, layout_of, wait_until


@asynccontextmanager
async def two(hand: Hand, redis: RedisSettings) -> AsyncIterator[tuple[Place, Place]]:
    await hand.create()
    async with (
        coordinating(hand, redis),
        serving(hand, redis, "gw-0") as one,
        serving(hand, redis, "gw-1") as other,
    ):
        yield one, other


async def test_device_takes_its_task_along(redis: RedisSettings, hand: Hand) -> None:
    async with two(hand, redis) as (one, other):
        offer = await given_task(hand, one)
        moved = (await other.check_in(3, wait_s=50)).offer
        assert (moved.task, moved.attempt) == (offer.task, offer.attempt)
        assert (len(one.gateway.replica.sessions), len(other.gateway.replica.sessions)) == (0, 1)
        assert (await other.beat(3, offer)).json["go_on"]
        assert await hand.ledger.owners() == {3: member(SITE, "gw-0")}, "as long as it has its task"
        await other.give_up(3, offer)
        await ends(hand, "given_up", reasons.DROPPED_OUT)
        await owned_by(hand, 3, "gw-1")
        await hand.open(device=3)
        assert (await other.check_in(3, wait_s=50)).status == 200


async def test_task_that_was_on_its_way_follows_the_device(
    redis: RedisSettings, hand: Hand
) -> None:
    async with two(hand, redis) as (one, other):
        for device in (3, 4):
            await joined(hand, one, device)
        second = asyncio.create_task(other.check_in(3, wait_s=50))
        await wait_until(lambda: not one.gateway.replica.sessions.is_present(3))
        # The coordinators still know the device at the first replica.
        assert (await hand.ledger.owners())[3] == member(SITE, "gw-0")
        [trigger] = await hand.open(device=3)
        assert (await second).offer.task.id == trigger.task
        assert not one.gateway.replica.sessions.is_present(3)


async def test_restarted_replica_leaves_tasks_to_where_their_devices_came(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis, trainer_silence_s=60.0):
        async with serving(hand, redis, "gw-0") as one:
            for device in (3, 4):
                await joined(hand, one, device)
                await hand.open(device=device)
            await wait_until(lambda: len(one.gateway.replica.sessions) == 2)
            offer = (await one.check_in(3)).offer
        async with serving(hand, redis, "gw-1") as other:
            assert (await other.check_in(3)).status == 204
            await wait_until(lambda: not other.gateway.replica.sessions.newcomers)
            async with serving(hand, redis, "gw-0") as one:
                assert (await other.check_in(3, wait_s=50)).offer.attempt == offer.attempt
                assert (await one.check_in(4, wait_s=50)).offer.task.device == 4
                assert {held.task.device for held in one.gateway.replica.sessions} == {4}


async def test_tasks_of_a_replica_that_dies_lapse_to_where_they_came_from(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with (
        coordinating(hand, redis),
        serving(hand, redis, "gw-0", task_lease_s=1.0) as one,
    ):
        offer = await given_task(hand, one)
        async with serving(hand, redis, "gw-1", task_lease_s=1.0) as other:
            assert (await other.check_in(3, wait_s=50)).offer.attempt == offer.attempt
            stream = one.gateway.replica.group.stream
            begun, idle_ms = time.monotonic(), [0]
            while time.monotonic() < begun + 1.5:  # longer than its lease, which is renewed
                [(_, owner, idle, _)] = await hand.client.call(
                    "XPENDING", stream, TRAINERS, "-", "+", 9
                )
                assert owner == b"gw-1"
                idle_ms.append(idle)
                await asyncio.sleep(0.02)
            assert sum(later < before for before, later in pairwise(idle_ms)) > 2
        again = (await one.check_in(3, wait_s=50)).offer
        assert again.attempt == offer.attempt


async def test_replica_cut_off_from_redis_serves_again(redis: RedisSettings, hand: Hand) -> None:
    """Coordinators strike it off and give its tasks up; nobody has to restart anything.

    It says every two seconds that it is there: after less silence it would be struck off again.
    """
    await hand.create()
    async with (
        Proxy(redis) as proxy,
        coordinating(hand, redis, trainer_silence_s=4.0),
        serving(hand, proxy.settings, task_lease_s=1.0, device_rate=1e6) as place,
    ):
        offer = await given_task(hand, place)
        proxy.refuse = lambda _: True
        proxy.cut()
        await ends(hand, "given_up", reasons.OWNER_GONE)
        assert (await place.beat(3, offer)).json["go_on"], "it can't know better"
        answer = await place.give_up(3, offer)
        assert (answer.status, answer.json["reason"]) == (503, "unavailable")
        proxy.refuse = None

        async def is_over() -> bool:
            said = await place.beat(3, offer)
            return bool(said.json == {"go_on": False, "why": "given up"})

        await wait_until(is_over)
        waiting = asyncio.create_task(place.check_in(3, wait_s=50))
        await owned_by(hand, 3, "gw-0")
        [trigger] = await hand.open(device=3)
        assert (await waiting).offer.task.id == trigger.task


async def test_nothing_is_lost_while_the_replica_that_had_the_task_is_away(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It restarts, or has crashed: the task is open, and nobody says that it were over."""
    monkeypatch.setattr("fedstream.coordinator.gateway.handover._SETTLE_S", 0.3)
    await hand.create()
    async with (
        coordinating(hand, redis, trainer_silence_s=60.0),
        serving(hand, redis, "gw-1") as other,
    ):
        async with serving(hand, redis, "gw-0") as one:
            await joined(hand, one)
            await hand.open(device=3)
            phone = trained(hand, (await one.check_in(3, wait_s=50)).offer)
        for _ in range(2):
            for answer in (await other.beat(3, phone.offer), await other.give_up(3, phone.offer)):
                assert (answer.status, answer.json["reason"]) == (503, "unavailable")
                assert int(answer.headers["Retry-After"]) > 0
            assert (await phone.posts(other, phone.data)).refusal == (503, "unavailable")
            assert (await phone.looks(other)).status == 503
        async with serving(hand, redis, "gw-0"):

            async def goes_on() -> bool:
                return (await other.beat(3, phone.offer)).status == 200

            await wait_until(goes_on)
            assert (await other.beat(3, phone.offer)).json["go_on"]
            assert (await phone.posts(other, phone.data)).receipt == (200, "admitted", None)
            assert (await other.beat(3, phone.offer)).json == {"go_on": False, "why": "given up"}


async def test_draining_replica_keeps_its_tasks_and_leaves_them_to_others(
    redis: RedisSettings, hand: Hand
) -> None:
    """A drain may last longer than a trainer may be silent."""
    hand.layout = layout_of(SEVERAL)
    await hand.create()
    silence_s = 3.0
    async with (
        coordinating(hand, redis, trainer_silence_s=silence_s),
        serving(hand, redis, "gw-0") as one,
        serving(hand, redis, "gw-1") as other,
    ):
        phones = []
        for device in (3, 4):
            await joined(hand, one, device)
            await hand.open(device=device)
            phones.append(trained(hand, (await one.check_in(device, wait_s=50)).offer))
        sends, moves = phones
        under_way = await Scene(hand, redis).sending(one, sends, CHUNK + 9)
        one.context.stop.set()
        await asyncio.sleep(silence_s + 2.0)  # the sweep that would strike it off comes meanwhile
        assert (await other.beat(4, moves.offer)).json == {"go_on": True, "why": None}
        under_way.writer.write(sends.data[CHUNK + 9 :])
        assert await under_way.status() == 200
        under_way.close()
        assert (await moves.posts(other, moves.data)).receipt == (200, "admitted", None)
        await asyncio.wait_for(one.work, 60)


async def test_open_task_may_be_elsewhere_for_no_longer_than_a_lease(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that Redis does not know, or has forgotten, is nowhere."""
    monkeypatch.setattr("fedstream.coordinator.gateway.handover._SETTLE_S", 0.1)
    await hand.create()
    [task] = await hand.open()
    async with serving(hand, redis, lease_s=1.5, device_rate=1e6) as place:
        path, body = f"/v1/tasks/{task.task}/heartbeat", {"attempt": "0123456789ab"}
        assert (await place.ask("POST", path, 3, json=body)).status == 503
        unknown = await place.ask("POST", "/v1/tasks/nope/heartbeat", 3, json=body)
        assert unknown.json == {"go_on": False, "why": "given up"}

        async def is_known() -> bool:
            return (await place.ask("POST", path, 3, json=body)).status == 200

        await wait_until(is_known)
        answer = await place.ask("POST", path, 3, json=body)
        assert answer.json == {"go_on": False, "why": "given up"}


async def test_nobody_becomes_present_who_could_not_check_in(
    redis: RedisSettings, hand: Hand
) -> None:
    """A request about a task is no check-in: it brings nobody in who said no, or is shut out."""
    await hand.create()
    async with serving(hand, redis) as place:
        barred = NO_QUARANTINES.quarantined([4], "odd", 1.0, 0)
        await hand.commit(1, quarantines=barred)
        await place.gateway.replica.run_cache.look()
        assert (await place.check_in(3, eligible=False)).status == 204
        path, body = "/v1/tasks/nope/heartbeat", {"attempt": "0123456789ab"}
        for device in (3, 4, 10, 5000):
            answer = await place.ask("POST", path, device, json=body)
            assert answer.json == {"go_on": False, "why": "given up"}
        assert place.gateway.replica.sessions.present() == ()
        assert place.gateway.replica.sessions.newcomers == set()
        [task] = await hand.open()
        path = f"/v1/tasks/{task.task}/heartbeat"
        assert (await place.ask("POST", path, 5, json=body)).status == 503
        assert (await place.check_in(3)).status == 204
        assert set(place.gateway.replica.sessions.present()) == {3, 5}


async def test_move_that_is_told_while_another_is_on_its_way_counts(
    redis: RedisSettings, hand: Hand
) -> None:
    """The order of the stream decides, also for who hears of it before it has its own place."""
    async with two(hand, redis) as (one, other):
        moves = one.gateway._app.running
        ledger, told = moves.moves._ledger, asyncio.Event()
        move = ledger.move

        async def slow(message: ArrivedDevices | HandOver) -> str:
            place = await move(message)
            await told.wait()  # its reply is on its way
            return place

        ledger.move = slow  # type: ignore[method-assign]
        assert (await one.check_in(3)).status == 204
        assert one.gateway.replica.sessions.newcomers == {3}

        async def is_told() -> bool:
            return bool(await ledger.moves())

        await wait_until(is_told)
        assert (await other.check_in(3)).status == 204
        await wait_until(lambda: 3 in moves.moves._meanwhile)
        told.set()
        await wait_until(lambda: not one.gateway.replica.sessions.is_present(3))
        await owned_by(hand, 3, "gw-1")


async def test_unreadable_message_of_another_release_is_passed_over(
    redis: RedisSettings, hand: Hand
) -> None:
    """While replicas are upgraded one by one, or whatever is in the stream."""
    stream = hand.keys.moves(SITE)
    newer = ArrivedDevices(gateway="gw-9", devices=(3,)).encode().replace(b"seating", b"sitting")
    for name, value in (("m", newer), ("m", b"junk"), ("x", b"y")):
        await hand.client.call("XADD", stream, "*", name, value)
    async with two(hand, redis) as (one, other):
        await joined(hand, one)
        await hand.client.call("XADD", stream, "*", "m", newer)
        await hand.open(device=3)
        offer = (await one.check_in(3, wait_s=50)).offer
        assert (await other.check_in(3, wait_s=50)).offer.attempt == offer.attempt
        assert not one.work.done()
        assert not other.work.done()


# which other replicas are there


def listening(others: OtherReplicas, since: float, until: float) -> bool:
    """Whether there is one after listening for so long without a break."""
    for second in range(int(since), int(until) + 1):
        others.listened(float(second))
    return bool(others)


def test_replica_that_is_heard_now_and_then_is_there() -> None:
    others = OtherReplicas()
    assert not listening(others, 0, 10)
    others.heard("gw-1", 10.0)
    assert listening(others, 10, 10 + 3 * GREET_S), "two signs of life may be late"
    others.heard("gw-1", 11 + 3 * GREET_S)
    assert listening(others, 11 + 3 * GREET_S, 60)


def test_replica_that_is_silent_is_gone() -> None:
    others = OtherReplicas()
    others.heard("gw-1", 0.0)
    others.heard("gw-2", 20.0)
    assert listening(others, 0, 40), "the second one is there"
    assert not listening(others, 41, 60)


def test_silence_counts_only_while_somebody_listens() -> None:
    others = OtherReplicas()
    others.heard("gw-1", 0.0)
    assert listening(others, 0, 10)
    assert listening(others, 1000, 1030), "Redis was away: it has not had the time to say so"
    assert not listening(others, 1031, 1040)
