"""The names of numbers that Flower's clients report. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from fedstream.core.errors import DataError

SAMPLES: Final = ("num-examples", "num_examples")
RATES: Final = ("lr", "learning-rate", "learning_rate")
_PREFIXES: Final = ("eval_", "eval-")
_SHORT: Final = {"acc": "accuracy"}
_LOSSES: Final = ("train_loss", "train-loss", "loss")


def samples_of(numbers: Mapping[str, float], who: str) -> int:
    """The number of examples. Raises DataError if it is missing or not a positive whole number."""
    count = next((numbers[key] for key in SAMPLES if key in numbers), None)
    if count is None:
        raise DataError(
            f"{who} did not say on how many examples: its reply needs the metric 'num-examples'"
        )
    if not math.isfinite(count) or count != int(count) or count < 1:
        raise DataError(f"{who} reported num-examples = {count}: expected a whole number above 0")
    return int(count)


def loss_of(numbers: Mapping[str, float]) -> float | None:
    """The training loss, if the client reports one under a usual name."""
    return next((float(numbers[key]) for key in _LOSSES if key in numbers), None)


def metrics_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """The metrics under our names: ``eval_acc`` is ``accuracy``, ``eval_loss`` is ``loss``."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if name in SAMPLES:
            continue
        plain = next((name[len(p) :] for p in _PREFIXES if name.startswith(p)), name)
        found[_SHORT.get(plain, plain)] = float(value)
    return found
