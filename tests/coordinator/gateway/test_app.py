"""A gateway's answers to mistakes, its quotas, its OpenAPI document, and its settings."""

from __future__ import annotations

import json
import ssl
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiohttp import web
from pydantic import ValidationError

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway.check_ins import shared_end
from fedstream.coordinator.gateway.openapi import document
from fedstream.coordinator.gateway.refusals import REFUSALS, Quota, Refusal
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.errors import ConfigError
from fedstream.protocol.messages import BODY
from fedstream.runtime.limits import network_of
from fedstream.settings import services
from fedstream.settings.config import read
from tests.coordinator.gateway.places import Place, coordinating, given_task, serving
from tests.support import Hand, counted, full, wait_until

DOCS = Path(__file__).parents[3] / "docs"
NONCE = b"a" * 22
TIRED = b'{"attempt": "0123456789ab", "reason": "tired"}'


MISTAKES = (
    ("POST", "/v1/check-in", b"", 400, "malformed"),
    ("POST", "/v1/check-in", b"{}", 400, "malformed"),
    ("POST", "/v1/check-in", b'{"nonce": "short"}', 400, "malformed"),
    ("POST", "/v1/check-in", b"\xff\xfe", 400, "malformed"),
    ("POST", "/v1/check-in", b"[" * 50_000, 400, "malformed"),
    ("POST", "/v1/check-in", b'{"nonce": "%b", "wait_s": 1e999}' % NONCE, 400, "malformed"),
    ("POST", "/v1/check-in", b" " * (BODY + 1), 413, "too large"),
    ("POST", "/v1/tasks/x/heartbeat", b'{"attempt": "../../.."}', 400, "malformed"),
    ("POST", "/v1/tasks/x/give-up", TIRED, 400, "malformed"),
    ("GET", "/v1/check-in", b"", 405, "method"),
    ("DELETE", "/v1/models/" + "0" * 64, b"", 405, "method"),
    ("GET", "/", b"", 404, "no such route"),
    ("GET", "/v1/../../etc/passwd", b"", 404, "no such route"),
    ("GET", "/v1/models/a/b", b"", 404, "no such route"),
    ("PROPFIND", "/v1/coffee", b"", 404, "no such route"),
)


async def test_mistakes_are_answered_and_counted(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis, device_rate=1000, address_rate=1000) as place:
        refused = partial(counted, place.context, "fedstream_gateway_refused_total")
        for method, path, body, status, reason in MISTAKES:
            before = refused(reason=reason)
            answer = await place.ask(method, path, 3, data=body)
            assert (answer.status, answer.json["reason"]) == (status, reason), (method, path)
            assert answer.json["error"]
            assert refused(reason=reason) == before + 1
        assert (await place.check_in(3)).status == 204


async def test_requests_have_quotas_of_a_device_and_of_an_address(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis, device_rate=1.0, address_rate=5.0) as place:
        said = [(await place.check_in(3)).status for _ in range(4)]
        assert said[:2] == [204, 204]
        assert 429 in said
        assert (await place.check_in(4)).status == 204

        async def is_limited() -> bool:
            answer = await place.ask("GET", "/v1/openapi.json")
            return answer.status == 429 and answer.json["reason"] == "too many requests"

        await wait_until(is_limited)


async def test_proxies_say_whose_request_it_is(redis: RedisSettings, hand: Hand) -> None:
    """Only as far as they are ours: what a client adds in front is its own invention."""
    await hand.create()
    async with serving(hand, redis, proxies=2, address_rate=0.01) as place:

        async def status(chain: str) -> int:
            about = {"X-Forwarded-For": chain}
            return (await place.ask("GET", "/v1/openapi.json", headers=about)).status

        assert [await status(f"{n}.0.0.0, 7.7.7.7, 10.0.0.1") for n in range(3)] == [200, 200, 429]
        assert await status("8.8.8.8, 10.0.0.1") == 200


async def test_outage_of_redis_is_a_503(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place)
        async with full(hand.client):
            answer = await place.give_up(3, offer)
            assert (answer.status, answer.json["reason"]) == (503, "unavailable")
            assert int(answer.headers["Retry-After"]) >= 2
            assert (await place.beat(3, offer)).json["go_on"], "it was not given up"
        assert (await place.give_up(3, offer)).status == 200


