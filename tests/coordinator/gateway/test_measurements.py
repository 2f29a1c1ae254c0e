"""Evaluations at a gateway: offered to devices that can evaluate, and answered once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core import reasons
from fedstream.protocol.messages import EvaluationOffer
from tests.coordinator.gateway.places import (
    Answer,
    Place,
    coordinating,
    evaluates,
    joined,
    serving,
)
from tests.support import Hand, wait_until

SUMS = {"accuracy": (7.0, 10.0), "loss": (3.5, 10.0)}


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other replica is waited for that may have a device's tasks."""
    monkeypatch.setattr("fedstream.coordinator.gateway.handover._SETTLE_S", 0.2)


async def offered(at: Place, device: int = 3) -> EvaluationOffer:
    answer = await at.check_in(device, wait_s=50, evaluates=True)
    assert answer.status == 200, answer.body
    return EvaluationOffer.decode(answer.body)


async def measures(at: Place, offer: EvaluationOffer, device: int = 3, **more: Any) -> Answer:
    said = {"samples": 10, "sums": SUMS, "seconds": 0.5} | more
    return await at.ask("POST", offer.measurement.url, device, json=said)


async def outcomes(hand: Hand, **expected: int) -> None:
    """Waits until the devices' evaluations have ended in these ways."""
    wanted = {f"evaluated:{name.replace('_', ' ')}": n for name, n in expected.items()}

    async def is_so() -> bool:
        counts = (await hand.ledger.tally()).counts
        return {name: n for name, n in counts.items() if name.startswith("evaluated:")} == wanted

    await wait_until(is_so, what=f"{wanted}")
    await hand.balanced()


async def test_device_measures_the_version_that_is_evaluated(
    redis: RedisSettings, hand: Hand
) -> None:
    version = await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        await hand.commit(1)  # a newer version, which is not the one to be measured
        offer = await offered(place)
        assert (offer.model.version, offer.model.digest) == (0, version.digest)
        assert offer.measurement.layout == hand.layout.signature
        assert 50 < offer.task.left_s <= 60
        model = await place.ask("GET", offer.model.url, 3)
        assert (model.status, len(model.body)) == (200, hand.layout.nbytes)
        path = f"/v1/tasks/{offer.task.id}/heartbeat"
        beat = await place.ask("POST", path, 3, json={"attempt": offer.attempt})
        assert beat.json == {"go_on": True, "why": None}
        assert (await measures(place, offer)).json == {}
        await outcomes(hand, measured=1)
        [answer] = (await hand.ledger.answers()).values()
        assert answer.measured is not None
        told = answer.measured
        assert (told.sums, told.samples, told.seconds) == (SUMS, 10, 0.5)
        assert (told.version, told.base, told.site) == (0, version.digest, "gateway")
        assert (await measures(place, offer)).json == {}, "the same again"
        await outcomes(hand, measured=1)
        assert (await hand.ledger.tally()).counts.get("stray", 0) == 0


async def test_every_replica_has_the_model_that_is_evaluated(
    redis: RedisSettings, hand: Hand
) -> None:
    """Also one that never saw the version: a device's requests may go to any of them."""
    version = await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        await hand.commit(1)
        offer = await offered(place)
        async with serving(hand, redis, "gw-1") as other:
            model = await other.ask("GET", offer.model.url, 3)
            assert (model.status, len(model.body)) == (200, hand.layout.nbytes)
            await hand.client.call("DEL", hand.keys.evaluation)
            gone = await other.ask("GET", offer.model.url.replace(version.digest, "0" * 64), 3)
            assert gone.status == 404


