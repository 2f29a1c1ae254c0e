"""Short runs of hostile requests to a gateway; `make fuzz` has the long ones."""

from __future__ import annotations

import pytest

from fedstream.broker.client import RedisSettings
from tests.fuzz import by_schema, raw_requests
from tests.support import Hand


async def test_gateway_answers_or_cuts_off_whatever_comes(redis: RedisSettings, hand: Hand) -> None:
    tally = await raw_requests.attack(hand, redis, n=600, slow=30, seed=1)
    assert tally.is_clean, raw_requests.told(tally)
    assert tally.inputs >= 600
    assert {200, 204, 206, 400, 401, 403, 404, 405} <= tally.statuses.keys()
    assert tally.cut > 0
    assert tally.served > 5


# Hypothesis asks the garbage collector who refers to a generator of random numbers, and what there
# was when the tests began is frozen, so nobody seems to.
@pytest.mark.filterwarnings("ignore:It looks like `register_random`")
async def test_gateway_answers_as_its_document_says(redis: RedisSettings, hand: Hand) -> None:
    found = await by_schema.attack(hand, redis, n=120)
    every = {status for statuses in found.values() for status in statuses}
    assert {200, 204, 400, 401, 404} <= every, by_schema.told(found)
    assert found["POST /v1/token"][200] > 0, "signed requests are taken"
    assert found["POST /v1/tasks/{task}/heartbeat"][200] > 0, "and there is a task"
    upload = "/v1/tasks/{task}/updates/{attempt}"
    assert found[f"HEAD {upload}"][204] > 0, "and an upload that has begun"
    assert found[f"DELETE {upload}"][204] > 0
