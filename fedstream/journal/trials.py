"""Trials: the newest updates of a run, mixed in again at other scales of the rule's step.

The live evaluator reads the updates from the journal, a simulation has them at hand. Only vector
arithmetic takes place here; whoever calls scores the models and proposes the best one's scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.core.messages import Upload
from fedstream.journal.progress import Progress, Step, close_round, take
from fedstream.strategies import Strategy


class StepTrials:
    """Runs beside the real one, each from the same version on and at a scale of its own.

    The windows end at the multiples of W = ``adapt.every``. If the run's own scale changes within a
    window, the others' change by the same factor. Holds two models and the strategy's memory for
    each scale.
    """

    def __init__(self, rule: Strategy, start: Progress) -> None:
        """``rule``: one that adapts, as configured. ``start``: the run at any version."""
        if rule.adapt is None:
            raise ValueError(f"{rule.name} does not adapt")
        self.rule, self._adapt = rule, rule.adapt
        self._runs: dict[float, Progress] = {}  # by their scale, in the run's own scales
        self._free: list[Model] = []
        if self.is_due(start):
            self.begin(start)

    def is_due(self, run: Progress) -> bool:
        """Whether a window ends with the run's newest version."""
        return run.state.version % self._adapt.every == 0

    def begin(self, start: Progress) -> None:
        """Begin the next window from ``start``, which is copied."""
        for run in self._runs.values():
            self._free += run.state.models()
        self._runs, state = {}, start.state
        for scale in self._adapt.tried(self.rule.step_rate, start.scale):
            model, total = self._spare(state.model), state.memory.model
            model.buffer[:] = state.model.buffer
            memory = state.memory.copy(None if total is None else self._spare(total))
            copied = replace(state, model=model, memory=memory)
            self._runs[scale / start.scale] = replace(start, state=copied, scale=scale)

    def take(self, upload: Upload, update: Model) -> None:
        """Mix in an update that the run has used."""
        for factor, run in tuple(self._runs.items()):
            spare = self._spare(update)
            self._advance(factor, partial(take, self.rule, run, upload, update, spare), spare)

    def close_round(self, version: int, *, drops: bool) -> None:
        """End the round that the run ended."""
        for factor, run in tuple(self._runs.items()):
            self._advance(factor, partial(close_round, self.rule, run, version, drops=drops))

    def rescale(self, scale: float) -> None:
        """Note that the run's own scale is ``scale`` from now on."""
        self._runs = {f: replace(run, scale=scale * f) for f, run in self._runs.items()}

    def models(self) -> Iterator[tuple[float, Model]]:
        """The scales and models at the end of a window, valid until :meth:`begin`."""
        for run in self._runs.values():
            yield run.scale, run.state.model

    def _advance(self, factor: float, step: Callable[[], Step], *spare: Model) -> None:
        """Take a run's step; end the run if it is a user's rule that refuses it."""
        run = self._runs.pop(factor)
        used, in_use = (*run.state.models(), *spare), set()
        try:
            self._runs[factor] = after = step().after
            in_use = {id(model) for model in after.state.models()}
        except ConfigError:  # such as values that are not finite
            pass
        self._free += [model for model in used if id(model) not in in_use]

    def _spare(self, like: Model) -> Model:
        return self._free.pop() if self._free else Model(like.layout)
