"""The weight function of every strategy, and what it says of itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from fedstream.history.live.panels.weights import weight_rule
from fedstream.strategies import FUNCTIONS, Batch, FedAsyncSettings, StrategySettings

ASKED: dict[str, Any] = {"late": range(11), "last": 1000, "samples": 100}


def strategy(**about: Any) -> Any:
    return TypeAdapter(StrategySettings).validate_python(about)


@pytest.mark.parametrize("kind", sorted(FUNCTIONS.built_in))
@pytest.mark.parametrize("name", ["fedasync", "fedbuff"])
def test_each_staleness_function_is_drawn_as_it_is(name: str, kind: str) -> None:
    rule = strategy(name=name, staleness={"kind": kind})
    found = weight_rule(rule, 50, **ASKED)
    alpha = rule.alpha if name == "fedasync" else 1.0
    assert found.weights == pytest.approx([alpha * rule.staleness(d) for d in range(11)])
    assert not any("Adaptive" in note for note in found.notes)
    assert (kind == "constant") == ("The weight does not depend on staleness." in found.notes)


@pytest.mark.parametrize(
    "schedule", [{"kind": "step", "at": 800, "factor": 0.5}, {"kind": "inverse_sqrt"}]
)
def test_a_schedule_says_that_it_changes_with_the_version(schedule: dict[str, Any]) -> None:
    rule = strategy(name="fedasync", alpha=0.4, alpha_schedule=schedule)
    notes = weight_rule(rule, 50, **ASKED).notes
    assert any(
        note.startswith("Adaptive: the weight also changes with the version") for note in notes
    )
    assert "for version 51" in notes[0]


@pytest.mark.parametrize("name", ["fedavg", "afa-cd", "afa-cs", "scaffold"])
def test_strategies_without_a_staleness_function_say_so(name: str) -> None:
    found = weight_rule(strategy(name=name), 50, **ASKED)
    assert "The weight does not depend on staleness." in found.notes
    assert any("updates make a version" in note for note in found.notes)
    assert ("divided by its local steps" in " ".join(found.notes)) == name.startswith("afa")


def test_weights_by_samples_say_so() -> None:
    found = weight_rule(strategy(name="fedavg", weighting="samples"), 50, **ASKED)
    assert any("depends on how many samples" in note for note in found.notes)


def test_what_is_dropped_weighs_nothing() -> None:
    found = weight_rule(strategy(name="fedasync", max_staleness=4), 50, **ASKED)
    assert found.weights[4] > 0  # type: ignore[operator]
    assert found.weights[5:] == (0.0,) * 6
    assert "Updates that are more than 4 versions late are dropped." in found.notes
    late = weight_rule(strategy(name="fedavg"), 50, **ASKED)
    assert late.weights[:2] == (1.0, 0.0)
    assert "Late updates are dropped." in late.notes


def test_early_in_a_run_the_whole_curve_is_known() -> None:
    found = weight_rule(FedAsyncSettings(), 0, **ASKED)
    assert len(found.weights) == 11
    assert None not in found.weights


class _Broken(Batch):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        raise ZeroDivisionError("no samples")


def test_a_rule_that_raises_is_told() -> None:
    found = weight_rule(_Broken(), 50, **ASKED)
    assert found.weights == (None,) * 11
    assert found.notes == ("The rule could not be asked: it raised ZeroDivisionError: no samples",)


class _Odd(Batch):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        return float("inf") if version - tau == 2 else 1.0


def test_a_weight_that_is_no_number_is_left_out() -> None:
    assert weight_rule(_Odd(), 50, **ASKED).weights[1:4] == (1.0, None, 1.0)
