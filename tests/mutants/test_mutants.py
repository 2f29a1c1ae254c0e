"""What `make mutants` names exists, and its faults in Lua are faults."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.mutants.lua import SCRIPTS, TESTS, mutants

ROOT = Path(__file__).parents[2]
TARGETS = sorted(
    {*Path(__file__).parent.glob("*.toml")} - {Path(__file__).with_name("operators.toml")}
)


@pytest.mark.parametrize("target", TARGETS, ids=lambda path: path.stem)
def test_modules_and_tests_of_a_target_exist(target: Path) -> None:
    about = tomllib.loads(target.read_text())["cosmic-ray"]
    tests = [word for word in about["test-command"].split() if word.startswith("tests/")]
    assert tests
    for name in (*about["module-path"], *tests, *TESTS):
        assert (ROOT / name).exists(), name


def test_lua_is_mutated_outside_comments_and_texts() -> None:
    source = """local n = 1 -- one, not two
  redis.call('XADD', key.queue, '*', 'm', 1)
if n >= 3 and not done then return 'a and b' end
"""
    edits = {(one.line, one.new.strip()) for one in mutants(Path("f.lua"), source)}
    assert edits == {
        (1, "local n = 2 -- one, not two"),
        (2, "redis.call('XADD', key.queue, '*', 'm', 2)"),
        (2, ""),
        (3, "if n > 3 and not done then return 'a and b' end"),
        (3, "if n >= 4 and not done then return 'a and b' end"),
        (3, "if n >= 3 or not done then return 'a and b' end"),
        (3, "if n >= 3 and done then return 'a and b' end"),
    }
    scripts = sorted((ROOT / SCRIPTS).glob("*.lua"))
    every = [one for path in scripts for one in mutants(path, path.read_text())]
    assert len(every) > 500
    assert all(one.applied(one.path.read_text()) != one.path.read_text() for one in every[::50])
