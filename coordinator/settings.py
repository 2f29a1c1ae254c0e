"""The tables ``[coordinator]`` and ``[page]``, and the coordinator's interface to the live page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Protocol, TypeAlias

from aiohttp import web
from pydantic import Field, field_validator, model_validator

from fedstream.broker.client import Client
from fedstream.broker.settings import Secret
from fedstream.coordinator.access import Tokens, tokens_of
from fedstream.coordinator.sites import served
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL
from fedstream.runtime.config import Section
from fedstream.runtime.http import HttpSettings, TokensSecret
from fedstream.runtime.service import Context


class CoordinatorSettings(Section):
    """The table ``[coordinator]``: admission, and expiry of trainers, entries and dead letters."""

    max_update_bytes: Annotated[int, Field(gt=0)] = 4 << 30
    sites: tuple[str, ...] = (POOL,)  # served: "name", or "name:0-9" with its devices
    # Sites whose claims about staleness, samples, steps and learning rates are believed.
    trusted_sites: tuple[str, ...] = (POOL,)
    # Largest factor between an untrusted site's learning rate and the configured one, for a rule
    # that divides by it; 0: no bound.
    lr_factor: float = 10.0
    site_trainers: Annotated[int, Field(ge=1)] = 10_000  # per site
    announce_rate: Annotated[int, Field(ge=1)] = 50_000  # trainers and devices per second and site
    site_workspace_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # per site, except the pool
    inbox_limit: Annotated[int, Field(ge=1)] = 1_000_000  # entries; a longer inbox is deleted
    # Limits of devices' own triggers (scheduler.policy "none").
    open_limit: Annotated[int, Field(ge=1)] = 10_000  # concurrent tasks, all devices together
    trigger_rate: Annotated[int, Field(ge=1)] = 1000  # per second and site
    most_steps: Annotated[int, Field(ge=1)] = 1_000_000
    most_epochs: Annotated[int, Field(ge=1)] = 1000
    most_seconds: Annotated[float, Field(gt=0)] = 86_400.0
    letter_days: Annotated[float, Field(gt=0, le=10_000)] = 30.0  # then a dead letter is deleted
    trainer_silence_s: Annotated[float, Field(gt=0)] = 10.0  # then a trainer is deregistered
    redeliver_s: Annotated[float, Field(gt=0)] = 15.0  # then crashed replicas' entries are claimed
    downloads: Annotated[int, Field(ge=1)] = 16  # concurrent downloads of models over HTTP
    drain_s: Annotated[float, Field(gt=0)] = 15.0  # beyond redis.timeout_s

    @field_validator("lr_factor")
    @classmethod
    def _is_a_factor(cls, factor: float) -> float:
        if factor != 0 and factor < 1:
            raise ValueError("must be 0 (no bound) or at least 1")
        return factor

    @model_validator(mode="after")
    def _sites_are_named(self) -> CoordinatorSettings:
        try:
            served(self.sites, self.trusted_sites)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class PageSettings(Section):
    """The table ``[page]``: access to the live page, and its limits."""

    enabled: bool | None = None  # None: only if http.host is local
    viewers: Annotated[int, Field(ge=1)] = 64  # concurrent viewers, each with a connection
    question_s: Annotated[float, Field(gt=0)] = 900.0  # for bisect and what-if, which replay
    question_bytes: Annotated[int, Field(ge=1 << 28)] = 2 << 30  # memory limit of a replay
    operator_token: TokensSecret = None  # required for actions; None: no actions
    operator_username: str = "operator"  # in Redis, if a password is set
    operator_password: Secret = None  # None: actions use the coordinator's login


def has_page(page: PageSettings, http: HttpSettings) -> bool:
    """Whether a coordinator serves the page. Raises ConfigError if anybody could read it."""
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
    """The coordinator's interface to the live page."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The page's routes, outside of /v1."""

    async def run(self, context: Context) -> None:
        """Serve viewers until ``context.stop``."""


MakePage: TypeAlias = Callable[[Client, Tokens | None], LivePage]
"""Makes a coordinator's page from its client for Redis and the tokens that viewers need."""
