"""Logins of viewers and operators, as cookies signed with the token that was given.

Only the cookie stores a login. So every replica with the same tokens accepts it, and it ends when
its time is over or its token is replaced.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Literal, TypeAlias

from pydantic import SecretStr

from fedstream.coordinator.access import Tokens, is_same

ViewerRole: TypeAlias = Literal["viewer", "operator"]

LASTS_S: dict[ViewerRole, int] = {"viewer": 12 * 3600, "operator": 15 * 60}


class Sessions:
    """Makes and checks cookies and forms. ``now`` is in seconds since 1970."""

    def __init__(self, run: str, tokens: Tokens | None, operator_token: SecretStr | None) -> None:
        """``tokens``: None: views need no token. ``operator_token``: None: no actions."""
        self._tokens: dict[ViewerRole, Tokens | None] = {
            "viewer": tokens,
            "operator": Tokens(operator_token) if operator_token is not None else None,
        }
        # Cookies don't distinguish ports, and several runs may be at one host.
        self.cookie = f"fedstream-{sha256(run.encode()).hexdigest()[:8]}"
        self.is_open = tokens is None
        self.has_operators = operator_token is not None

    def begun(self, token: str, now: float) -> tuple[ViewerRole, str] | None:
        """The role that a token has, and a cookie for it; None for a wrong token."""
        for role in ("operator", "viewer"):
            if self._is(role, token):
                return role, self._signed(role, int(now) + LASTS_S[role], token)
        return None

    def role(self, cookie: str, now: float) -> ViewerRole | None:
        """The role of a cookie; None if the cookie is wrong or too old."""
        said, _, _ = cookie.rpartition(".")
        name, _, until = said.partition(".")
        if not (until.isascii() and until.isdigit() and len(until) < 12 and int(until) > now):
            return None
        for role in ("operator", "viewer"):
            if name == role:  # signed with any of the tokens: one may be being replaced
                signed = (self._signed(role, int(until), token) for token in self._now(role))
                return role if any(is_same(one, cookie) for one in signed) else None
        return None

    def is_bearer(self, header: str) -> bool:
        """Whether an ``Authorization`` header has the viewers' token."""
        kind, _, token = header.partition(" ")
        return kind.lower() == "bearer" and self._is("viewer", token)

    def form_of(self, cookie: str) -> str:
        """The secret that a session's forms must contain."""
        return self._mac(f"form.{cookie}", self._now("operator")[0])

    def is_form(self, cookie: str, said: str) -> bool:
        """Whether a form belongs to this session."""
        return is_same(self.form_of(cookie), said)

    def _now(self, role: ViewerRole) -> list[str]:
        """The valid tokens of viewers or operators; empty if there are none."""
        tokens = self._tokens[role]
        return tokens.now() if tokens is not None else []

    def _is(self, role: ViewerRole, token: str) -> bool:
        tokens = self._tokens[role]
        return tokens is not None and tokens.has(token)

    def _signed(self, role: ViewerRole, until: int, token: str) -> str:
        said = f"{role}.{until}"
        return f"{said}.{self._mac(said, token)}"

    def _mac(self, text: str, token: str) -> str:
        key = f"fedstream page {self.cookie} {token}"
        return hmac.new(key.encode(), text.encode(errors="surrogateescape"), sha256).hexdigest()
