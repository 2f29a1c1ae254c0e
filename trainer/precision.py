"""The precision of local training: bfloat16 only where it is faster than float32.

Without the processor's own instructions, a step in bfloat16 was seen to take 12 times as long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from fedstream.trainer.data import seeded

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.trainer.solvers import Work
    from fedstream.trainer.task import Task

_PAIRS = 5  # steps in each precision; the first one also prepares torch's kernels
_TRY_S = 2.0  # no further pairs after this time


class Precision:
    """Replaces ``solver.precision = "bf16"`` by float32 if that is faster: measured once.

    The result depends on model, batch size and machine, so two trainers of a run may train in
    different precisions. Journals hold what was trained, and replay identically.
    """

    def __init__(self, task: Task, say: Callable[[str], object]) -> None:
        """``say``: called with a line if float32 is faster."""
        self._task = task
        self._say = say
        self.chosen: Literal["", "bf16", "float32"] = ""
        """the faster one; empty: not measured yet"""

    def settled(self, work: Work, model: nn.Module, data: Dataset[Any]) -> Work:
        """The work in the faster precision.

        The first work in bfloat16 is measured; ``model`` keeps its values. A task without
        ``exact_steps`` trains for any length: its precision stays as configured. Raises the errors
        of training.
        """
        if work.solver.precision == "float32" or not self._task.exact_steps:
            return work
        if not self.chosen:
            float32, bf16 = (1e3 * seconds for seconds in self._measured(work, model, data))
            if work.cancelled():
                return work
            self.chosen = "bf16" if bf16 < float32 else "float32"
            if self.chosen == "float32":
                self._say(
                    f"solver.precision = bf16 is slower here: a step takes {bf16:.3g} ms, in "
                    f"float32 {float32:.3g} ms; training in float32"
                )
        return _in_precision(work, self.chosen)

    def _measured(self, work: Work, model: nn.Module, data: Dataset[Any]) -> list[float]:
        """The least seconds of a step in float32 and in bfloat16."""
        step = replace(work, steps=1, epochs=None, seconds=None, resume=None, descents=count(1))
        steps = [_in_precision(step, "float32"), step]
        least, until = [math.inf, math.inf], time.perf_counter() + _TRY_S
        changing = [*model.parameters(), *model.buffers()]
        values = [x.detach().clone() for x in changing]
        try:
            for _ in range(_PAIRS):
                for n, one in enumerate(steps):
                    if work.cancelled():
                        return least
                    began = time.perf_counter()
                    with seeded(work.seed):
                        self._task.train(model, data, one)
                    least[n] = min(least[n], time.perf_counter() - began)
                if time.perf_counter() > until:
                    break
        finally:
            for x, value in zip(changing, values, strict=True):
                x.detach().copy_(value)
        return least


def _in_precision(work: Work, precision: str) -> Work:
    return replace(work, solver=work.solver.model_copy(update={"precision": precision}))
