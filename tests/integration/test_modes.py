"""Devices that decide for themselves, live."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.command import TEST_GUARD_S, Command, adds_up

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def test_anarchic_devices_decide_when_and_how_long_they_train(
    tmp_path: Path, quick_programs: Path
) -> None:
    command = Command(
        tmp_path,
        "--versions",
        "40",
        "--trainers",
        "1",
        "--set",
        "scheduler.policy.kind=none",
        "--set",
        "trainer.anarchic.rate=50",
        "--set",
        'trainer.anarchic.steps={kind="uniform", c=5}',
        "--set",
        "participation=[{devices=[3], rate=1e-12}]",
        programs=quick_programs,
    )
    try:
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()
    assert command.summary["tasks"]["applied"] == 40
    assert adds_up(command.summary)
    devices = {row["device"] for row in command.rows}
    assert len(devices) > 5
    assert "3" not in devices
