"""Versions of several opened sums: the same as of one, unless a bucket is poisoned."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from fedstream.core.errors import ConfigError, SumOutOfRange
from fedstream.strategies import AfaCdSettings, FedAvgSettings, FedBuffSettings, strategy_of
from fedstream.strategies.optimizers import Adam
from fedstream.strategies.private_sums import PrivateSums, PrivateTerms
from fedstream.strategies.strategy import Strategy
from tests.private.enrolled import policy_of
from tests.strategies.test_private_sums import SIZE, Run

EACH, BUCKETS = 3, 3
K = EACH * BUCKETS
POLICY = policy_of(parameters=SIZE, sigma=0.0, max_batch=EACH)
PER = 0.25
RULES = [
    FedBuffSettings(buffer_size=K, server_lr=0.7),
    FedBuffSettings(buffer_size=K, server=Adam()),
    FedAvgSettings(clients_per_round=K),
    AfaCdSettings(buffer_size=K),
]


def run_of(rule: Strategy = RULES[0], over: str = "mean", buckets: int = BUCKETS) -> Run:
    terms = {"policy": POLICY, "per": PER, "buckets": buckets, "over": over}
    return Run(rule, PrivateTerms.model_validate(terms))


def fills(run: Run, updates: int = EACH) -> np.ndarray:
    """A bucket's updates, opened; their mean."""
    total = sum(run.takes(tau=run.state.version) for _ in range(updates))
    run.opens()
    return np.asarray(total / EACH)


def moved(run: Run, version: int = 1) -> np.ndarray:
    """How far the rule moved the model, which was 0.5 everywhere."""
    assert (run.state.version, run.state.memory.opened) == (version, 0)
    assert run.state.memory.model is None
    return run.state.model.floats - np.float32(0.5)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_mean_over_buckets_is_the_mean_over_updates(rule: Strategy) -> None:
    """As if the same updates were in one sum; three versions, so optimizers' vectors count."""
    policy = policy_of(parameters=SIZE, sigma=0.0, max_batch=K)
    whole = Run(rule, PrivateTerms(policy=policy, per=PER))
    split = run_of(rule)
    for version in range(3):
        for _ in range(BUCKETS):
            assert split.state.version == version
            fills(split)
        for _ in range(K):
            whole.takes(tau=version)
        whole.opens()
    np.testing.assert_allclose(split.state.model.floats, whole.state.model.floats, atol=2e-5)


def test_one_bucket_is_one_sum_bit_for_bit() -> None:
    policy = policy_of(parameters=SIZE, sigma=0.0, max_batch=K)
    run = Run(RULES[0], PrivateTerms(policy=policy))
    total = sum(run.takes() for _ in range(K))
    run.opens()
    step = np.float32(0.7 / K) * np.asarray(total, np.float32)
    np.testing.assert_array_equal(run.state.model.floats, np.float32(0.5) + step)


def test_version_is_the_median_of_the_buckets_means() -> None:
    run = run_of(over="median")
    means = [fills(run) for _ in range(BUCKETS)]
    np.testing.assert_allclose(moved(run), 0.7 * np.median(means, axis=0), atol=1e-6)


@pytest.mark.parametrize("over", ["median", "geometric median"])
def test_poisoned_bucket_moves_the_mean_alone(over: str) -> None:
    """One device sends more than S' allows, as much as the range check lets pass."""
    bound, direction, step = POLICY.norm_bound, np.full(SIZE, SIZE**-0.5), {}
    for rule in ("mean", over):
        run = run_of(over=rule)
        honest = run.rng.integers(-bound // 100, bound // 100, (K, SIZE)) // 6
        attack = (0.99 * EACH * bound * direction).astype(np.int64)
        for place, values in enumerate([attack, *honest[1:]]):
            run.takes(values=values)
            if place % EACH == EACH - 1:
                run.opens()
        step[rule] = moved(run) @ direction / np.ldexp(0.7 * bound, -POLICY.scale_bits)
    assert step["mean"] == pytest.approx(0.99 / BUCKETS, abs=0.01)
    assert abs(step[over]) < 0.01


def test_dropped_bucket_is_collected_again() -> None:
    """A sum out of range costs its own updates, and none of the buckets before."""
    run = run_of(over="median")
    means = [fills(run), fills(run)]
    for _ in range(EACH):
        run.takes()
    run.seeds[0] = (os.urandom(32), 1)
    with pytest.raises(SumOutOfRange):
        run.opens()
    run.state, run.seeds = run.rule.drop_sum(run.state), []
    assert (run.state.version, run.state.memory.opened, run.state.memory.arrivals) == (0, 2, 0)
    means.append(fills(run))
    np.testing.assert_allclose(moved(run), 0.7 * np.median(means, axis=0), atol=1e-6)


@pytest.mark.parametrize("last", ["none", "some", "dropped"])
def test_round_that_ends_early_is_of_the_buckets_so_far(last: str) -> None:
    """An unfinished bucket is opened with what came, or its updates are lost, and no others."""
    run = run_of(FedAvgSettings(clients_per_round=K), over="mean")
    means = [fills(run), fills(run)]
    if last == "none":
        run.state = run.rule.end_round(run.state)
    else:
        total = run.takes() + run.takes()
        run.state = run.rule.end_round(run.state)
        assert run.rule.is_due(run.state)
        if last == "some":
            run.opens()
            means.append(total / EACH)
        else:
            run.state = run.rule.drop_sum(run.state)
    np.testing.assert_allclose(moved(run), np.mean(means, axis=0), atol=1e-6)


def test_round_without_buckets_makes_no_version() -> None:
    run = run_of(FedAvgSettings(clients_per_round=K))
    run.takes()
    run.state = run.rule.drop_sum(run.rule.end_round(run.state))
    assert (run.state.version, run.state.memory) == (0, replace(run.state.memory, closed=False))
    assert run.rule.end_round(run.state) is run.state


def test_round_that_is_dropped_takes_its_buckets_along() -> None:
    run = run_of(over="median")
    fills(run)
    run.state = run.rule.drop_round(run.state)
    means = [fills(run) for _ in range(BUCKETS)]
    np.testing.assert_allclose(moved(run), 0.7 * np.median(means, axis=0), atol=1e-6)


@pytest.mark.parametrize("over", ["mean", "median"])
def test_recorded_rule_is_the_same_rule(over: str) -> None:
    rule = run_of(RULES[1], over=over).rule
    assert strategy_of(rule.model_dump(mode="json"), devices=20) == rule
    assert rule.vector_names == (*RULES[1].vector_names, "bucket 1", "bucket 2")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"buckets": 4}, "9 updates can't be split into private.buckets = 4"),
        ({"buckets": 9}, "in 9 buckets .* of 1, but the privacy policy opens sums of 3 to 3"),
        ({"buckets": 2, "over": "median"}, "set private.buckets to at least 3"),
    ],
)
def test_impossible_buckets_are_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        PrivateSums.of(RULES[0], PrivateTerms.model_validate({"policy": POLICY, **changes}))
