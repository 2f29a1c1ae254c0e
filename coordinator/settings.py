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
    """What is admitted, and when trainers, entries and letters expire."""

    max_update_bytes: Annotated[int, Field(gt=0)] = 4 << 30
    sites: tuple[str, ...] = (POOL,)  # served: "name", or "name:0-9" with its devices
    # Believed about staleness, samples, steps and learning rates.
    trusted_sites: tuple[str, ...] = (POOL,)
    # How far from the configured one another site's learning rate may be, as a factor, where the
    # rule divides by it; 0: no bound.
    lr_factor: float = 10.0
    site_trainers: Annotated[int, Field(ge=1)] = 10_000  # per site
    announce_rate: Annotated[int, Field(ge=1)] = 50_000  # trainers and devices per second and site
    site_workspace_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # per site, except the pool
    inbox_limit: Annotated[int, Field(ge=1)] = 1_000_000  # entries; a longer inbox is deleted
    # What devices may ask for if they decide for themselves (scheduler.policy "none").
    open_limit: Annotated[int, Field(ge=1)] = 10_000  # concurrent tasks, all devices together
    trigger_rate: Annotated[int, Field(ge=1)] = 1000  # per second and site
    most_steps: Annotated[int, Field(ge=1)] = 1_000_000
    most_epochs: Annotated[int, Field(ge=1)] = 1000
    most_seconds: Annotated[float, Field(gt=0)] = 86_400.0
    letter_days: Annotated[float, Field(gt=0, le=10_000)] = 30.0  # then a dead letter is deleted
    trainer_silence_s: Annotated[float, Field(gt=0)] = 10.0  # then a trainer is struck off
    redeliver_s: Annotated[float, Field(gt=0)] = 15.0  # then crashed replicas' entries are claimed
    downloads: Annotated[int, Field(ge=1)] = 16  # concurrent, of models over HTTP
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
