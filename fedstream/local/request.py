"""What the user asked of `fedstream run`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedstream.journal import FOLDER
from fedstream.local import over_http
from fedstream.settings.config import Settings
from fedstream.terminal import counted


@dataclass(frozen=True)
class RunRequest:
    """Configuration, output folder and options of a local run."""

    settings: Settings
    out: Path
    trainers: int = 2
    devices_over_http: int = 0  # in place of trainers; 0: none
    port: int | None = None  # the coordinator's; 0: any free one; None: http.port
    resume: bool = False
    changed_rules: bool = False  # resume although the source of a rule isn't the recorded one
    redis_within_s: float = 10.0  # how long a Redis that was named may take to answer

    @property
    def own_redis(self) -> bool:
        """Whether the run brings its own Redis, because none was configured."""
        return not self.settings.redis.is_named

    @property
    def who_trains(self) -> str:
        """In words."""
        if self.devices_over_http:
            return f"gateway, {counted(self.devices_over_http, 'device')} over HTTPS"
        return counted(self.trainers, "trainer")

    def resolved(self) -> RunRequest:
        """The request with absolute paths, and with the journal in the run's own folder.

        A local run's journal is always there, whatever the configuration says. Raises ConfigError
        if devices over HTTPS can't take part.
        """
        settings = self.settings.with_absolute_paths()
        folder = {"dir": str(self.out.absolute() / FOLDER)}
        journal = settings.journal.model_copy(update=folder)
        sinks = tuple(sink.placed(self.out.absolute()) for sink in settings.sinks)
        settings = settings.model_copy(update={"journal": journal, "sinks": sinks})
        if self.devices_over_http:
            settings = over_http.configured(settings, self.devices_over_http, self.out)
        return replace(self, settings=settings)
