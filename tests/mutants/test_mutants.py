"""Faults are small, valid, and planted where they are said to be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, _first_failure
from tests.mutants.operators import Mutant, mutants
from tests.mutants.plan import TESTS, sample, suite_for

PYTHON = '''"""Text."""
LIMIT = 5


def f(a: int, b: int = 3) -> bool:
    """Not this: 1 < 2."""
    if a < b and not b:
        raise ValueError(f"{a} + {b}")
    total = a + 2
    log.info("x")
    g(total)
    return a is not None and True
'''
LUA = """-- a comment: 1 < 2
local n = tonumber(ARGV[1])
if n >= 3 and not other then return 'a < b' end
redis.call('XADD', key.queue, '*', 'm', 1)
"""


def _edits(name: str, source: str) -> set[tuple[int, str, str]]:
    return {(m.line, m.old, m.new) for m in mutants(Path(name), source)}


def test_python_is_mutated_where_it_runs() -> None:
    assert _edits("f.py", PYTHON) == {
        (7, "a < b and not b", "not (a < b and not b)"), (7, "<", "<="), (7, "and", "or"),
        (7, "not ", ""), (8, 'raise ValueError(f"{a} + {b}")', "pass"), (9, "+", "-"),
        (9, "2", "3"), (11, "g(total)", "pass"), (12, "is not", "is"), (12, "and", "or"),
        (12, "True", "False"),
    }  # fmt: skip


def test_lua_is_mutated_outside_of_comments_and_texts() -> None:
    assert _edits("f.lua", LUA) == {
        (2, "1", "2"), (3, ">=", ">"), (3, "3", "4"), (3, "and", "or"), (3, "not ", ""),
        (4, "redis.call('XADD', key.queue, '*', 'm', 1)", ""), (4, "1", "2"),
    }  # fmt: skip


@pytest.mark.parametrize("package", TESTS)
def test_every_mutant_of_the_code_is_another_text_and_python_still_parses(package: str) -> None:
    drawn = sample(ROOT, package, 150, seed=2)
    assert len(drawn) == 150
    for mutant in drawn:
        source = (ROOT / mutant.path).read_text()
        applied = mutant.applied(source)
        assert applied != source
        if mutant.path.suffix == ".py":
            ast.parse(applied)


def test_the_same_seed_draws_the_same_and_the_files_own_tests_come_first() -> None:
    drawn = sample(ROOT, "broker", 20, seed=1)
    assert drawn == sample(ROOT, "broker", 20, seed=1) != sample(ROOT, "broker", 20, seed=2)
    layout = Mutant(Path("broker/layout.py"), 0, "", "", 1, "")
    assert suite_for(ROOT, layout)[0] == "tests/broker/test_layout.py"


def test_a_text_that_changed_is_not_mutated() -> None:
    mutant = next(m for m in mutants(Path("f.py"), PYTHON) if m.what == "arithmetic")
    with pytest.raises(ValueError, match="is not the text"):
        mutant.applied("\n" + PYTHON)


def test_a_fault_is_noticed_and_a_good_tree_is_not(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a():\n    assert 1 + 1 == 2\n")
    assert _first_failure(tmp_path, ["test_it.py"]) == ""
    (tmp_path / "test_it.py").write_text("def test_a():\n    assert 1 - 1 == 2\n")
    assert _first_failure(tmp_path, ["test_it.py"]) == "test_it.py::test_a"
    (tmp_path / "test_it.py").write_text("import nothing_of_this_name\n")
    assert _first_failure(tmp_path, ["test_it.py"]) == "test_it.py"
    with pytest.raises(RuntimeError, match="file or directory not found"):
        _first_failure(tmp_path, ["test_gone.py"])
