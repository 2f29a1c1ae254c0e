"""Every block of every page is run by test_pages.py, or is a copy of one that is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.elsewhere import NOT_RUN, not_run
from tests.docs.pages import COMMANDS, LANGUAGES, Block, blocks, pages

pytestmark = pytest.mark.process  # bash says where a command ends

COPIES = {  # pages that tell again what another one does
    "CONTRIBUTING.md": "README.md",
    "docs/tutorial/first-run.md": "README.md",
}
_PROGRAMS = r"fedstream|make|python|pip|docker|kubectl|redis-server|redis-cli|export|\.venv/bin/\S+"
_COMMAND = re.compile(rf"\s*(\$ |({_PROGRAMS}) \S)")


def to_follow(page: str) -> list[Block]:
    return [block for block in blocks(page) if block.language != "text"]


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: one of {LANGUAGES} after the ```"
        if block.language == "text":
            commands = [line for line in block.text.splitlines() if _COMMAND.match(line)]
            assert commands == [], f"{block.place}: commands are in a block ```sh or ```console"


def test_every_page_with_something_to_follow_is_followed() -> None:
    """To its end: a Reader complains about what is left."""
    module = ast.parse(Path(__file__).with_name("test_pages.py").read_text())
    named = {node.value for node in ast.walk(module) if isinstance(node, ast.Constant)}
    wanted = {page for page in pages() if to_follow(page)}
    assert wanted - named - COPIES.keys() == set()
    assert wanted & named & COPIES.keys() == set()


def said(command: str) -> str:
    """A command without its comment."""
    return command.partition(" #")[0].rstrip()


@pytest.mark.parametrize("page", COPIES)
def test_a_copy_has_nothing_of_its_own(page: str) -> None:
    there, files = set(), set()
    for block in to_follow(COPIES[page]):
        if block.language in COMMANDS:
            there |= {said(command) for command in block.commands()}
        else:
            files.add(block.text)
    for block in to_follow(page):
        if block.language not in COMMANDS:
            assert block.text in files, block.place
            continue
        for command in block.commands():
            if entry := not_run(command):
                entry.check(command)
            else:
                assert said(command) in there, f"{block.place}: {command}"


def test_what_is_not_run_is_on_a_page() -> None:
    commands = [
        command
        for page in pages()
        for block in blocks(page)
        if block.language in COMMANDS
        for command in block.commands()
    ]
    found = {entry.pattern for command in commands if (entry := not_run(command))}
    assert {entry.pattern for entry in NOT_RUN} == found
