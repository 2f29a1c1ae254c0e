"""What a setting says of a theorem, for the README."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Verdict = Literal["held", "did not hold", "not tested"]
Results = dict[str, Any]  # what a setting's JSON file holds


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim of a paper, what was measured (a sentence with its figures), and the verdict."""

    source: str
    claim: str
    measured: str
    verdict: Verdict


def held(condition: bool) -> Verdict:
    """Whether a claim that was tested held."""
    return "held" if condition else "did not hold"


def exponent(x: list[float], y: list[float]) -> float:
    """The slope of log y over log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def figure(value: float) -> str:
    """Three digits."""
    return f"{value:.3g}"
