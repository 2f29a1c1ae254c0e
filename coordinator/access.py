"""Access to the coordinator over HTTP: open, or by token (``http.token``)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import web
from pydantic import SecretStr

from fedstream.runtime.problems import problem

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarded(handler: Handler, token: SecretStr | None) -> Handler:
    """Require ``Authorization: Bearer TOKEN`` for a handler, else answer 401 (RFC 6750)."""
    if token is None:
        return handler
    wanted = f"Bearer {token.get_secret_value()}".encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        said = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if hmac.compare_digest(said, wanted):
            return await handler(request)
        refusal = problem(
            401, "this coordinator requires its token: send Authorization: Bearer TOKEN"
        )
        refusal.headers["WWW-Authenticate"] = 'Bearer realm="fedstream"'
        return refusal

    return answer
