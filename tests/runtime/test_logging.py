"""Logging: one JSON object a line, for our own events and for those of the standard library."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from datetime import UTC, datetime
from io import StringIO
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from fedstream.runtime.health import Health
from fedstream.runtime.logging import LogSettings, configure
from fedstream.runtime.service import Context

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]


def test_event_carries_bound_values(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(), run="r1", service="updater")
    structlog.get_logger().info("applied", version=7)
    [line] = lines(capsys)
    stamp = line.pop("timestamp")
    assert stamp.endswith("Z")
    assert abs(datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds() < 60
    assert line == {
        "run": "r1",
        "service": "updater",
        "level": "info",
        "event": "applied",
        "version": 7,
    }


def test_standard_library_logs_have_the_same_format(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(LogSettings(), run="r1", service="updater")
    logging.getLogger("aiohttp.server").warning("odd request from %s", "10.0.0.1")
    [line] = lines(capsys)
    assert line["timestamp"]
    assert line["event"] == "odd request from 10.0.0.1"
    assert (line["run"], line["level"], line["logger"]) == ("r1", "warning", "aiohttp.server")


def test_exception_is_logged_as_one_string(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings())
    try:
        raise ValueError("no such thing")
    except ValueError:
        structlog.get_logger().exception("ours")
        logging.getLogger("theirs").exception("theirs")
    for line in lines(capsys):
        assert line["level"] == "error"
        assert line["exception"].startswith("Traceback")
        assert line["exception"].endswith("ValueError: no such thing")


def test_level_applies_to_both_loggers(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(level="warning"))
    for log in (structlog.get_logger(), logging.getLogger("theirs")):
        log.info("not this")
        log.warning("this")
    assert [line["event"] for line in lines(capsys)] == ["this", "this"]


def test_configuring_twice_does_not_duplicate_lines(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings())
    configure(LogSettings())
    logging.getLogger("theirs").info("once")
    assert len(lines(capsys)) == 1


def test_unwritable_log_line_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    monkeypatch.setattr("sys.stderr", disk)
    configure(LogSettings(format="json"))
    log = structlog.get_logger()
    log.warning("retrying")
    logging.getLogger("aiohttp").warning("slow")
    disk.full = False
    log.info("recovered")
    assert [json.loads(line)["event"] for line in disk.getvalue().splitlines()] == ["recovered"]


def test_console_format_is_plain_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(LogSettings(format="console"))
    structlog.get_logger().info("applied", version=7)
    plain = capsys.readouterr().err
    assert "applied" in plain
    assert "version=7" in plain
    assert "\x1b[" not in plain  # no colours in a file

    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    configure(LogSettings())
    structlog.get_logger().info("applied", version=7)
    assert "\x1b[" in capsys.readouterr().err


def traced(settings: LogSettings) -> Context:
    """What a service of these settings gets."""
    configure(settings, run="r1", service="updater")
    log = structlog.get_logger()
    return Context(asyncio.Event(), Health(), CollectorRegistry(), log, settings.traces)


def test_task_steps_are_logged_only_if_enabled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    traced(LogSettings()).trace("applied", task="a")
    assert lines(capsys) == []
    for settings in (LogSettings(tasks=True), LogSettings(level="debug")):
        traced(settings).trace("applied", task="a", version=7)
        [line] = lines(capsys)
        assert (line["event"], line["task"], line["version"]) == ("applied", "a", 7)


def test_step_is_stamped_with_the_time_it_happened(capsys: pytest.CaptureFixture[str]) -> None:
    context = traced(LogSettings(tasks=True))
    context.trace("admitted", at=1_700_000_000.25, task="a")
    context.trace("applied", task="a")
    first, second = lines(capsys)
    assert first["timestamp"] == "2023-11-14T22:13:20.250000Z"
    assert second["timestamp"] > first["timestamp"]  # one format: they sort as text


@pytest.mark.parametrize("level", ["warning", "error"])
def test_task_lines_need_a_level_that_shows_them(level: Any) -> None:
    with pytest.raises(ValidationError, match=f"tasks = true .* level = '{level}' hides"):
        LogSettings(tasks=True, level=level)


def test_console_escapes_control_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    configure(LogSettings(format="console"), run="r1")
    escape = "\x1b]0;owned\x07\u202e"
    structlog.get_logger().warning(f"event {escape}", reason=escape, names=[escape])
    logging.getLogger("aiohttp").warning("asked for %s", escape)
    try:
        raise ValueError(escape)
    except ValueError:
        structlog.get_logger().exception("crashed")
    said = capsys.readouterr().err
    assert "event \\x1b]0;owned\\x07\\u202e" in said
    assert "ValueError: \\x1b]0;owned" in said
    assert "Traceback (most recent call last):\n" in said
    assert all(sign.isprintable() or sign == "\n" for sign in said)
