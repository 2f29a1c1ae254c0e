"""Sending an answer: the update's bytes first, then the message that names them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from fedstream.broker import blobs
from fedstream.broker.errors import FedstreamError, OutOfMemory
from fedstream.broker.ledger.plumbing import word
from fedstream.broker.messages import Dead, GiveUp, Upload
from fedstream.runtime.backoff import Backoff, pause

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.commands import Command
    from fedstream.broker.keys import Keys
    from fedstream.broker.layout import Payload
    from fedstream.broker.ledger.trainer import Outbox
    from fedstream.broker.streams import Entry
    from fedstream.runtime.service import Context
    from fedstream.trainer.leases import Leases
    from fedstream.trainer.metrics import TrainerMetrics


class Delivery:
    """Sends one trainer's answers."""

    def __init__(
        self, client: Client, keys: Keys, outbox: Outbox, leases: Leases, stream: str,
        expire_s: float, context: Context, metrics: TrainerMetrics,
    ) -> None:  # fmt: skip
        """``stream``: of the tasks; ``expire_s``: of an update that is never admitted."""
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
        answer: Upload | GiveUp,
        update: Payload | None,
        make_room: Callable[[], Awaitable[None]],
        stage: Callable[[], Awaitable[Sequence[str]]] | None = None,
        *,
        along: bool = False,
    ) -> bool:
        """Send the answer, retrying transient errors so that finished work isn't lost.

        ``update`` is what an upload announces; None: nothing. ``make_room`` is called if Redis is
        full. ``stage`` writes what the update left unsent, and returns the keys to keep it by.
        Retrying is harmless: answering is idempotent. False if the lease was lost.

        ``along``: take the next task in the same write. If the answer must be sent again, a task
        that was taken is handed back first, and none is taken along any more.
        """
        key = self._keys.update(answer.blob) if isinstance(answer, Upload) else ""
        unwritten, feedback = True, tuple[str, ...]()
        backoff = Backoff(rng=self._rng)
        has_taken = False  # a task, maybe, along with an answer that has to be sent again
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
                        # Don't rewrite it unasked: once admitted, it must not expire.
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
                if isinstance(error, OutOfMemory):
                    await make_room()
                await pause(self._context.stop, backoff.next())
            else:
                if (said := word(reply)) != "unwritten":
                    return said == "said"
                unwritten = True  # it expired during an outage, or never arrived

    async def bury(self, entry: Entry, reason: str) -> None:
        """Have a coordinator move an entry to ``dead``; trainers may not write there."""
        dead = Dead(
            stream=self._stream.removeprefix(self._keys.prefix), entry=entry.id, reason=reason,
            time=self._client.clock.now(), deliveries=1, data=entry.data,
        )  # fmt: skip
        await self._outbox.answer(self._stream, entry, dead)
