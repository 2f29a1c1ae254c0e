"""run.toml of a run with a private Redis, which ends with the run."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError
from fedstream.broker.settings import RedisSettings

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

MARK = "# redis.url is of a Redis that ends with this run\n"  # the file's first line
_AWAY_S = 30.0  # once such a Redis has been away this long, it won't come back


def is_meant(settings: Settings, config: Path | None) -> bool:
    """Whether the configuration, read from ``config``, points to a run's private Redis."""
    text = config.read_text(encoding="utf-8") if config is not None else ""
    return text.startswith(MARK) and tomllib.loads(text)["redis"]["url"] == settings.redis.url


def without_lost(settings: Settings, config: Path | None) -> Settings:
    """The configuration without a private Redis's URL, which a killed run left in run.toml."""
    if not is_meant(settings, config):
        return settings
    kept = {name: getattr(settings.redis, name) for name in settings.redis.model_fields_set}
    del kept["url"]
    return settings.model_copy(update={"redis": RedisSettings(**kept)})


def refuse_ended(settings: Settings, config: Path | None) -> None:
    """Raise FedstreamError if ``config`` is that of a run whose private Redis ended with it.

    Its run.toml names no Redis any more, so another run of the same name, at the default address,
    would be taken for it.
    """
    if config is None or settings.redis.is_named:
        return
    from fedstream.observe.report import SUMMARY
    from fedstream.settings.recording import CONFIG

    summary = config.with_name(SUMMARY)
    if config.name == CONFIG and summary.is_file():
        raise FedstreamError(
            f"{config} is of a run that is over, and its own Redis ended with it: its numbers are "
            f"in {summary}; if you mean another Redis, set redis.url"
        )


def joining(settings: Settings, config: Path | None) -> Settings:
    """The configuration for a trainer that joins a run with a private Redis and ends with it.

    If the run is interrupted or killed, the trainer ends once its Redis has been away for 30 s.
    """
    if not is_meant(settings, config):
        return settings
    ends = {"ends_with_run": True, "redis_away_s": _AWAY_S}
    missing = {key: ends[key] for key in ends if getattr(settings.trainer, key) is None}
    trainer = settings.trainer.model_copy(update=missing)
    return settings.model_copy(update={"trainer": trainer})
