"""Refusing updates by their metadata and by their content. Pure.

The updater and the simulation share these decisions. The updater alone decides on reasons that
concern the pipeline (the run is over, a blob is gone).
"""

from __future__ import annotations

import math

import numpy as np

from fedstream.core import reasons
from fedstream.core.errors import Undecodable
from fedstream.core.formats import format_of
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Upload
from fedstream.journal.norms import sizes
from fedstream.journal.progress import Progress, weight_of
from fedstream.journal.rebuild import unfit
from fedstream.journal.records import Counted
from fedstream.strategies import State, Strategy
from fedstream.strategies.mixing import norm

MOST_COUNTED = 1_000_000  # most minibatches that one update may add to a batch norm's counter
LARGEST = 1e37  # norm; the difference of two models within it cannot overflow float32,
LARGEST_DELTA = 1e30  # nor can a batch's sum of deltas within this, times its rate


def by_word(upload: Upload, rule: Strategy, state: State) -> str:
    """The reason to refuse an update by its metadata, before it is read; '' for none."""
    limit = rule.max_staleness
    if upload.tau > state.version:
        return reasons.UNKNOWN_BASE
    if limit is not None and state.version - upload.since > limit:
        return reasons.TOO_STALE
    if (why := unfit(rule, upload)) != "":
        return why
    if upload.sends != rule.sends:
        return reasons.sends(upload.sends)
    layout = state.model.layout
    return by_format(upload, layout) if upload.layout == layout.signature else reasons.LAYOUT


def by_format(upload: Upload, layout: Layout) -> str:
    """The reason to refuse an update by its format and encoded size; '' for none."""
    try:
        how = format_of(upload.format)
    except Undecodable as error:
        return error.reason
    if how.of_changes and upload.sends == "model":
        return reasons.WIRE_FORMAT
    least, most = how.sizes(layout)
    return "" if least <= upload.size <= most else reasons.SIZE


def by_content(
    upload: Upload,
    rule: Strategy,
    update: Model,
    before: Progress,
    *,
    max_norm: float | None,
    norm_factor: float,
) -> tuple[str, Counted]:
    """The reason to refuse an update by its content, after :func:`by_word`; '' for none.

    Also returns the sizes by which later updates are judged; () if this update's don't count.
    Raises ConfigError if the rule can't weigh the update.
    """
    x = before.state.model
    size = norm(update.floats)
    refusal = by_norm(upload, rule, size, max_norm) or by_integers(update, x)
    if not refusal and rule.sends == "delta":  # whose weighted sum could overflow float32
        weight = weight_of(rule, before.state.version, upload)
        refusal = reasons.NORM_TOO_LARGE if weight * size > LARGEST_DELTA else ""
    if refusal or not norm_factor:
        return refusal, ()
    usual, counted = before.norms.judged(sizes(upload, rule, update, x), norm_factor, x)
    return "" if usual else reasons.NORM_TOO_LARGE, counted


def by_integers(update: Model, x: Model) -> str:
    """The reason to refuse an update by its integers, compared with model ``x``; '' for none."""
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
    return "" if allowed else reasons.INTEGERS


def by_norm(upload: Upload, rule: Strategy, size: float, max_norm: float | None) -> str:
    """The reason to refuse an update by its norm, after :func:`by_word`; '' for none."""
    if not math.isfinite(size):
        return reasons.NOT_FINITE
    largest = LARGEST if rule.sends == "model" else LARGEST_DELTA
    scaled = size / (upload.lr * upload.steps) if rule.by_steps else size
    if size > (max_norm or largest) or max(size, scaled) > largest:
        return reasons.NORM_TOO_LARGE
    return ""
