"""Strategies and the like that are given as classes, functions and objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedstream
from fedstream.api.parameters import options
from fedstream.core.errors import ConfigError
from fedstream.settings.config import Settings, read
from fedstream.strategies import Batch
from fedstream.strategies.batches import FedBuffSettings
from fedstream.strategies.staleness import Hinge
from fedstream.trainer.solvers import Proximal

SOURCE = """
from fedstream import Policy, Solver
from fedstream.strategies import Batch, StalenessFunction

class Mine(Batch):
    beta: float
    def weigh(self, version, tau, samples): return self.beta

class Usual(Batch):
    staleness: StalenessFunction | None = None

class Slow(Solver):
    def rate(self, n): return self.lr / (n + 1)

class Two(Policy):
    def in_flight(self, traffic): return 2

def half(d: int, a: float = 0.5) -> float:
    return 1.0 if d == 0 else a

class Outer:
    class Inner(Batch): pass
"""


@pytest.fixture
def rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A user's module, imported from its file as a script beside it would."""
    (tmp_path / "my_api_rules.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    import my_api_rules  # type: ignore[import-not-found]

    yield my_api_rules
    del sys.modules["my_api_rules"]


def settings(**parameters: object) -> Settings:
    return read(None, (), options(None, parameters))


def test_a_class_stands_for_its_name(rules: ModuleType) -> None:
    file = rules.__file__
    made = settings(
        strategy={"name": rules.Mine, "beta": 0.5},
        solver=rules.Slow,
        solvers=[{"kind": rules.Slow, "devices": [0], "lr": 0.5}],
        scheduler={"policy": rules.Two},
    )
    assert type(made.strategy) is rules.Mine
    assert made.strategy.name == f"{file}:Mine"
    assert (made.solver.kind, made.solvers[0].kind) == (f"{file}:Slow", f"{file}:Slow")
    assert type(made.policy) is rules.Two
    staleness = {"name": "fedbuff", "staleness": {"kind": rules.half, "a": 0.25}}
    rule: Any = settings(strategy=staleness).strategy
    assert rule.staleness(3) == 0.25


def test_an_object_stands_for_its_table(rules: ModuleType) -> None:
    made = settings(strategy=rules.Mine(beta=0.25, buffer_size=3), solver=rules.Slow(lr=0.5))
    assert made.strategy.model_dump() == {
        "name": f"{rules.__file__}:Mine",
        "max_staleness": None,
        "beta": 0.25,
        "buffer_size": 3,
        "server_lr": 1.0,
    }
    assert (type(made.solver), made.solver.lr) == (rules.Slow, 0.5)


def test_built_in_classes_have_their_usual_names() -> None:
    inner = FedBuffSettings(staleness=Hinge(b=7), buffer_size=4)
    made = settings(strategy=inner, solver=Proximal)
    assert made.strategy == inner
    assert (made.strategy.name, made.solver.kind) == ("fedbuff", "proximal")


def test_a_reloaded_module_gives_the_new_classes(rules: ModuleType) -> None:
    """As in a notebook, whose kernel goes on while the file changes."""
    file = Path(rules.__file__ or "")
    staleness = {"name": "fedbuff", "staleness": {"kind": rules.half}}
    before: Any = settings(strategy=rules.Mine(beta=1.0)).strategy, settings(strategy=staleness)
    file.write_text(SOURCE.replace("self.beta", "2 * self.beta").replace("else a", "else a / 2"))
    importlib.reload(rules)
    staleness["staleness"] = {"kind": rules.half}
    after: Any = settings(strategy=rules.Mine(beta=1.0)).strategy, settings(strategy=staleness)
    assert [rule.weigh(1, 0, 1) for rule in (before[0], after[0])] == [1.0, 2.0]
    assert [one.strategy.staleness(1) for one in (before[1], after[1])] == [0.5, 0.25]


class Here(Batch):
    """A rule of this module's, which other processes find by its dotted name."""


def test_what_a_process_cannot_find_is_told_with_what_to_do(
    rules: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(Here, "__module__", "__main__")
    monkeypatch.setattr(main, "Here", Here, raising=False)
    told = r"^strategy\S*: the class Here is defined in the program or notebook.*my_rules\.py"
    for start in (fedstream.run, fedstream.simulate):
        for given in (Here, Here()):
            with pytest.raises(ConfigError, match=told):
                start(strategy=given)
    with pytest.raises(ConfigError, match=r"class Outer.Inner can't be found .* in my_api_rules"):
        settings(strategy=rules.Outer.Inner)
    with pytest.raises(ConfigError, match=r"function \S*<lambda> can't be found"):
        settings(strategy={"name": "fedbuff", "staleness": {"kind": lambda d: 1.0}})
