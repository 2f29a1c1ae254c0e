"""Tokens: devices are recognised by them, revocation ends them, and forged ones are refused."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import jwt
import pytest

from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.coordinator.gateway import registry
from fedstream.coordinator.gateway.auth import ALGORITHM, VerifiedTokens
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.digest import digest_of
from fedstream.protocol.headers import as_bearer
from fedstream.protocol.signatures import pem_of
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

# revocation


async def test_a_revoked_device_is_turned_away_until_it_is_admitted(
    phone: Phone, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LOOK_S", 0.0)
    await phone.join()
    assert (await phone.who()).status == 200
    await hand.ledger.set_access(SITE, [3], admit=False)
    assert await said(await phone.who()) == (401, "token")
    assert await said(await phone.ask_token()) == (401, "revoked")
    assert await said(await phone.enrol()) == (403, "revoked")
    assert await said(await Phone(phone.http).ask_token()) == (401, "signature"), "not for others"
    await hand.ledger.set_access(SITE, [3], admit=True)
    assert (await phone.who()).status == 200


async def test_an_old_key_ends_when_its_device_enrols_with_another(
    phone: Phone, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens too."""
    monkeypatch.setattr(registry, "LOOK_S", 0.0)
    await phone.join()
    newer = Phone(phone.http)
    again = "3-" + "k" * 32
    await invite(hand, again)
    assert (await phone.who()).status == 200
    assert (await newer.enrol(again)).status == 201
    assert await said(await phone.who()) == (401, "token")
    assert await said(await phone.ask_token()) == (401, "signature")


async def test_devices_are_looked_at_again_every_other_second(hand: Hand) -> None:
    """And all of them anew when one has changed, but not when none has."""
    await hand.create()
    ledger, now = GatewayLedger(hand.client, hand.keys, "g", SITE), 0.0
    known = registry.Registry(ledger, clock=lambda: now)
    await invite(hand)
    assert await known.get(3) is None
    await ledger.enrol(3, digest_of(INVITE.encode()), "key", "n", nonce_s=60)
    now = 1.9
    assert await known.get(3) is None
    now = 2.0
    found = await known.get(3)
    assert found
    assert found.key == "key"
    await hand.client.call("HDEL", hand.keys.enrolled(SITE), 3)  # and nobody says so
    now = 4.0
    assert await known.get(3) == found
    now = 599.0  # a device that checks in each minute costs nothing
    assert await known.get(3) == found
    now = 601.0
    assert await known.get(3) is None


async def test_what_was_read_before_a_change_is_not_remembered(hand: Hand) -> None:
    await hand.create()
    now = 0.0

    class Slow(GatewayLedger):
        async def registration(self, device: int) -> Any:
            found = await super().registration(device)
            reached.set()
            await released.wait()
            return found

    ledger = Slow(hand.client, hand.keys, "g", SITE)
    reached, released = asyncio.Event(), asyncio.Event()
    known = registry.Registry(ledger, clock=lambda: now)
    await invite(hand)
    await ledger.enrol(3, digest_of(INVITE.encode()), "key", "n", nonce_s=60)
    early = asyncio.create_task(known.get(3))
    await reached.wait()
    await hand.ledger.set_access(SITE, [3], admit=False)
    now = 3.0
    await known.secret()  # looks, and notices
    released.set()
    assert await early
    assert await known.get(3) is None


async def test_only_so_many_devices_are_remembered(hand: Hand) -> None:
    await hand.create()
    known = registry.Registry(GatewayLedger(hand.client, hand.keys, "g", SITE), most=5)
    for device in range(9):
        await known.get(device)
    assert len(known._found) == 5


# attacks on tokens


async def test_a_device_gets_only_so_many_tokens(replica: Replica, hand: Hand) -> None:
    """Each leaves a nonce in Redis. What isn't signed by the device isn't charged to it."""
    phone = await replica(device_rate=1e-9)  # two at once, and no more in the time of a test
    await invite(hand)
    await phone.enrol()
    for _ in range(3):
        assert await said(await Phone(phone.http).ask_token()) == (401, "signature")
    answers = [await phone.ask_token() for _ in range(4)]
    assert [one.status for one in answers] == [200, 200, 429, 429]
    assert await said(answers[-1]) == (429, "too many requests")
    nonces = await hand.client.call("KEYS", hand.keys.nonce(SITE, "*"))
    assert len(nonces) == 3, "of the enrolment and of two tokens"


def forged(claims: dict[str, Any], key: str | bytes = "", alg: str = "HS256", **head: Any) -> str:
    return jwt.encode(claims, key, alg, headers=head)


async def claims_of(phone: Phone) -> dict[str, Any]:
    return dict(jwt.decode(phone.token, options={"verify_signature": False}))


@pytest.fixture
async def known(replica: Replica, hand: Hand) -> Phone:
    """A device with a token, at a gateway whose secret the attacker knows."""
    phone: Phone = await replica(secret=SECRET)
    await invite(hand)
    await phone.join()
    assert (await phone.who()).status == 200
    return phone


