"""A replica's tasks: taking them, renewing their leases, giving up tasks of lost devices."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from fedstream.broker.keys import TRAINERS
from fedstream.broker.streams import Group
from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.device_sessions import Held
from fedstream.coordinator.gateway.upload_state import receipt_of, upload_blob
from fedstream.core import reasons
from fedstream.core.errors import BadMessage
from fedstream.core.messages import (
    OWNED,
    Assignment,
    Dead,
    Evaluation,
    GiveUp,
    Measured,
    Upload,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from fedstream.broker.partial_blobs import PartialBlob
    from fedstream.broker.streams import Entry
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.protocol.messages import Advice
    from fedstream.runtime.service import Context

_AT_ONCE = 256  # tasks per read
_DEAF_S = 3.0  # pause between sweeps after which silence counts anew
_LAST_S = 3.0  # from the end of a run, or of an evaluation after it, to the end of the check-ins


class Tasks:
    """Takes tasks from the replica's stream, and sends given-up tasks to the inbox."""

    def __init__(self, replica: Replica, context: Context) -> None:
        self._sessions = replica.sessions
        self._run_cache = replica.run_cache
        self._client = replica.client
        self._group = replica.group
        self._ledger = replica.ledger
        self._outbox = replica.outbox
        self._keys = replica.keys
        self._lease = replica.lease
        self._name = replica.name
        self._context = context
        self._unsure = True  # whether unknown pending tasks may be ours
        self._began = False
        self._swept = 0.0
        self._listened = self._hears_since = 0.0  # end of the last sweep; beginning without a break
        self._evaluates_until = -math.inf  # monotonic time until which evaluations may come
        self.answers = 0

    @property
    def is_over(self) -> bool:
        """Whether the run is finished, and its last version evaluated on the devices.

        A gateway that stops tells devices so at once, as they might find no gateway later.
        """
        is_measured = time.monotonic() >= self._evaluates_until or self._context.stop.is_set()
        return self._run_cache.is_over and is_measured

    async def take(self) -> None:
        """Take new tasks, or first our pending ones from before a restart or a lost reply."""
        unsure, self._unsure = self._unsure, True  # until the read succeeds
        head, are_new = None, False
        if unsure:
            # Quiet: devices do the work, so our crash says nothing about a task.
            await self._group.ensure()
            entries, _ = await self._group.claim(
                idle_ms=0, most=self._lease.attempts, own=True, quiet=True, count=OWNED
            )
            await self._run_cache.look()
        elif entries := await self._lapsed():
            await self._run_cache.look()
        else:
            are_new = True
            entries, head = await self._ledger.take_some(self._group, count=_AT_ONCE)
            if head is not None and entries:
                self._run_cache.saw(head)
        now = time.monotonic()
        known = {held.entry.id for held in self._sessions} if unsure else set()
        for entry in entries:
            if entry.id not in known:
                await self._hold(entry, self._group, now, is_new=are_new)
        self._unsure, self._began = False, True

    @property
    def has_begun(self) -> bool:
        """Whether this replica's earlier tasks are held again."""
        return self._began

    async def take_over(self, stream: str, entries: Sequence[str]) -> None:
        """Hold tasks that another replica of the site hands over."""
        group = self._group_of(stream)
        taken = await group.take_over(entries)
        await (
            self._run_cache.look()
        )  # a task is trained from no older version than it was sent with
        for entry in taken:
            await self._hold(entry, group, time.monotonic())

    def _group_of(self, stream: str) -> Group:
        if stream == self._group.stream:
            return self._group
        return Group(self._client, stream, TRAINERS, self._name)

    async def _lapsed(self) -> list[Entry]:
        """Tasks of our stream that another replica took over and lost; asks every quarter lease."""
        if time.monotonic() - self._swept <= self._lease.seconds / 4:
            return []
        self._swept = time.monotonic()
        entries, _ = await self._group.claim(
            idle_ms=round(self._lease.seconds * 1000),
            most=self._lease.attempts,
            quiet=True,
            count=_AT_ONCE,
        )
        return entries

    async def _hold(self, entry: Entry, group: Group, now: float, *, is_new: bool = False) -> None:
        try:
            task = decode(entry.data, Assignment, Evaluation)
        except BadMessage as error:
            await self._bury(entry, group.stream, str(error))
            return
        if isinstance(task, Evaluation):
            self._evaluates_until = now + _LAST_S
        self._context.trace("taken", task=task.task, device=task.device)
        self._sessions.hold(
            Held(task, entry, group.stream, is_new=is_new, is_untouched=is_new), now
        )

    async def renew(self) -> None:
        """Renew all leases together; release the tasks whose lease is lost."""
        by_stream: dict[str, list[Held]] = {}
        for held in self._sessions:
            by_stream.setdefault(held.stream, []).append(held)
        for stream, some in by_stream.items():
            ours = await self._group_of(stream).renew_all([held.entry.id for held in some])
            lost = [one for one in some if one.entry.id not in ours and self._sessions.has(one)]
            for held in lost:
                task = held.task
                self._context.log.info("lease lost", task=task.task, device=task.device)
                self._sessions.ended(task.task)
            await self._discard_ended(lost)

    async def sweep(self) -> None:
        """Read the run, and give up the tasks of devices that stay away.

        Once the run is over, gives up all tasks and ends all waiting check-ins; in a run with
        evaluations, not before that of the last version.

        Silence counts only while devices can be heard: not while Redis is away, when devices are
        told to retry, nor while the process is stopped.
        """
        await self._run_cache.look()
        now = time.monotonic()
        if now - self._listened > _DEAF_S:
            self._hears_since = now
        for held in self._sessions.gone(now, self._hears_since):
            await self.give_up(held, reasons.DROPPED_OUT)
        if self._run_cache.is_over:
            # That of the last version begins once the one under way has ended.
            under_way = await self._ledger.evaluation_under_way()
            evaluates = under_way is not None and under_way.deadline > self.now()
        else:
            evaluates = self._evaluates_until > -math.inf
        if evaluates:
            self._evaluates_until = now + _LAST_S
        if self.is_over:
            self._sessions.release_all()
        if self._run_cache.is_over:
            for held in self._sessions:
                if isinstance(held.task, Assignment):
                    await self.give_up(held, reasons.RUN_FINISHED)
        self._listened = time.monotonic()

    async def turn_away(self, devices: Set[int]) -> None:
        """Remove revoked devices, and give up their tasks."""
        for held in self._sessions.expel(devices):
            await self.give_up(held, reasons.REVOKED_DEVICE)

    async def give_up(self, held: Held, reason: str) -> None:
        """Give up a task, and release it."""
        task = held.task
        answer: GiveUp | Measured
        if isinstance(task, Evaluation):
            answer = self.measured(held, task, reason=reason)
        else:
            answer = GiveUp(
                task=task.task,
                attempt=held.attempt,
                device=task.device,
                trainer=self._name,
                reason=reason,
            )
        said = await self._outbox.answer(held.stream, held.entry, answer)
        self._sessions.ended(task.task)
        if said == "said":
            self.answers += 1
            self._context.trace("gave up", task=task.task, device=task.device, reason=reason)
            await self._upload(held).discard()
        else:
            await self._discard_ended([held])

    def measured(self, held: Held, task: Evaluation, **about: Any) -> Measured:
        """The answer to an evaluation; ``about``: the device's part of it."""
        return Measured(
            task=task.task,
            attempt=held.attempt,
            device=task.device,
            trainer=self._name,
            version=task.version,
            base=task.base,
            **about,
        )

    async def _discard_ended(self, some: Sequence[Held]) -> None:
        """Delete the partial uploads of those tasks that have ended.

        A lost lease alone is no end: the answer may still be unread by a coordinator, or another
        replica may have taken the task over. The uploads of such tasks stay.
        """
        fates = await self._ledger.fates([held.task.task for held in some])
        for held, fate in zip(some, fates, strict=True):
            if receipt_of(fate, held.attempt) is not None:
                await self._upload(held).discard()

    def _upload(self, held: Held) -> PartialBlob:
        site, task = self._outbox.site, held.task.task
        return upload_blob(self._client, self._keys, site, task, held.attempt)

    async def due(self, device: int, *, evaluates: bool = False) -> Held | None:
        """Give up the device's overdue tasks; return its oldest other task, or None.

        Gives up evaluations too, unless the device ``evaluates``.
        """
        while (held := self._sessions.first(device)) is not None:
            why = await self.overdue(held)
            if isinstance(held.task, Evaluation) and not evaluates:
                why = why or reasons.DOES_NOT_EVALUATE
            if why is None:
                held.is_new = False
                return held
            await self.give_up(held, why)
        return None

    async def overdue(self, held: Held) -> str | None:
        """The reason to give up a task if it is overdue, else None.

        Reads the newest version first if the task is of a newer version than the last one read.
        """
        if self._run_cache.is_over and isinstance(held.task, Assignment):
            return reasons.RUN_FINISHED
        version = held.task.version
        if version is not None and version > self._run_cache.head.version:
            await self._run_cache.look()  # another replica read it, or Redis fell back
        return offers.overdue(held.task, self._run_cache.head, self.now())

    async def advise(self, held: Held, attempt: str) -> tuple[Advice, str | None]:
        """The advice to a device that works on a task, and the reason to give the task up if any.

        The caller gives the task up.
        """
        why = await self.overdue(held)
        run, head = self._run_cache.run, self._run_cache.head
        advice = offers.advice(held, attempt, run, head, self.now())
        if advice.why == "run over":
            why = reasons.RUN_FINISHED
        elif advice.why == "too stale":  # another offer would have the same staleness
            why = why or reasons.BECAME_STALE
        return advice, why

    def now(self) -> float:
        """Seconds since 1970 by Redis's clock, as in the tasks' deadlines."""
        return self._ledger.now()

    def answered(self, answer: Upload | Measured, *, said: bool) -> None:
        """Release a task whose answer was handed over.

        ``said``: whether this request handed the answer over, and not an earlier one.
        """
        self._sessions.ended(answer.task)
        if said:
            self.answers += 1
            self._context.trace(
                "uploaded" if isinstance(answer, Upload) else "measured",
                task=answer.task,
                device=answer.device,
                attempt=answer.attempt,
                tau=answer.tau if isinstance(answer, Upload) else answer.version,
                seconds=round(answer.seconds, 3),
            )

    async def _bury(self, entry: Entry, stream: str, reason: str) -> None:
        """Have a coordinator move an entry to ``dead``."""
        dead = Dead(
            stream=stream.removeprefix(self._keys.prefix),
            entry=entry.id,
            reason=reason,
            time=self.now(),
            deliveries=1,
            data=entry.data,
        )
        await self._outbox.answer(stream, entry, dead)
