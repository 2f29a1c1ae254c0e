"""Limits on the size of updates, against updates that ruin a model.

An update's size is how far it alone would move the model, for each part: parameters, buffers and
controls. With ``x`` for the model's own part, the limit of a part is

    max(factor * median, factor / 3 * norm(x))

The median is of the newest updates, of five at least, and zero before. A refused update counts
there as the limit that it exceeded, so that a change which most devices share gets through. The
second term is for the time when training has converged: then the median is close to zero, and an
honest device that was seldom heard or takes larger steps than the others moves the model by up to
five times the model's norm. Controls are gradients and vanish then as well, so the parameters' norm
counts for them too, if it is larger.

For the first 20 updates, and while the median is zero, the limit is at least sqrt(1000), for small
models. Let ones be the norm of a vector of max(n, 1000) ones, for a part of n values. If norm(x) is
below 1% of ones then, the model has no scale yet, and ones counts in place of norm(x). Unscaled
inputs have large statistics, so without a median, buffers may be 1e9 times as large as ones or
their own norm.

Senders of half of the newest updates can move the median: a few devices are enough, if they answer
fast and are asked often. And nothing here keeps a patient few from steering the model in steps of
usual size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from fedstream.core.layout import Floats, Model
from fedstream.core.messages import Upload
from fedstream.journal.records import Sizes
from fedstream.strategies import Strategy
from fedstream.strategies.mixing import distance, norm

WINDOW = 101  # newest updates that the median is taken over
_FEWEST = 5  # updates that a median needs
_FIRST = 20  # updates that may be as large as a vector of `_ONES` ones
_ONES = 1000
_SCALE = 0.01  # of a vector of ones: a model with a smaller norm has no scale yet
_OWN = 1 / 3  # of `factor`, relative to the model's own part
_BUFFERS, _UNSCALED = 1, 1e9


def sizes(upload: Upload, rule: Strategy, update: Model, x: Model) -> Sizes:
    """The distance that an update alone would move each part of ``x``, as Euclidean norms.

    For parameters sent as a model, that is their distance from ``x``; for a delta, its norm times
    the rule's rate, divided by gamma H if the rule does so. For buffers it is their distance from
    ``x``, and for controls their norm.
    """
    if rule.sends == "model":
        moved = distance(update.parameters, x.parameters)
    else:
        moved = rule.rate * norm(update.parameters)
        moved = moved / (upload.lr * upload.steps) if rule.by_steps else moved
    return moved, distance(update.buffers, x.buffers), norm(update.controls)


@dataclass(frozen=True, slots=True)
class Norms:
    """The sizes and counted samples of the newest updates, oldest first."""

    last: tuple[Sizes, ...] = ()
    samples: tuple[int, ...] = ()

    def judged(self, found: Sizes, factor: float, x: Model) -> tuple[bool, Sizes]:
        """Whether these sizes are usual for ``x``; also returns the sizes, capped at the limits."""
        own = ((x.parameters,), (x.buffers,), (x.controls, x.parameters))
        limits = [
            self._limit(n, size, factor, vectors)
            for n, (size, vectors) in enumerate(zip(found, own, strict=True))
        ]
        usual = all(size <= limit for size, limit in zip(found, limits, strict=True))
        parameters, buffers, controls = map(min, found, limits)
        return usual, (parameters, buffers, controls)

    def _limit(self, n: int, size: float, factor: float, own: tuple[Floats, ...]) -> float:
        if not size:
            return 0.0
        middle = median([row[n] for row in self.last]) if len(self.last) >= _FEWEST else 0.0
        usual = factor * middle
        if size <= usual:
            return usual  # the model's own norm, which takes a pass over the model, isn't needed
        largest = max(map(norm, own))
        limit = max(usual, factor * _OWN * largest)
        ones = math.sqrt(max(own[0].size, _ONES))
        if n == _BUFFERS:
            return limit if middle else max(limit, _UNSCALED * max(largest, ones))
        if middle and len(self.last) >= _FIRST:
            return limit
        has_scale = largest >= _SCALE * ones
        return max(limit, math.sqrt(_ONES) if has_scale else factor * _OWN * ones)

    def grown(self, counted: Sizes) -> Norms:
        """Add one more update's sizes."""
        return replace(self, last=(*self.last, counted)[-WINDOW:])

    def with_samples(self, samples: int) -> Norms:
        """Add one more update's counted samples."""
        return replace(self, samples=(*self.samples, samples)[-WINDOW:])
