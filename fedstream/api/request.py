"""What is asked of a run's own process, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedstream.local.request import RunRequest
from fedstream.runtime.config import Option
from fedstream.settings.config import Settings, read


@dataclass(frozen=True)
class PythonRequest:
    """The parameters of ``fedstream.run``.

    The configuration is read again by the process that runs it: written out, it would lack its
    secrets.
    """

    config: Path | None
    options: Sequence[Option]
    out: Path
    trainers: int
    port: int | None

    def settings(self) -> Settings:
        """The resolved configuration. Raises ConfigError."""
        return read(self.config, (), self.options)

    def as_json(self) -> str:
        """The same as text; it may hold secrets."""
        return json.dumps(
            {
                "config": None if self.config is None else str(self.config),
                "options": self.options,
                "out": str(self.out),
                "trainers": self.trainers,
                "port": self.port,
            }
        )


def request_of(text: str) -> RunRequest:
    """The request that was made as JSON. Raises ConfigError."""
    said = json.loads(text)
    config = None if said["config"] is None else Path(said["config"])
    options = [Option(*option) for option in said["options"]]
    asked = PythonRequest(config, options, Path(said["out"]), said["trainers"], said["port"])
    return RunRequest(asked.settings(), asked.out, trainers=asked.trainers, port=asked.port)
