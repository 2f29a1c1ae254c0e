"""Tokens of devices, each verified only once."""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final, NamedTuple

import jwt
from aiohttp import hdrs

from fedstream.coordinator.gateway.refusals import Refusal

ALGORITHM: Final = "HS256"

_DEVICE = re.compile(r"0|[1-9][0-9]{0,9}")
_REMEMBERED = 50_000  # cached tokens; the oldest are dropped


class _Claims(NamedTuple):
    device: int
    key: object
    ends: float  # seconds since 1970


class VerifiedTokens:
    """A cache of verified tokens for one run and gateway.

    Verifying a token takes a sixth of a task's processor time. The registry, not the token, tells
    with each request whether the device is still enrolled.
    """

    def __init__(self, audience: str) -> None:
        self._audience = audience
        self._secret = b""
        self._known: dict[bytes, _Claims] = {}  # by SHA-256, so that no usable token is kept

    def claims(self, token: str, secret: bytes, now: float) -> tuple[int, object]:
        """The device and key of a valid token. Raises Refusal.

        ``now``: seconds since 1970.
        """
        if secret != self._secret:
            self._known.clear()
            self._secret = secret
        name = _name(token)
        found = self._known.get(name)
        if found is None or now >= found.ends:
            self._known.pop(name, None)
            found = self._verify(token)
            if now >= found.ends:
                raise untrusted("the token has expired: ask for another at /v1/token")
            self._known[name] = found
            if len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]
        return found.device, found.key

    def _verify(self, token: str) -> _Claims:
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[ALGORITHM],
                audience=self._audience,
                options={
                    "require": ["sub", "aud", "iat", "exp", "key"],
                    "strict_aud": True,
                    # Not checked by the library, whose clock may differ from the issuing replica's.
                    "verify_exp": False,
                    "verify_iat": False,
                },
            )
        except jwt.InvalidTokenError as error:
            raise untrusted("not a token of this gateway and run") from error
        if not _DEVICE.fullmatch(claims["sub"]):
            raise untrusted("not a token of a device")
        return _Claims(int(claims["sub"]), claims["key"], float(claims["exp"]))


def _name(token: str) -> bytes:
    return sha256(token.encode()).digest()


def untrusted(text: str) -> Refusal:
    """The refusal of a request without a valid token."""
    return Refusal(401, "token", text, headers={hdrs.WWW_AUTHENTICATE: 'Bearer realm="fedstream"'})
