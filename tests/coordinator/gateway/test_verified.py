"""Tokens are verified once, and no longer believed than they are valid."""

from __future__ import annotations

from typing import Any

import jwt
import pytest

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.tokens import ALGORITHM, VerifiedTokens

SECRET, OTHER = b"s" * 32, b"o" * 32
NOW = 1e9  # far from the time of the machine, which PyJWT would go by
HOUR = 3600


def token(device: int = 3, *, secret: bytes = SECRET) -> str:
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
        assert tokens.claims(mine, SECRET, NOW) == (3, "key-3")
        assert tokens.claims(others, SECRET, NOW) == (4, "key-4")
    assert decoded == [mine, others]


def test_a_forged_token_is_never_remembered(decoded: list[str]) -> None:
    tokens, forged = VerifiedTokens("run/gateway"), token(secret=OTHER)
    for _ in range(2):
        with pytest.raises(Refusal, match="not a token"):
            tokens.claims(forged, SECRET, NOW)
    assert decoded == [forged, forged]


def test_a_known_token_ends_with_its_secret() -> None:
    tokens, mine = VerifiedTokens("run/gateway"), token()
    assert tokens.claims(mine, SECRET, NOW) == (3, "key-3")
    with pytest.raises(Refusal, match="not a token"):
        tokens.claims(mine, OTHER, NOW)


def test_a_token_ends_by_the_clock_of_its_gateway() -> None:
    tokens, mine, end = VerifiedTokens("run/gateway"), token(), int(NOW) + HOUR
    for one in (tokens, tokens, VerifiedTokens("run/gateway")):
        assert one.claims(mine, SECRET, end - 0.1) == (3, "key-3")
    for one in (tokens, VerifiedTokens("run/gateway")):
        with pytest.raises(Refusal, match="has expired"):
            one.claims(mine, SECRET, end)


def test_memory_is_bounded(decoded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.coordinator.gateway.tokens._REMEMBERED", 2)
    tokens, three = VerifiedTokens("run/gateway"), [token(device) for device in range(3)]
    for one in (*three, three[2], three[1], three[0]):
        tokens.claims(one, SECRET, NOW)
    assert decoded == [*three, three[0]]
