"""Access to the coordinator over HTTP: open, or by token (``http.token``, ``http.token_file``)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from pydantic import SecretStr

from fedstream.broker.errors import ConfigError
from fedstream.broker.settings import in_lines
from fedstream.runtime.http import LEAST_TOKEN, HttpSettings, problem
from fedstream.runtime.tls import stamp

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Tokens:
    """The tokens that are accepted: of a setting, or of a file, which is read when it has changed.

    One a line: two while a token is being replaced, the new one first.
    """

    def __init__(self, token: SecretStr | None, file: str | None = None) -> None:
        """``file`` counts if there is no ``token``. Raises ConfigError if it can't be used."""
        self._file = Path(file) if file is not None and token is None else None
        self._stamp = stamp([self._file]) if self._file else None
        self._tokens = self._read(self._file) if self._file else in_lines(_text(token))

    def now(self) -> list[str]:
        """The tokens; those before, while the file can't be used."""
        if self._file is not None and (found := stamp([self._file])) != self._stamp:
            self._stamp = found
            with suppress(ConfigError):
                self._tokens = self._read(self._file)
        return self._tokens

    def has(self, token: str) -> bool:
        """Whether this is one of them."""
        return any(is_same(one, token) for one in self.now())

    @staticmethod
    def _read(file: Path) -> list[str]:
        try:
            found = in_lines(file.read_text(errors="replace"))
        except OSError as error:
            raise ConfigError(f"http.token_file: {file}: {error.strerror}") from error
        if not found or min(map(len, found)) < LEAST_TOKEN:
            raise ConfigError(
                f"http.token_file: {file}: expected tokens of at least {LEAST_TOKEN} "
                "characters, one a line"
            )
        return found


def tokens_of(http: HttpSettings) -> Tokens | None:
    """The tokens for the coordinator; None if it is open. Raises ConfigError."""
    return Tokens(http.token, http.token_file) if http.has_token else None


def is_same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(*(text.encode(errors="surrogateescape") for text in (one, other)))


def _text(secret: SecretStr | None) -> str:
    return secret.get_secret_value() if secret is not None else ""


def guarded(handler: Handler, tokens: Tokens | None) -> Handler:
    """Require ``Authorization: Bearer TOKEN`` for a handler, else answer 401 (RFC 6750)."""
    if tokens is None:
        return handler

    async def answer(request: web.Request) -> web.StreamResponse:
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        if kind == "Bearer" and tokens.has(token):
            return await handler(request)
        refusal = problem(
            401, "this coordinator requires its token: send Authorization: Bearer TOKEN"
        )
        refusal.headers["WWW-Authenticate"] = 'Bearer realm="fedstream"'
        return refusal

    return answer
