"""Training and evaluating in a thread, with training's state saved to disk periodically.

Uses the trainers' learner in the same way, so a device and a trainer with the same task, seed and
model send the same bits. Saving interrupts training between two steps, and a killed process loses
at most the steps since the last save.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fedstream.broker.clock import uptime
from fedstream.core.errors import BadMessage, ConfigError, LayoutMismatch
from fedstream.core.formats import format_of
from fedstream.core.layout import Model
from fedstream.trainer.solvers import Cancelled, Work
from fedstream.trainer.task import solver_for_device
from fedstream.trainer.workspace import Start

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from fedstream.core.layout import Floats, Layout
    from fedstream.core.messages import Sum
    from fedstream.device.folder import DeviceFolder
    from fedstream.device.privacy import PrivateTasks
    from fedstream.protocol.messages import Offer
    from fedstream.trainer.learner import Learned, Learner
    from fedstream.trainer.solvers import Solvers
    from fedstream.trainer.workspace import Workspace

_OF_NO_USE = (BadMessage, ConfigError, LayoutMismatch)  # a workspace of other work


class Halt:
    """A request to end training, from any thread; the first reason counts."""

    def __init__(self, left_s: float | None) -> None:
        """``left_s``: seconds until the task's deadline; None: no deadline."""
        self._deadline = None if left_s is None else uptime() + left_s
        self._called = threading.Event()
        self.why = ""

    def call(self, why: str) -> None:
        """End training at its next step."""
        if not self._called.is_set():
            self.why = why
            self._called.set()

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and uptime() > self._deadline

    def __bool__(self) -> bool:
        return self._called.is_set() or self.is_late


class LocalTraining:
    """Performs a device's tasks, one at a time."""

    def __init__(
        self,
        learner: Learner,
        solvers: Solvers,
        thread: Executor,
        folder: DeviceFolder,
        private: PrivateTasks | None = None,
        *,
        save_s: float,
    ) -> None:
        """``thread``: only this thread may use the learner. ``save_s``: time between two saves."""
        self._learner = learner
        self._solvers = solvers
        self._thread = thread
        self._folder = folder
        self._private = private
        self._save_s = save_s
        self._saves = True  # the task's training can be interrupted and resumed
        self._into = Model(learner.layout)

    async def measured(
        self, model: Model, local: Model | None, device: int
    ) -> tuple[int, dict[str, Sum]] | None:
        """A model's metrics on the device's test data, as :meth:`Learner.measure` returns them.

        Measuring can't be interrupted.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._learner.measure, model, local, device
        )

    def interrupted(self, task: str, layout: Layout) -> Start | None:
        """Where training of this task was interrupted in an earlier process; None if it was not.

        ``layout``: the run's.
        """
        saved = self._folder.work()
        if saved is None:
            return None
        try:
            if saved.task == task:
                return Start.resumed(saved, layout)
        except LayoutMismatch:
            pass
        self._folder.drop_work()
        return None

    def again(self) -> None:
        """Delete the earlier process's workspace."""
        self._folder.drop_work()

    async def learned(
        self, offer: Offer, start: Start, memory: Floats | None, halt: Halt
    ) -> tuple[Learned | None, float]:
        """Train; return the result and its learning rate.

        The result is None if the earlier process's workspace is unusable: start anew. ``memory``:
        error feedback of the last update. Raises Cancelled on ``halt``, and the task's errors.
        """
        work = self._work(offer, start, halt)
        while True:
            saves_at = time.monotonic() + self._save_s if self._saves else None
            work = replace(work, cancelled=partial(_is_to_stop, halt, saves_at))
            try:
                learned = await asyncio.get_running_loop().run_in_executor(
                    self._thread,
                    self._learner.train,
                    start,
                    work,
                    self._into,
                    offer.update.sends,
                    format_of(offer.update.format),
                    memory,
                )
            except Cancelled as stopped:
                if halt:
                    raise
                await self._saved(stopped.workspace)
                work = replace(work, resume=stopped.workspace)
            except _OF_NO_USE:
                if start.saved is None or work.resume is not start.saved:
                    raise
                self._folder.drop_work()
                return None, 0.0
            else:
                if self._private is not None:
                    learned = self._private.sealed(offer, learned, self._into, start)
                return learned, learned.trained.lr or work.solver.lr

    async def _saved(self, workspace: Workspace | None) -> None:
        if workspace is None:  # a task with its own training, which restarts from the beginning
            self._saves = False
            return
        began = time.monotonic()
        await asyncio.to_thread(self._folder.keep_work, workspace)
        # Saving takes at most a hundredth of the time.
        self._save_s = max(self._save_s, 100 * (time.monotonic() - began))

    def _work(self, offer: Offer, start: Start, halt: Halt) -> Work:
        task = offer.task
        return Work(
            device=task.device,
            task=task.id,
            version=start.version,
            seed=task.seed,
            steps=task.steps,
            epochs=task.epochs,
            seconds=task.seconds,
            solver=solver_for_device(self._learner.task, task.device, self._solvers, start.version),
            cancelled=lambda: bool(halt),
            base=start.digest,
            resume=start.saved,
        )


def _is_to_stop(halt: Halt, saves_at: float | None) -> bool:
    """Whether to end training, or to interrupt it for a save."""
    return bool(halt) or (saves_at is not None and time.monotonic() > saves_at)
