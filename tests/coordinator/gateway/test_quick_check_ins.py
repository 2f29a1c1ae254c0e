"""Check-ins that only wait: answered as all others are, at next to no cost."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.check_ins import CheckIns
from tests.coordinator.gateway.places import Answer, Place, coordinating, ends, owned_by, serving
from tests.support import Hand, counted, wait_until


@asynccontextmanager
async def waiting(
    place: Place, device: int = 3, nonce: str = "", **said: Any
) -> AsyncIterator[asyncio.Task[Answer]]:
    """A check-in that a quick route has taken: its device is there already."""
    if not place.gateway._desk.is_present(device):
        assert (await place.check_in(device)).status == 204
    waits = place.gateway._app._waits
    assert waits is not None
    before = _number(waits._by_end)
    asks = asyncio.create_task(place.check_in(device, nonce=nonce, wait_s=50, **said))
    await wait_until(lambda: _number(waits._by_end) == before + 1, what="a check-in that waits")
    yield asks
    assert (await asks).status


def _number(by_end: dict[float, set[Any]]) -> int:
    return sum(map(len, by_end.values()))


async def test_task_comes_to_who_waits(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        nonce = secrets.token_urlsafe(16)
        async with waiting(place, nonce=nonce) as asks:
            await owned_by(hand, 3, "gw-0")
            [trigger] = await hand.open(device=3)
            offer = (await asks).offer
            assert offer.task.id == trigger.task
        again = await place.check_in(3, nonce=nonce)
        assert again.offer == offer, "the same nonce gets the same answer"
        assert (await place.give_up(3, offer)).status == 200
        await ends(hand, "given_up", "dropped out")


async def test_wait_ends_without_a_task(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis, poll_s=0.3, retry_s=(2.0, 3.0)) as place:
        nonce = secrets.token_urlsafe(16)
        async with waiting(place, nonce=nonce) as asks:
            answer = await asks
            assert (answer.status, answer.body) == (204, b"")
            assert int(answer.headers["Retry-After"]) == 3
            assert "Content-Length" not in answer.headers
        assert place.gateway._desk.polls == 0
        again = await asyncio.wait_for(place.check_in(3, nonce=nonce, wait_s=50), 5)
        assert again.status == 204


async def test_newer_check_in_takes_the_place_of_one_that_waits(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis) as place, waiting(place) as older:
        newer = asyncio.create_task(place.check_in(3, wait_s=50))
        assert (await older).status == 204
        await wait_until(lambda: place.gateway._desk.polls == 1)
        assert (await place.check_in(3, eligible=False)).status == 204
        assert (await newer).status == 204


async def test_end_of_the_run_is_told_to_who_waits(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place, waiting(place) as asks:
        await hand.commit(1, finish="done")
        answer = await asks
        assert (answer.status, answer.json["reason"]) == (410, "run over")
        assert counted(place.context, "fedstream_gateway_refused_total", reason="run over") == 1


async def test_stop_ends_waits_and_connections(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place, waiting(place) as asks:
        place.context.stop.set()
        answer = await asks
        assert answer.status == 204
        assert answer.headers["Connection"] == "close"


async def test_waiting_makes_no_task_and_shares_its_timer(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place, waiting(place) as asks:
        assert not _by_aiohttp()
        assert place.gateway._desk.polls == 1
        place.gateway._desk.release_all()
        assert (await asks).status == 204


async def test_arrivals_and_offers_need_no_aiohttp(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, by_aiohttp = CheckIns.answer, list[bool]()

    async def seen(self: CheckIns, *about: Any) -> bytes | None:
        by_aiohttp.append(_by_aiohttp())
        return await answer(self, *about)

    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        monkeypatch.setattr(CheckIns, "answer", seen)
        assert (await place.check_in(3)).status == 204
        assert (await place.check_in(3, eligible=False)).status == 204
        assert not place.gateway._desk.is_present(3)
        arriving = asyncio.create_task(place.check_in(3, wait_s=50))
        await wait_until(lambda: place.gateway._desk.polls == 1)
        await owned_by(hand, 3, "gw-0")
        [trigger] = await hand.open(device=3)
        assert (await arriving).offer.task.id == trigger.task
        assert (await place.check_in(3, wait_s=50)).offer.task.id == trigger.task
        assert by_aiohttp == [False] * 4


def _by_aiohttp() -> bool:
    """Whether aiohttp is handling a request."""
    names = {task.get_coro().__qualname__ for task in asyncio.all_tasks()}  # type: ignore[union-attr]
    return "RequestHandler._handle_request" in names


async def test_an_answer_that_fails_leaves_the_others_alone(
    redis: RedisSettings, hand: Hand
) -> None:
    class Broken:
        remote, is_open = "", True

        def answer(self, *_about: Any, **_more: Any) -> None:
            raise OSError("this connection fails")

    await hand.create()
    async with serving(hand, redis, poll_s=11) as place, waiting(place) as asks:
        desk, waits = place.gateway._desk, place.gateway._app._waits
        assert waits is not None
        assert (await place.check_in(4)).status == 204
        fails = asyncio.create_task(place.check_in(4, wait_s=50))
        await wait_until(lambda: desk.polls == 2)
        for end, together in [*waits._by_end.items()]:
            for wait in together:
                if wait.device == 4:
                    wait.exchange = Broken()  # type: ignore[assignment]
            waits._end(end)
        assert (await asyncio.wait_for(asks, 5)).status == 204
        assert desk.polls == 0
        fails.cancel()


async def test_quotas_count_check_ins_that_wait(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis, device_rate=1.0, poll_s=0.01) as place:
        said = [(await place.check_in(3, wait_s=50)).status for _ in range(4)]
        assert said[:2] == [204, 204]
        assert said[3] == 429


async def test_quarantined_device_does_not_wait(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        assert (await place.check_in(3)).status == 204
        for said, status in (({"eligible": False}, 204), ({"formats": ["int8"]}, 406)):
            assert (await place.check_in(3, wait_s=50, **said)).status == status


async def test_who_waits_is_answered_if_the_offer_is_cancelled(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_about: Any) -> None:
        await asyncio.Event().wait()

    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place, waiting(place) as asks:
        await owned_by(hand, 3, "gw-0")
        monkeypatch.setattr(CheckIns, "go_on", hang)
        await hand.open(device=3)
        offering = place.gateway._app._waits._offering  # type: ignore[union-attr]
        await wait_until(lambda: offering, what="an offer that is being made")
        for task in offering:
            task.cancel()
        answer = await asks
        assert (answer.status, answer.json["reason"]) == (500, "internal")
        assert counted(place.context, "fedstream_gateway_refused_total", reason="internal") == 1
        assert not offering


async def test_only_a_device_that_names_another_task_is_refused(
    redis: RedisSettings, hand: Hand
) -> None:
    """Older devices name none; a refusal does not wait, though the device is present."""
    await hand.create()
    ours = {"layout": hand.layout.signature, "devices": 10}
    async with coordinating(hand, redis), serving(hand, redis) as place:
        assert (await place.check_in(3)).status == 204
        async with waiting(place, **ours) as asks:
            for wrong in ({"layout": "0" * 64}, {"devices": 9}):
                refused = await place.check_in(3, wait_s=50, **ours | wrong)
                assert (refused.status, refused.json["reason"]) == (409, "another task")
            assert not asks.done()
            await hand.open(device=3)
            assert (await asks).offer.task.device == 3
