"""Reasons come off the wire as text, and are counted by a closed set."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fedstream.broker import scripts
from fedstream.broker.scripts import Script
from fedstream.core import reasons

ROOT = Path(__file__).parents[2]
TABLES = {
    "refused": reasons.REFUSED,
    "given up": reasons.GIVEN_UP,
    "dead": reasons.DEAD,
    "evaluated": reasons.EVALUATED,
    "stray": reasons.STRAY,
}


def documented() -> dict[str, list[str]]:
    """The reasons by outcome, as the architecture's page lists them."""
    page = (ROOT / "docs/architecture.md").read_text()
    rows = dict(re.findall(r"^\| ([a-z ]+) \| [^|]+ \| ([^|]+) \|$", page, re.MULTILINE))
    strays = re.search(r"is a \*\*stray\*\*(.*?)A trainer that repeats", page, re.DOTALL)
    assert strays
    rows["stray"] = strays[1]
    return {outcome: _quoted(rows[outcome]) for outcome in TABLES}


def _quoted(text: str) -> list[str]:
    """What stands in backticks, but for names of settings."""
    found = [" ".join(one.split()) for one in re.findall(r"`([^`]+)`", text)]
    return [one for one in found if "_" not in one]


def test_documentation_lists_every_reason() -> None:
    listed = documented()
    listed["given up"].remove("raised <Error>")
    assert {outcome: sorted(some) for outcome, some in listed.items()} == {
        outcome: sorted(table) for outcome, table in TABLES.items()
    }


def test_each_reason_has_one_name_and_one_outcome() -> None:
    texts = sorted(text for table in TABLES.values() for text in table)
    assert len(set(texts)) == len(texts)
    assert sorted(reasons.named().values()) == texts


def test_scripts_know_reasons_by_name() -> None:
    """None has a reason's text of its own; each name becomes its text when the script is loaded."""
    fields = {"size", "layout", "digest"}  # fields of records and blobs are called the same
    apart = [text for text in reasons.named().values() if text not in fields]
    for path in scripts._LUA.iterdir():
        code = re.sub(r"--[^\n]*", "", path.read_text())
        written = [text for text in apart if re.search(rf"['\":]{text}['\"]", code)]
        assert (path.name, written) == (path.name, [])
    source = Script("admit").source.decode()
    assert "reasons." not in re.sub(r"--[^\n]*", "", source)
    assert 'astray("another site\'s task")' in source


def test_services_know_reasons_by_name() -> None:
    """One word may mean other things too, and a log line says that a run finished.

    What a gateway tells its devices, and a helper the updater, are closed sets of their own.
    """
    apart = {text for text in reasons.named().values() if " " in text} - {reasons.RUN_FINISHED}
    packages = ("broker", "coordinator", "fedstream", "trainer", "updater")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    assert len(paths) > 100
    found = {
        (path.name, node.value)
        for path in paths
        if path.name != "reasons.py"
        and not {"gateway", "device", "helper", "protocol"} & {*path.parts}
        if any(text in (source := path.read_text()) for text in apart)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and node.value in apart
    }
    assert found == {("sealing.py", "helper lost")}  # what a helper tells


def test_unknown_reason_is_detected_when_its_script_is_loaded() -> None:
    with pytest.raises(KeyError, match="TO_STALE"):
        scripts._REASON.sub(scripts._reason, "return refused(reasons.TO_STALE)")


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("dropped out", "dropped out"),
        ("deadline passed", "deadline passed"),
        ("round over", "round over"),
        ("raised ValueError", "raised ValueError"),
        ("raised LayoutMismatch", "raised LayoutMismatch"),
        ("raised OutOfMemoryError", "raised OutOfMemoryError"),
        ("raised Ours", "raised another error"),
        ("raised ", "raised another error"),
        ("raised KeyboardInterrupt", "raised another error"),
        ("tired", "another reason"),
        ("run finished", "run finished"),  # a gateway's devices have no more to do
        ("owner gone", "another reason"),  # which a coordinator says, and no trainer
    ],
)
def test_why_a_device_gave_up(said: str, counted: str) -> None:
    assert reasons.of_giving_up(said) == counted


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("crashed its trainers", "crashed its trainers"),
        ("crashed its coordinators", "crashed its coordinators"),
        ("task: device: Input should be a valid integer", "unreadable"),
    ],
)
def test_why_an_entry_is_dead(said: str, counted: str) -> None:
    assert reasons.of_death(said) == counted
