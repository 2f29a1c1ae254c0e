"""Which files are mutated, and which tests have to notice."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.mutants.operators import Mutant, mutants

# What runs a package's code.
TESTS = {
    "broker": (
        "tests/broker",
        "tests/coordinator",
        "tests/updater",
        "tests/fedstream/operate/test_dead.py",
    ),
    "coordinator": (
        "tests/coordinator",
        "tests/broker/test_invariant.py",
        "tests/integration/test_run.py",
    ),
    "runtime": ("tests/runtime", "tests/coordinator"),
    "journal": (
        "tests/journal",
        "tests/updater",
        "tests/fedstream/history/test_journal.py",
        "tests/fedstream/history/test_replay.py",
    ),
    "strategies": ("tests/strategies", "tests/updater"),
    "trainer": ("tests/trainer", "tests/strategies/test_scaffold.py"),
    "updater": ("tests/updater", "tests/journal", "tests/fedstream/history/test_journal.py"),
}
_SKIPPED = {"__init__.py", "metrics.py", "settings.py"}


def folder(root: Path, package: str) -> Path:
    """Where a package is: at the top of the repository, or in ``fedstream``."""
    return next(path for path in (root / package, root / "fedstream" / package) if path.exists())


def package_of(mutant: Mutant) -> str:
    """The package, a key of :data:`TESTS`, that a mutant is in."""
    return next(part for part in mutant.path.parts if part in TESTS)


def sample(root: Path, package: str, n: int, seed: int) -> list[Mutant]:
    """``n`` mutants of a package, each equally likely, the same for the same seed and code."""
    files = sorted(
        path
        for path in folder(root, package).rglob("*")
        if path.suffix in (".py", ".lua") and path.name not in _SKIPPED
    )
    every = [m for path in files for m in mutants(path.relative_to(root), path.read_text())]
    return Random(f"{package} {seed}").sample(every, min(n, len(every)))