async def test_forged_tokens_are_refused(known: Phone) -> None:
    """`alg: none`, another secret, another algorithm, and the parts of two tokens."""
    claims = await claims_of(known)
    body = known.token.split(".")[1]
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    other = forged(claims | {"sub": "4"}, SECRET).split(".")
    for token in (
        f"{none}.{body}.",
        f"{none}.{body}.{known.token.split('.')[2]}",
        forged(claims, "x" * 32),
        forged(claims, pem_of(known.key.public_key()).replace("PUBLIC KEY", "SECRET")),
        forged(claims, "x" * 64, "HS512"),
        forged(claims, SECRET * 2, "HS512"),
        ".".join([other[0], other[1], known.token.split(".")[2]]),
        ".".join([*known.token.split(".")[:2], "A" * 43]),
        known.token + "A",
    ):
        assert await said(await known.who(as_bearer(token))) == (401, "token"), token


async def test_a_token_with_other_claims_is_refused(known: Phone) -> None:
    """Even if it is signed with the secret."""
    right = await claims_of(known)
    for changed in (
        {"exp": 1},
        {"aud": "another/gateway"},
        {"sub": "4"},  # not enrolled
        {"sub": "\u0663"},  # a digit, to some
        {"sub": "03"},
        {"key": "0" * 64},
        {"key": ...},
        {"exp": ...},
    ):
        claims = {name: value for name, value in (right | changed).items() if value is not ...}
        token = jwt.PyJWS().encode(json.dumps(claims).encode(), SECRET, "HS256")
        assert await said(await known.who(as_bearer(token))) == (401, "token"), changed
    assert (await known.who()).status == 200


async def test_a_token_is_for_one_run_and_one_gateway(
    known: Phone, replica: Replica, hand: Hand
) -> None:
    """Even if another gateway has the same secret, the same device and the same key."""
    there = await replica(site="clinics", secret=SECRET)
    there.key = known.key
    await invite(hand, site="clinics")
    await there.join()
    assert (await there.who()).status == 200
    assert await said(await there.who(as_bearer(known.token))) == (401, "token")
    assert await said(await known.who(as_bearer(there.token))) == (401, "token")


async def test_a_token_has_a_secret_of_its_own_run(phone: Phone, hand: Hand) -> None:
    await phone.join()
    secret = await hand.client.call("GET", hand.keys.secret(SITE))
    assert len(secret) == 32
    assert (await claims_of(phone))["aud"] == f"{hand.keys.name}/{SITE}"
    jwt.decode(phone.token, secret, ["HS256"], audience=f"{hand.keys.name}/{SITE}")


async def test_authorization_is_one_header(known: Phone) -> None:
    good = as_bearer(known.token)
    bare = await known.http.get("/who")
    assert await said(bare) == (401, "token")
    assert bare.headers["WWW-Authenticate"].startswith("Bearer")
    for given in (
        (good, good),
        ("Basic eA==",),
        (known.token,),
        ("bearer x",),
        (good + "A" * 1000,),
    ):
        assert await said(await known.who(*given)) == (401, "token"), given


# tokens that were verified before

OWN, ANOTHER = b"s" * 32, b"o" * 32
NOW = 1e9  # far from the time of the machine, which PyJWT would go by
HOUR = 3600


def token(device: int = 3, *, secret: bytes = OWN) -> str:
    claims = {
        "sub": str(device),
        "aud": "run/gateway",
        "iat": int(NOW),
        "exp": int(NOW) + HOUR,
        "key": f"key-{device}",
    }
    return jwt.encode(claims, secret, ALGORITHM)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tokens whose signature was computed."""
    found: list[str] = []
    decode = jwt.decode

    def noted(one: str, *rest: Any, **about: Any) -> Any:
        found.append(one)
        return decode(one, *rest, **about)

    monkeypatch.setattr(jwt, "decode", noted)
    return found


def test_a_token_is_verified_once(decoded: list[str]) -> None:
    tokens, mine, others = VerifiedTokens("run/gateway"), token(3), token(4)
    for _ in range(3):
        assert tokens.claims(mine, OWN, NOW) == (3, "key-3")
        assert tokens.claims(others, OWN, NOW) == (4, "key-4")
    assert decoded == [mine, others]


def test_a_forged_token_is_never_remembered(decoded: list[str]) -> None:
    tokens, forged = VerifiedTokens("run/gateway"), token(secret=ANOTHER)
    for _ in range(2):
        with pytest.raises(Refusal, match="not a token"):
            tokens.claims(forged, OWN, NOW)
    assert decoded == [forged, forged]


def test_a_known_token_ends_with_its_secret() -> None:
    tokens, mine = VerifiedTokens("run/gateway"), token()
    assert tokens.claims(mine, OWN, NOW) == (3, "key-3")
    with pytest.raises(Refusal, match="not a token"):
        tokens.claims(mine, ANOTHER, NOW)


def test_a_token_ends_by_the_clock_of_its_gateway() -> None:
    tokens, mine, end = VerifiedTokens("run/gateway"), token(), int(NOW) + HOUR
    for one in (tokens, tokens, VerifiedTokens("run/gateway")):
        assert one.claims(mine, OWN, end - 0.1) == (3, "key-3")
    for one in (tokens, VerifiedTokens("run/gateway")):
        with pytest.raises(Refusal, match="has expired"):
            one.claims(mine, OWN, end)


def test_memory_is_bounded(decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.coordinator.gateway.auth._REMEMBERED", 2)
    tokens, three = VerifiedTokens("run/gateway"), [token(device) for device in range(3)]
    for one in (*three, three[2], three[1], three[0]):
        tokens.claims(one, OWN, NOW)
    assert decoded == [*three, three[0]]
