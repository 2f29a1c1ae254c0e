"""A gateway between real devices' requests and a real run."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import member
from fedstream.core import reasons
from fedstream.core.errors import ConfigError
from fedstream.core.formats import format_of
from fedstream.core.messages import Presence, Trigger, Withdraw, decode
from fedstream.core.records import NO_QUARANTINES
from tests.coordinator.gateway.places import (
    SITE,
    coordinating,
    ends,
    given_task,
    joined,
    owned_by,
    serving,
)
from tests.support import Clock, Hand, Proxy, counted, layout_of, wait_until


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other replica is waited for that may have a device's tasks."""
    monkeypatch.setattr("fedstream.coordinator.gateway.handover._SETTLE_S", 0.2)


async def test_device_that_waits_gets_its_task(redis: RedisSettings, hand: Hand) -> None:
    version = await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        waiting = asyncio.create_task(place.check_in(3, wait_s=50))
        await owned_by(hand, 3, "gw-0")
        [trigger] = await hand.open(device=3, epochs=None, steps=7)
        offer = (await waiting).offer
        assert (offer.task.id, offer.task.device, offer.task.steps) == (trigger.task, 3, 7)
        assert offer.task.epochs is offer.task.seconds is offer.task.left_s is None
        assert offer.model.digest == version.digest
        assert (offer.model.version, offer.model.size) == (0, hand.layout.nbytes)
        assert offer.update.layout == hand.layout.signature
        assert (offer.update.sends, offer.update.format) == ("model", "f32")
        assert offer.update.most == hand.layout.nbytes
        assert offer.update.url == f"/v1/tasks/{trigger.task}/updates/{offer.attempt}"
        assert (await place.beat(3, offer)).json == {"go_on": True, "why": None}
        assert (await place.give_up(3, offer, "raised ValueError")).json == {}
        await ends(hand, "given_up", "raised ValueError")
        assert (await place.give_up(3, offer)).json == {}, "the same again"
        await ends(hand, "given_up", "raised ValueError")
        assert (await place.beat(3, offer)).json == {"go_on": False, "why": "given up"}
        assert (await place.check_in(3)).status == 204


