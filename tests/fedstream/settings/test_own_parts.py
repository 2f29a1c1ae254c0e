"""Own solvers, partitions and policies in a configuration: absolute names, and trust."""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path

import pytest

from fedstream.journal import opened
from fedstream.runtime.config import dump, load
from fedstream.runtime.plugins import NotTrusted, allowing
from fedstream.settings.config import Settings, read
from fedstream.settings.plugin_sources import doubts, part_sources
from fedstream.settings.recording import settings_of
from fedstream.simulation import simulate

PROGRAM = """
from pathlib import Path
from fedstream import Policy, Solver

Path(__file__).with_name("ran").touch()

class Slow(Solver): pass

class One(Policy):
    def in_flight(self, traffic): return 1

def all_alike(labels, devices, seed): ...
"""
NAMED = {
    "solver": 'solver.kind = "{}:Slow"',
    "group": 'solvers = [{{devices = [0], kind = "{}:Slow"}}]',
    "partition": 'task.partition.kind = "{}:all_alike"',
    "policy": 'scheduler.policy.kind = "{}:One"',
}


@pytest.mark.parametrize("part", NAMED)
def test_a_recordings_own_parts_do_not_run_unless_trusted(part: str, tmp_path: Path) -> None:
    program, file = tmp_path / f"recorded_{part}.py", tmp_path / "run.toml"
    program.write_text(PROGRAM)
    file.write_text(NAMED[part].format(program))
    with pytest.raises(NotTrusted, match=f"run.toml names the .*recorded_{part}.py.*runs its code"):
        load(Settings, path=file, environ={}, trusted=False)
    assert not (tmp_path / "ran").exists()
    with allowing(recorded=True):
        load(Settings, path=file, environ={}, trusted=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("part", ["solver", "group", "policy"])
def test_measuring_needs_no_part_that_only_trained(part: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(NAMED[part].format(tmp_path / f"trained_{part}.py") + "\ntask.name = 'digits'")
    assert settings_of(tmp_path, None, trusted=False).task.name == "digits"


def test_the_hint_names_the_key_to_choose(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(NAMED["partition"].format(tmp_path / "trained_on.py"))
    with pytest.raises(NotTrusted, match=r"choose task\.partition\.kind yourself, or give --trust"):
        settings_of(tmp_path, None, trusted=False)


def test_the_journal_has_their_sources(tmp_path: Path) -> None:
    program, journal = tmp_path / "journalled_parts.py", tmp_path / "journal"
    program.write_text(PROGRAM.replace("...", "return np.array_split(range(len(labels)), devices)"))
    program.write_text("import numpy as np\n" + program.read_text())
    sets = [line.format(program).replace(" = ", "=", 1) for line in NAMED.values()]
    simulate(read(None, [*sets, "run.versions=2", "simulation.threads=1"]), journal=journal)
    with opened(journal) as chain:
        head = chain[-1].head
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    keys = ("solver.kind", "solvers[0].kind", "task.partition.kind", "scheduler.policy.kind")
    assert head.parts == dict.fromkeys(keys, digest)
    assert head.sources == {}
    assert part_sources(Settings()) == {}


def test_names_are_kept_with_absolute_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    sets = [line.format("own_parts.py").replace(" = ", "=", 1) for line in NAMED.values()]
    kept = tomllib.loads(dump(read(None, sets)))
    found = {
        kept["solver"]["kind"],
        kept["solvers"][0]["kind"],
        kept["task"]["partition"]["kind"],
        kept["scheduler"]["policy"]["kind"],
    }
    assert found == {f"{tmp_path}/own_parts.py:{name}" for name in ("Slow", "all_alike", "One")}


def test_a_staleness_function_that_slows_fresh_updates_is_doubted(tmp_path: Path) -> None:
    (tmp_path / "halved.py").write_text(
        "def half(d: int, a: float = 0.5) -> float: return a if d < 3 else 0.1\n"
        "def fails(d: int) -> float: return 1 / d\n"
    )
    name = f"strategy.staleness.kind={tmp_path}/halved.py"
    (told,) = doubts(read(None, [f"{name}:half"]))
    assert f"strategy.staleness.kind = '{tmp_path}/halved.py:half': s(0) is 0.5, but" in told
    assert list(doubts(read(None, [f"{name}:half", "strategy.staleness.a=1.0"]))) == []
    assert list(doubts(read(None, [f"{name}:fails"]))) == []  # the first update tells where
    for strategy in ("fedasync", "fedbuff", "fedavg"):
        assert list(doubts(read(None, [f"strategy.name={strategy}"]))) == []


def test_a_run_too_short_to_adapt_its_step_is_doubted() -> None:
    def told(versions: int) -> list[str]:
        return list(doubts(read(None, ["strategy.adapt.every=20", f"run.versions={versions}"])))

    assert told(40) == []
    (short,) = told(39)
    assert "changes first after 2 * adapt.every = 40 versions, and run.versions = 39" in short
