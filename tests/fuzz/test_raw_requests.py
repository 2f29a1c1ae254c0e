"""A short run of mutated requests; ``python -m tests.fuzz.raw_requests`` is the long one."""

from __future__ import annotations

from random import Random
from typing import Any

import aiohttp
import pytest

from fedstream.broker.client import RedisSettings
from tests.coordinator.gateway.places import Answer, Place
from tests.fuzz import raw_requests
from tests.fuzz.raw_requests import Request, Tally, attack, inputs, memory, told
from tests.support import Hand


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


async def test_gateway_answers_or_cuts_off_whatever_comes(redis: RedisSettings, hand: Hand) -> None:
    tally = await attack(hand, redis, n=600, slow=30, seed=1)
    assert tally.is_clean, told(tally)
    assert tally.inputs >= 600
    assert {200, 204, 206, 400, 401, 403, 404, 405} <= tally.statuses.keys()
    assert tally.cut > 0
    assert tally.served > 5


async def test_fault_of_the_gateway_is_found_and_told(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedstream.coordinator.gateway.app import GatewayApp

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(GatewayApp, "_document", broken)
    tally = await attack(hand, redis, n=40, slow=0, seed=1)
    [what] = tally.wrong
    assert "answered 500" in what
    assert not tally.is_clean
    assert "WRONG: answered 500" in told(tally)


async def test_honest_device_that_is_cut_off_is_told(
    redis: RedisSettings, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends neither the run nor the count of what else went wrong."""
    ask = Place.ask

    async def cut_off(place: Place, method: str, path: str, *args: Any, **options: Any) -> Answer:
        if path == "/v1/check-in":
            raise aiohttp.ClientOSError("reset")
        return await ask(place, method, path, *args, **options)

    monkeypatch.setattr(Place, "ask", cut_off)
    tally = await attack(hand, redis, n=40, slow=0, seed=1)
    assert [*tally.wrong] == ["the honest device was cut off: reset"]


def test_same_seed_gives_the_same_inputs_most_of_them_changed() -> None:
    valid = [Request("GET", "/v1/openapi.json", [("Host", "gateway"), ("Range", "bytes=0-")])]
    first = list(inputs(300, valid, Random(3)))
    assert first == list(inputs(300, valid, Random(3)))
    assert first != list(inputs(300, valid, Random(4)))
    assert first[0] == b"GET /v1/openapi.json HTTP/1.1\r\nHost: gateway\r\nRange: bytes=0-\r\n\r\n"
    assert len(set(first)) > 200


def test_memory_and_waiting_have_limits() -> None:
    assert Tally().is_clean
    assert not Tally(grown=raw_requests.GROWN).is_clean
    assert not Tally(waited_s=raw_requests.WAITS_S).is_clean


@pytest.mark.skipif(raw_requests._TRIM is None, reason="its malloc is not glibc's")
def test_memory_that_was_freed_does_not_count() -> None:
    """Though something behind it is still in use, so that malloc keeps it."""
    before = memory()
    freed, kept = [], []
    for _ in range(500):
        freed.append(b"x" * 100_000)
        kept.append(b"x" * 20_000)
    freed.clear()
    assert memory() - before < 20_000_000
    assert len(kept) == 500
