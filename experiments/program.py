"""The version of the program that produced a result."""

from __future__ import annotations

import subprocess
from pathlib import Path

_CHECKOUT = Path(__file__).parents[1]
_CODE = ("*.py", "*.lua", "*.toml", "*.txt")  # files that affect results, not the results


def commit(checkout: Path = _CHECKOUT) -> str:
    """The checkout's commit, with ``+`` if its code has changes; empty if unknown."""
    try:
        head = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--", *_CODE)
    except (OSError, subprocess.CalledProcessError):  # no git, or no checkout
        return ""
    return f"{head}+" if changed else head


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(  # noqa: S603  (no words but ours)
        ["git", *arguments],  # noqa: S607  (the user's git, wherever that is)
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
