"""Adaptive steps (``strategy.adapt``): which scale of the rule's step held-out data prefer.

A simulation asks the :class:`Scorer` itself. In a live run the evaluator follows the journal, and
proposes the best scale to the updater by a control entry of its queue.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.core.errors import ConfigError
from fedstream.core.messages import StepProposed
from fedstream.journal.errors import JournalError
from fedstream.journal.follow import FollowedJournal
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import words
from fedstream.strategies.adapt import Windows, best_scale
from fedstream.trainer.data import placed, thinned
from fedstream.trainer.goals import required_goal
from fedstream.trainer.task import measured

if TYPE_CHECKING:
    from torch import nn

    from fedstream.broker.ledger.evaluator import EvaluatorLedger
    from fedstream.broker.streams import Reader
    from fedstream.core.layout import Model
    from fedstream.core.records import Run
    from fedstream.journal.progress import Progress
    from fedstream.runtime.service import Context
    from fedstream.strategies import Strategy
    from fedstream.strategies.adapt import Adapt
    from fedstream.trainer.data import Processor
    from fedstream.trainer.task import Task

_AGAIN_S = 2.0  # between two attempts to read a journal


class Scorer:
    """Scores models by a metric on the task's held-out data, or some rows of them."""

    def __init__(self, adapt: Adapt, task: Task, module: nn.Module, place: Processor) -> None:
        """``module``: takes the models, on ``place``. Raises ConfigError, DataError."""
        goal = required_goal("strategy.adapt.metric", adapt.metric, task.goal)
        if (data := task.validation_data()) is None:
            raise ConfigError(
                "strategy.adapt: the task has no held-out data to score models by: define "
                "validation_data(), or test_data()"
            )
        self._metric, self._goal = adapt.metric, goal
        self._task, self._module = task, module
        self._data = placed(thinned(data, adapt.rows), place)

    def proposal(self, rule: Strategy, run: Progress, windows: Windows) -> StepProposed | None:
        """The best scale at the end of a window; None if it is the run's present one.

        ``rule``: as configured. Raises ConfigError without the metric, and the errors of
        ``metrics()``.
        """
        if rule.adapt is None:
            return None
        now = rule.bounded(run.scale)
        scores = tuple(
            (scale, self._score(windows.at(scale / now)))
            for scale in rule.adapt.tried(rule.step_rate, now)
        )
        best = best_scale(scores, self._goal)
        if best is None or best == now:
            return None
        return StepProposed(at=run.state.version, scale=best, metric=self._metric, scores=scores)

    def _score(self, model: Model) -> float:
        from fedstream.trainer import vector

        vector.load(model, self._module)
        metrics = measured(self._task, self._module, self._data)
        if self._metric not in metrics:
            raise ConfigError(
                f"strategy.adapt.metric = {self._metric!r}: the task's metrics are "
                f"{', '.join(metrics)}"
            )
        return metrics[self._metric]


class StepProposals:
    """Follows a live run's journal, and proposes scales to its updater."""

    def __init__(
        self,
        journal: Path,
        every: int,
        scorer: Scorer,
        ledger: EvaluatorLedger,
        versions: Reader,
        context: Context,
        alone: asyncio.Lock,
    ) -> None:
        """``every``: W. ``versions``: reads new ones; nobody else uses it. ``alone``: held while
        the scorer's module is used.
        """
        self._folder = journal
        self._every = every
        self._scorer = scorer
        self._ledger = ledger
        self._versions = versions
        self._context = context
        self._alone = alone
        self._journal: FollowedJournal | None = None
        self._windows = Windows(every)
        self._unsent: StepProposed | None = None
        self._told = ""  # why the journal could not be read

    async def step(self, run: Run) -> None:
        """Follow the journal to the end of a window, or else wait for the next version."""
        await self._send()  # again, if Redis did not answer: the updater obeys it once
        if run.state == "finished":
            await pause(self._context.stop, 0.5)
            return
        try:
            is_due = await asyncio.to_thread(self._follow, run.lineage)
        except (JournalError, OSError) as error:
            self._begin_anew()
            if self._told != str(error):
                self._told = str(error)
                self._context.log.warning("steps do not adapt: no usable journal", why=str(error))
            await pause(self._context.stop, _AGAIN_S)
            return
        if is_due and self._journal is not None:
            await self._propose(self._journal)
        else:
            await self._versions.read(count=1000)

    def _follow(self, lineage: str) -> bool:
        """Read on until a decision is due; False if the journal's end comes first."""
        if self._journal is None:
            self._journal = FollowedJournal(self._folder)
        if self._journal.lineage != lineage:
            raise JournalError(f"{self._folder}: holds the journal of another run: set journal.dir")
        with closing(self._journal.made()) as versions:
            for run in versions:
                self._windows.add(run.state.version, run.state.model)
                if self._windows.is_due:
                    return True
        return False

    async def _propose(self, journal: FollowedJournal) -> None:
        """Score the models of the windows that have passed, and propose the best one's scale."""
        rule, run = journal.rebuild.strategy, journal.rebuild.progress
        try:
            async with self._alone:
                self._unsent = await asyncio.to_thread(
                    self._scorer.proposal, rule, run, self._windows
                )
        except ConfigError:
            raise
        except Exception as error:
            self._context.log.warning("scoring raised", why=words(error), exc_info=error)
        await self._send()

    async def _send(self) -> None:
        if self._unsent is not None:
            await self._ledger.propose(self._unsent)
            self._context.log.info(
                "step proposed", version=self._unsent.at, scale=self._unsent.scale
            )
            self._unsent = None

    def _begin_anew(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal, self._windows = None, Windows(self._every)
