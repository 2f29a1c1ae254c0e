"""The pages, and what they tell a reader to type or to write into a file."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMANDS = ("sh", "console")  # in a console the lines after `$ ` are commands, and others output
FILES = ("python", "toml", "yaml", "json")
LANGUAGES = (*COMMANDS, *FILES, "text")  # text is read and nothing else
_BLOCK = re.compile(r"^( *)```(.*?)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str  # path from the root
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """What is to be typed, each with the lines that belong to it."""
        text = self.text
        if self.language == "console":
            typed = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
            return [one for line in typed for one in whole(f"{line}\n")]
        return list(whole(text))


@cache
def whole(text: str) -> tuple[str, ...]:
    """Complete commands; lines that are only comments are none."""
    found, begun = [], ""
    for line in text.splitlines(keepends=True):
        if not begun and (not line.strip() or line.startswith("#")):
            continue
        begun += line
        if not line.endswith("\\\n"):
            checked = subprocess.run(
                ["bash", "-n"], input=begun, capture_output=True, text=True, check=False
            )
            if checked.returncode == 0 and not checked.stderr:  # a here-document only warns
                found.append(begun.rstrip("\n"))
                begun = ""
    assert not begun, f"not a complete command: {begun}"
    return tuple(found)


def pages() -> list[str]:
    """All of them, from the root."""
    beside = ("README.md", "CONTRIBUTING.md", "SECURITY.md")
    return [*beside, *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]


def blocks(page: str) -> Iterator[Block]:
    """A page's blocks in order."""
    text = (ROOT / page).read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(page, line, match[2], textwrap.dedent(match[3]))
