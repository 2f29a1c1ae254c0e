"""What a look at a deployment found: the lines of `fedstream doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem", "not checked"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: how it is, and what to change."""

    level: Level
    about: str
    text: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.text} -> {self.change}" if self.change else self.text


def ok(about: str, text: str) -> Finding:
    """It is as it has to be."""
    return Finding("ok", about, text)


def warning(about: str, text: str, change: str) -> Finding:
    """It works, and costs something or may end badly."""
    return Finding("warning", about, text, change)


def problem(about: str, text: str, change: str = "") -> Finding:
    """It does not work. Without ``change`` the text says what to do."""
    return Finding("problem", about, text, change)


def not_checked(about: str, why: str) -> Finding:
    """It could not be looked at from here."""
    return Finding("not checked", about, why)


def size(count: float) -> str:
    """Bytes in words."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f} bytes"


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"
