"""Enrolment and signed requests: what works, and each attack as it is made."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedstream.coordinator.gateway import registry
from fedstream.coordinator.gateway.auth import TOKEN_S
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.digest import digest_of
from fedstream.protocol.messages import BODY, ENROL_ROUTE, TOKEN_ROUTE, Access, Enrolled, Enrolment
from fedstream.protocol.signatures import PrivateKey, pem_of
from tests.coordinator.gateway.phones import (
    INVITE,
    SECRET,
    SITE,
    Phone,
    Replica,
    invite,
    said,
)
from tests.support import Hand

# what works


@pytest.mark.parametrize(
    "key",
    [Ed25519PrivateKey.generate(), generate_private_key(SECP256R1())],
    ids=["ed25519", "p256"],
)
async def test_a_device_enrols_and_is_known_by_its_token(phone: Phone, key: PrivateKey) -> None:
    phone.key = key
    enrolled = await phone.enrol()
    assert enrolled.status == 201
    assert enrolled.headers["Cache-Control"] == "no-store"
    run = Enrolled.decode(await enrolled.read()).run
    assert Enrolled.decode(await (await phone.enrol()).read()) == Enrolled(device=3, run=run)
    access = Access.decode(await (await phone.ask_token()).read())
    assert access.expires_in == TOKEN_S
    phone.token = access.token
    who = await phone.who()
    assert (who.status, await who.json()) == (200, 3)


async def test_replicas_with_a_configured_secret_leave_none_in_redis(
    replica: Replica, hand: Hand
) -> None:
    one, other = await replica(secret=SECRET), await replica(secret=SECRET)
    await invite(hand)
    await one.join()
    other.token = one.token
    assert (await other.who()).status == 200
    assert await hand.client.call("EXISTS", hand.keys.secret(SITE)) == 0
    stranger = await replica(secret="t" * 32)
    stranger.token = one.token
    assert await said(await stranger.who()) == (401, "token")


async def test_tokens_end_when_redis_lost_their_secret(
    replica: Replica, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At all replicas, so none of them would accept what another does not."""
    monkeypatch.setattr(registry, "LOOK_S", 0.0)
    one, other = await replica(), await replica()
    await invite(hand)
    await one.join()
    other.token = one.token
    assert (await other.who()).status == 200
    await hand.client.call("DEL", hand.keys.secret(SITE))
    assert await said(await other.who()) == (401, "token")
    assert await said(await one.who()) == (401, "token")
    await one.join()
    other.token = one.token
    assert (await one.who()).status == (await other.who()).status == 200


