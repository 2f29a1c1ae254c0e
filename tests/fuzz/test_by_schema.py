"""A short run of requests drawn from the document; ``python -m tests.fuzz.by_schema`` is longer."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from schemathesis.core.failures import FailureGroup

from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.app import GatewayApp
from tests.fuzz.by_schema import attack, told
from tests.support import Hand

# Hypothesis asks the garbage collector who refers to a generator of random numbers, and what there
# was when the tests began is frozen, so nobody seems to.
pytestmark = pytest.mark.filterwarnings("ignore:It looks like `register_random`")


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


async def test_gateway_answers_as_its_document_says(redis: RedisSettings, hand: Hand) -> None:
    found = await attack(hand, redis, n=200)
    every = {status for statuses in found.values() for status in statuses}
    assert {200, 204, 400, 401, 404} <= every, told(found)
    assert found["POST /v1/token"][200] > 0, "signed requests are taken"
    assert found["POST /v1/tasks/{task}/heartbeat"][200] > 0, "and there is a task"
    upload = "/v1/tasks/{task}/updates/{attempt}"
    assert found[f"HEAD {upload}"][204] > 0, "and an upload that has begun"
    assert found[f"DELETE {upload}"][204] > 0


GOES_ON = {"go_on": True}


@pytest.mark.parametrize(
    ("status", "said", "asks_who", "complaint"),
    [
        (500, {"error": "no"}, True, "Server error"),
        (200, {"go_on": "yes"}, True, "Response violates schema"),
        (200, GOES_ON, False, "requests without authentication"),
        (200, GOES_ON, True, "Schema-violating request accepted"),
    ],
    ids=["fault", "another body", "takes anyone", "takes anything"],
)
async def test_answer_that_the_document_rules_out_is_found(
    redis: RedisSettings,
    hand: Hand,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    said: dict[str, Any],
    asks_who: bool,
    complaint: str,
) -> None:
    async def answers(app: GatewayApp, request: web.Request) -> web.Response:
        if asks_who:
            await app.device_of(request)
        return web.json_response(said, status=status)

    monkeypatch.setattr(GatewayApp, "_heartbeat", answers)
    with pytest.raises(FailureGroup, match=complaint):
        await attack(hand, redis, n=100, only="heartbeat")
