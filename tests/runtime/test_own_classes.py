"""Own classes: misspelt methods, helpers that look like ours, and names of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.coordinator.policies import POLICIES, Policy, Traffic
from fedstream.core.errors import ConfigError
from fedstream.runtime.text import check_spelling
from fedstream.settings.config import read
from fedstream.strategies import RULES, Batch
from fedstream.strategies.batches import FedBuffSettings
from fedstream.trainer.partitions import Iid
from fedstream.trainer.solvers import SOLVERS, Sgd, Solver


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


# classes derived from built-in ones

SOURCE = """
from typing import Literal
from fedstream.strategies.batches import FedBuffSettings
from fedstream.trainer.solvers import Sgd
from fedstream.trainer.partitions import Iid

class Rule(FedBuffSettings):
    beta: float = 1.0

class Steps(Sgd): pass
class Parts(Iid): pass

class Copied(FedBuffSettings):
    name: Literal["fedbuff"] = "fedbuff"
"""
PLACES: dict[str, tuple[str, Callable[[Any], Any], type[Any]]] = {
    "Rule": ("strategy.name", lambda s: s.strategy, FedBuffSettings),
    "Steps": ("solver.kind", lambda s: s.solver, Sgd),
    "Parts": ("task.partition.kind", lambda s: s.task.partition, Iid),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_class_derived_from_a_built_in_one_has_its_own_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"derived_{name.lower()}.py"
    file.write_text(SOURCE)
    key, found, base = PLACES[name]
    part = found(read(None, [f"{key}={file}:{name}"]))
    assert (type(part).__name__, isinstance(part, base)) == (name, True)
    tag = key.rpartition(".")[2]
    assert getattr(part, tag) == getattr(type(part)(), tag) == f"{file}:{name}"
    assert list(type(part).model_fields)[: len(base.model_fields)] == list(base.model_fields)
    assert getattr(base(), tag) == base.model_fields[tag].default  # which keeps its own


def test_a_copy_that_names_itself_as_a_built_in_one_is_told_what_to_leave_out(
    tmp_path: Path,
) -> None:
    file = tmp_path / "copied_rules.py"
    file.write_text(SOURCE)
    told = r"strategy.name = .*: leave out the field name of Copied: your own class needs none"
    with pytest.raises(ConfigError, match=told):
        read(None, [f"strategy.name={file}:Copied"])
