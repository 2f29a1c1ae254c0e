"""Findings about a deployment: the lines of `fedstream doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem", "not checked"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: its level, and the change to make."""

    level: Level
    about: str
    text: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.text} -> {self.change}" if self.change else self.text


def ok(about: str, text: str) -> Finding:
    """A finding that all is well."""
    return Finding("ok", about, text)


def warning(about: str, text: str, change: str) -> Finding:
    """A finding of a costly or risky condition."""
    return Finding("warning", about, text, change)


def problem(about: str, text: str, change: str = "") -> Finding:
    """A finding of an error. Without ``change``, the text has the remedy."""
    return Finding("problem", about, text, change)


def not_checked(about: str, why: str) -> Finding:
    """A finding that a check is impossible from here."""
    return Finding("not checked", about, why)


def size(count: float) -> str:
    """Number of bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"
