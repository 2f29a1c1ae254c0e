"""Runs whose services' machines have wrong clocks, each another: nothing may come of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.command import BLOBS, TEST_GUARD_S, Command, adds_up

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

HOUR_S = 3600.0
AHEAD = ("coordinator", "evaluator", "device-0")
BEHIND = ("scheduler", "updater", "gateway", "device-1")
# Python imports this before anything else. Services are forked, so their words come later.
SITE = f"""
import sys, time

skews = dict.fromkeys({AHEAD}, {HOUR_S}) | dict.fromkeys({BEHIND}, -{HOUR_S})
now, now_ns = time.time, time.time_ns

def skew():
    words = " ".join(sys.argv).replace("/", " ").replace(".pem", "").split()
    return next((skews[word] for word in words if word in skews), 0.0)

time.time = lambda: now() + skew()
time.time_ns = lambda: now_ns() + int(skew() * 1e9)
"""


def test_round_loses_nothing_if_every_service_has_another_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of devices over HTTPS, which have a gateway's clock beside the others'."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    (tmp_path / "blobs.py").write_text(BLOBS.replace("devices = 4", "devices = 2"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    command = Command(
        tmp_path,
        "--task blobs.py:task --strategy fedavg --versions 10 --devices-over-http 2",
        sets=("strategy.clients_per_round=2",),
    )
    try:
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    summary = command.summary
    assert adds_up(summary)
    assert summary["versions"] == 10
    assert summary["given_up"].keys() <= {"round over", "run finished"}
    seconds = [float(row["seconds"]) for row in command.rows]
    assert seconds == sorted(seconds)
    assert 0.0 < seconds[-1] < HOUR_S
    logs = (command.out / "logs").glob("*.log")
    said = [
        json.loads(line) for log in logs for line in log.read_text().splitlines() if line[:1] == "{"
    ]
    assert [one for one in said if one["level"] in ("error", "critical")] == []
