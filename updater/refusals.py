"""Why an update is refused, by what it says of itself and by its size: pure decisions.

The updater and the simulation take them here and nowhere else. What else may be wrong with an
update (a run that is over, a blob that is gone) is about the pipeline, and the updater's own.
"""

from __future__ import annotations

import math

from broker.messages import Upload
from updater.rebuild import unfit
from updater.strategies import State, Strategy

LARGEST = 1e37  # norm; between models of at most this, no difference overflows float32,
LARGEST_DELTA = 1e30  # and of deltas of at most this, no batch's sum times its rate


def by_word(upload: Upload, rule: Strategy, state: State) -> str:
    """Why it is refused before it is read; '' if it is not."""
    limit = rule.max_staleness
    if upload.tau > state.version:
        return "unknown base"
    if limit is not None and state.version - upload.since > limit:
        return "too stale"
    if (why := unfit(rule, upload)) != "":
        return why
    if upload.sends != rule.sends:
        return f"sends a {upload.sends}"
    return "" if upload.layout == state.model.layout.signature else "layout"


def by_norm(upload: Upload, rule: Strategy, norm: float, max_norm: float | None) -> str:
    """Why one that :func:`by_word` let pass is refused for its vector's norm; '' if it is not."""
    if not math.isfinite(norm):
        return "not finite"
    largest = LARGEST if rule.sends == "model" else LARGEST_DELTA
    scaled = norm / (upload.lr * upload.steps) if rule.per_step else norm
    if norm > (max_norm or largest) or max(norm, scaled) > largest:
        return "norm too large"
    return ""
