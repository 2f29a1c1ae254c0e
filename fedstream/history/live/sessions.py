"""Who has logged in: cookies that say it, signed with the token that was shown.

A cookie is all that is kept of a login, so it counts at every replica that has the same tokens, and
ends when its time is over, or when the token is gone.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Literal, TypeAlias

from pydantic import SecretStr

from fedstream.coordinator.access import Tokens, is_same

Who: TypeAlias = Literal["viewer", "operator"]

LASTS_S: dict[Who, int] = {"viewer": 12 * 3600, "operator": 15 * 60}


class Sessions:
    """Logins of viewers and operators. Pure: it is told what time it is, in seconds since 1970."""

    def __init__(self, run: str, tokens: Tokens | None, operator_token: SecretStr | None) -> None:
        """``tokens``: None lets everybody look; ``operator_token``: None lets nobody act."""
        self._tokens: dict[Who, Tokens | None] = {
            "viewer": tokens,
            "operator": Tokens(operator_token) if operator_token is not None else None,
        }
        # Cookies don't distinguish ports, and several runs may be at one host.
        self.cookie = f"fedstream-{sha256(run.encode()).hexdigest()[:8]}"
        self.is_open = tokens is None
        self.has_operators = operator_token is not None

    def begun(self, token: str, now: float) -> tuple[Who, str] | None:
        """Who shows a token, and the cookie that says so; None if it is no token of ours."""
        for who in ("operator", "viewer"):
            if self._is(who, token):
                return who, self._signed(who, int(now) + LASTS_S[who], token)
        return None

    def who(self, cookie: str, now: float) -> Who | None:
        """Who a cookie is from; None if it says nothing, or no more."""
        said, _, _ = cookie.rpartition(".")
        name, _, until = said.partition(".")
        if not (until.isascii() and until.isdigit() and len(until) < 12 and int(until) > now):
            return None
        for who in ("operator", "viewer"):
            if name == who:  # signed with any of the tokens: one may be being replaced
                signed = (self._signed(who, int(until), token) for token in self._now(who))
                return who if any(is_same(one, cookie) for one in signed) else None
        return None

    def is_bearer(self, header: str) -> bool:
        """Whether an ``Authorization`` header has the viewers' token."""
        kind, _, token = header.partition(" ")
        return kind.lower() == "bearer" and self._is("viewer", token)

    def form_of(self, cookie: str) -> str:
        """What the forms of a session must contain, which a page elsewhere can't know."""
        return self._mac(f"form.{cookie}", self._now("operator")[0])

    def is_form(self, cookie: str, said: str) -> bool:
        """Whether a form is of this session."""
        return is_same(self.form_of(cookie), said)

    def _now(self, who: Who) -> list[str]:
        """The tokens of viewers or operators, if there are any."""
        tokens = self._tokens[who]
        return tokens.now() if tokens is not None else []

    def _is(self, who: Who, token: str) -> bool:
        tokens = self._tokens[who]
        return tokens is not None and tokens.has(token)

    def _signed(self, who: Who, until: int, token: str) -> str:
        said = f"{who}.{until}"
        return f"{said}.{self._mac(said, token)}"

    def _mac(self, text: str, token: str) -> str:
        key = f"fedstream page {self.cookie} {token}"
        return hmac.new(key.encode(), text.encode(errors="surrogateescape"), sha256).hexdigest()
