"""The strategies reproduce the trajectories that an independent program computed in float64, and
make none of the mistakes that others made."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from broker.layout import Layout, Model
from tests.support import layout_of, model_of
from updater.rules import Hinge, Polynomial
from updater.strategies import (
    FedAsync,
    FedAsyncSettings,
    FedAvg,
    FedAvgSettings,
    State,
    Strategy,
    StrategySettings,
    Update,
)

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "known_answers_server.json").read_text())
SETTINGS: TypeAdapter[StrategySettings] = TypeAdapter(StrategySettings)
LAYOUT = layout_of(2)


def named(case: dict[str, Any]) -> str:
    rule = case["strategy"]
    inner = [rule.get(key, {}).get("kind") for key in ("staleness", "alpha_schedule")]
    parts = [rule["name"], *inner, rule.get("weighting"), rule.get("max_staleness")]
    return "-".join(str(part) for part in parts if part is not None)


def update(model: Model, tau: int = 0, **changes: Any) -> Update:
    about: dict[str, Any] = {"device": 0, "samples": 1, "steps": 1, "lr": 0.1}
    return Update(model=model, tau=tau, **about | changes)


def state(*floats: float, version: int = 0, layout: Layout = LAYOUT) -> State:
    return State(version, model_of(layout, *floats))


def receive(rule: Strategy, before: State, new: Update) -> tuple[State, str, float, int]:
    after, decision = rule.receive(before, new, Model(before.model.layout))
    return after, decision.outcome, decision.weight, decision.staleness


# the papers' rules


@pytest.mark.parametrize("case", KNOWN, ids=named)
def test_known_answers(case: dict[str, Any]) -> None:
    rule = SETTINGS.validate_python(case["strategy"]).build()
    layout = layout_of(len(case["x0"]))
    now = State(0, model_of(layout, *case["x0"]))
    for number, (arrived, expected) in enumerate(
        zip(case["updates"], case["expected"], strict=True)
    ):
        new = Update(
            model=model_of(layout, *arrived["x_new"]), tau=arrived["base_version"],
            device=arrived["device"], samples=arrived["samples"],
            steps=arrived["local_steps"], lr=arrived["local_lr"],
        )  # fmt: skip
        now, outcome, weight, staleness = receive(rule, now, new)
        found = (outcome, staleness, now.version)
        assert found == (expected["outcome"], expected["staleness"], expected["version"]), number
        assert weight == pytest.approx(expected["weight"], rel=1e-12), number
        wanted = np.array(expected["x"])
        assert np.abs(now.model.floats - wanted).max() <= 1e-5 * np.abs(wanted).max(), number


def test_the_known_answers_cover_every_outcome_and_both_strategies() -> None:
    outcomes = {(c["strategy"]["name"], e["outcome"]) for c in KNOWN for e in c["expected"]}
    assert outcomes >= {
        ("fedasync", "applied"), ("fedasync", "dropped"),
        ("fedavg", "applied"), ("fedavg", "buffered"), ("fedavg", "dropped"),
    }  # fmt: skip
    assert all(e["weight"] == 0 for c in KNOWN for e in c["expected"] if e["outcome"] == "dropped")


# mistakes that others made


def test_the_staleness_discount_does_not_compound() -> None:
    """Applied to alpha in place, the second of two equally stale updates would weigh less."""
    rule = FedAsyncSettings(alpha=0.8, staleness=Polynomial(a=0.5)).build()
    now, weights = state(0.0, version=8), []
    for _ in range(3):
        now, _, weight, _ = receive(rule, now, update(model_of(LAYOUT, 1.0), tau=now.version - 3))
        weights.append(weight)
    assert weights == pytest.approx([0.4, 0.4, 0.4])


def test_staleness_is_counted_before_the_version_is_raised() -> None:
    rule = FedAsyncSettings(alpha=0.8, staleness=Polynomial(a=0.5)).build()
    after, _, weight, staleness = receive(
        rule, state(0.0, version=5), update(model_of(LAYOUT, 1.0), tau=5)
    )
    assert (after.version, staleness, weight) == (6, 0, 0.8)


def test_the_hinge_is_the_papers() -> None:
    rule = FedAsyncSettings(alpha=1.0, staleness=Hinge(a=10, b=4)).build()
    weights = [
        receive(rule, state(0.0, version=10), update(model_of(LAYOUT, 1.0), tau=10 - d))[2]
        for d in (4, 5, 6)
    ]
    assert weights == pytest.approx([1, 1 / 11, 1 / 21])


def test_a_dropped_update_changes_nothing_not_even_the_schedule() -> None:
    rule = FedAsyncSettings(alpha=0.5, max_staleness=2).build()
    before = state(1.0, 2.0, version=7)
    after, outcome, weight, staleness = receive(rule, before, update(model_of(LAYOUT, 9.0), tau=4))
    assert after is before
    assert (outcome, weight, staleness) == ("dropped", 0.0, 3)
    assert receive(rule, before, update(model_of(LAYOUT, 9.0), tau=5))[1] == "applied"


def test_fedavg_is_the_mean_over_the_k_that_came_and_all_of_them() -> None:
    """Not over the number of clients there are, and not only the first of the batch."""
    rule = FedAvgSettings(clients_per_round=3).build()
    now = state(100.0, -100.0)
    for n in (1.0, 2.0, 6.0):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, n, -n)))
    assert now.version == 1
    assert now.model.floats == pytest.approx([3.0, -3.0])
    assert (now.memory.model, now.memory.arrivals) == (None, 0)


def test_fedavg_is_unweighted_unless_told_and_then_by_samples() -> None:
    for weighting, mean in (("uniform", 5.0), ("samples", 7.5)):
        rule = SETTINGS.validate_python(
            {"name": "fedavg", "clients_per_round": 2, "weighting": weighting}
        ).build()
        now = state(0.0)
        now, _, first, _ = receive(rule, now, update(model_of(LAYOUT, 0.0), samples=10))
        now, _, second, _ = receive(rule, now, update(model_of(LAYOUT, 10.0), samples=30))
        assert now.model.floats == pytest.approx([mean, mean])
        assert (first, second) == ((1, 1) if weighting == "uniform" else (10, 30))


def test_devices_without_samples_do_not_divide_by_zero() -> None:
    rule = FedAvgSettings(clients_per_round=3, weighting="samples").build()
    now = state(0.0)
    for samples, value in ((0, 1.0), (0, 2.0), (4, 8.0)):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, value), samples=samples))
    assert now.model.floats == pytest.approx([8.0, 8.0])


def test_a_round_that_times_out_is_the_mean_of_fewer_than_k() -> None:
    rule = FedAvgSettings(clients_per_round=10).build()
    now = state(0.0)
    for value in (2.0, 4.0):
        now, outcome, *_ = receive(rule, now, update(model_of(LAYOUT, value)))
        assert outcome == "buffered"
    after = rule.end_round(now)
    assert (after.version, after.memory.arrivals) == (1, 0)
    assert after.model.floats == pytest.approx([3.0, 3.0])


def test_a_round_without_arrivals_makes_no_version() -> None:
    now = state(1.0, version=3)
    assert FedAvg(FedAvgSettings()).end_round(now) is now
    assert FedAsync(FedAsyncSettings()).end_round(now) is now


def test_late_arrivals_of_a_round_are_dropped() -> None:
    rule = FedAvgSettings(clients_per_round=2).build()
    before = state(1.0, version=3)
    after, outcome, weight, staleness = receive(rule, before, update(model_of(LAYOUT, 2.0), tau=2))
    assert (after, outcome, weight, staleness) == (before, "dropped", 0.0, 1)


def test_a_device_that_answers_twice_counts_twice() -> None:
    rule = FedAvgSettings(clients_per_round=2).build()
    now = state(0.0)
    for value in (1.0, 3.0):
        now, *_ = receive(rule, now, update(model_of(LAYOUT, value), device=4))
    assert now.version == 1
    assert now.model.floats == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    "settings",
    [
        FedAsyncSettings(alpha=0.25, staleness=Polynomial()),
        FedAvgSettings(clients_per_round=2),
    ],
)
def test_batch_norms_statistics_mix_and_its_counters_take_the_newest(
    settings: FedAsyncSettings | FedAvgSettings,
) -> None:
    layout = layout_of(1, buffers=1, integers=1)
    now = State(0, model_of(layout, 0.0, 1.0, integers=[5]))
    arrived = (
        model_of(layout, 4.0, 3.0, integers=[60]),
        model_of(layout, 8.0, 5.0, integers=[7]),
    )
    rule = settings.build()
    for model in arrived:
        now, *_ = receive(rule, now, update(model, tau=now.version))
    if settings.name == "fedavg":
        assert now.model.floats == pytest.approx([6.0, 4.0])
    else:
        assert now.model.floats == pytest.approx([0.75 * 1.0 + 0.25 * 8, 0.75 * 1.5 + 0.25 * 5])
    assert now.model.integers.tolist() == [7]


# purity


@pytest.mark.parametrize(
    "settings",
    [FedAsyncSettings(), FedAsyncSettings(max_staleness=0), FedAvgSettings(clients_per_round=3)],
)
@given(data=st.data())
def test_the_current_model_is_never_written_to(
    settings: FedAsyncSettings | FedAvgSettings, data: st.DataObject
) -> None:
    """Readers may be reading it; and the memory that may be reused is never one in use."""
    layout = layout_of(3, integers=1)
    rule = settings.build()
    now = State(0, model_of(layout, 1.0, 2.0, 3.0, integers=[1]))
    free: list[Model] = []
    for _ in range(12):
        before, bytes_before = now, now.model.digest()
        values = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3))
        arriving = model_of(layout, *values, integers=[2])
        spare = free.pop() if free else Model(layout)
        tau = data.draw(st.integers(max(0, now.version - 1), now.version))
        now, _ = rule.receive(before, update(arriving, tau=tau), spare)
        assert before.model.digest() == bytes_before
        in_use = {id(model) for model in now.models()}
        for model in (before.model, arriving, spare):
            if id(model) not in in_use and all(model is not other for other in free):
                model.buffer[:] = 0xFF  # whoever still read it would read NaN
                free.append(model)
        assert np.isfinite(now.model.floats).all()


def test_the_same_updates_give_the_same_bits() -> None:
    def run() -> str:
        rng = np.random.default_rng(7)
        rule = FedAsyncSettings().build()
        layout = layout_of(1000)
        now = state(0.0, layout=layout)
        for _ in range(20):
            model = Model(layout)
            model.floats[:] = rng.standard_normal(1000)
            tau = max(0, now.version - int(rng.integers(4)))
            now, *_ = receive(rule, now, update(model, tau=tau))
        return now.model.digest()

    assert run() == run()


def test_a_mixture_of_finite_models_stays_between_them() -> None:
    rule = FedAsyncSettings(alpha=1.0).build()
    now = state(-1e36, 1e36)
    now, *_ = receive(rule, now, update(model_of(LAYOUT, 1e37, -1e37)))
    assert all(math.isfinite(x) for x in now.model.floats)
