"""run.toml of a local run: its resolved configuration, for the services and for later commands.

While a run with a private Redis is alive, its run.toml has that Redis's URL, below a marking line.
The URL is removed at the run's end; only a killed run leaves it behind.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from fedstream.broker.settings import RedisSettings
from fedstream.core.errors import FedstreamError
from fedstream.runtime.config import dump
from fedstream.settings.recording import CONFIG, SUMMARY

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

_MARK = "# redis.url is of a Redis that ends with this run\n"  # the file's first line
_AWAY_S = 30.0  # once such a Redis has been away this long, it won't come back


def write(settings: Settings, out: Path, url: str | None, *, private: bool) -> None:
    """Write run.toml into the folder ``out``. Raises OSError.

    ``url``: Redis's current URL, or None to leave it out. ``private``: it ends with the run.
    """
    redis = settings.redis.model_copy(update={"url": url} if url else {})
    log = settings.log.model_copy(update={"format": "json"})
    text = dump(settings.model_copy(update={"redis": redis, "log": log}))
    if url is None:
        tables = tomllib.loads(text)
        del tables["redis"]["url"]
        text = tomli_w.dumps(tables)
    elif private:
        text = _MARK + text
    aside = out / f".{CONFIG}"  # write atomically, even if the disk is full
    aside.unlink(missing_ok=True)
    try:
        aside.touch(mode=0o600, exist_ok=False)  # the URL may hold a password
        aside.write_text(text, encoding="utf-8")
        aside.replace(out / CONFIG)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def names_private_redis(settings: Settings, config: Path | None) -> bool:
    """Whether the configuration, read from ``config``, points to a run's private Redis."""
    text = config.read_text(encoding="utf-8") if config is not None else ""
    return text.startswith(_MARK) and tomllib.loads(text)["redis"]["url"] == settings.redis.url


def is_left_behind(config: Path) -> bool:
    """Whether the file is of a run with a private Redis that is alive or was killed.

    Raises OSError.
    """
    with config.open(encoding="utf-8", errors="replace") as file:
        return file.readline() == _MARK


def without_private_redis(settings: Settings, config: Path | None) -> Settings:
    """The configuration without the URL of a private Redis that a killed run left in run.toml."""
    if not names_private_redis(settings, config):
        return settings
    kept = {name: getattr(settings.redis, name) for name in settings.redis.model_fields_set}
    del kept["url"]
    return settings.model_copy(update={"redis": RedisSettings(**kept)})


def refuse_ended(settings: Settings, config: Path | None) -> None:
    """Raise FedstreamError if ``config`` is of a run whose private Redis has ended.

    Such a run.toml no longer names a Redis, so another run of this name at the default address
    could be mistaken for it.
    """
    if config is None or settings.redis.is_named:
        return
    summary = config.with_name(SUMMARY)
    if config.name == CONFIG and summary.is_file():
        raise FedstreamError(
            f"{config} belongs to a run that is over and has no Redis any more, or to a "
            f"simulation: its results are in {summary}; if you mean another Redis, set redis.url"
        )


def for_joining_trainer(settings: Settings, config: Path | None) -> Settings:
    """The configuration for a trainer that joins a run with a private Redis and ends with it.

    If the run is interrupted or killed, the trainer ends once its Redis has been away for 30 s.
    """
    if not names_private_redis(settings, config):
        return settings
    ends = {"ends_with_run": True, "redis_away_s": _AWAY_S}
    missing = {key: ends[key] for key in ends if getattr(settings.trainer, key) is None}
    trainer = settings.trainer.model_copy(update=missing)
    return settings.model_copy(update={"trainer": trainer})
