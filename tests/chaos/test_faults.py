"""Plans: a seed says everything."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest

from tests.chaos.faults import (
    ALONE,
    GATEWAYS,
    STRATEGIES,
    SYNCS,
    WITH_GATEWAY,
    Kind,
    plan,
)


def test_same_seed_gives_the_same_plan() -> None:
    assert plan(7, 10) == plan(7, 10)
    assert plan(7, 10).faults != plan(8, 10).faults


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


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_ordered_and_end_before_the_run(seed: int) -> None:
    faults = plan(seed, 12).faults
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert plan(seed, 12).versions > faults[-1].at
    assert all(0 <= fault.seconds <= 4 and 0 <= fault.after_s < 1 for fault in faults)
    aimed = {Kind.KILL, Kind.PAUSE, Kind.DOUBLE, Kind.CLOCK, Kind.PARTITION, Kind.LATE}
    assert all(bool(fault.target) == (fault.kind in aimed) for fault in faults)


def test_some_faults_overlap() -> None:
    faults = plan(0, 40).faults
    assert any(one.at == next_.at for one, next_ in pairwise(faults))


def test_gateway_is_hit_as_often_as_all_others_together() -> None:
    plans = [plan(seed, 14, WITH_GATEWAY, gateway=True) for seed in range(30)]
    aimed = [fault.target for one in plans for fault in one.faults if fault.target]
    times = [aimed.count(name) for name in GATEWAYS]
    assert 0.35 < sum(times) / len(aimed) < 0.65
    assert all(times)
    assert {one.strategy for one in plans} == {*STRATEGIES} - {"scaffold"}
    assert all({*GATEWAYS} <= {*one.names} and one.over_http for one in plans)
    assert not {*GATEWAYS} & {*plan(0, 14).names}
