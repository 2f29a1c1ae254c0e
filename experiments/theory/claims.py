"""Claims: what a setting's results say about a theorem, for the README."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Judgement = Literal["held", "did not hold", "not tested"]
Measured = dict[str, Any]  # the contents of a setting's JSON file


@dataclass(frozen=True, slots=True)
class TheoremClaim:
    """A paper's claim, what was measured (a sentence with its figures), and the verdict."""

    source: str
    claim: str
    measured: str
    verdict: Judgement


def held(condition: bool) -> Judgement:
    """The verdict on a claim that was tested."""
    return "held" if condition else "did not hold"


def exponent(x: list[float], y: list[float]) -> float:
    """The slope of log y over log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def figure(value: float) -> str:
    """A number to three digits."""
    return f"{value:.3g}"
