"""Faults are small, valid, and planted where they are said to be."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, killed_by, traced
from tests.mutants.operators import Mutant, mutants
from tests.mutants.plan import TESTS, sample

PYTHON = '''"""Text."""
LIMIT = 5


def f(a: int, b: int = 3) -> bool:
    """Not this: 1 < 2."""
    if a < b and not b:
        raise ValueError(f"{a} + {b}")
    total = a + 2
    log.info("x")
    g(total)
    return a is not None and not (a and True)
'''
LUA = """-- a comment: 1 < 2
local n = tonumber(ARGV[1])
if n >= 3 and not other then return 'a < b' end
redis.call('XADD', key.queue, '*', 'm', 1)
"""


def _edits(name: str, source: str) -> set[tuple[int, str, str]]:
    return {(m.line, m.old, m.new) for m in mutants(Path(name), source)}


def test_every_test_in_the_plan_exists() -> None:
    missing = [path for paths in TESTS.values() for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_python_is_mutated_where_it_runs() -> None:
    assert _edits("f.py", PYTHON) == {
        (7, "a < b and not b", "not (a < b and not b)"),
        (7, "<", "<="),
        (7, "and", "or"),
        (7, "not ", ""),
        (8, 'raise ValueError(f"{a} + {b}")', "pass"),
        (9, "+", "-"),
        (9, "2", "3"),
        (11, "g(total)", "pass"),
        (12, "is not", "is"),
        (12, "and", "or"),
        (12, "not ", ""),
        (12, "True", "False"),
    }


def test_lua_is_mutated_outside_comments_and_strings() -> None:
    assert _edits("f.lua", LUA) == {
        (2, "1", "2"),
        (3, ">=", ">"),
        (3, "3", "4"),
        (3, "and", "or"),
        (3, "not ", ""),
        (4, "redis.call('XADD', key.queue, '*', 'm', 1)", ""),
        (4, "1", "2"),
    }


@pytest.mark.parametrize("package", TESTS)
def test_every_mutant_differs_and_still_parses(package: str) -> None:
    drawn = sample(ROOT, package, 40, seed=2)
    assert len(drawn) == 40
    for mutant in drawn:
        source = (ROOT / mutant.path).read_text()
        applied = mutant.applied(source)
        assert applied != source
        if mutant.path.suffix == ".py":
            ast.parse(applied)


def test_same_seed_draws_the_same_mutants() -> None:
    drawn = sample(ROOT, "broker", 20, seed=1)
    assert drawn == sample(ROOT, "broker", 20, seed=1) != sample(ROOT, "broker", 20, seed=2)


def test_changed_text_is_not_mutated() -> None:
    mutant = next(m for m in mutants(Path("f.py"), PYTHON) if m.what == "arithmetic")
    with pytest.raises(ValueError, match="is not the text"):
        mutant.applied("\n" + PYTHON)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A project with a package, a script and tests: one starts a process, one knows no peace."""
    shutil.copytree(ROOT / "tests/mutants/traced", tmp_path / "tree/tests/mutants/traced")
    shutil.copy(ROOT / "tests/mutants/twice.py", tmp_path / "tree/tests/mutants")
    for path, text in PROJECT.items():
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / path).write_text(text)
    (tmp_path / "tree/fedstream/broker").symlink_to("../broker")
    return tmp_path / "tree"


PROJECT = {
    "fedstream/__init__.py": "",
    "broker/scripts.py": """
class Script:
    def __init__(self, name):
        self.name = name

    def command(self):
        return self.name
""",
    "broker/lua/prelude.lua": """
local function count(what)
  redis.call('HINCRBY', key.counts, what, 1)
end

local function tell(event)
  count('told')
end

local function alone()
  return 1
end
""",
    "broker/lua/told.lua": "-- keys:\ntell({})\n",
    "broker/lua/other.lua": "-- keys:\nalone()\n",
    "broker/sums.py": """
def add(a, b):
    if a is None:
        return 0
    return (
        a
        + b
    )


def at_import():
    return 1 + 1


TWO = at_import()

if __name__ == "__main__":
    print(add(1, 1))
""",
    "tests/test_sums.py": """
import subprocess
import sys

from fedstream.broker.scripts import Script
from fedstream.broker.sums import add


def test_here():
    assert add(1, 1) == 2


def test_of_nothing():
    assert add(None, 1) == 0


def test_in_a_process():
    said = subprocess.run([sys.executable, "broker/sums.py"], capture_output=True, check=True)
    assert said.stdout == b"2\\n"


def test_told():
    assert Script("told").command() == "told"


def test_other():
    assert Script("other").command() == "other"
""",
    "pytest.ini": "[pytest]\n",
}
IN = "tests/test_sums.py::test_"


@pytest.mark.process
def test_mutant_faces_the_tests_that_run_its_line(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # this one is none of the tree's
    reach, failed = traced(tree, ["tests"], jobs=1)
    assert failed == []

    def tests_of(path: str, old: str) -> set[str] | None:
        source = (tree / path).read_text()
        found = next(m for m in mutants(Path(path), source) if m.old == old)
        tests = reach.of(found, tree)
        return None if tests is None else {test.removeprefix(IN) for test in tests}

    assert tests_of("broker/sums.py", "+") == {"here", "in_a_process"}  # of three lines
    assert tests_of("broker/sums.py", "is") == {"here", "in_a_process", "of_nothing"}
    assert tests_of("broker/sums.py", "0") == {"of_nothing"}
    assert tests_of("broker/sums.py", "1") is None  # run when it was imported
    assert tests_of("broker/lua/told.lua", "tell({})") == {"told"}
    assert tests_of("broker/lua/prelude.lua", "redis.call('HINCRBY', key.counts, what, 1)") == {
        "told"
    }
    quickest = reach.of(next(m for m in _planted(tree) if m.old == "+"), tree)
    assert quickest
    assert quickest[-1] == f"{IN}in_a_process"


def _planted(tree: Path) -> list[Mutant]:
    path = Path("broker/sums.py")
    return mutants(path, (tree / path).read_text())


@pytest.mark.process
def test_kill_must_be_repeatable(tree: Path) -> None:
    """A test that fails by itself now and then has not noticed it."""
    (tree / "tests/test_sums.py").write_text("""
from pathlib import Path

from fedstream.broker.sums import add


def test_that_fails_once():
    if not Path("seen").exists():
        Path("seen").touch()
        raise AssertionError


def test_it():
    assert add(1, 1) == 2
""")
    tests = [f"{IN}that_fails_once", f"{IN}it"]
    assert killed_by(tree, tests) == ""
    plus = next(m for m in _planted(tree) if m.old == "+")
    (tree / plus.path).write_text(plus.applied((tree / plus.path).read_text()))
    (tree / "seen").unlink()
    assert killed_by(tree, tests) == f"{IN}it"


@pytest.mark.process
def test_hanging_test_is_killed_after_one_try(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutants.__main__.HANGS_S", 1)
    (tree / "tests/test_sums.py").write_text("""
import time


def test_it():
    time.sleep(3600)
""")
    assert killed_by(tree, [f"{IN}it"]) == f"{IN}it"


@pytest.mark.process
def test_tree_without_the_tests_gives_no_verdict(tree: Path) -> None:
    (tree / "tests/test_sums.py").write_text("import nothing_of_this_name\n")
    assert killed_by(tree, ["tests/test_sums.py"]) == "tests/test_sums.py"
    with pytest.raises(RuntimeError, match="file or directory not found"):
        killed_by(tree, ["tests/test_gone.py"])
