"""A run whose step begins far too short: its evaluator lengthens it, and the run is replayed."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.journal import StepScaled
from fedstream.journal.replay import Replayer
from tests.integration.command import TEST_GUARD_S, Command

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def test_the_evaluator_of_a_live_run_adapts_the_step(tmp_path: Path) -> None:
    """In segments of 40 versions; every version has its recorded bits, and its weight the scale."""
    sets = ("strategy.alpha=0.02", "strategy.adapt.every=10", "journal.segment_versions=40")
    command = Command(tmp_path, "--versions 300", "--task digits", sets=sets)
    try:
        assert command.ended() == 0, command.stdout + command.stderr
        with Replayer(command.out / "journal") as replayer:
            messages = [moment.message for moment in replayer]
    finally:
        command.clean_up()
    changes = [one for one in messages if isinstance(one, StepScaled)]
    assert changes
    assert all(one.at % 10 == 0 and one.version >= one.at for one in changes)
    assert max(one.rate for one in changes) >= 0.08
