"""Who has logged in: cookies that say it, signed with the token that was shown.

A cookie is all that is kept of a login, so it counts at every replica that has the same tokens, and
ends when its time is over, or when the token is replaced.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Literal, TypeAlias

from pydantic import SecretStr

Who: TypeAlias = Literal["viewer", "operator"]

LASTS_S: dict[Who, int] = {"viewer": 12 * 3600, "operator": 15 * 60}


class Sessions:
    """Logins of viewers and operators. Pure: it is told what time it is, in seconds since 1970."""

    def __init__(self, run: str, token: SecretStr | None, operator_token: SecretStr | None) -> None:
        """``token``: None lets everybody look; ``operator_token``: None lets nobody act."""
        self._tokens: dict[Who, SecretStr | None] = {"viewer": token, "operator": operator_token}
        # Cookies don't distinguish ports, and several runs may be at one host.
        self.cookie = f"fedstream-{sha256(run.encode()).hexdigest()[:8]}"
        self.is_open = token is None
        self.has_operators = operator_token is not None

    def begun(self, token: str, now: float) -> tuple[Who, str] | None:
        """Who shows a token, and the cookie that says so; None if it is no token of ours."""
        for who in ("operator", "viewer"):
            if self._is(who, token):
                return who, self._signed(who, int(now) + LASTS_S[who])
        return None

    def who(self, cookie: str, now: float) -> Who | None:
        """Who a cookie is from; None if it says nothing, or no more."""
        said, _, _ = cookie.rpartition(".")
        name, _, until = said.partition(".")
        if not (until.isascii() and until.isdigit() and len(until) < 12 and int(until) > now):
            return None
        for who in ("operator", "viewer"):
            if name == who and self._tokens[who] is not None:
                return who if _same(self._signed(who, int(until)), cookie) else None
        return None

    def is_bearer(self, header: str) -> bool:
        """Whether an ``Authorization`` header has the viewers' token."""
        kind, _, token = header.partition(" ")
        return kind.lower() == "bearer" and self._is("viewer", token)

    def form_of(self, cookie: str) -> str:
        """What the forms of a session must contain, which a page elsewhere can't know."""
        return self._mac("operator", f"form.{cookie}")

    def is_form(self, cookie: str, said: str) -> bool:
        """Whether a form is of this session."""
        return _same(self.form_of(cookie), said)

    def _is(self, who: Who, token: str) -> bool:
        wanted = self._tokens[who]
        return wanted is not None and _same(wanted.get_secret_value(), token)

    def _signed(self, who: Who, until: int) -> str:
        said = f"{who}.{until}"
        return f"{said}.{self._mac(who, said)}"

    def _mac(self, who: Who, text: str) -> str:
        token = self._tokens[who]
        assert token is not None  # noqa: S101  (asked only of those there are)
        key = f"fedstream page {self.cookie} {token.get_secret_value()}"
        return hmac.new(key.encode(), text.encode(errors="surrogateescape"), sha256).hexdigest()


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(*(text.encode(errors="surrogateescape") for text in (one, other)))
