"""Messages from a run's process to the caller of ``fedstream.run``: lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from fedstream.core.errors import (
    ConfigError,
    DataError,
    FedstreamError,
    TaskError,
    Unavailable,
)
from fedstream.core.records import Tally
from fedstream.history.display import doing, figures
from fedstream.history.timeline import History
from fedstream.journal import JournalError

_EVERY_S = 0.1
_ERRORS: dict[str, type[FedstreamError]] = {
    error.__name__: error
    for error in (ConfigError, DataError, JournalError, TaskError, Unavailable)
}


class MessageWriter:
    """The run's :class:`fedstream.history.display.Display`: writes a line for each call."""

    def __init__(self, channel: IO[bytes]) -> None:
        self._channel = channel
        self._shown = -_EVERY_S

    def _tell(self, **message: object) -> None:
        try:
            self._channel.write(json.dumps(message).encode() + b"\n")
            self._channel.flush()
        except BrokenPipeError:
            pass  # the caller has died, which interrupts the run

    def header(self, rows: Mapping[str, str]) -> None:
        self._tell(kind="header", rows=dict(rows))

    def add(self, name: str, value: str) -> None:
        self._tell(kind="header", rows={name: value})

    def say(self, text: str) -> None:
        self._tell(kind="say", text=text)

    def show(self, view: Tally | None, history: History, *, stopping: bool) -> None:
        now = time.monotonic()
        if now - self._shown >= _EVERY_S:
            self._shown = now
            text = doing(view, history, stopping=stopping)
            told = f"{text} · {figures(view, history)}" if view else text
            self._tell(kind="show", version=view.head.version if view else 0, text=told)

    def result(self, numbers: Mapping[str, Any], files: Sequence[str]) -> None:
        self._tell(kind="result", state=numbers["state"], why=numbers["why"])

    def close(self) -> None:
        pass

    def error(self, error: FedstreamError) -> None:
        """Send the reason why the run could not start."""
        known = (one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS)
        self._tell(kind="error", error=next(known, ""), text=str(error), trace=error.trace)


def as_error(message: Mapping[str, Any]) -> FedstreamError:
    """The exception in a message of the kind ``error``."""
    error = _ERRORS.get(message["error"], FedstreamError)(message["text"])
    if message["trace"]:
        error.add_note(message["trace"])
    return error
