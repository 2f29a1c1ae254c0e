"""Classes derived from built-in ones have names of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.coordinator.policies import InFlight
from fedstream.core.errors import ConfigError
from fedstream.settings.config import read
from fedstream.strategies.batches import FedBuffSettings
from fedstream.strategies.staleness import Hinge
from fedstream.trainer.partitions import Iid
from fedstream.trainer.solvers import Sgd

SOURCE = """
from typing import Literal
from fedstream.coordinator.policies import InFlight
from fedstream.strategies.batches import FedBuffSettings
from fedstream.strategies.staleness import Hinge
from fedstream.trainer.solvers import Sgd
from fedstream.trainer.partitions import Iid

class Rule(FedBuffSettings):
    beta: float = 1.0

class Slower(Hinge): pass
class Steps(Sgd): pass
class Two(InFlight): pass
class Parts(Iid): pass

class Copied(FedBuffSettings):
    name: Literal["fedbuff"] = "fedbuff"
"""
PLACES: dict[str, tuple[str, Callable[[Any], Any], type[Any]]] = {
    "Rule": ("strategy.name", lambda s: s.strategy, FedBuffSettings),
    "Slower": ("strategy.staleness.kind", lambda s: s.strategy.staleness, Hinge),
    "Steps": ("solver.kind", lambda s: s.solver, Sgd),
    "Two": ("scheduler.policy.kind", lambda s: s.policy, InFlight),
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
