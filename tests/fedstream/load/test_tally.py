"""Latencies in buckets, and what the laboratory counts."""

from __future__ import annotations

import random

import pytest

from fedstream.load.tally import Latencies, LoadTally


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.0])
def test_quantiles_are_right_to_two_percent(share: float) -> None:
    rng, found = random.Random(1), Latencies()
    times = sorted(rng.lognormvariate(-5, 2) for _ in range(10_000))
    for one in times:
        found.add(one)
    exact = times[int(share * len(times)) - 1]
    assert exact <= found.quantile(share) <= exact * 1.021
    assert found.most_s == times[-1]


def test_nothing_measured_is_zero_and_nothing_is_shorter_than_the_first_bucket() -> None:
    found = Latencies()
    assert found.quantile(0.99) == 0
    found.add(0.0)
    assert (found.count, found.quantile(0.5)) == (1, 0.0)


def test_beginning_anew_forgets_everything() -> None:
    tally = LoadTally()
    fresh = {name: repr(value) for name, value in vars(LoadTally()).items() if name != "turns"}
    tally.answered("token", 200, 0.1)
    tally.turns.add(1.0)
    tally.lag.add(1.0)
    for counts in (tally.refusals, tally.receipts, tally.events, tally.ended):
        counts["x"] += 1
    tally.sent = tally.received = 5
    tally.begin_anew()
    assert (tally.turns.count, tally.lag.count, len(tally.latencies)) == (0, 0, 0)
    now = {name: repr(value) for name, value in vars(tally).items()}
    assert {name: now[name] for name in fresh if name != "lag"} == {
        name: value for name, value in fresh.items() if name != "lag"
    }
