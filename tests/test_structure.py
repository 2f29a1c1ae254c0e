"""What import-linter cannot see: start-up, printing, names, and how the folders are linked."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
LINKED = ("broker", "coordinator", "trainer", "updater")


def test_services_without_training_do_not_import_torch() -> None:
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


def test_only_one_module_prints() -> None:
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


def types_of(module: ast.Module) -> Iterator[str]:
    """Names of a module's public classes and type aliases."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp()):
                pass
            case _:
                continue
        if name[0].isupper() and not name.isupper():
            yield name


def test_no_two_types_have_the_same_name() -> None:
    places: dict[str, set[str]] = defaultdict(set)
    for folder in ("fedstream", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            for name in types_of(ast.parse(path.read_text())):
                places[name].add(str(path.resolve().relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("part", LINKED)
def test_parts_are_imported_by_one_name(part: str) -> None:
    """Its folder stands at the top for readers; Python knows it as a package of fedstream's."""
    link = ROOT / "fedstream" / part
    assert link.is_symlink()
    assert link.readlink() == Path("..", part)
    code = f"import fedstream.{part}, importlib.util; print(importlib.util.find_spec('{part}'))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"
