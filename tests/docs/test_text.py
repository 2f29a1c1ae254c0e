"""What the text has to keep to: width, and names of files, modules and commands that exist."""

from __future__ import annotations

import pkgutil
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
_PACKAGES = sorted(entry.parent.name for entry in ROOT.glob("*/__init__.py"))
_DOTTED = re.compile(rf"(?:{'|'.join(_PACKAGES)})(?:\.\w+)+")
_KEYS = (ROOT / "docs" / "reference" / "configuration.md").read_text()
_COMMANDS = (ROOT / "docs" / "reference" / "cli.md").read_text()
_TARGETS = (ROOT / "Makefile").read_text()
TEXTS = [*pages(), "experiments/README.md", "experiments/theory/README.md"]
PROGRAMS = sorted(
    str(path.relative_to(ROOT)) for package in _PACKAGES for path in (ROOT / package).rglob("*.py")
)
# Written by a reader, or by fedstream for one.
MADE = {
    "ask.py",
    "helper.pem",
    "keys/0.pem",
    "owner.pem",
    "policy.json",
    "private.toml",
    "private/helper.toml",
    "roster.txt",
    "devices.csv",
    "helper.toml",
    ".../run.toml",
    "best.toml",
    "compare.py",
    "digits.py",
    "train.py",
    "device.pem",
    "device.pem.state",
    "devices.py",
    "dist/fedstream.cdx.json",
    "backup.yaml",
    "journal.before",
    "journal.index",
    "lines.py",
    "metrics.csv",
    "my_attestation.py",
    "my_partitions.py",
    "my_policies.py",
    "my_solvers.py",
    "my_task.py",
    "personal.py",
    "poisoned.py",
    "replay.csv",
    "results.csv",
    "run.toml",
    "runs.jsonl",
    "sized.py",
    "my_rules.py",
    "my_staleness.py",
    "summary.json",
    "sweep.png",
    "test_my_rules.py",
    "task.py",
    "test.txt",
    "train.txt",
    "valid.txt",
    "vouch.py",
}


def prose(page: str) -> Iterator[tuple[int, str]]:
    """A page's lines outside blocks of code, with their numbers."""
    fenced = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield number, line


@pytest.mark.parametrize("page", [*TEXTS, "CHANGELOG.md"])
def test_lines_are_wrapped(page: str) -> None:
    """Except tables, and what cannot be broken: links and code."""
    for number, line in prose(page):
        rest = re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        longest = max((len(code) for code in _CODE.findall(line)), default=0)
        if not line.startswith("|") and longest < WIDTH - 30:
            assert len(rest) <= WIDTH, f"{page}:{number} has {len(rest)} characters"


@pytest.mark.parametrize("page", TEXTS)
def test_commands_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for command in re.findall(r"(?:^ {4}|`)fedstream ([a-z][\w-]*)", text, re.MULTILINE):
        assert f"`fedstream {command}" in _COMMANDS, f"{page}: fedstream {command}"
    for target in re.findall(r"`make ([\w./-]+)", text):
        assert f"\n{target}:" in _TARGETS, f"{page}: make {target}"


def test_modules_that_docstrings_name_exist() -> None:
    for program in PROGRAMS:
        for code in re.findall(r"`([^`\n]+)`", (ROOT / program).read_text()):
            for word in code.split():
                if _DOTTED.fullmatch(word) and not _FILE.fullmatch(word) and word not in MADE:
                    assert exists(word), f"{program}: {word}"


@pytest.mark.parametrize("page", TEXTS)
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
    """Whether there is a module, something in one, or a configuration key of this name."""
    for name in (dotted, f"fedstream.{dotted}"):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            continue
        return True
    return re.search(rf"`(?:\w+\.)*{dotted.rpartition('.')[2]}[`.]", _KEYS) is not None
