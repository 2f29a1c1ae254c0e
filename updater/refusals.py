"""Why an update is refused, by what it says of itself and by its size: pure decisions.

The updater and the simulation take them here and nowhere else. What else may be wrong with an
update (a run that is over, a blob that is gone) is about the pipeline, and the updater's own.
"""

from __future__ import annotations

import math

import numpy as np

from fedstream.broker.layout import Model
from fedstream.broker.messages import Upload
from fedstream.updater.journal.messages import Counted
from fedstream.updater.mixing import norm
from fedstream.updater.norms import sizes
from fedstream.updater.progress import Progress
from fedstream.updater.rebuild import unfit
from fedstream.updater.strategies import State, Strategy

MOST_COUNTED = 1_000_000  # minibatches that a batch norm's counter may be ahead of the model's
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


def by_content(
    upload: Upload,
    rule: Strategy,
    update: Model,
    before: Progress,
    *,
    max_norm: float | None,
    norm_factor: float,
) -> tuple[str, Counted]:
    """Why one that :func:`by_word` let pass is refused for what is in it; '' if it is not.

    Also its sizes, as they count for what is usual: () if they don't.
    """
    x = before.state.model
    refusal = by_norm(upload, rule, norm(update.floats), max_norm) or by_integers(update, x)
    if refusal or not norm_factor:
        return refusal, ()
    usual, counted = before.norms.judged(sizes(upload, rule, update, x), norm_factor, x)
    return "" if usual else "norm too large", counted


def by_integers(update: Model, x: Model) -> str:
    """Why it is refused for its integers, next to those of the model ``x``."""
    layout, new, old = x.layout, update.integers, x.integers
    stay, counters = slice(layout.counters.start), layout.counters
    allowed = not layout.integers or (
        np.array_equal(new[stay], old[stay])
        and np.all(new[counters] >= 0)
        and np.all(new[counters] - old[counters] <= MOST_COUNTED)
        and all(
            np.all((least <= new[at]) & (new[at] <= largest))
            for at, least, largest in layout.variables
        )
    )
    return "" if allowed else "integers"


def by_norm(upload: Upload, rule: Strategy, size: float, max_norm: float | None) -> str:
    """Why one that :func:`by_word` let pass is refused for its vector's norm; '' if it is not."""
    if not math.isfinite(size):
        return "not finite"
    largest = LARGEST if rule.sends == "model" else LARGEST_DELTA
    scaled = size / (upload.lr * upload.steps) if rule.per_step else size
    if size > (max_norm or largest) or max(size, scaled) > largest:
        return "norm too large"
    return ""
