"""Access to the coordinator over HTTP: open, or by token (``http.token``, ``http.token_file``)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path

import structlog
from aiohttp import web
from pydantic import SecretStr

from fedstream.core.errors import ConfigError
from fedstream.runtime.http import HttpSettings, problem, tokens_in
from fedstream.runtime.tls import RenewedFiles

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Tokens:
    """The accepted tokens, from a setting or from a file, which is reread after a change.

    The file has one token a line: two while a token is being replaced, the new one first.
    """

    def __init__(
        self, token: SecretStr | None, file: str | None = None, operator: SecretStr | None = None
    ) -> None:
        """``file``: used if there is no ``token``. ``operator``: the operators' tokens. Raises
        ConfigError if an operator's token is also accepted here, or if a token is invalid.
        """
        self._text = token.get_secret_value() if token is not None else ""
        self._file = Path(file) if file is not None and token is None else None
        self._operator = tokens_in(operator.get_secret_value()) if operator is not None else []
        self._tokens = RenewedFiles([self._file] if self._file is not None else [], self._read)

    def now(self) -> list[str]:
        """The accepted tokens; while the file is unusable, its previous ones (logged once)."""
        return self._tokens.look(
            lambda error: structlog.get_logger().warning(
                "unusable token file, so its previous tokens stay valid: correct it",
                reason=str(error),
            )
        )

    def has(self, token: str) -> bool:
        """Whether the token is accepted."""
        return any(is_same(one, token) for one in self.now())

    def _read(self) -> list[str]:
        where = f"http.token_file: {self._file}" if self._file is not None else "http.token"
        try:
            found = tokens_in(
                self._file.read_text(errors="replace") if self._file is not None else self._text
            )
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if any(is_same(one, other) for one in found for other in self._operator):
            raise ConfigError(
                f"{where}: a token is the same as one of page.operator_token: viewers could "
                "act, too; choose another"
            )
        return found


def tokens_of(http: HttpSettings, operator: SecretStr | None = None) -> Tokens | None:
    """The coordinator's tokens; None if it is open. ``operator``: the operators' tokens.

    Raises ConfigError.
    """
    return Tokens(http.token, http.token_file, operator) if http.has_token else None


def is_same(one: str, other: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(*(text.encode(errors="surrogateescape") for text in (one, other)))


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
