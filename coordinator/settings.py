"""The table ``[coordinator]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from fedstream.coordinator.sites import served
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL
from fedstream.runtime.config import Section


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
