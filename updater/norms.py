"""How large an update is, and whether that is usual: against updates that would ruin a model.

The size of an update is how far it alone would move the model, part by part: parameters, buffers,
controls. A part may be ``factor`` times as large as the median of the newest updates; what was
refused counts there as the limit that it was over, so that a change which most devices share gets
through. In any case it may be a third of ``factor`` times as large as the model's own part: where
training has converged the median is next to nothing, and an honest device that was seldom heard, or
that takes larger steps than the others, moves the model by up to five times its own norm. Controls,
which are gradients, vanish then themselves, so that the parameters' norm counts for them as well.
The first updates have no median (nor those behind ones that moved nothing); they may be ``_FIRST``
times as large as the model's own part, or as one of ones.

Whoever sends half of the newest updates can move a median: few devices, if they answer fast and are
asked often. And nothing here keeps a patient few from steering the model by steps of usual size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from fedstream.broker.layout import Floats, Model
from fedstream.broker.messages import Upload
from fedstream.updater.journal.messages import Sizes
from fedstream.updater.mixing import distance, norm
from fedstream.updater.strategies import Strategy

_WINDOW = 101  # updates that the median is of
_FEWEST = 20  # of which there is a median
_OWN = 1 / 3  # of `factor`, over the model's own part
# Over the model's own part, or one of ones: statistics of inputs that nobody scaled grow large.
_FIRST = (1e3, 1e9, 1e3)


def sizes(upload: Upload, rule: Strategy, update: Model, x: Model) -> Sizes:
    """How far an update alone would move each part of the model ``x``, Euclidean.

    Of a device that sends its model, that is how far away it is from ``x``; of one that sends a
    delta, the delta at the rule's rate, over gamma H where the rule divides by it.
    """
    if rule.sends == "model":
        moved = distance(update.parameters, x.parameters)
    else:
        moved = rule.rate * norm(update.parameters)
        moved = moved / (upload.lr * upload.steps) if rule.per_step else moved
    return moved, distance(update.buffers, x.buffers), norm(update.controls)


@dataclass(frozen=True, slots=True)
class Norms:
    """The sizes of the newest updates, oldest first."""

    last: tuple[Sizes, ...] = ()

    def judged(self, found: Sizes, factor: float, x: Model) -> tuple[bool, Sizes]:
        """Whether an update of these sizes is usual on top of ``x``; its sizes as they count."""
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
        middle = median(row[n] for row in self.last) if len(self.last) >= _FEWEST else 0.0
        if not middle:
            return _FIRST[n] * max(*map(norm, own), math.sqrt(own[0].size))
        usual = factor * middle
        # The model's own norm takes a pass over it: only where it matters.
        return usual if size <= usual else max(usual, factor * _OWN * max(map(norm, own)))

    def grown(self, counted: Sizes) -> Norms:
        """With one update more."""
        return Norms((*self.last, counted)[-_WINDOW:])
