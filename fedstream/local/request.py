"""What the user asked of `fedstream run`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fedstream.journal import FOLDER
from fedstream.settings.config import Settings


@dataclass(frozen=True)
class RunRequest:
    """Configuration, output folder and options of a local run."""

    settings: Settings
    out: Path
    trainers: int = 2
    port: int | None = None  # the coordinator's; 0: any free one; None: http.port
    resume: bool = False
    changed_rules: bool = False  # resume although the source of a rule isn't the recorded one
    redis_within_s: float = 10.0  # how long a Redis that was named may take to answer

    @property
    def own_redis(self) -> bool:
        """Whether the run brings its own Redis, because none was configured."""
        return not self.settings.redis.is_named

    def resolved(self) -> RunRequest:
        """The request with absolute paths, and with the journal in the run's own folder.

        A local run's journal is always there, whatever the configuration says.
        """
        settings = self.settings.with_absolute_paths()
        folder = {"dir": str(self.out.absolute() / FOLDER)}
        journal = settings.journal.model_copy(update=folder)
        sinks = tuple(sink.placed(self.out.absolute()) for sink in settings.sinks)
        update = {"journal": journal, "sinks": sinks}
        return replace(self, settings=settings.model_copy(update=update))
