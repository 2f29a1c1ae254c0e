"""`make docs` fails on what is broken, and the reference lists what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from fedstream.cli.app import application
from fedstream.settings.config import Settings

ROOT = Path(__file__).parents[2]


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
