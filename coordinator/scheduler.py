"""The scheduler: triggers training tasks, which controls staleness and the updater's load.

The scheduler holds no essential state: on each event it reads the changes, `plan` decides, and one
script opens the tasks and hands them to their trainers. Opening, waiting and reading changes take a
single round trip, since with small updates round trips are the main cost of a task. One scheduler
leads, by lease.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from aiohttp import web
from pydantic import Field

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.base import Pending
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.broker.streams import BLOCK_MS, Reader
from fedstream.coordinator.cooldowns import Cooldowns
from fedstream.coordinator.intake import Gathering
from fedstream.coordinator.metrics import SchedulerMetrics
from fedstream.coordinator.mirror import Mirror
from fedstream.coordinator.policies import Policy, PolicySettings
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduling import HoldBack, Plan, Situation, Steering, plan
from fedstream.core import reasons
from fedstream.core.errors import NoRun
from fedstream.core.layout import Layout
from fedstream.core.messages import CloseRound, Trigger, Withdraw
from fedstream.core.reasons import Overdue
from fedstream.core.records import Run, Tally
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.runtime.service import Context, lead, repeat
from fedstream.runtime.task_settings import FixedSteps, Participation, ParticipationGroup, Steps

BUDGET_SHARE = 0.8  # of Redis's own limit, if no budget is given
_ASK_AGAIN_S = 10.0  # until a seemingly lost request to coordinators is repeated
# Between two looks at all open tasks and owned devices, in case a change is missing in the log and
# leaves their numbers equal: an earlier release, without the log, may replace one task by another.
_WHOLE_S = 60.0
_NAMED = 20  # devices named in a log line
_NOTHING_ASKED: tuple[int, tuple[str, ...], float] = (-1, (), 0.0)  # see `_asked`
_BUDGET_HOLDS_S = 10.0  # until Redis's limit, which an operator may raise, is read again


class SchedulerSettings(Section):
    """The table ``[scheduler]``: the policy, the length of tasks, and limits."""

    policy: PolicySettings | None = None  # None: the strategy's default
    steps: Steps = FixedSteps()
    task_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # of a task outside rounds
    # From the beginning of a device's task to the beginning of its next.
    rest_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    max_queue: Annotated[int, Field(ge=1)] = 64  # entries
    target_staleness: Annotated[float, Field(gt=0)] | None = None  # mean, in versions
    memory_budget: Annotated[int, Field(gt=0)] | None = None  # bytes; None: 0.8 of maxmemory
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 15.0  # beyond redis.timeout_s


class Scheduler:
    """The scheduler service.

    ``is_eligible``: whether a device may begin a task at a time (seconds since 1970), for simulated
    availability; None: always.
    """

    role = "scheduler"

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: Policy | Rounds,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        seed: int,
        is_eligible: Callable[[Run, int, float], bool] | None = None,
        participation: Sequence[ParticipationGroup] = (),
    ) -> None:
        self._settings = settings
        self._participation = Participation(settings.steps, participation)
        self._policy = policy
        self._seed = seed
        self._is_eligible = is_eligible
        self._rests = Cooldowns(settings.rest_s)
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = SchedulerLedger(self._client, keys, name)
        self._models = Reader(self._client, {keys.models: "0"})
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        self._budget = settings.memory_budget
        self._budget_until = 0.0
        self._seen: Tally | None = None  # None: at the start, and after an error
        self._mirror = Mirror(self._participation)
        self._whole_at = 0.0  # time of the last look at all tasks and devices
        self._last = 0.0
        self._round = (-1, 0.0)  # version of the round, beginning
        # The last request to close a round: version, tasks, and time of the request.
        self._asked = _NOTHING_ASKED
        self._given_up: dict[str, float] = {}  # overdue tasks: time of the last request
        self._held = ""
        self._steering: Steering | None = None
        self._gathering = Gathering()
        self._issued = 0  # tasks, at the last look

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The scheduler serves no routes."""
        return ()

    async def run(self, context: Context) -> None:
        """Wait for the lease, then trigger tasks until stop."""
        self._context = context
        self._metrics = SchedulerMetrics(context.registry, max_queue=self._settings.max_queue)
        context.watch(self._client)
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._client.close()

    async def _work(self) -> None:
        self._last = self._ledger.now()
        await repeat(self._context, "schedule", self._step, within_s=60.0)

    async def _step(self) -> None:
        """Act on the last look, then wait for events and look again."""
        seen, self._seen = self._seen, None
        try:
            if seen is None:
                await self._ledger.prepare()
                seen = await self._look_at_all()
            self._metrics.open = seen.tasks
            if seen.run.state == "finished":
                await pause(self._context.stop, 0.5)
            else:
                done, self._issued = seen.issued - self._issued, seen.issued
                await self._gathering.more(seen.tasks, seen.trainers, done)
                self._seen = await self._decide(seen)
        except NoRun:
            await self._models.read(count=1000)  # from the first version on

    async def _look_at_all(self) -> Tally:
        """Read the state of all open tasks and owned devices anew."""
        tally, changes = await self._ledger.changes()
        self._mirror.follow(tally, changes, self._ledger.now())
        self._whole_at = time.monotonic()
        self._tell_failing()
        return tally

    async def _look_after(
        self, before: Tally, wait_ms: int, opening: Pending[int] | None, own: Sequence[Trigger]
    ) -> tuple[int, Tally, bool]:
        """Open tasks, wait for events, and look at what changed.

        Returns the number of opened tasks, the new look, and whether the mirror followed it.
        """
        is_old = time.monotonic() - self._whole_at >= _WHOLE_S
        opened, tally, changes = await self._ledger.changes_after(
            before,
            None if is_old else self._mirror.place,
            block_ms=wait_ms,
            opening=opening,
            own={trigger.task: trigger for trigger in own},
        )
        if changes.all_tasks:
            self._whole_at = time.monotonic()
        followed = self._mirror.follow(tally, changes, self._ledger.now())
        self._tell_failing()
        return opened, tally, followed

    def _tell_failing(self) -> None:
        """Log the devices that begin to fail, and those that work again, in one line each."""
        mirror, log = self._mirror, self._context.log
        if failing := mirror.begin_to_fail:
            reason = mirror.failing[failing[0]].reason
            log.warning(
                "devices fail and rest",
                devices=failing[:_NAMED],
                number=len(failing),
                reason=reason,
            )
        if working := mirror.work_again:
            log.info("devices work again", devices=working[:_NAMED], number=len(working))

    async def _decide(self, view: Tally) -> Tally:
        """Carry out the plan, wait for events or the next planning time; return the new look."""
        if self._settings.memory_budget is None and time.monotonic() >= self._budget_until:
            self._budget = await self._redis_budget()
            self._budget_until = time.monotonic() + _BUDGET_HOLDS_S
        seen = self._situation(view)
        todo = await self._planned(seen)
        self._metrics.limit, self._steering = todo.limit, todo.steering
        if todo.held != self._held:
            self._held = todo.held
            self._metrics.show_held(todo.held)
            self._context.log.info("held back" if todo.held else "not held back", by=todo.held)
        if todo.overdue:
            await self._withdraw(todo.overdue)
        if todo.again:
            self._round = (seen.version, seen.now)
            self._metrics.again.inc()
            self._context.log.warning(
                "round continues: too few answers", version=seen.version, answers=len(seen.held)
            )
        if todo.close is not None:
            await self._close(view, *todo.close, todo.drops)
        opening = None
        if todo.triggers:
            opening = self._ledger.trigger(
                self._lease.token, todo.limit, view.issued, todo.triggers
            )
        wait_ms, now = BLOCK_MS, self._ledger.now()
        if todo.wake_at is not None:
            wait_ms = min(BLOCK_MS, max(1, int((todo.wake_at - now) * 1000)))
        opened, view, followed = await self._look_after(view, wait_ms, opening, todo.triggers)
        if opened:
            self._metrics.triggered.inc(opened)
            self._last = todo.last
            for trigger in todo.triggers[:opened]:
                self._rests.begin(trigger.device, time.monotonic())
                self._context.trace(
                    "triggered", at=now, task=trigger.task, device=trigger.device, why=trigger.why
                )
        # Only now that the opened tasks are accounted for, as this look may fail.
        return view if followed else await self._look_at_all()

    async def _planned(self, seen: Situation) -> Plan:
        planned = partial(
            plan,
            self._policy,
            self._participation,
            self._hold,
            self._seed,
            seen,
            task_timeout_s=self._settings.task_timeout_s,
        )
        if seen.is_eligible is None:
            return planned()
        # In a thread, as finding eligible devices is slow and the lease must be renewed.
        return await asyncio.to_thread(planned)

    @property
    def _hold(self) -> HoldBack:
        return HoldBack(
            max_queue=self._settings.max_queue,
            target_staleness=self._settings.target_staleness,
            memory_budget=self._budget or None,
        )

    async def _close(
        self, view: Tally, version: int, tasks: tuple[str, ...], drops: tuple[int, ...]
    ) -> None:
        """Ask the coordinators to end a round; repeat only a request that seems lost."""
        before, among, asked_at = self._asked
        now = time.monotonic()
        if version == before and set(tasks) <= set(among):
            if view.triggers or now - asked_at < _ASK_AGAIN_S:
                return
            self._context.log.warning("asking again for the end of a round", version=version)
        why = reasons.ROUND_OVER
        await self._ledger.ask(CloseRound(version=version, tasks=tasks, why=why, drops=drops))
        self._asked = (version, tasks, now)

    async def _withdraw(self, overdue: Sequence[tuple[str, Overdue]]) -> None:
        """Ask the coordinators to give up tasks; repeat only requests that seem lost.

        A task whose answer is in the queue stays open until the updater reaches it.
        """
        now, asked = time.monotonic(), self._given_up
        self._given_up = {task: asked[task] for task, _ in overdue if task in asked}
        by_reason: dict[Overdue, list[str]] = {}
        for task, why in overdue:
            if now - self._given_up.get(task, -math.inf) >= _ASK_AGAIN_S:
                by_reason.setdefault(why, []).append(task)
        for why, tasks in by_reason.items():
            self._context.log.warning("tasks given up", reason=why, tasks=len(tasks))
            await self._ledger.ask(Withdraw(tasks=tuple(tasks), why=why))
            self._given_up |= dict.fromkeys(tasks, now)

    def _situation(self, view: Tally) -> Situation:
        mirror, now = self._mirror, self._ledger.now()
        self._last = min(self._last, now)  # a clock that was set back must not delay tasks
        version, buffered = view.head.version, view.head.buffered
        begun = buffered or mirror.tasks.count(version)
        if not begun and self._asked[0] == version:  # the round was dropped, and another begins
            self._asked = _NOTHING_ASKED
        if self._round[0] != version or not begun or self._round[1] > now:  # set back, too
            self._round = (version, now)
        return Situation(
            now=now,
            issued=view.issued,
            version=version,
            open=mirror.tasks,
            queue=view.queue,
            backlog=view.backlog,
            kept=kept(view),
            held=view.head.held,
            # Queue entries that are no admitted answers are ends of rounds.
            round_ending=self._asked[0] == version and view.backlog > view.admitted,
            mean_staleness=view.head.mean_staleness,
            trainers=view.trainers,
            workers=view.workers,
            model_bytes=view.run.layout.nbytes,
            devices=mirror.devices,
            last=self._last,
            round_since=self._round[1],
            began=view.run.created,
            is_eligible=self._who_may_begin(view.run, now),
            not_at_work=mirror.idle,
            steering=self._steering,
        )

    def _who_may_begin(self, run: Run, now: float) -> Callable[[int], bool] | None:
        """A function that tells whether a device may begin a task; None: every device may."""
        is_eligible, rests, here = self._is_eligible, self._rests, time.monotonic()
        if not rests:
            return is_eligible and (lambda device: is_eligible(run, device, now))
        return lambda device: (
            rests.end(device) <= here and (is_eligible is None or is_eligible(run, device, now))
        )

    async def _redis_budget(self) -> int:
        """The bytes that the run may use in Redis; 0: no known limit."""
        _, limit = await self._ledger.memory()
        return int(limit * BUDGET_SHARE)


def kept(view: Tally) -> int:
    """The size, in models, of published versions, unshared values and devices' vectors in Redis."""
    layout = view.run.layout
    return -(-view.kept_bytes // max(1, layout.nbytes)) + vectors(layout, view.run.devices)


def vectors(layout: Layout, devices: int) -> int:
    """The size, in models, of the devices' vectors (SCAFFOLD's c_i) and their sites' copies."""
    return -(-2 * 4 * layout.controls * devices // max(1, layout.nbytes))
