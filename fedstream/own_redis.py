"""What run.toml says of a Redis that a run brought itself, and that ends with it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.settings import RedisSettings

if TYPE_CHECKING:
    from fedstream.config import Settings

MARK = "# redis.url is of a Redis that ends with this run\n"  # the file's first line
_AWAY_S = 30.0  # such a Redis, away for so long, does not come back


def is_meant(settings: Settings, config: Path | None) -> bool:
    """Whether the configuration leads to such a Redis, by the file that it was read from."""
    text = config.read_text(encoding="utf-8") if config is not None else ""
    return text.startswith(MARK) and tomllib.loads(text)["redis"]["url"] == settings.redis.url


def without_lost(settings: Settings, config: Path | None) -> Settings:
    """The configuration without the URL of such a Redis, which a run that was killed left in it."""
    if not is_meant(settings, config):
        return settings
    kept = {name: getattr(settings.redis, name) for name in settings.redis.model_fields_set}
    del kept["url"]
    return settings.model_copy(update={"redis": RedisSettings(**kept)})


def joining(settings: Settings, config: Path | None) -> Settings:
    """The configuration of a trainer that joins a run here: it ends with the run.

    If the run did not finish, but was interrupted or killed, it ends some time after its Redis.
    """
    if not is_meant(settings, config):
        return settings
    ends = {"ends_with_run": True, "redis_away_s": _AWAY_S}
    missing = {key: ends[key] for key in ends if getattr(settings.trainer, key) is None}
    trainer = settings.trainer.model_copy(update=missing)
    return settings.model_copy(update={"trainer": trainer})
