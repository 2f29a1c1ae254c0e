"""One task can be followed through all services by its id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.command import BLOBS, TEST_GUARD_S, Command

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

STEPS = [
    ("scheduler", "triggered"),
    ("coordinator", "dispatched"),
    ("trainer", "taken"),
    ("trainer", "uploaded"),
    ("coordinator", "admitted"),
    ("updater", "applied"),
    ("updater", "published"),
]


def lines(out: Path) -> list[dict[str, Any]]:
    """All services' lines, by their time."""
    found = [
        json.loads(line)
        for path in (out / "logs").glob("*.log")
        for line in path.read_text().splitlines()
    ]
    return sorted(found, key=lambda line: line["timestamp"])


def test_a_task_leaves_a_line_at_every_step(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(BLOBS)
    command = Command(
        tmp_path, "--task", "my_task.py:task", "--versions", "12", "--set", "log.tasks=true"
    )
    try:
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    said = lines(command.out)
    assert len(command.rows) == 13  # version 0 was made by nobody
    for row in command.rows[1:]:
        of_task = [line for line in said if line.get("task") == row["task"]]
        assert [(line["service"], line["event"]) for line in of_task] == STEPS
        assert {line["device"] for line in of_task} == {int(row["device"])}
        uploaded, applied, published = of_task[3], of_task[5], of_task[6]
        assert applied["version"] == published["version"] == int(row["version"])
        assert applied["staleness"] == int(row["version"]) - 1 - uploaded["tau"]
        assert uploaded["attempt"] == of_task[2]["attempt"]
