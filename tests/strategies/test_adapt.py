"""Adaptive steps: the windows' means, the choice among scales, and the whole loop."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from fedstream.core.layout import Model
from fedstream.journal.progress import Progress, close_round, take
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, FedBuffSettings, State, Strategy
from fedstream.strategies.adapt import Adapt, Windows, best_scale
from tests.strategies import independent
from tests.strategies.independent import Arrival, Vector
from tests.support import layout_of, model_of
from tests.updater.states import upload_of

WIDTH = 5
LAYOUT = layout_of(WIDTH)
TARGET = np.linspace(-2.0, 2.0, WIDTH)
CURVES = np.linspace(0.5, 2.0, WIDTH)
ADAPT = Adapt(every=4, factors=(0.5, 2.0), least=0.05, most=1.6)
RULE = FedBuffSettings(buffer_size=2, server_lr=0.4, adapt=ADAPT)


def loss(x: Vector) -> float:
    """A quadratic, in place of held-out data."""
    return float(CURVES @ (x - TARGET) ** 2) / 2


def arrivals_of(seed: int, n: int = 240) -> list[Arrival]:
    """First most of the deltas lead towards the optimum, then they are noise around it."""
    rng = np.random.default_rng(seed)
    way = TARGET * np.linspace(0.05, 0.0, n)[:, None]
    deltas = (way + 0.15 * rng.standard_normal((n, WIDTH))).astype(np.float32)
    return [Arrival(0, 0, delta.astype(np.float64), 1, 1.0) for delta in deltas]


def played(arrivals: list[Arrival]) -> tuple[list[Vector], list[tuple[int, float]]]:
    """The rule on these arrivals, as a simulation plays it."""
    run, windows = Progress(State(0, model_of(LAYOUT, *np.zeros(WIDTH)))), Windows(ADAPT.every)
    found, changes = list[Vector](), list[tuple[int, float]]()
    for number, arrival in enumerate(arrivals):
        update = model_of(LAYOUT, *arrival.delta)
        upload = upload_of(f"task-{number}", tau=run.state.version)
        step = take(RULE, run, upload, update, Model(LAYOUT))
        run = step.after
        found.append(run.state.model.parameters.astype(np.float64))
        if step.made is None:
            continue
        windows.add(run.state.version, run.state.model)
        if not windows.is_due:
            continue
        scores = [
            (scale, loss(windows.at(scale / run.scale).parameters.astype(np.float64)))
            for scale in ADAPT.tried(RULE.step_rate, run.scale)
        ]
        if (best := best_scale(scores, "min")) != run.scale and best is not None:
            run = replace(run, scale=best)
            changes.append((run.state.version, RULE.step_rate * best))
    return found, changes


def program(arrivals: list[Arrival], bug: str = "") -> tuple[list[Vector], list[tuple[int, float]]]:
    return independent.adaptive(
        np.zeros(WIDTH),
        arrivals,
        size=2,
        rate=0.4,
        every=4,
        factors=(0.5, 2.0),
        least=0.05,
        most=1.6,
        loss=loss,
        bug=bug,
    )


def apart(found: list[Vector], wanted: list[Vector]) -> float:
    largest = max(np.abs(x).max() for x in wanted)
    return float(max(np.abs(a - b).max() for a, b in zip(found, wanted, strict=True)) / largest)


def test_course_is_that_of_an_independent_program() -> None:
    """The rate rises while the deltas lead somewhere, meets its bound, and falls at the end."""
    changes: list[tuple[int, float]] = []
    for seed in range(3):
        arrivals = arrivals_of(seed)
        (found, changes), (wanted, same) = played(arrivals), program(arrivals)
        assert apart(found, wanted) <= 1e-5
        assert [at for at, _ in changes] == [at for at, _ in same]
        assert [rate for _, rate in changes] == pytest.approx([rate for _, rate in same])
    assert max(rate for _, rate in changes) == 1.6
    assert changes[-1][1] < 0.4


@pytest.mark.parametrize("bug", ["single models", "from the last model", "of the configured rate"])
def test_an_error_in_the_rule_would_be_noticed(bug: str) -> None:
    arrivals = arrivals_of(0)
    assert apart(played(arrivals)[0], program(arrivals, bug)[0]) > 1e-3


def test_windows_compare_the_means_of_two_whole_windows() -> None:
    """x = 1, 2, 3 and 10, 20, 30: means of 2 and 20; a reader that came late waits for both."""
    windows, due = Windows(3), []
    for version, value in enumerate((1.0, 2.0, 3.0, 10.0, 20.0, 30.0), 1):
        windows.add(version, model_of(layout_of(1), value))
        due.append(windows.is_due)
    assert due == [False] * 5 + [True]
    assert [windows.at(f).parameters[0] for f in (0.5, 1.0, 2.0)] == [11.0, 20.0, 38.0]
    late = Windows(3)
    due = []
    for version in range(3, 13):
        late.add(version, model_of(layout_of(1), float(version)))
        due.append(late.is_due)
    assert [at for at, is_due in enumerate(due, 3) if is_due] == [9, 12]
    with pytest.raises(RuntimeError, match="two windows"):
        Windows(3).at(1.0)


def test_only_parameters_are_extrapolated() -> None:
    """A running variance would turn negative; counters are the newest."""
    layout, windows = layout_of(1, 1, 1), Windows(1)
    for version, (value, variance, count) in enumerate(((0.0, 4.0, 1), (1.0, 1.0, 2)), 1):
        model = model_of(layout, value)
        model.buffers[:], model.integers[:] = variance, count
        windows.add(version, model)
    far = windows.at(8.0)
    assert (far.parameters[0], far.buffers[0], far.integers[0]) == (8.0, 1.0, 2)


@pytest.mark.parametrize(
    ("scores", "goal", "best"),
    [
        ([(1.0, 0.5), (0.5, 0.4), (2.0, 0.6)], "min", 0.5),
        ([(1.0, 0.5), (0.5, 0.4), (2.0, 0.6)], "max", 2.0),
        ([(1.0, 0.5), (0.5, 0.5), (2.0, 0.5)], "min", 1.0),  # the present one, listed first
        ([(1.0, nan), (0.5, 9.0), (2.0, inf)], "min", 0.5),
        ([(1.0, nan), (2.0, inf)], "max", None),
    ],
)
def test_best_scale(scores: list[tuple[float, float]], goal: Any, best: float | None) -> None:
    assert best_scale(scores, goal) == best


def test_scales_are_tried_within_the_bounds() -> None:
    adapt = Adapt(factors=(0.5, 2.0, 4.0), least=0.2, most=0.8)
    assert adapt.tried(0.4, 1.0) == (1.0, 0.5, 2.0)  # 4 is bounded to 2, which is there
    assert adapt.tried(0.4, 2.0) == (2.0, 1.0)
    assert adapt.bounded(0.4, 9.0) * 0.4 == 0.8


@pytest.mark.parametrize(
    ("rule", "rate"),
    [
        (FedAsyncSettings(alpha=0.4, adapt=Adapt()), {"alpha": 0.2}),
        (FedBuffSettings(server_lr=0.4, adapt=Adapt()), {"server_lr": 0.2}),
        (FedAsyncSettings(alpha=0.4), {"alpha": 0.4}),
    ],
)
def test_a_rule_that_adapts_is_scaled(rule: Strategy, rate: dict[str, float]) -> None:
    scaled = rule.scaled(0.5)
    assert {key: getattr(scaled, key) for key in rate} == rate
    assert rule.scaled(1.0) == rule


def test_a_round_that_ends_early_steps_by_the_scale() -> None:
    """0 + .5 of .4 times the mean of 4 and 8."""
    run = Progress(State(0, model_of(LAYOUT)), scale=0.5)
    rule = RULE.model_copy(update={"buffer_size": 3})
    for number, value in enumerate((4.0, 8.0)):
        delta = model_of(LAYOUT, value)
        run = take(rule, run, upload_of(f"task-{number}", tau=0), delta, Model(LAYOUT)).after
    made = close_round(rule, run, 0).after
    assert made.state.model.parameters.tolist() == pytest.approx([1.2] * WIDTH)
    assert made.scale == 0.5


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValidationError, match="'fedavg' has no rate to scale"):
        FedAvgSettings(adapt=Adapt())
    with pytest.raises(ValidationError, match=r"alpha = 0.4 is not between least = 0.5"):
        FedAsyncSettings(alpha=0.4, adapt=Adapt(least=0.5))
    with pytest.raises(ValidationError, match=r"least = 2 is above most = 1"):
        Adapt(least=2.0)
    with pytest.raises(ValidationError, match="at least one factor that is not 1"):
        Adapt(factors=(1.0, 1.0))
    with pytest.raises(ValidationError, match=r"most = 1\.5: alpha is at most 1"):
        FedAsyncSettings(adapt=Adapt(most=1.5))


def test_an_earlier_release_reads_a_rule_that_does_not_adapt() -> None:
    assert "adapt" not in FedAsyncSettings().model_dump(mode="json")
