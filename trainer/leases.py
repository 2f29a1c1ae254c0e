"""A trainer's tasks: taking them, renewing their leases, and sending the answers.

A lease is the idle time of the task's entry in the consumer group.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fedstream.broker import blobs
from fedstream.broker.ledger.base import word
from fedstream.broker.ledger.trainer import TakenTask
from fedstream.core.errors import FedstreamError, OutOfMemory
from fedstream.core.messages import Dead, GiveUp, Measured, Upload
from fedstream.runtime.backoff import Backoff, pause

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from fedstream.broker.client import Client
    from fedstream.broker.commands import Command
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.trainer import ComingTask, Outbox, TrainerLedger
    from fedstream.broker.streams import Entry, Group
    from fedstream.core.layout import Payload
    from fedstream.runtime.service import Context
    from fedstream.runtime.task_settings import LeaseSettings
    from fedstream.trainer.metrics import TrainerMetrics


class Leases:
    """One trainer's leases, at most one at a time."""

    def __init__(
        self, group: Group, ledger: TrainerLedger, settings: LeaseSettings, context: Context
    ) -> None:
        self._group = group
        self._ledger = ledger
        self._settings = settings
        self._context = context
        # Why unknown pending tasks may be ours.
        self._unsure: Literal["crash", "trouble"] | None = "crash"
        self._swept = 0.0
        self._coming: ComingTask | None = None  # requested with the last answer

    async def next(self) -> TakenTask | None:
        """Take a task: our own pending one, one that another trainer lost, or a new one.

        None if there is none within a second. If a reply is lost before :meth:`settle`, this
        trainer may hold a task that it doesn't know.
        """
        why, self._unsure = self._unsure, "trouble"  # until the read succeeds
        coming, self._coming = self._coming, None
        most = self._settings.attempts
        if coming is not None:
            taken = await coming.taken()
        elif why is not None:
            await self._group.ensure()
            entries, _ = await self._group.claim(
                idle_ms=0, most=most, own=True, quiet=why == "trouble", count=1
            )
            taken = TakenTask(entries[0], again=True) if entries else None
        else:
            taken = await self._lapsed() or await self._ledger.take(self._group)
        if taken is None:
            self.settle()
        return taken

    @property
    def is_due(self) -> bool:
        """Whether the search for other trainers' lost tasks is due."""
        return time.monotonic() - self._swept > self._settings.seconds / 4

    async def take_along(self, commands: Sequence[Command]) -> list[Any]:
        """Send the commands that answer a task, and request the next task in the same write.

        Returns the commands' replies as soon as they are there; :meth:`next` waits for the task. If
        the commands did not answer the task, :meth:`hand_back_others` must follow.
        """
        replies, self._coming = await self._ledger.take_after(commands, self._group)
        return replies

    async def hand_back_others(self, entry: Entry) -> None:
        """Hand back a task that was taken together with a failed answer to ``entry``."""
        self.abandon()
        if await self._group.release_others(entry):
            self._swept = 0.0  # the task has no lease, so any trainer may take it

    async def end(self) -> None:
        """Hand back the requested task, if one comes."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        try:
            taken = await coming.taken()
            if taken is not None:
                await self._group.release(taken.entry)
        except FedstreamError as error:
            self._context.log.warning("a task may wait for its lease to end", reason=str(error))

    def abandon(self) -> None:
        """Stop waiting for the requested task."""
        if self._coming is not None:
            self._coming.abandon()
            self._coming = None

    async def _lapsed(self) -> TakenTask | None:
        """A task whose lease has expired; searched each quarter of the lease."""
        if not self.is_due:
            return None
        entries, _ = await self._group.claim(
            idle_ms=round(self._settings.seconds * 1000), most=self._settings.attempts, count=1
        )
        if not entries:
            self._swept = time.monotonic()
            return None
        return TakenTask(entries[0], again=True)

    def held(self, entry: Entry) -> AbstractAsyncContextManager[asyncio.Event]:
        """Renew the lease inside the block; the event is set when the lease is lost."""
        return _Renewals(partial(self._renew, entry), self._settings.seconds / 4)

    async def _renew(self, entry: Entry, lost: asyncio.Event) -> None:
        while True:
            self._context.health.beat("tasks")
            try:
                if not await self._group.renew(entry):
                    self._context.log.warning("lease lost")
                    lost.set()
            except FedstreamError as error:
                self._context.log.warning("lease not renewed", reason=str(error))
            if await pause(lost, self._settings.seconds / 4):
                return

    async def hand_back(self, entry: Entry) -> None:
        """Hand the task back, claimable at once."""
        await self._group.release(entry)

    def settle(self) -> None:
        """Note that the trainer holds no task."""
        self._unsure = None


class _Renewals(AbstractAsyncContextManager[asyncio.Event]):
    """Renews a lease inside the block, starting after the first interval."""

    def __init__(
        self, renew: Callable[[asyncio.Event], Coroutine[Any, Any, None]], after_s: float
    ) -> None:
        self._renew = renew
        self._after_s = after_s
        self._lost = asyncio.Event()
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> asyncio.Event:
        # Most tasks of a fast device end before the first renewal.
        self._timer = asyncio.get_running_loop().call_later(self._after_s, self._begin)
        return self._lost

    def _begin(self) -> None:
        self._renewing = asyncio.create_task(self._renew(self._lost), name="renew")

    async def __aexit__(self, *_error: object) -> None:
        self._timer.cancel()
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.wait({self._renewing})
            if not self._renewing.cancelled():
                self._renewing.result()  # re-raises if renewing failed


class Delivery:
    """Sends one trainer's answers."""

    def __init__(
        self,
        client: Client,
        keys: Keys,
        outbox: Outbox,
        leases: Leases,
        stream: str,
        expire_s: float,
        context: Context,
        metrics: TrainerMetrics,
    ) -> None:
        """``stream``: of tasks; ``expire_s``: expiry of an update that is never admitted."""
        self._client = client
        self._keys = keys
        self._outbox = outbox
        self._leases = leases
        self._stream = stream
        self._expire_s = expire_s
        self._context = context
        self._metrics = metrics
        self._rng = random.Random()  # seeding one takes longer than sending an answer's commands

    async def send(
        self,
        entry: Entry,
        answer: Upload | GiveUp | Measured,
        update: Payload | None = None,
        make_room: Callable[[], Awaitable[None]] | None = None,
        stage: Callable[[], Awaitable[Sequence[str]]] | None = None,
        *,
        along: bool = False,
    ) -> bool:
        """Send the answer, retrying transient errors so that finished work isn't lost.

        Returns False if the lease was lost. Retries are safe, as answering is idempotent.
        ``update``: the payload of an upload; None: another answer. ``make_room``: called if Redis
        is full. ``stage``: writes the error feedback, and returns its staged and final keys.

        ``along``: request the next task in the same write. If the answer must be sent again, a
        taken task is handed back first, and no further one is requested.
        """
        key = self._keys.update(answer.blob) if isinstance(answer, Upload) else ""
        unwritten, feedback = True, tuple[str, ...]()
        backoff = Backoff(rng=self._rng)
        has_taken = False  # a task may be taken by a failed answer
        while True:
            ahead: Sequence[Command] = ()
            try:
                with self._metrics.timed("upload"):
                    if has_taken:
                        await self._leases.hand_back_others(entry)
                        along = has_taken = False
                    if update is not None and unwritten:
                        feedback = tuple(await stage()) if stage is not None else ()
                        ahead = await blobs.prepare(
                            self._client, key, update, expire_s=self._expire_s
                        )
                        # Don't rewrite the blob without need: once admitted, it must not expire.
                        unwritten = False
                    answering = self._outbox.answering(
                        self._stream, entry, answer, expire_s=self._expire_s, feedback=feedback
                    )
                    has_taken = along
                    send = self._leases.take_along if along else self._client.pipeline
                    *_, reply = await send([*ahead, answering])
            except FedstreamError as error:
                if not error.retriable or self._context.stop.is_set():
                    raise
                self._context.log.warning("answer not delivered yet", reason=str(error))
                if isinstance(error, OutOfMemory) and make_room is not None:
                    await make_room()
                await pause(self._context.stop, backoff.next())
            else:
                if (said := word(reply)) != "unwritten":
                    return said == "said"
                unwritten = True  # the blob expired during an outage or never arrived

    async def bury(self, entry: Entry, reason: str) -> None:
        """Have a coordinator move an entry to ``dead``; trainers may not write there."""
        dead = Dead(
            stream=self._stream.removeprefix(self._keys.prefix),
            entry=entry.id,
            reason=reason,
            time=self._client.clock.now(),
            deliveries=1,
            data=entry.data,
        )
        await self._outbox.answer(self._stream, entry, dead)
