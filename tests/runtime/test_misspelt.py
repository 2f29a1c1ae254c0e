"""A misspelt method is an error, a helper that happens to look like one of ours is not."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedstream.coordinator.policies import POLICIES, Policy, Traffic
from fedstream.core.errors import ConfigError
from fedstream.runtime.text import check_spelling
from fedstream.strategies import RULES, Batch
from fedstream.trainer.solvers import SOLVERS, Solver


class Ends(Batch):
    def end_rond(self, state: Any) -> Any:
        return state


class Factors(Batch):
    @property
    def bacth(self) -> int:
        return 3


class Inherits(Ends):
    def weigh(self, version: int, tau: int, samples: int) -> float:
        return 1.0


class Steers(Solver):
    def directions(self, g: Any, at: Any) -> Any:
        return g


class Chooses(Policy):
    def in_flight(self, traffic: Traffic) -> int:
        return 2

    def chose(self, traffic: Traffic, idle: Any, draw: Any) -> int:
        return 0


@pytest.mark.parametrize(
    ("registry", "cls", "wrong", "right"),
    [
        (RULES, Ends, "end_rond", "end_round"),
        (RULES, Factors, "bacth", "batch"),
        (RULES, Inherits, "end_rond", "end_round"),
        (SOLVERS, Steers, "directions", "direction"),
        (POLICIES, Chooses, "chose", "choose"),
    ],
)
def test_a_misspelt_method_is_refused_by_its_door(
    registry: Any, cls: type[Any], wrong: str, right: str
) -> None:
    told = f"defines {wrong}(), which nothing uses; did you mean {right}()?"
    with pytest.raises(ConfigError, match=re.escape(told)):
        registry.accepted(cls)


class Helps(Batch):
    """Names near ours, but its own code uses them; others are private or unlike."""

    def weigh(self, version: int, tau: int, samples: int) -> float:
        return max(self.weight(n) for n in range(samples)) + self.rates[0]

    def weight(self, n: int) -> float:
        return float(n)

    @property
    def rates(self) -> list[float]:
        return [1.0]

    def _end_rond(self) -> None:
        """Nobody's business."""

    def describe(self) -> str:
        return "unlike ours"


class Mixin:
    """Not ours: whatever it has, it has for others."""

    def end_rounds(self) -> None:
        """Unused here."""


class Mixed(Mixin, Batch):
    pass


OURS = [*RULES.built_in.values(), *SOLVERS.built_in.values(), *POLICIES.built_in.values()]


@pytest.mark.parametrize("cls", [Helps, Mixed, *OURS])
def test_helpers_and_built_in_classes_pass(cls: type[Any]) -> None:
    check_spelling(cls)
