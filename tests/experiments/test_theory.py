"""The theorems' cheap part: short runs of the production rules against the bounds, and the floors
that are known exactly."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from experiments.theory import __main__ as command
from experiments.theory import afa, fedasync, fedbuff, readme, speedup
from experiments.theory.arrivals import DrawnArrival, batches, inclusion
from experiments.theory.loop import closed_loop, points
from experiments.theory.quadratics import Quadratics, fan, stationary
from fedstream.strategies import AfaCdSettings

# what the measurements stand on


def test_biased_draw_follows_its_odds() -> None:
    exact = inclusion(afa.BIASED, afa.BATCH)
    assert exact.sum() == pytest.approx(afa.BATCH)
    arriving = batches(np.random.default_rng(0), afa.BIASED, afa.BATCH, oldest=4)
    drawn = np.array([arrival.device for arrival in islice(arriving, 20_000 * afa.BATCH)])
    assert np.bincount(drawn) / 20_000 == pytest.approx(exact, abs=0.015)
    assert all(len(set(batch)) == afa.BATCH for batch in drawn.reshape(-1, afa.BATCH))


def test_objectives_constants_match_its_gradients() -> None:
    rng = np.random.default_rng(0)
    problem = Quadratics(rng.uniform(0.1, 1.0, (4, 3)), rng.standard_normal((4, 3)))
    x = rng.standard_normal(3)

    def f(x: Any) -> float:
        return float((problem.hessians * (x - problem.centres) ** 2).sum() / 8)

    gradient = [(f(x + step) - f(x - step)) / 2e-4 for step in np.eye(3) * 1e-4]
    assert problem.slope(x) == pytest.approx(np.square(gradient).sum(), rel=1e-5)
    assert problem.gap(x) == pytest.approx(f(x) - f(problem.optimum), rel=1e-9)
    local = [(x - problem.train(i, x.astype(np.float32), 3, 0.2, rng)) / 0.6 for i in range(4)]
    at = stationary(problem, slice(None), steps=3, lr=0.2).astype(np.float32)
    rest = [(at - problem.train(i, at, 3, 0.2, rng)) / 0.6 for i in range(4)]
    assert np.abs(np.mean(rest, axis=0)).max() < 1e-6 < np.abs(np.mean(local, axis=0)).max()


def test_loop_passes_each_updates_base_to_the_rule() -> None:
    """One device: x_{t+1} = x_t - s G(x_{t-d}), G the mean gradient of H steps, in float64."""
    problem = Quadratics(fan(0.1, 1.0, 1), np.full((1, 10), 2.0))
    rule = AfaCdSettings(buffer_size=1, server_lr=0.3).build(1)
    sent = [DrawnArrival(0, *of) for of in ((0, 1), (0, 3), (1, 2), (2, 1), (2, 3), (0, 2), (1, 1))]
    states = closed_loop(
        rule,
        problem,
        np.zeros((1, 10), np.float32),
        iter(sent),
        lr=0.5,
        oldest=2,
        rng=np.random.default_rng(0),
    )
    found = [points(state, (1, 10))[0].copy() for state in states]
    expected = [np.zeros(10)]
    for t, (_, d, steps) in enumerate(sent):
        shrunk = 1 - (1 - 0.5 * problem.hessians[0]) ** steps
        mean_gradient = shrunk * (expected[t - d] - 2.0) / (0.5 * steps)
        expected.append(expected[t] - 0.3 * mean_gradient)
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


# FedAsync, theorem 1


def test_fedasync_stays_below_both_bounds_and_converges() -> None:
    found = fedasync.measure(repeats=20, versions=60)
    assert [claim.verdict for claim in fedasync.claims(found)] == [
        "held (20 repeats; 60 comparisons)"
    ] * 2
    assert found["gap"][-1] < 0.02 * found["gap"][0]
    assert min(found["theorem"]) >= found["gap"][0]  # empty, as is said of it


# AFA


def test_afa_cs_stalls_without_a_device() -> None:
    problem = afa.objective()
    floor = afa.run(afa.cs(0.08), problem, afa.ABSENT, burn_in=100, average=10).floor
    nine = stationary(problem, slice(0, 9), steps=1, lr=1.0)
    assert floor == pytest.approx(float(problem.slope(nine)), rel=0.01)


# speed-up


def test_error_falls_by_sqrt_2_per_doubling_of_m() -> None:
    errors = [
        speedup.average(AfaCdSettings(buffer_size=m, server_lr=(m / 1000) ** 0.5), 16, 1000)
        for m in (1, 4, 16)
    ]
    assert errors[0] / errors[1] == pytest.approx(2, rel=0.12)
    assert errors[1] / errors[2] == pytest.approx(2, rel=0.12)


# FedBuff, theorem 1


def test_fedbuff_is_below_its_bound_and_falls_as_1_over_sqrt_t() -> None:
    found = fedbuff.measure((1200, 2400), sequences=1)
    assert max(found["mean"][n] / found["bound"][n] for n in range(2)) < 0.1
    assert found["mean"][0] / found["mean"][1] == pytest.approx(2**0.5, rel=0.05)
    assert [claim.verdict for claim in fedbuff.claims(found)] == ["not tested (one repeat)"] * 2


# what is written


def test_readme_matches_the_results() -> None:
    results = {
        name: json.loads((command.HERE / "results" / f"{name}.json").read_text())
        for name in command.SETTINGS
    }
    claims = {name: command.SETTINGS[name].claims(found) for name, found in results.items()}
    how = {name: found["how"] for name, found in results.items()}
    assert (command.HERE / "README.md").read_text() == readme.page(claims, how)