async def test_requests_with_tokens_cost_redis_nothing(
    phone: Phone, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LOOK_S", 1000.0)
    await phone.join()
    assert (await phone.who()).status == 200

    async def none(*_: object) -> None:
        raise AssertionError("Redis was asked")

    monkeypatch.setattr(hand.client, "call", none)
    monkeypatch.setattr(hand.client, "pipeline", none)
    statuses = [(await phone.who()).status for _ in range(5)]
    monkeypatch.undo()
    assert statuses == [200] * 5


# attacks on signatures


async def test_a_signature_by_another_key_is_refused(phone: Phone) -> None:
    stranger = Phone(phone.http)
    wrong = await stranger.signed(ENROL_ROUTE, phone.enrolment(), keyid="new")
    assert await said(wrong) == (401, "signature")
    await phone.join()
    assert await said(await stranger.ask_token()) == (401, "signature")


async def test_a_signature_is_for_one_body_and_one_route(phone: Phone) -> None:
    await phone.join()
    headers = phone.signing(TOKEN_ROUTE, b"{}")
    for path, body in (
        (TOKEN_ROUTE, b'{"a": 1}'),
        (ENROL_ROUTE, b"{}"),
        (TOKEN_ROUTE + "?x=1", b"{}"),
    ):
        assert (await phone.signed(path, body, headers=headers)).status in (400, 401)
    assert (await phone.signed(TOKEN_ROUTE, b"{}", headers=headers)).status == 200


async def test_a_header_given_twice_is_refused(phone: Phone) -> None:
    """Who checks the first and who checks the last would not mean the same request."""
    body = phone.enrolment()
    headers = phone.signing(ENROL_ROUTE, body, keyid="new")
    for name, value in headers.items():
        twice = [*headers.items(), (name, value)]
        response = await phone.http.post(ENROL_ROUTE, data=body, headers=twice)
        assert await said(response) == (401, "signature"), name


async def test_a_request_is_accepted_once(phone: Phone, replica: Replica) -> None:
    """By all replicas together."""
    await phone.join()
    other = await replica()
    headers = phone.signing(TOKEN_ROUTE, b"{}")
    copies = [
        await one.signed(TOKEN_ROUTE, b"{}", headers=headers)
        for one in (phone, phone, other, other)
    ]
    assert copies[0].status == 200
    assert [await said(one) for one in copies[1:]] == [(401, "nonce")] * 3


async def test_a_copied_enrolment_is_refused(phone: Phone) -> None:
    body = phone.enrolment()
    headers = phone.signing(ENROL_ROUTE, body, keyid="new")
    assert (await phone.signed(ENROL_ROUTE, body, headers=headers)).status == 201
    assert await said(await phone.signed(ENROL_ROUTE, body, headers=headers)) == (401, "nonce")


@pytest.mark.parametrize("skew_s", [-61.5, 61.5])
async def test_a_wrong_clock_is_told_the_time(replica: Replica, hand: Hand, skew_s: float) -> None:
    now = 1_763_884_800.5
    phone = await replica(clock=lambda: now)
    await invite(hand)
    response = await phone.enrol(created=int(now + skew_s))
    assert response.headers["Date"] == "Sun, 23 Nov 2025 08:00:00 GMT"
    assert "1763884800" in (await response.json())["error"]
    assert await said(response) == (401, "clock")
    assert (await phone.enrol(created=int(now + skew_s * 0.9))).status == 201


async def test_a_nonce_is_remembered_for_as_long_as_its_request_is_fresh(
    phone: Phone, hand: Hand
) -> None:
    """One signed by a clock that is a minute ahead stays fresh for two."""
    await phone.join()
    await phone.ask_token(nonce="n" * 22)
    assert await hand.client.call("PTTL", hand.keys.nonce(SITE, "n" * 22)) > 120_000


async def test_keyid_is_the_devices_own(phone: Phone) -> None:
    """A device can't get another's token, nor one for a number that nobody has."""
    await phone.join()
    assert await said(await phone.ask_token(keyid="4")) == (401, "unknown device")
    assert await said(await phone.ask_token(keyid="new")) == (401, "signature")
    assert await said(await phone.enrol(keyid="3")) == (401, "signature")


# attacks on invites


async def test_an_invite_is_for_one_key(phone: Phone) -> None:
    await phone.join()
    thief = Phone(phone.http)
    assert await said(await thief.enrol()) == (403, "invite")
    assert await said(await thief.ask_token()) == (401, "signature")
    assert (await phone.who()).status == 200


async def test_an_invite_that_is_none_is_refused(phone: Phone) -> None:
    for text in ("3-" + "j" * 32, "4-" + "i" * 32, "03-" + "i" * 32):
        assert await said(await phone.enrol(text)) == (403, "invite"), text


async def test_an_expired_invite_is_refused(phone: Phone, hand: Hand) -> None:
    late = "4-" + "i" * 32
    await hand.ledger.invite(SITE, {4: digest_of(late.encode())}, seconds=0)
    response = await phone.enrol(late)
    assert "expired" in (await response.json())["error"]
    assert await said(response) == (403, "invite")


async def test_redis_holds_no_invite(phone: Phone, hand: Hand) -> None:
    """Who reads it there can't enrol."""
    held = await hand.client.call("HGETALL", hand.keys.invites(SITE))
    assert held
    assert not any(INVITE.encode() in one or b"i" * 32 in one for one in held)


async def test_a_key_of_another_kind_is_refused(phone: Phone) -> None:
    pem = pem_of(phone.key.public_key()).replace("MCow", "MCox")
    body = Enrolment(invite=INVITE, public_key=pem).encode()
    assert await said(await phone.signed(ENROL_ROUTE, body, keyid="new")) == (400, "key")


# what is too large or too slow


async def test_a_body_is_bounded_whatever_is_said_of_its_length(phone: Phone) -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 1024

    headers = phone.signing(ENROL_ROUTE, b"", keyid="new")
    for data in (b" " * (BODY + 1), parts()):
        response = await phone.http.post(ENROL_ROUTE, data=data, headers=headers)
        assert await said(response) == (413, "too large")


async def test_a_body_that_does_not_arrive_is_not_awaited(phone: Phone) -> None:
    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(30)

    headers = phone.signing(ENROL_ROUTE, b"", keyid="new")
    response = await phone.http.post(ENROL_ROUTE, data=parts(), headers=headers)
    assert await said(response) == (408, "too slow")


async def test_a_signature_of_junk_is_refused_as_junk(phone: Phone) -> None:
    assert await said(await phone.signed(ENROL_ROUTE, b"junk", keyid="new")) == (400, "malformed")
    await phone.join()
    assert await said(await phone.signed(TOKEN_ROUTE, b"[]")) == (400, "malformed")


def test_a_secret_is_long_enough() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        GatewaySettings.model_validate({"secret": "short"})
    assert "secret" not in GatewaySettings.model_validate({"secret": SECRET}).model_dump()


# against a whole gateway