async def test_device_that_cannot_evaluate_trains_on(redis: RedisSettings, hand: Hand) -> None:
    """As devices of an earlier release, which would not understand the offer."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        [trigger] = await hand.open(device=3)
        assert (await place.check_in(3, wait_s=50)).offer.task.id == trigger.task
        await outcomes(hand, does_not_evaluate=1)


async def test_busy_device_evaluates_before_its_next_task(redis: RedisSettings, hand: Hand) -> None:
    """Neither kind of task starves the other, however soon the next one is there."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        first, second = await hand.open(device=3), []
        training = (await place.check_in(3, wait_s=50)).offer
        assert training.task.id == first[0].task
        await evaluates(hand, 3)
        second = await hand.open(device=3)
        await wait_until(lambda: len(place.gateway.replica.sessions) == 3)
        await place.give_up(3, training)
        await measures(place, await offered(place))
        assert (await place.check_in(3)).offer.task.id == second[0].task
        await outcomes(hand, measured=1)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("no test data", reasons.NO_TEST_DATA),
        ("metrics not finite", reasons.METRICS_NOT_FINITE),
        ("raised ValueError", "raised ValueError"),
        ("dropped out", reasons.DROPPED_OUT),
    ],
)
async def test_device_says_why_it_has_no_metrics(
    redis: RedisSettings, hand: Hand, said: str, outcome: str
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        offer = await offered(place)
        path = f"/v1/tasks/{offer.task.id}/give-up"
        for _ in range(2):  # again: as before
            gone = await place.ask("POST", path, 3, json={"attempt": offer.attempt, "reason": said})
            assert gone.json == {}
        await outcomes(hand, **{outcome: 1})
        assert (await measures(place, offer)).status == 404


async def test_task_takes_only_an_answer_of_its_kind_and_of_its_device(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        offer = await offered(place)
        assert (await measures(place, offer, 4)).status == 404
        wrong = offer.measurement.url.replace(offer.attempt, "0" * 12)
        other = offer.model_copy(
            update={"measurement": offer.measurement.model_copy(update={"url": wrong})}
        )
        assert (await measures(place, other)).status == 404
        update = f"/v1/tasks/{offer.task.id}/updates/{offer.attempt}"
        assert (await place.ask("HEAD", update, 3)).status == 404
        wrong_sums: tuple[dict[str, Any], ...] = (
            {"sums": {}},
            {"sums": {"accuracy": (1.0, 0.0)}},
            {"sums": {"accuracy": (1e300, 1.0)}},
            {"sums": {"a" * 201: (1.0, 1.0)}},
            {"sums": {f"m{n}": (1.0, 1.0) for n in range(101)}},
        )
        for malformed in wrong_sums:
            assert (await measures(place, offer, **malformed)).json["reason"] == "malformed"
        await measures(place, offer)
        await outcomes(hand, measured=1)
        await hand.open(device=3)
        training = (await place.check_in(3, wait_s=50, evaluates=True)).offer
        path = f"/v1/tasks/{training.task.id}/measurements/{training.attempt}"
        said = {"samples": 10, "sums": SUMS}
        assert (await place.ask("POST", path, 3, json=said)).status == 404


async def test_device_answers_at_another_replica_and_after_a_restart(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis, "gw-1") as other:
        async with serving(hand, redis) as place:
            await joined(hand, place)
            await evaluates(hand, 3)
            offer = await offered(place)
        async with serving(hand, redis) as place:  # the next process of gw-0
            again = await offered(place)
            assert (again.task.id, again.attempt) == (offer.task.id, offer.attempt)
            await wait_until(lambda: not place.gateway.replica.sessions.newcomers)
            moved = await offered(other)
            assert (moved.task.id, moved.attempt) == (offer.task.id, offer.attempt)
            assert (await measures(other, offer)).json == {}
            await outcomes(hand, measured=1)
            assert (await measures(place, offer)).json == {}, "the same, wherever it asks"
            await outcomes(hand, measured=1)


async def test_evaluation_that_is_over_is_not_offered(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3, within_s=0.0)
        await wait_until(lambda: len(place.gateway.replica.sessions) == 1)
        assert (await place.check_in(3, evaluates=True)).status == 204
        await outcomes(hand, deadline_passed=1)


async def test_last_version_is_evaluated_after_the_runs_end(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are not sent home before; but no device begins to train any more."""
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        await joined(hand, place)
        await evaluates(hand, 3)
        await measures(place, await offered(place))
        await outcomes(hand, measured=1)
        await hand.client.call("DEL", hand.keys.evaluation, hand.keys.measured)
        [trigger] = await hand.open(device=3)
        await wait_until(lambda: trigger.task in place.gateway.replica.sessions)
        assert await hand.ledger.finish("enough")
        await wait_until(lambda: place.gateway.replica.run_cache.is_over)
        waiting = asyncio.create_task(offered(place))
        await wait_until(lambda: place.gateway.replica.sessions.polls == 1)
        await evaluates(hand, 3)
        monkeypatch.setattr("fedstream.coordinator.gateway.tasks._LAST_S", 0.7)
        await measures(place, await waiting)
        await outcomes(hand, measured=2)
        still = await place.check_in(3, wait_s=5, evaluates=True)
        assert still.status == 204, "another device's answer may be missing"
        waits = asyncio.create_task(place.check_in(3, wait_s=50, evaluates=True))
        await wait_until(lambda: place.gateway.replica.sessions.polls == 1)
        place.context.stop.set()
        assert (await waits).json["reason"] == "run over", "also if the gateway stops before"
