"""Evaluating versions on the devices: opening evaluations, sending their tasks, ending them.

All state is in Redis (docs/architecture.md#evaluation-on-the-devices), so an evaluator that died
left nothing behind that its successor does not find.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from fedstream.core.messages import task_id
from fedstream.core.reasons import DOES_NOT_EVALUATE, NO_ANSWER, NO_TEST_DATA
from fedstream.runtime.backoff import pause
from fedstream.trainer.on_devices import Choice, Names, result

if TYPE_CHECKING:
    from fedstream.broker.ledger.evaluator import EvaluatorLedger, OpenEvaluation
    from fedstream.broker.streams import Reader
    from fedstream.core.messages import DevicesEvaluated, Goal
    from fedstream.core.records import Best, Head, Run
    from fedstream.runtime.service import Context
    from fedstream.trainer.goals import Goals
    from fedstream.trainer.on_devices import OnDevicesSettings

Candidate: TypeAlias = Callable[
    [Mapping[str, float], int, str, str], "tuple[()] | tuple[Best, Goal]"
]

_LOOK_S = 0.02  # between two looks at an evaluation,
_LOOK_DEVICE_S = 5e-5  # in addition for each of its devices,
_LOOK_SHARE = 0.05  # of the time since it began,
_LONGEST_LOOK_S = 1.0  # and at most
_ABSENT_S = 0.2  # between two looks for devices while none is there
_ASKING_S = 1.0  # for which tasks are sent before the next look
_AT_ONCE = 500  # tasks in a request


def is_due(version: int, last: int | None, every: int, *, is_over: bool) -> bool:
    """Whether to measure the newest version: every ``every`` versions, and a run's last one.

    ``last``: the version measured last; None: none was. ``is_over``: whether the run has finished.
    """
    if last is None:
        return True
    behind = version - last  # negative after a restart of the run
    return behind < 0 or behind >= every or (is_over and behind > 0)


class DeviceEvaluations:
    """Evaluates a run's versions on the devices, one after the other."""

    def __init__(
        self,
        settings: OnDevicesSettings,
        every: int,
        ledger: EvaluatorLedger,
        versions: Reader,
        context: Context,
        goals: Goals,
        candidate: Candidate,
        found: Callable[[dict[str, float], int], str],
    ) -> None:
        """``every``: versions between two evaluations. ``versions``: reads new ones; nobody else
        uses it. ``goals``: the task's.

        ``candidate``: takes a version's metrics, number, given digest and blob; returns it as the
        one that may be the best, with the goal of its metric; () if it can't be.
        ``found``: takes a version's metrics and its number; returns why the run ends, '' if not.
        """
        self._candidate = candidate
        self._settings = settings
        self._every = every
        self._ledger = ledger
        self._versions = versions
        self._context = context
        self._goals = goals
        self._found = found
        self._last: int | None = None  # the version evaluated last
        self._choice = Choice(settings, 0)
        self._names = Names()
        self._is_alone = False  # no device was present at the last look, and that was logged
        self._most = _AT_ONCE  # tasks that may be open, by the last request
        # The result that was sent to the queue: whether it arrived, or was dealt with, is unsure.
        self._unsure: DevicesEvaluated | None = None

    def begin(self, run: Run, last: int | None) -> None:
        """Begin with a run. ``last``: the version evaluated last; None: none was."""
        self._last, self._unsure = last, None
        self._choice, self._names = Choice(self._settings, run.seed), Names()

    async def step(self, run: Run) -> None:
        """Take the evaluation under way further, or open one if it is due."""
        evaluation = await self._ledger.evaluation()
        unsure = self._unsure
        if unsure is not None and (evaluation is None or evaluation.id != unsure.evaluation):
            await self._ended(unsure)
        elif evaluation is not None:
            await self._go_on(evaluation)
        else:
            await self._open_if_due(run)

    async def _open_if_due(self, run: Run) -> None:
        """Open an evaluation of the newest version, or wait for a newer one or for devices."""
        head, is_over = await self._ledger.head(), run.state == "finished"
        if head is None or not is_due(head.version, self._last, self._every, is_over=is_over):
            if is_over:
                await pause(self._context.stop, 0.5)
            else:
                await self._versions.read(count=1000)
        elif not await self._open(run, head):
            await pause(self._context.stop, _ABSENT_S)

    async def _open(self, run: Run, head: Head) -> bool:
        """Open an evaluation of the newest version; False if no device is present."""
        barred = head.quarantines.by_device
        present = await self._ledger.present(run.devices)
        if barred:
            present = [device for device in present if device not in barred]
        if not present:
            if not self._is_alone:
                self._context.log.warning("no device is there to evaluate", version=head.version)
            self._is_alone = True
            return False
        self._is_alone = False
        devices = self._choice.of(present, head.version)
        now = self._ledger.now()
        id_, deadline = task_id(round(now * 1000)), now + self._settings.timeout_s
        nbytes = run.layout.nbytes
        how = await self._ledger.open_evaluation(id_, head, devices, deadline, nbytes=nbytes)
        if how == "begun":
            self._context.log.debug("evaluation begun", version=head.version, devices=len(devices))
        return how != "moved"

    async def _go_on(self, evaluation: OpenEvaluation) -> None:
        """Send tasks as others are answered; end the evaluation when it is over."""
        await self._ask(evaluation)
        left = evaluation.deadline - self._ledger.now()
        if left <= 0 or len(evaluation.answered) >= len(evaluation.devices):
            await self._end(evaluation)
            return
        rest = _LOOK_S + _LOOK_DEVICE_S * len(evaluation.devices)
        rest = max(rest, _LOOK_SHARE * (self._settings.timeout_s - left))
        await pause(self._context.stop, min(rest, _LONGEST_LOOK_S, left))

    async def _ask(self, evaluation: OpenEvaluation) -> None:
        """Send tasks for a while, or until every device has or had one."""
        waiting, now = evaluation.waiting, self._ledger.now()
        until = min(now + _ASKING_S, evaluation.deadline)
        while waiting and now < until and not self._context.stop.is_set():
            ms = round(now * 1000)
            some = waiting[: min(_AT_ONCE, self._most)]
            tasks = [evaluation.task(task_id(ms), device) for device in some]
            passed, most = await self._ledger.ask_devices(evaluation, self._settings.share, tasks)
            if not most:  # it is over
                return
            waiting, self._most = waiting[passed:], most
            if waiting:
                await pause(self._context.stop, _LOOK_S)
            now = self._ledger.now()

    async def _end(self, evaluation: OpenEvaluation) -> None:
        answers = await self._ledger.answers()
        measured = {
            device: answer.measured for device, answer in answers.items() if answer.measured
        }
        outcomes = Counter(answer.outcome for answer in answers.values())
        outcomes[NO_ANSWER] = len(evaluation.devices) - len(answers)
        ended = result(
            measured,
            outcomes,
            self._settings,
            self._goals,
            self._names,
            evaluation=evaluation.id,
            version=evaluation.version,
            base=evaluation.base,
        )
        best = self._candidate(
            ended.metrics, evaluation.version, evaluation.base, evaluation.model["blob"]
        )
        self._choice.without_data(
            device
            for device, answer in answers.items()
            if answer.outcome in (NO_TEST_DATA, DOES_NOT_EVALUATE)
        )
        self._unsure = ended
        if await self._ledger.end_evaluation(len(answers), ended, *best) == "more":
            self._unsure = None
        else:
            await self._ended(ended)

    async def _ended(self, ended: DevicesEvaluated) -> None:
        """Go on after an evaluation; called again if Redis fails meanwhile."""
        metrics = ended.metrics
        if self._last != ended.version:
            log = self._context.log
            (log.info if metrics else log.warning)(
                "devices evaluated", version=ended.version, found=ended.summary, metrics=metrics
            )
        self._last = ended.version
        if metrics and (why := self._found(metrics, ended.version)):
            await self._ledger.finish(why)
        self._unsure = None
