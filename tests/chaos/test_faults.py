"""Plans: a seed says everything."""

from __future__ import annotations

from collections import Counter
from itertools import product

from tests.chaos.faults import (
    ALONE,
    STRATEGIES,
    SYNCS,
    Kind,
    plan,
)


def test_seeds_cover_every_rule_with_both_ways_to_sync() -> None:
    plans = [plan(seed, 3) for seed in range(12)]
    assert {(one.strategy, one.sync) for one in plans} == {*product(STRATEGIES, SYNCS)}


def test_kinds_are_dealt_evenly() -> None:
    times = Counter(fault.kind for seed in range(24) for fault in plan(seed, 7).faults)
    blackouts = times.pop(Kind.BLACKOUT)
    assert 0 < blackouts < 7
    assert times.pop(Kind.POWER) == 14 - blackouts, "with interval it is the power alone"
    assert set(times.values()) == {7}
    assert len(times) == len(ALONE) - 2