@pytest.mark.parametrize(
    ("now", "wait_s", "end"), [(7.1, 50.0, 57.0), (7.2, 50.0, 57.0), (7.3, 50.0, 57.25)]
)
def test_long_waits_end_together(now: float, wait_s: float, end: float) -> None:
    assert shared_end(now, wait_s) == pytest.approx(end)


def test_short_waits_are_as_long_as_they_were_to_be() -> None:
    assert shared_end(7.1, 1.0) == pytest.approx(8.1)


async def test_kept_connection_may_wait_longer_than_it_may_be_idle(
    redis: RedisSettings, hand: Hand
) -> None:
    """And once it has waited, it may not be idle for longer than before."""
    await hand.create()
    async with serving(hand, redis, idle_s=0.3) as place:
        assert (await place.check_in(3)).status == 204
        assert (await place.check_in(3, wait_s=1.0)).status == 204
        connector = place.session.connector
        assert connector is not None
        [[connection]] = connector._conns.values()
        await wait_until(lambda: not connection[0].is_connected(), what="closed")


# the document


async def described(place: Place) -> dict[str, set[str]]:
    answer = await place.ask("GET", "/v1/openapi.json")
    paths = answer.json["paths"]
    return {path: {method.upper() for method in paths[path]} for path in paths}


async def test_document_describes_the_routes(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    async with serving(hand, redis) as place:
        there: dict[str, set[str]] = {}
        for route in place.gateway.routes():
            if not isinstance(route, web.RouteDef) or route.method == "*":
                continue
            methods = {route.method, "HEAD"} if route.kwargs.get("allow_head") else {route.method}
            there.setdefault(route.path, set()).update(methods)
        there["/v1/openapi.json"].remove("HEAD")
        said = await described(place)
        assert {path: methods for path, methods in said.items() if path in there} == there


def test_document_resolves_and_lists_every_reason() -> None:
    whole = document()
    schemas = whole["components"]["schemas"]
    text = json.dumps(whole)
    named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert named <= schemas.keys()
    assert schemas["Problem"]["properties"]["reason"]["enum"] == list(REFUSALS)
    for path, methods in whole["paths"].items():
        for about in methods.values():
            given = {one["name"] for one in about.get("parameters", ()) if one["in"] == "path"}
            assert given == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_page_names_every_route_and_reason() -> None:
    """The page that says in words what the document says."""
    page = (DOCS / "reference" / "gateway-protocol.md").read_text()
    assert [path for path in document()["paths"] if path not in page] == []
    page += (DOCS / "how-to" / "attest-devices.md").read_text()
    assert [reason for reason in REFUSALS if f"`{reason}`" not in page] == []


# quotas


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("192.0.2.1", "192.0.2.2", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("unknown", "_hidden", False),
    ],
)
def test_a_host_with_a_network_of_ipv6_is_one(one: str, other: str, *, same: bool) -> None:
    assert (network_of(one) == network_of(other)) is same


def test_new_addresses_of_one_network_are_no_way_around_the_quota() -> None:
    quota = Quota("address", 1.0)
    for n in range(2):
        quota.take(network_of(f"2001:db8::{n}"))
    with pytest.raises(Refusal, match="too many requests of this address"):
        quota.take(network_of("2001:db8::ffff"))
    quota.take(network_of("2001:db8:0:1::"))


# the table [gateway]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"site": "pool"}, "not trusted"),
        ({"site": "a b"}, "not a valid name"),
        ({"retry_s": (5.0, 1.0)}, "the first is the shorter"),
        ({"retry_s": (5.0, 60.0)}, "must be above gateway.retry_s"),
        ({"tls_cert": "cert.pem"}, "go together"),
        ({"devices": 50_001}, "50000"),
        ({"poll_s": 51.0}, "50"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        GatewaySettings(**given)


def test_certificate_and_key_are_loaded(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(cert, append=True)
    context = GatewaySettings(tls_cert=str(cert), tls_key=str(key)).tls()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert GatewaySettings().tls() is None
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    for wrong, said in (
        (tmp_path / "absent.pem", "No such file"),
        (other, "not a certificate in PEM and its key"),
        (cert, "not a certificate in PEM and its key"),
    ):
        with pytest.raises(ConfigError, match=said):
            GatewaySettings(tls_cert=str(cert), tls_key=str(wrong)).tls()


def test_gateway_without_its_packages_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("fedstream.coordinator.gateway.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstream\[gateway\]'"):
        services._BUILDERS["gateway"](read(None, []), Keys("demo"), "gw-0")
