"""Attacks by requests: each is refused and counted, and honest devices are served.

Elsewhere: other devices' tasks (test_service.py), false claims about uploads
(test_upload_refusals.py), and mutated requests by the thousand (tests/fuzz).
"""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import product
from typing import Any

from yarl import URL

from fedstream.broker.client import RedisSettings
from tests.coordinator.gateway.attacks import HIDDEN, SMUGGLED, TRICKS, ZEROS
from tests.coordinator.gateway.places import Place, serving
from tests.coordinator.gateway.raw import request, said_to, trickle
from tests.support import Hand, counted


def port_of(place: Place) -> int:
    port = URL(place.url).port
    assert port is not None
    return port


def refused(place: Place, reason: str) -> float:
    """Refusals of this kind, by a route or before one."""
    by_routes = counted(place.context, "fedstream_gateway_refused_total", reason=reason)
    known = ("malformed", "no such route", "method", "busy", "internal")
    if reason not in known:
        return by_routes
    return by_routes + counted(place.context, "fedstream_http_refused_total", reason=reason)


async def test_no_request_is_smuggled_behind_another(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        for number, (what, attack) in enumerate(SMUGGLED.items(), 1):
            said = await said_to(port_of(place), attack)
            # Else the parser itself objects that more comes on a connection that is to end.
            status = 505 if "HTTP/1.0, kept alive" in what else 400
            assert (said.statuses, said.reasons) == ([status], ["malformed"]), what
            assert said.is_closed, what
            assert refused(place, "malformed") == number, what
        assert (await place.check_in(3)).status == 204
        assert refused(place, "internal") == 0


async def test_no_path_leads_elsewhere(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        for target, (status, reason) in TRICKS.items():
            before = refused(place, reason)
            said = await said_to(port_of(place), request("GET", target))
            assert (said.statuses, said.reasons) == ([status], [reason]), target
            assert b"X-Evil" not in said.data.partition(b"\r\n\r\n")[0]
            assert refused(place, reason) == before + 1, target


async def test_requests_that_ask_for_something_else_than_http(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        for attack, status, reason in (
            (request("CONNECT", "elsewhere:443"), 404, "no such route"),
            (request("OPTIONS", "*"), 404, "no such route"),
            (request("POST", "/v1/check-in", "Expect: a-miracle", body=b"{}"), 417, "malformed"),
            (request("POST", "/v1/token", "Expect: \xe9", body=b"{}"), 417, "malformed"),
            (request("TRACE", "/v1/check-in"), 405, "method"),
        ):
            before = refused(place, reason)
            said = await said_to(port_of(place), attack)
            assert (said.statuses, said.reasons) == ([status], [reason]), (attack, said)
            assert refused(place, reason) == before + 1
        up = request("GET", "/v1/check-in", "Connection: Upgrade", "Upgrade: websocket")
        assert (await said_to(port_of(place), up)).statuses == [405]  # and no protocol but HTTP


EXPECTED = ("a-miracle", "100-continue, a-miracle", "\xe9", "100-continue\xa0", ";", "")
# Each of another kind: a token is asked for, or none; a body is read, or none; there is no route.
ASKED = (
    ("POST", "/v1/check-in"),
    ("POST", "/v1/token"),
    ("POST", "/v1/devices"),
    ("GET", "/v1/models/" + ZEROS),
    ("POST", "/v1/tasks/t/heartbeat"),
    ("POST", "/v1/tasks/t/measurements/0123456789ab"),
    ("POST", "/v1/tasks/t/updates/a"),
    ("PATCH", "/v1/tasks/t/updates/a"),
    ("GET", "/v1/openapi.json"),
    ("POST", "/nothing"),
)


async def test_no_expectation_gets_further_than_a_refusal(redis: RedisSettings, hand: Hand) -> None:
    """Only 100-continue is met. What is behind the request's body is still the next request."""
    await hand.create()
    async with serving(hand, redis, address_rate=10_000, device_rate=10_000) as place:

        async def refuses(expected: str, method: str, path: str) -> None:
            asked = request(method, path, f"Expect: {expected}", body=b"{} GET / HTTP/1.1")
            said = await said_to(port_of(place), asked + HIDDEN)
            own, *next_ = said.statuses
            # Uploads say no 100 before their checks, and look at no expectation either.
            assert own == 417 or not expected or "updates" in path, (expected, path, said)
            assert 400 <= own < 500 or path == "/v1/openapi.json", (expected, path, said)
            assert next_ in ([], [200]), (expected, path, said)

        asked = product(EXPECTED, ASKED)
        await asyncio.gather(*(refuses(expected, *route) for expected, route in asked))
        assert refused(place, "internal") == 0


SLOW = 80  # connections of each kind
BEGUN = [b"", b"POST /v1/check-in HTTP/1.1\r\nX: "] * SLOW
BODIES = [
    request("POST", "/v1/check-in", "Content-Length: 60000", device=100 + n) for n in range(SLOW)
]


async def test_slow_connections_are_cut_off_when_a_requests_time_is_over(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    limits: tuple[tuple[list[bytes], dict[str, Any], list[str]], ...] = (
        (BEGUN, {"idle_s": 0.3}, []),
        (BODIES, {"body_s": 0.3}, ["too slow"]),
    )
    for begun, limit, reasons in limits:
        async with serving(hand, redis, **limit) as place, asyncio.timeout(60):
            trickling = partial(trickle, port_of(place), every_s=0.1)
            cut = await asyncio.gather(*map(trickling, begun))
            assert [one.reasons for one in cut] == [reasons] * len(begun)
            assert refused(place, "too slow") == len(begun) * len(reasons)
