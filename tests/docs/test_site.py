"""`make docs` fails on what is broken, and the reference lists what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from fedstream.cli.app import application
from fedstream.settings.config import Settings

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
BROKEN = {
    "[a page](nothere.md)": "'nothere.md', but the target is not found",
    "[an anchor](#nothere)": "'#nothere', but there is no such anchor",
    "[another page's anchor](replay.md#nothere)": "does not contain an anchor '#nothere'",
    "[from the root](/tasks.md)": "an absolute link '/tasks.md'",
    "[a file outside](../nothere.md)": "../nothere.md does not exist",
    "![a picture](https://example.org/a.png)": "loads https://example.org/a.png",
    '<script src="//example.org/a.js"></script>': "loads //example.org/a.js",
}


@pytest.mark.process
@pytest.mark.skipif(not MKDOCS.is_file(), reason="mkdocs is not installed: make docs")
def test_broken_links_are_all_reported_and_fail(tmp_path: Path) -> None:
    """Also that nothing else is: the other pages are as they are in docs/."""
    for entry in ROOT.iterdir():  # what pages link to, and the sources of the Python reference
        if entry.name not in ("docs", "mkdocs.yml", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "tasks.md").open("a") as page:
        page.write("\n\n" + "\n\n".join(BROKEN) + "\n")
    built = subprocess.run(
        [MKDOCS, "build", "--strict"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert built.returncode == 1
    found = re.findall(r"^WARNING +-  (.*)$", built.stderr, re.MULTILINE)
    for expected in BROKEN.values():
        [line] = [line for line in found if expected in line]
        found.remove(line)
    assert found == []


def test_pages_outside_docs_have_valid_links() -> None:
    """The site leaves these out, and so does its check of links."""
    link = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")
    links = [
        (page, *found) for page in ROOT.glob("*.md") for found in link.findall(page.read_text())
    ]
    assert links
    for page, target, anchor in links:
        path = ROOT / target if target else page
        assert path.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {slug(one) for one in headings}, f"{page.name}: {target}#{anchor}"


def slug(heading: str) -> str:
    """The anchor that GitHub and mkdocs give a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


REFERENCE = ROOT / "docs" / "reference"
SCHEMA = Settings.model_json_schema()


def keys(schema: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """The keys of a table with those of its tables, of every alternative."""
    if name := schema.get("$ref"):
        schema = SCHEMA["$defs"][name.rpartition("/")[2]]
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        yield from keys(one)
    if "items" in schema:
        yield from keys(schema["items"])
    for name, inner in schema.get("properties", {}).items():
        yield (name,)
        yield from ((name, *rest) for rest in keys(inner))


@pytest.mark.parametrize("table", SCHEMA["properties"])
def test_configuration_reference_lists_exactly_the_keys(table: str) -> None:
    page = (REFERENCE / "configuration.md").read_text()
    [section] = re.findall(rf"^## {table}$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    if table == "simulation":
        section = (ROOT / "docs" / "simulation.md").read_text()
    there = set(keys(SCHEMA["properties"][table]))
    if table != "scheduler":  # the others' are "like `scheduler.steps`"
        there = {path for path in there if "steps" not in path[:-1]}
    if table == "solvers":  # and whatever a solver has
        there -= set(keys(SCHEMA["properties"]["solver"]))
    said = {
        word for code in re.findall(r"`([^`\n]+)`", section) for word in re.findall(r"\w+", code)
    }
    assert {path[-1] for path in there} - said == set()
    if table != "simulation":
        cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
        listed = {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}
        known = {".".join(path) for path in there}
        assert {name.removeprefix(f"{table}.") for name in listed} - known == set()


def commands(command: object, name: str) -> Iterator[str]:
    if isinstance(command, TyperGroup):
        for inner in command.commands:
            yield from commands(command.commands[inner], f"{name} {inner}")
    else:
        yield name


def test_command_reference_lists_exactly_the_commands() -> None:
    listed = re.findall(
        r"^\| `(fedstream .*?)` \|", (REFERENCE / "cli.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(commands(typer.main.get_command(application()), "fedstream"))
