"""The parts know of each other what the design allows, and no more."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = (
    "broker", "coordinator", "experiments", "fedstream", "journal", "runtime", "strategies",
    "trainer", "updater",
)  # fmt: skip
MAY_IMPORT = {
    "broker": {"broker"},
    "runtime": {"broker", "runtime"},
    "coordinator": {"broker", "runtime", "coordinator"},
    "strategies": {"broker", "runtime", "strategies"},
    "journal": {"broker", "runtime", "strategies", "journal"},
    "updater": {"broker", "runtime", "strategies", "journal", "updater"},
    "trainer": {"broker", "runtime", "trainer"},
    "fedstream": set(PARTS),
    "experiments": set(PARTS),
}


def imports(part: str) -> Iterator[tuple[str, str]]:
    """Every import of a part, wherever it stands: (file and line, module)."""
    for path in sorted((ROOT / part).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: a relative import"
                modules = [node.module or ""]
                if node.module == "fedstream":  # a package of ours, or a module
                    modules = [f"fedstream.{alias.name}" for alias in node.names]
            else:
                continue
            for module in modules:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", module


def part_of(module: str) -> str | None:
    """The part of ours that a module belongs to; None: a library's."""
    first, _, rest = module.partition(".")
    if first != "fedstream":
        return first if first in ("tests", "benchmarks", *PARTS) else None
    second = rest.partition(".")[0]
    return second if second in PARTS else "fedstream"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_the_parts_that_it_may(part: str) -> None:
    found = list(imports(part))
    assert found
    wrong = [
        (where, module)
        for where, module in found
        if (owner := part_of(module)) and owner not in MAY_IMPORT[part]
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "part", ["broker", "runtime", "coordinator", "journal", "strategies", "updater"]
)
def test_torch_is_for_training_alone(part: str) -> None:
    assert [found for found in imports(part) if found[1].startswith("torch")] == []


def test_one_module_alone_knows_redis_py() -> None:
    users = {
        where.partition(":")[0]
        for part in PARTS
        for where, module in imports(part)
        if module.partition(".")[0] == "redis"
    }
    assert users == {"broker/client.py"}


def test_the_services_without_training_start_without_torch() -> None:
    """Not even by way of a library."""
    code = (
        "import sys, fedstream.coordinator.service, fedstream.coordinator.scheduler;"
        "import fedstream.updater.service;"
        "print([name for name in ('torch', 'sklearn', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_one_module_alone_prints() -> None:
    """So that nothing of what others wrote gets past it to a terminal."""
    printing = {"Console", "typer.echo", "typer.secho", "typer.confirm", "print", "escape"}
    printing |= {f"sys.{name}.write" for name in ("stdout", "stderr")}
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fedstream").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in printing
    }
    assert found == {"fedstream/terminal.py"}


@pytest.mark.parametrize("part", [part for part in PARTS if part != "fedstream"])
def test_a_part_is_imported_by_one_name(part: str) -> None:
    """Its folder stands at the top for readers; Python knows it as a package of fedstream's."""
    link = ROOT / "fedstream" / part
    assert link.is_symlink()
    assert link.readlink() == Path("..", part)
    code = f"import fedstream.{part}, importlib.util; print(importlib.util.find_spec('{part}'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
