"""The theorems' cheap part: short runs of the production rules against the bounds, and the floors
that are known exactly."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest

from experiments.theory import __main__ as command
from experiments.theory import (
    afa,
    fedasync,
    fedbuff,
    readme,
    remarks,
    reuse,
    schedule,
    speedup,
    terms,
    weak,
)
from experiments.theory.arrivals import DrawnArrival, batches, inclusion
from experiments.theory.loop import closed_loop, points
from experiments.theory.quadratics import Quadratics, fan, stationary
from fedstream.core.layout import Floats
from fedstream.strategies import AfaCdSettings, FedAsyncSettings
from fedstream.strategies.staleness import Constant


def arrival(*of: list[int]) -> DrawnArrival:
    """An arrival with these devices, staleness and H of each run."""
    return DrawnArrival(*map(np.array, of))


# what the measurements stand on


def test_biased_draw_follows_its_odds() -> None:
    exact = inclusion(afa.BIASED, afa.BATCH)
    assert exact.sum() == pytest.approx(afa.BATCH)
    arriving = batches(np.random.default_rng(0), afa.BIASED, afa.BATCH, oldest=4)
    drawn = np.array([arrival.devices[0] for arrival in islice(arriving, 20_000 * afa.BATCH)])
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
    sent = ((0, 1), (0, 3), (1, 2), (2, 1), (2, 3), (0, 2), (1, 1))  # d and H
    states = closed_loop(
        rule,
        problem,
        np.zeros((1, 10), np.float32),
        (arrival([0], [d], [steps]) for d, steps in sent),
        lr=0.5,
        oldest=2,
        rng=np.random.default_rng(0),
    )
    found = [points(state, (1, 10))[0].copy() for state in states]
    expected = [np.zeros(10)]
    for t, (d, steps) in enumerate(sent):
        shrunk = 1 - (1 - 0.5 * problem.hessians[0]) ** steps
        mean_gradient = shrunk * (expected[t - d] - 2.0) / (0.5 * steps)
        expected.append(expected[t] - 0.3 * mean_gradient)
    assert np.abs(np.array(found) - np.array(expected)).max() < 1e-5


def test_runs_side_by_side_are_the_runs_alone() -> None:
    problem = Quadratics(fan(0.1, 1.0, 3), np.arange(30.0).reshape(3, 10))
    sent = [arrival([0, 2], [0, 1], [1, 4]), arrival([1, 1], [1, 0], [3, 2])] * 4

    def last(rows: slice) -> Floats:
        start = np.arange(20, dtype=np.float32).reshape(2, 10)[rows]
        states = closed_loop(
            FedAsyncSettings(alpha=0.5, staleness=Constant()).build(),
            problem,
            start,
            (DrawnArrival(*(of[rows] for of in one)) for one in sent),
            lr=0.3,
            oldest=1,
            rng=np.random.default_rng(0),
        )
        return [points(state, start.shape).copy() for state in states][-1]

    both = last(slice(0, 2))
    assert both[0].tobytes() == last(slice(0, 1)).tobytes()
    assert both[1].tobytes() == last(slice(1, 2)).tobytes()


# FedAsync, theorem 1


def test_fedasync_stays_below_both_bounds_and_converges() -> None:
    found = fedasync.measure(repeats=20, versions=60)
    assert [claim.verdict for claim in fedasync.claims(found)] == [
        "held (20 repeats; 60 comparisons)"
    ] * 2
    assert found["gap"][-1] < 0.02 * found["gap"][0]
    assert min(found["theorem"]) >= found["gap"][0]  # empty, as is said of it


# FedAsync, theorem 2


def test_cosines_constants_match_their_gradients() -> None:
    rng = np.random.default_rng(0)
    problem = weak.Cosines(rng.uniform(0.2, 1.0, 2), rng.uniform(-1.0, 1.0, (3, 2)), rho=0.0)

    def f(x: Any) -> float:
        return float((problem.amplitudes * (1 - np.cos(x - problem.phases))).sum() / 3)

    x = rng.standard_normal(2)
    gradient = [(f(x + step) - f(x - step)) / 2e-4 for step in np.eye(2) * 1e-4]
    assert problem.slope(x) == pytest.approx(np.square(gradient).sum(), rel=1e-5)
    assert problem.gap(x) == pytest.approx(f(x) - f(problem.mean[1]), rel=1e-9)
    grid = np.stack(np.meshgrid(*[np.linspace(0, 2 * np.pi, 200)] * 2), axis=-1)
    own = problem.amplitudes * np.sin(grid[:, :, None] - problem.phases)
    apart = ((own - own.mean(axis=2, keepdims=True)) ** 2).sum(axis=3)
    v1, v2 = problem.constants()
    assert v1 == pytest.approx(apart.max(), rel=1e-3)
    assert v2 == pytest.approx((own**2).sum(axis=3).max(), rel=1e-3)


def test_proximal_term_pulls_to_the_base() -> None:
    """One step has no pull; the second is that of f + rho/2 |x - x_tau|^2."""
    problem = weak.Cosines(np.array([1.0]), np.zeros((1, 1)), rho=2.0)
    x, lr = 1.0, 0.1
    first = x - lr * np.sin(x)
    second = first - lr * (np.sin(first) + 2.0 * (first - x))
    ends = problem.train(
        np.array([0, 0]),
        np.full((2, 1), x, np.float32),
        np.array([1, 2]),
        lr,
        np.random.default_rng(0),
    )
    assert ends[:, 0] == pytest.approx([first, second], rel=1e-6)


def test_option_ii_leaves_the_concave_part_and_its_bound_is_empty() -> None:
    found = weak.measure(runs=20, versions=100, least_steps=(2, 3), repeats=1)
    assert found["gap"][-1] < 0.1 * found["gap"][0] <= 0.1 * min(found["bound"])
    assert weak.claims(found)[0].verdict == "held (20 repeats; 100 comparisons)"


# AFA


def test_afa_cs_stalls_without_a_device() -> None:
    problem = afa.objective()
    floor = afa.run(afa.cs(0.08), problem, afa.ABSENT, burn_in=100, average=10).floors[0]
    nine = stationary(problem, slice(0, 9), steps=1, lr=1.0)
    assert floor == pytest.approx(float(problem.slope(nine)), rel=0.01)


def test_theorem_4_holds_with_the_least_beta_its_conditions_allow() -> None:
    problem = afa.objective()
    theory = reuse.constants(problem)
    rise = reuse.STEP * 9 / 2 * (1 + reuse.STEP) * 3 * reuse.TAU  # L = 1, m' = 0
    assert np.diff(theory.beta) == pytest.approx(-rise)  # condition (5)
    assert theory.beta[-1] == pytest.approx(rise)  # condition (6)
    assert theory.least_direction == 0  # condition (7) without noise
    found = reuse.measure(versions=100, repeats=1)
    assert found["exact"]["met"] == 100
    assert found["exact"]["means"][0][0] < found["exact"]["bound"][0]


@pytest.mark.parametrize("delay", [0, 4])
def test_delayed_error_follows_its_formula(delay: int) -> None:
    measured, predicted = terms.delayed(1000, delay, repeats=1)
    assert measured[0] == pytest.approx(predicted, rel=0.05)


def test_local_steps_end_where_the_mean_of_g_is_zero() -> None:
    for reused in (False, True):
        measured, end = terms.local(1000, 5, reuse=reused, repeats=1)
        assert measured[0] == pytest.approx(end, rel=0.05)


def test_terms_refuse_steps_that_the_theorem_does_not_cover() -> None:
    with pytest.raises(ValueError, match="delay of 32"):
        terms.delayed(1000, 32, repeats=1)
    with pytest.raises(ValueError, match="64 local steps"):
        terms.local(1000, 64, reuse=False, repeats=1)


# speed-up


def test_error_falls_by_sqrt_2_per_doubling_of_m() -> None:
    errors = [
        speedup.errors(AfaCdSettings(buffer_size=m, server_lr=(m / 1000) ** 0.5), 16, 1000).mean()
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


@pytest.mark.parametrize("devices", [5, 40])
def test_objectives_differ_in_n_alone(devices: int) -> None:
    problem, model = remarks.alike(devices), fedbuff.objective()
    assert problem.devices == devices
    assert fedbuff.start_gap(problem) == pytest.approx(0.0, abs=1e-12)
    diversity = problem.diversity(problem.optimum).mean()
    assert diversity == pytest.approx(model.diversity(model.optimum).mean())


# FedBuff, figure 1


def test_schedule_counts_what_each_rule_does() -> None:
    """Two versions of two updates, a third begun; the last task ends after the time that counts."""
    tasks = [(0, 0.0, 10.0, 0, 1), (1, 0.0, 20.0, 0, 1), (0, 10.0, 30.0, 0, 2)]
    tasks += [(1, 20.0, 50.0, 1, 2), (0, 50.0, 59.0, 2, 3), (1, 50.0, 70.0, 2, 3)]
    found = schedule.figures(tasks)
    assert found["staleness"] == pytest.approx(1 / 5)  # the third started from 0, used at 1
    assert (found["fewest"], found["most"]) == (2, 2)
    assert found["busy"] == pytest.approx((10 + 20 + 20 + 30 + 9 + 10) / (5 * 60))
    assert found["rate"] == pytest.approx(5 / 60)


def test_devices_train_without_pause_except_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "SECONDS", 8.0)
    monkeypatch.setattr(schedule, "VERSIONS", {"FedAvg": 5, "FedBuff": 16})
    found = {rule: schedule.figures(schedule.record(rule, 0)) for rule in ("FedAvg", "FedBuff")}
    assert found["FedBuff"]["busy"] == pytest.approx(1.0)
    assert found["FedBuff"]["fewest"] == found["FedBuff"]["most"] == 2
    assert found["FedAvg"]["busy"] < 0.6
    assert found["FedAvg"]["staleness"] == 0


# what is written


def test_readme_matches_the_results() -> None:
    results = {
        name: json.loads((command.HERE / "results" / f"{name}.json").read_text())
        for name in command.SETTINGS
    }
    claims = {name: command.SETTINGS[name].claims(found) for name, found in results.items()}
    how = {name: found["how"] for name, found in results.items()}
    assert (command.HERE / "README.md").read_text() == readme.page(claims, how)
