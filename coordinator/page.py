"""The seam to the live page: what it is configured by, and what a coordinator knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeAlias

from aiohttp import web
from pydantic import Field

from fedstream.broker.client import Client
from fedstream.broker.settings import Secret
from fedstream.coordinator.access import Tokens, tokens_of
from fedstream.core.errors import ConfigError
from fedstream.runtime.config import Section
from fedstream.runtime.http import HttpSettings, TokensSecret
from fedstream.runtime.service import Context


class PageSettings(Section):
    """The table ``[page]``: who sees the live page, and who may act on it."""

    enabled: bool | None = None  # None: if http.host is this machine alone
    viewers: Annotated[int, Field(ge=1)] = 64  # at the same time, each with a connection
    question_s: Annotated[float, Field(gt=0)] = 900.0  # for bisect and what if, which replay
    question_bytes: Annotated[int, Field(ge=1 << 28)] = 2 << 30  # of memory, for the same
    operator_token: TokensSecret = None  # asked of those who act; None: nobody can
    operator_username: str = "operator"  # in Redis, if a password is set
    operator_password: Secret = None  # None: acts are the coordinator's own


def has_page(page: PageSettings, http: HttpSettings) -> bool:
    """Whether a coordinator serves the page. Raises ConfigError if it would be everybody's."""
    if not (http.is_local if page.enabled is None else page.enabled):
        return False
    if not http.is_local and not http.has_token:
        raise ConfigError(
            f"page.enabled = true with http.host = {http.host!r}: everybody who reaches the "
            "coordinator would see the run: set http.token too (FEDSTREAM_HTTP__TOKEN)"
        )
    tokens_of(http, page.operator_token)
    return True


class LivePage(Protocol):
    """What a coordinator serves beside its API."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Its routes, outside of /v1."""

    async def run(self, context: Context) -> None:
        """Work while somebody looks; returns after ``context.stop``."""


MakePage: TypeAlias = Callable[[Client, Tokens | None], LivePage]
"""Makes the page of a coordinator, which reads with this client, for those with its tokens."""
