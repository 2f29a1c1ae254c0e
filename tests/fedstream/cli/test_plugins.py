"""`fedstream plugins`: what installed packages announce, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedstream.runtime.plugins import Registry
from fedstream.settings.plugin_sources import REGISTRIES
from fedstream.strategies import RULES
from tests.fedstream.conftest import Command


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that announces a rule, one that is gone, and one by a taken name."""
    (tmp_path / "announced_rules.py").write_text(
        "from fedstream.strategies import Batch\nclass Mine(Batch): pass\n"
    )
    about = tmp_path / "announced_rules-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: announced-rules\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(
        "[fedstream.strategies]\nmine = announced_rules:Mine\ngone = announced_rules:Gone\n"
        "fedbuff = announced_rules:Mine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(RULES, "_found", {})
    yield
    sys.modules.pop("announced_rules", None)


@pytest.mark.usefixtures("installed")
def test_each_name_has_its_source_and_what_is_wrong(command: Command) -> None:
    code, out, err = command("plugins")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert ["strategy.name", "fedasync", "built in"] in rows
    assert ["strategy.name", "mine", "announced-rules 1.5: announced_rules:Mine"] in rows
    assert ["solver.kind", "proximal", "built in"] in rows
    assert code == 1
    assert "strategy.name = gone: strategy 'gone', entry point announced_rules:Gone: imp" in err
    assert "strategy.name = fedbuff: the name of a built-in one" in err
    assert "mine" not in err
    code, out, _ = command("plugins", "--json")
    told = {(one["key"], one["name"], bool(one["problem"])) for one in json.loads(out)}
    assert {("strategy.name", "gone", True), ("strategy.name", "mine", False)} <= told


def test_only_built_in_ones_are_there_without_packages(command: Command) -> None:
    code, out, err = command("plugins")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 + sum(
        len(registry.built_in) for registry in REGISTRIES.values()
    )


def test_no_door_is_left_out() -> None:
    modules = [module for name, module in sys.modules.items() if name.startswith("fedstream.")]
    doors = {
        one for module in modules for one in vars(module).values() if isinstance(one, Registry)
    }
    assert doors == set(REGISTRIES.values())
