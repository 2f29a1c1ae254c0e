"""Adaptive steps (``strategy.adapt``): the newest updates are scored at other scales of the step.

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
from fedstream.journal.records import RoundClosed, StepScaled, is_used
from fedstream.journal.trials import StepTrials
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import words
from fedstream.strategies.adapt import best_scale
from fedstream.trainer.data import placed, thinned
from fedstream.trainer.goals import goal_of, unknown_goal
from fedstream.trainer.task import measured

if TYPE_CHECKING:
    from torch import nn

    from fedstream.broker.ledger.evaluator import EvaluatorLedger
    from fedstream.broker.streams import Reader
    from fedstream.core.layout import Model
    from fedstream.core.records import Run
    from fedstream.journal.progress import Progress
    from fedstream.runtime.service import Context
    from fedstream.strategies.adapt import Adapt
    from fedstream.trainer.data import Processor
    from fedstream.trainer.task import Task

_AGAIN_S = 2.0  # between two attempts to read a journal


class Scorer:
    """Scores models by a metric on the task's held-out data, or some rows of them."""

    def __init__(self, adapt: Adapt, task: Task, module: nn.Module, place: Processor) -> None:
        """``module``: takes the models, on ``place``. Raises ConfigError, DataError."""
        goal, data = goal_of(adapt.metric, task.goal), task.validation_data()
        if goal is None:
            raise ConfigError(f"strategy.adapt.metric: {unknown_goal(adapt.metric)}")
        if data is None:
            raise ConfigError(
                "strategy.adapt: the task has no held-out data to score models by: define "
                "validation_data(), or test_data()"
            )
        self._metric, self._goal = adapt.metric, goal
        self._task, self._module = task, module
        self._data = placed(thinned(data, adapt.rows), place)

    def proposal(self, run: Progress, trials: StepTrials) -> StepProposed | None:
        """The best scale at the end of a window; None if it is the run's present one.

        Raises ConfigError without the metric, and the errors of ``metrics()``.
        """
        models = (run.scale, run.state.model), *trials.models()
        scores = tuple((scale, self._score(model)) for scale, model in models)
        scale = best_scale(scores, run.scale, self._goal)
        if scale == run.scale:
            return None
        return StepProposed(at=run.state.version, scale=scale, metric=self._metric, scores=scores)

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
        scorer: Scorer,
        ledger: EvaluatorLedger,
        versions: Reader,
        context: Context,
        alone: asyncio.Lock,
    ) -> None:
        """``versions``: reads new ones; nobody else uses it. ``alone``: held to use the module."""
        self._folder = journal
        self._scorer = scorer
        self._ledger = ledger
        self._versions = versions
        self._context = context
        self._alone = alone
        self._journal: FollowedJournal | None = None
        self._trials: StepTrials | None = None
        self._unsent: StepProposed | None = None
        self._told = ""  # why the journal could not be read

    async def step(self, run: Run) -> None:
        """Follow the journal to the end of a window, or else wait for the next version."""
        if self._unsent is not None:  # Redis did not answer; the updater obeys it once
            await self._ledger.propose(self._unsent)
            self._unsent = None
        if run.state == "finished":
            await pause(self._context.stop, 0.5)
            return
        try:
            is_due = await asyncio.to_thread(self._follow, run.lineage)
        except (JournalError, OSError) as error:
            self._begin_anew()
            if self._told != str(error):
                self._told = str(error)
                self._context.log.warning("steps don't adapt: no journal", why=str(error))
            await pause(self._context.stop, _AGAIN_S)
            return
        if is_due:
            await self._propose()
        else:
            await self._versions.read(count=1000)

    def _follow(self, lineage: str) -> bool:
        """Read on until a window ends; False if the journal's end comes first."""
        if self._journal is None:
            self._journal = FollowedJournal(self._folder)
        journal = self._journal
        if journal.lineage != lineage:
            raise JournalError(f"{self._folder}: holds the journal of another run: set journal.dir")
        with closing(journal.appended()) as records:
            for message, update in records:
                run, rule = journal.rebuild.progress, journal.rebuild.strategy
                trials = self._trials
                if trials is None or trials.rule != rule:
                    trials = self._trials = StepTrials(rule, run) if rule.adapt else None
                elif isinstance(message, StepScaled):
                    trials.rescale(message.scale)
                elif is_used(message) and update is not None:
                    trials.take(message.upload, update)
                elif isinstance(message, RoundClosed) and not message.late:
                    trials.close_round(message.round, drops=message.dropped > 0)
                if trials is not None and message.digest is not None and trials.is_due(run):
                    return True
        return False

    async def _propose(self) -> None:
        """Score the models at the end of a window, propose the best one's scale, and go on."""
        journal, trials = self._journal, self._trials
        assert journal is not None  # noqa: S101  (a window of it has ended)
        assert trials is not None  # noqa: S101
        run = journal.rebuild.progress
        try:
            async with self._alone:
                self._unsent = await asyncio.to_thread(self._scorer.proposal, run, trials)
        except ConfigError:
            raise
        except Exception as error:
            self._context.log.warning("scoring raised", why=words(error), exc_info=error)
        trials.begin(run)
        if self._unsent is not None:
            await self._ledger.propose(self._unsent)
            self._context.log.info(
                "step proposed", version=run.state.version, scale=self._unsent.scale
            )
            self._unsent = None

    def _begin_anew(self) -> None:
        if self._journal is not None:
            self._journal.close()
        self._journal = self._trials = None
