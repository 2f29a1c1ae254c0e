"""Logging: structlog for our own lines, and the same form for the standard library's.

One event is one line on stderr: JSON for machines, aligned text on a terminal. Values bound with
``structlog.contextvars`` (task, device, version) appear on every line of the asyncio task.

Warnings and errors are rate-limited by kind (:mod:`fedstream.runtime.limits`), so that they can't
fill the disk. The next logged line of a kind has the number of dropped ones.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Self, TextIO, cast

import structlog
from pydantic import model_validator

from fedstream.runtime.config import Section
from fedstream.runtime.limits import LogLimiter
from fedstream.runtime.text import escaped

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger


_LOUD = ("warning", "error", "critical", "exception")


class LogSettings(Section):
    """The table ``[log]``: level and form of log lines."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, else JSON
    tasks: bool = False  # log each step of each task; always on at level debug

    @model_validator(mode="after")
    def _lines_that_are_written(self) -> Self:
        if self.tasks and self.level in ("warning", "error"):
            raise ValueError(
                f"tasks = true logs at level info, which level = {self.level!r} hides: set "
                "level = 'info'"
            )
        return self

    @property
    def traces(self) -> bool:
        """Whether each step of each task is logged."""
        return self.tasks or self.level == "debug"


class _Lines:
    """A stream that drops lines it can't write, instead of raising.

    Services log that they wait for a full disk; these lines must not end the services.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        with suppress(OSError):
            self._stream.write(line)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def _sparing(limiter: LogLimiter) -> Processor:
    """A processor that drops lines over the limit. Raises structlog.DropEvent."""

    def spare(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if method not in _LOUD:
            return event
        left_out = limiter.passes(event["event"])
        if left_out is None:
            raise structlog.DropEvent
        return {**event, "left_out": left_out} if left_out else event

    return spare


class _Spare(logging.Filter):
    """The same limit for the standard library's lines, by logger, since their texts may vary."""

    def __init__(self, limiter: LogLimiter) -> None:
        super().__init__()
        self._limiter = limiter

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        return self._limiter.passes((record.name,)) is not None


def _escape(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Escape untrusted text for the terminal; JSON does its own escaping."""
    return {
        key: escaped(value, lines=key == "exception") if isinstance(value, str) else value
        for key, value in event.items()
    }


def stamp(seconds: float) -> str:
    """A time, in seconds since 1970, in the format of the log lines."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def configure(settings: LogSettings, **bound: object) -> None:
    """Set up logging for this process; ``bound`` (run, service) appears on every line."""
    terminal = sys.stderr.isatty()
    limiter = LogLimiter()
    level = logging.getLevelNamesMapping()[settings.level.upper()]

    # A processor rather than context variables: those do not reach threads.
    def bind(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**bound, **event}

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        bind,
        structlog.processors.add_log_level,
        # A task's outcome is logged after a wait, but with the time of the outcome.
        structlog.processors.MaybeTimeStamper(fmt="iso", utc=True),
    ]
    ending: list[Processor]
    if settings.format == "console" or (settings.format == "auto" and terminal):
        plain = structlog.dev.plain_traceback
        ending = [
            structlog.processors.format_exc_info,
            _escape,
            structlog.dev.ConsoleRenderer(colors=terminal, exception_formatter=plain),
        ]
    else:
        ending = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]

    # Our own lines bypass the standard library: below the level a call is a no-op, above it one
    # write.
    structlog.configure(
        processors=[_sparing(limiter), *shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Lines(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Spare(limiter))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level)
