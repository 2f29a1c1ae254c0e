"""How long devices rest."""

from __future__ import annotations

from fedstream.coordinator.cooldowns import Cooldowns


def test_rest_lasts_from_one_task_to_the_next() -> None:
    rests = Cooldowns(10.0)
    rests.begin(3, 100.0)
    rests.begin(4, 101.0)
    assert [rests.end(device) for device in (3, 4)] == [110.0, 111.0]
    rests.begin(3, 110.0)
    assert rests.end(3) == 120.0
    assert rests.end(5) < 0, "it had no task"


def test_rests_that_are_over_are_forgotten() -> None:
    rests = Cooldowns(10.0)
    for device in range(100):
        rests.begin(device, float(device))
    assert len(rests._ends) == 10
    assert rests.end(99) == 109.0


def test_without_rests_nobody_is_remembered() -> None:
    rests = Cooldowns(0.0)
    rests.begin(3, 100.0)
    assert not rests


def test_rest_too_short_for_the_clock_is_none() -> None:
    rests = Cooldowns(1e-300)
    rests.begin(3, 100.0)
    assert rests.end(3) < 100.0
