"""What the pages' text has to keep to: width, and names of files and modules that exist."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.pages import ROOT, pages

WIDTH = 100
_CODE = re.compile(r"`([^`\n]+)`")
_SUFFIXES = "conf|csv|json|lua|md|py|sh|sha256|toml|txt|yaml"
_FILE = re.compile(rf"(?:[\w.*-]+/)*[\w*-][\w.*-]*\.(?:{_SUFFIXES})")
_IGNORED = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
# Not runs/ and the like, which are there or not.
_FOLDERS = tuple(
    f"{entry.name}/" for entry in ROOT.iterdir() if entry.is_dir() and entry.name not in _IGNORED
)
_DOTTED = re.compile(r"fedstream(?:\.\w+)+")
# Written by a reader, or by fedstream for one.
MADE = {
    "devices.csv",
    ".../run.toml", "best.toml", "compare.py", "devices.py", "dist/fedstream.cdx.json",
    "journal-pod.yaml", "lines.py",
    "metrics.csv", "my_attestation.py", "my_partitions.py", "my_policies.py", "my_solvers.py",
    "my_task.py", "poisoned.py", "replay.csv", "results.csv", "run.toml", "runs.jsonl", "sized.py",
    "my_rules.py", "my_staleness.py", "summary.json", "sweep.png", "test_my_rules.py",
    "task.py", "test.txt", "train.txt", "valid.txt", "vouch.py",
}  # fmt: skip


def prose(page: str) -> Iterator[tuple[int, str]]:
    """A page's lines outside blocks of code, with their numbers."""
    fenced = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_lines_are_wrapped(page: str) -> None:
    """Except tables, and what cannot be broken: links and code."""
    for number, line in prose(page):
        rest = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        longest = max((len(code) for code in _CODE.findall(line)), default=0)
        if not line.startswith("|") and longest < WIDTH - 30:
            assert len(rest) <= WIDTH, f"{page}:{number} has {len(rest)} characters"


@pytest.mark.parametrize("page", pages())
def test_files_and_modules_that_are_named_exist(page: str) -> None:
    for number, line in prose(page):
        for code in _CODE.findall(line):
            for word in code.split():
                word = word.rstrip(",;:)").lstrip("(")
                place = f"{page}:{number}: {word}"
                if word in MADE:
                    continue
                if _FILE.fullmatch(word):
                    if "/" in word:
                        assert list(ROOT.glob(word.lstrip("/"))), place
                    else:
                        assert word in names(), place
                elif word.startswith(_FOLDERS) and "=" not in word:
                    assert list(ROOT.glob(word)), place
                elif _DOTTED.fullmatch(word):
                    assert exists(word), place


@cache
def names() -> frozenset[str]:
    """All files of the repository, without their folders."""
    tops = [entry for entry in ROOT.iterdir() if entry.name[0] != "." or entry.name == ".github"]
    below = (path.name for top in tops if top.is_dir() for path in top.rglob("*.*"))
    return frozenset({*below, *(top.name for top in tops)})


def exists(dotted: str) -> bool:
    """Whether there is a module, or something in one, of this name."""
    module, _, name = dotted.rpartition(".")
    try:
        importlib.import_module(dotted)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), name)
    return True