async def test_task_is_kept_for_a_device_that_does_not_wait(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        first = await place.check_in(3)
        assert first.status == 204
        assert first.headers["Retry-After"] in ("1", "2")
        await owned_by(hand, 3, "gw-0")
        triggers = await hand.open(2, device=3)
        await wait_until(lambda: len(place.gateway.replica.sessions) == 2)
        await hand.commit(1)  # a newer version by now
        offer = (await place.check_in(3)).offer
        assert (offer.task.id, offer.model.version) == (triggers[0].task, 1)
        again = (await place.check_in(3)).offer
        assert (again.task.id, again.attempt) == (offer.task.id, offer.attempt)
        await place.give_up(3, offer)
        assert (await place.check_in(3)).offer.task.id == triggers[1].task


async def test_same_nonce_gets_the_same_answer(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        one, two = "a" * 22, "b" * 22
        assert (await place.check_in(3, nonce=one)).status == 204
        await owned_by(hand, 3, "gw-0")
        await hand.open(device=3)
        await wait_until(lambda: len(place.gateway.replica.sessions))
        assert (await place.check_in(3, nonce=one)).status == 204
        offered = await place.check_in(3, nonce=two)
        await hand.commit(1)
        assert (await place.check_in(3, nonce=two)).body == offered.body
        await place.give_up(3, offered.offer)
        assert (await place.check_in(3, nonce=two)).body == offered.body
        assert counted(place.context, "fedstream_gateway_offered_total") == 1


async def test_newer_check_in_of_a_device_waits_in_the_place_of_the_older(
    redis: RedisSettings, hand: Hand
) -> None:
    """A device whose connection was cut asks again; the older request is nobody's any more."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        nonce = "a" * 22
        older = asyncio.create_task(place.check_in(3, nonce=nonce, wait_s=50))
        await wait_until(lambda: place.gateway.replica.sessions.polls == 1)
        newer = asyncio.create_task(place.check_in(3, nonce=nonce, wait_s=50))
        assert (await older).status == 204
        await owned_by(hand, 3, "gw-0")
        [trigger] = await hand.open(device=3)
        assert (await newer).offer.task.id == trigger.task


async def test_device_that_hung_up_is_offered_nothing(redis: RedisSettings, hand: Hand) -> None:
    """Or its task would count as begun, and wait for it for the whole lease."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        desk = place.gateway.replica.sessions
        waiting = asyncio.create_task(place.check_in(3, wait_s=50))
        await wait_until(lambda: desk.polls)
        await owned_by(hand, 3, "gw-0")
        waiting.cancel()
        await asyncio.wait({waiting})
        for _ in range(3):  # the gateway has heard of the end by then
            await place.check_in(4)
        [trigger] = await hand.open(device=3)
        await wait_until(lambda: len(desk) and not desk.polls)
        for _ in range(3):
            await place.check_in(4)
        assert counted(place.context, "fedstream_gateway_offered_total") == 0
        held = desk.first(3)
        assert held is not None
        assert held.is_new
        assert (await place.check_in(3)).offer.task.id == trigger.task
        assert not held.is_new


async def test_silent_device_loses_its_task_and_then_its_place(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis, away_s=2.5, lease_s=3.0) as place:
        await joined(hand, place)
        await hand.open(device=3)
        await ends(hand, "given_up", reasons.DROPPED_OUT)
        await owned_by(hand, 3, None)


async def test_silence_does_not_count_while_redis_is_away(redis: RedisSettings, hand: Hand) -> None:
    """Devices are told to come again then; when Redis is back, their tasks are still theirs."""
    await hand.create()
    async with (
        Proxy(redis) as proxy,
        coordinating(hand, redis, trainer_silence_s=60.0),
        serving(hand, proxy.settings, lease_s=3.5) as place,
    ):
        offer = await given_task(hand, place)
        opened = place.gateway._app.running
        proxy.refuse = lambda _: True
        proxy.cut()
        await asyncio.sleep(4.0)
        swept, proxy.refuse = opened.tasks._listened, None
        await wait_until(lambda: opened.tasks._listened > swept)
        assert (await place.beat(3, offer)).json == {"go_on": True, "why": None}
    assert (await hand.ledger.tally()).reasons("given_up") == {}


async def test_restarts_do_not_make_a_task_poison(redis: RedisSettings, hand: Hand) -> None:
    """It is devices that work on it, so the gateway's own crashes don't speak against it."""
    await hand.create()
    async with coordinating(hand, redis):
        async with serving(hand, redis) as place:
            await joined(hand, place)
            await hand.open(device=3)
            await wait_until(lambda: len(place.gateway.replica.sessions))
        for _ in range(5):
            async with serving(hand, redis) as place:
                await wait_until(lambda: len(place.gateway.replica.sessions))
        async with serving(hand, redis) as place:
            assert (await place.check_in(3, wait_s=50)).status == 200


async def test_stop_answers_waiting_devices_at_once(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        waiting = asyncio.create_task(place.check_in(3, wait_s=50))
        await wait_until(lambda: place.gateway.replica.sessions.polls)
        await owned_by(hand, 3, "gw-0")
        begun = time.monotonic()
        place.context.stop.set()
        answer = await waiting
        assert time.monotonic() - begun < 1
        assert (answer.status, answer.headers["Connection"]) == (204, "close")
        await place.work
        await owned_by(hand, 3, None)  # it said good-bye: no task was in hand


async def test_task_in_hand_outlasts_a_stop(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis):
        async with serving(hand, redis) as place:
            await joined(hand, place)
            [trigger] = await hand.open(device=3)
            await wait_until(lambda: len(place.gateway.replica.sessions))
            place.context.stop.set()
            await place.work
        assert (await hand.ledger.owners())[3] == member(SITE, "gw-0")
        async with serving(hand, redis) as place:
            assert (await place.check_in(3, wait_s=50)).offer.task.id == trigger.task


async def test_finished_run_sends_devices_home(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place)
        waiting = asyncio.create_task(place.check_in(4, wait_s=50))
        await wait_until(lambda: place.gateway.replica.sessions.polls)
        await hand.commit(1, finish="done")
        assert ((await waiting).status, (await waiting).json["reason"]) == (410, "run over")
        assert (await place.beat(3, offer)).json == {"go_on": False, "why": "run over"}
        assert (await place.check_in(3)).status == 410
        await ends(hand, "given_up", reasons.RUN_FINISHED)
        view = await hand.ledger.look()
        assert view.open == ()


async def test_task_of_a_round_that_ended_is_not_offered(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await hand.open(device=3, version=0, deadline=await hand.client.time() + 600)
        await wait_until(lambda: len(place.gateway.replica.sessions))
        offer = (await place.check_in(3)).offer
        assert offer.task.left_s is not None
        assert 590 < offer.task.left_s < 601  # Redis's clock is known to a millisecond or so
        await hand.commit(1)
        assert (await place.check_in(3)).status == 204
        await ends(hand, "given_up", reasons.ROUND_OVER)
        assert (await place.beat(3, offer)).json == {"go_on": False, "why": "given up"}


async def test_task_of_a_round_that_this_replica_has_not_read_yet_goes_on(
    redis: RedisSettings, hand: Hand
) -> None:
    """A device may come with it from a replica that has read the newest version sooner."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        current = place.gateway.replica.run_cache
        older = current.head
        await hand.commit(1)
        await hand.open(device=3, version=1)
        await wait_until(lambda: len(place.gateway.replica.sessions))
        current._head = older  # between two looks
        offer = (await place.check_in(3)).offer
        assert offer.model.version == 1
        current._head = older
        assert (await place.beat(3, offer)).json == {"go_on": True, "why": None}
    assert (await hand.ledger.tally()).reasons("given_up") == {}


async def test_heartbeat_ends_a_task_whose_deadline_has_passed(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place, version=0, deadline=clock.time() + 600)
        clock.ahead_s = 601
        assert (await place.beat(3, offer)).json == {"go_on": False, "why": "given up"}
        await ends(hand, "given_up", reasons.DEADLINE_PASSED)


async def test_withdrawn_task_is_over_for_its_device(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis, task_lease_s=1.0) as place:
        await joined(hand, place)
        [trigger] = await hand.open(device=3)
        offer = (await place.check_in(3, wait_s=50)).offer
        assert (await place.beat(3, offer)).json["go_on"]
        await hand.ledger.ask(Withdraw(tasks=(trigger.task,), why=reasons.TIMED_OUT))
        await ends(hand, "given_up", reasons.TIMED_OUT)

        async def is_over() -> bool:
            return bool((await place.beat(3, offer)).json == {"go_on": False, "why": "given up"})

        await wait_until(is_over)


async def test_device_hears_that_its_task_is_too_stale(redis: RedisSettings, hand: Hand) -> None:
    await hand.create(max_staleness=1)
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place)
        await hand.commit(1)
        await place.gateway.replica.run_cache.look()
        assert (await place.beat(3, offer)).json["go_on"]
        await hand.commit(2)
        await place.gateway.replica.run_cache.look()
        assert (await place.beat(3, offer)).json == {"go_on": False, "why": "too stale"}
        await ends(hand, "given_up", reasons.BECAME_STALE)
        assert (await place.check_in(3)).status == 204, "it would be too stale again"


async def test_quarantined_device_is_not_kept_waiting(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        barred = NO_QUARANTINES.quarantined([3], "odd", 1.0, 0)
        await hand.commit(1, quarantines=barred)
        await place.gateway.replica.run_cache.look()
        assert (await place.check_in(3, wait_s=50)).status == 204
        await owned_by(hand, 3, None)


async def test_another_devices_task_is_refused_and_left_alone(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place)
        for answer in (await place.beat(4, offer), await place.give_up(4, offer)):
            assert (answer.status, answer.json["reason"]) == (404, "unknown task")
        assert (await place.beat(3, offer)).json["go_on"]
        refused = counted(place.context, "fedstream_gateway_refused_total", reason="unknown task")
        assert refused == 2


async def test_device_that_the_run_does_not_have_is_refused(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        answer = await place.check_in(10)
        assert (answer.status, answer.json["reason"]) == (403, "unknown device")


async def test_gateway_waits_for_the_run(redis: RedisSettings, hand: Hand) -> None:
    async with serving(hand, redis, is_open=False) as place:
        answer = await place.check_in(3)
        assert (answer.status, answer.json["reason"]) == (503, "unavailable")
        assert int(answer.headers["Retry-After"]) >= 2
        await hand.create()

        async def is_served() -> bool:
            return (await place.check_in(3)).status == 204

        await wait_until(is_served)


@pytest.mark.parametrize(
    ("about", "update", "said"),
    [
        ({"strategy": "scaffold"}, "f32", "control variates"),
        ({"sends": "model"}, "int4", "too coarse"),
    ],
)
async def test_run_that_devices_cannot_take_part_in_ends_the_gateway(
    redis: RedisSettings, hand: Hand, about: dict[str, Any], update: str, said: str
) -> None:
    if about.get("strategy") == "scaffold":
        hand.layout = layout_of(4).with_controls()
    await hand.create(**about)
    with pytest.raises(ConfigError, match=said):
        async with serving(hand, redis, update=format_of(update), is_open=False) as place:
            await place.work


@pytest.mark.parametrize(
    ("formats", "expected"),
    [(["f32"], "f32"), (["f32", "int8+zstd"], "int8+zstd"), (["f32", "int8"], "f32")],
)
async def test_updates_are_asked_for_in_a_format_that_the_device_knows(
    redis: RedisSettings, hand: Hand, formats: list[str], expected: str
) -> None:
    await hand.create()
    how = format_of("int8+zstd")
    async with coordinating(hand, redis), serving(hand, redis, update=how) as place:
        await joined(hand, place)
        await hand.open(device=3)
        offer = (await place.check_in(3, wait_s=50, formats=formats)).offer
        assert offer.update.format == expected
        assert offer.update.most == format_of(expected).sizes(hand.layout)[1]
        answer = await place.check_in(3, formats=["bf16"])
        assert (answer.status, answer.json["reason"]) == (406, "format")


async def test_unreadable_task_is_buried(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        stream = hand.keys.tasks_of(member(SITE, "gw-0"))
        await hand.client.call("XADD", stream, "*", "m", b"junk")

        async def is_buried() -> bool:
            return bool((await hand.ledger.tally()).dead)

        await wait_until(is_buried)
        [trigger] = await hand.open(device=3)
        assert isinstance(trigger, Trigger)
        assert (await place.check_in(3, wait_s=50)).offer.task.id == trigger.task


async def test_long_list_is_announced_every_two_seconds_however_often_it_changes(
    redis: RedisSettings, hand: Hand
) -> None:
    """Coordinators look up each device that it names."""
    await hand.create(devices=5000)

    async def announced() -> list[int]:
        """How many devices each announcement named, of more than a thousand."""
        said = [decode(entry.data, Presence) for entry in await hand.heard(SITE)]
        return [len(one.owns) for one in said if len(one.owns) > 1000]

    async with serving(hand, redis) as place:
        desk, counts = place.gateway.replica.sessions, list[int]()
        begun = time.monotonic()
        for device in range(1200):
            desk.arrive(device, time.monotonic())
        for device in range(1200, 1225):
            await asyncio.sleep(0.1)
            desk.arrive(device, time.monotonic())
            counts += await announced()

        async def are_all() -> bool:
            counts.extend(await announced())
            return 1225 in counts

        await wait_until(are_all)
        assert len(counts) <= 2 + (time.monotonic() - begun) / 2


async def test_gateway_says_that_nobody_serves_its_site(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.gateway.service._ANNOUNCE_S", 0.1)
    await hand.create()
    with capture_logs() as lines:

        def is_said() -> bool:
            return any("is its site in coordinator.sites" in line["event"] for line in lines)

        async with coordinating(hand, redis, sites=("pool",)), serving(hand, redis) as place:
            await place.check_in(3)
            await wait_until(is_said)
