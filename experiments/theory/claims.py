"""Claims: what a setting's results say about a theorem, for the README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.reproduction import Margin, Series, margin, verdict

Measured = dict[str, Any]  # the contents of a setting's JSON file


@dataclass(frozen=True, slots=True)
class TheoremClaim:
    """A paper's claim, what was measured (a sentence with its figures), and the verdict."""

    source: str
    claim: str
    measured: str
    verdict: str


def judged(comparisons: Iterable[Series | Margin]) -> str:
    """The verdict on a claim that makes these comparisons, and what it rests on."""
    said, rests = verdict([one if isinstance(one, Margin) else margin(one) for one in comparisons])
    return f"{said} ({rests})"


def near(values: Series, to: float, by: float) -> list[Series]:
    """Margins of the claim that the values are within ``by`` of ``to``, in every repeat."""
    return [by - (values - to), by + (values - to)]


def exponent(x: Sequence[float], y: Sequence[float] | Series) -> float:
    """The slope of log y over log x, by least squares."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def figure(value: float) -> str:
    """A number to three digits."""
    return f"{value:.3g}"
