"""What a reader of the README does first, and devices that decide for themselves."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tests.integration.command import TEST_GUARD_S, Command, adds_up

README = Path(__file__).parents[2] / "README.md"

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def finished(folder: Path, *arguments: str) -> Command:
    """A run that came to its end by itself."""
    command = Command(folder, *arguments)
    try:
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    return command


def test_the_readmes_own_task_works_when_pasted(tmp_path: Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    (tmp_path / "my_task.py").write_text(program)
    command = finished(tmp_path, "--task", "my_task.py:task", "--versions", "60")
    assert command.summary["accuracy"] > 0.9
    assert adds_up(command.summary)


def test_anarchic_devices_decide_when_and_how_long_they_train(tmp_path: Path) -> None:
    command = finished(
        tmp_path, "--versions", "40",
        "--set", "scheduler.policy.kind=none",
        "--set", "trainer.anarchic.rate=50",
        "--set", 'trainer.anarchic.steps={kind="uniform", c=5}',
        "--set", "participation=[{devices=[3], rate=1e-12}]",
    )  # fmt: skip
    assert command.summary["tasks"]["applied"] == 40
    assert adds_up(command.summary)
    with (command.out / "metrics.csv").open() as table:
        devices = {row["device"] for row in csv.DictReader(table)}
    assert len(devices) > 5
    assert "3" not in devices


def test_devices_take_part_as_their_groups_say(tmp_path: Path) -> None:
    command = finished(
        tmp_path, "--versions", "20",
        "--set", "scheduler.policy={kind='in_flight', n=1}",
        "--set", "participation=[{devices=[4], rate=1e12, steps={kind='epochs', n=1}}]",
    )  # fmt: skip
    with (command.out / "metrics.csv").open() as table:
        trained = [row["device"] for row in csv.DictReader(table)][1:]  # version 0 is nobody's
    assert trained == ["4"] * 20
