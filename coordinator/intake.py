"""What coordinators read: triggers, and the sites' inboxes, each entry decided on once.

An entry stays pending in its group until the script that carries out its decision acknowledges it,
so a crash loses nothing: whoever claims it decides anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from fedstream.broker.client import Client
from fedstream.broker.keys import COORDINATORS, TRAINERS
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.streams import BLOCK_MS, PARTS, Entry, Group, given, lost, reading
from fedstream.coordinator.entries import LARGEST, Decided, Entries
from fedstream.coordinator.sites import Site
from fedstream.core import reasons
from fedstream.core.errors import BadMessage, BrokerError, FedstreamError, NoScript, ReplyTooLarge
from fedstream.core.messages import Assignment, Dead, GiveUp, Trigger, Upload
from fedstream.runtime.service import Context

_AMPLE = 4  # tasks for each trainer
# Of the open tasks, that is what comes in a wait. Two waits lie on a task's way, or three if it was
# asked for by a trigger, so most of the tasks are always with the trainers.
_SHARE = 1 / 8
_MOST_S = 0.02
_RECENT = 32  # tasks whose pace counts


class Gathering:
    """Waits of one loop. It learns how fast tasks follow one another."""

    def __init__(self) -> None:
        self._ended: float | None = None  # when the last wait did
        self._each_s = 0.0  # between one task and the next
        self._since = 0.0  # when tasks were last counted

    async def more(self, tasks: int, trainers: int, done: int) -> None:
        """Wait a moment, counted from the end of the last wait, if so many tasks are open.

        ``done``: tasks that passed here since the last call.
        """
        now = time.monotonic()
        if self._ended is None:
            self._ended = self._since = now
        elif done:
            weight = min(1.0, done / _RECENT)
            self._each_s += weight * ((now - self._since) / done - self._each_s)
            self._since = now
        if tasks >= _AMPLE * trainers > 0:
            left_s = self._ended + min(_MOST_S, _SHARE * tasks * self._each_s) - now
            if left_s > 0:
                await asyncio.sleep(left_s)
        self._ended = time.monotonic()


_READ = PARTS * LARGEST  # bytes read at once from all inboxes
_USUAL = 4096  # bytes that few entries exceed
_CRASHED = {TRAINERS: reasons.CRASHED_TRAINERS, COORDINATORS: reasons.CRASHED_COORDINATORS}

Given = tuple[Group, Entry]


class EntryIntake:
    """Reads entries in batches, and has each carried out by a script, or moved to ``dead``."""

    def __init__(
        self,
        client: Client,
        ledger: CoordinatorLedger,
        entries: Entries,
        context: Context,
        *,
        triggers: Group,
        inboxes: Mapping[Group, Site],
        attempts: int,
    ) -> None:
        """``attempts``: deliveries after which an entry is taken to crash whoever reads it."""
        self._client = client
        self._ledger = ledger
        self._entries = entries
        self._context = context
        self._sites = dict(inboxes)
        self._attempts = attempts
        self.groups = (triggers, *inboxes)
        count = max(1, min(64, _READ // _USUAL // len(self.groups)))  # entries of each
        self._next = reading(self.groups, count=count, block_ms=BLOCK_MS)
        # Groups in which we may hold entries that we don't know of, and why: a crash before this
        # start counts as a delivery, a failure of Redis since then does not.
        self._unsure = dict.fromkeys(self.groups, "crash")
        self._read: list[Given] = []  # and not yet decided on
        self._gathering = Gathering()
        self._open = (0, 0)  # tasks and trainers, when they were last counted

    def saw(self, tasks: int, trainers: int) -> None:
        """Take note of how many tasks are open, and how many trainers are alive."""
        self._open = (tasks, trainers)

    def distrust(self) -> None:
        """Look for pending entries in every group: one may have been replaced."""
        self._unsure |= dict.fromkeys(self.groups, "trouble")

    async def step(self) -> None:
        """Decide on the entries read last and read more, or first recover pending entries."""
        if self._unsure:
            await self._recover()
            return
        read, self._read = self._read, []
        if read:
            answers = sum(group in self._sites for group, _ in read)
            await self._gathering.more(*self._open, answers)
        try:
            self._read = await self._decided(read)
            if self._context.stop.is_set():
                await self._one_by_one(self._read)
        except FedstreamError:
            self.distrust()
            raise

    async def _recover(self) -> None:
        """Handle our pending entries: delivered to us, but never acknowledged.

        After a crash, entries are claimed one at a time: if one crashes us again, no other counts
        as delivered with it.
        """
        await self._ledger.prepare(site.name for site in self._sites.values())
        for group, why in tuple(self._unsure.items()):
            del self._unsure[group]
            with self._unless_lost(group):
                await group.ensure()
                entries, poison = await group.claim(
                    idle_ms=0,
                    most=self._attempts,
                    own=True,
                    quiet=why == "trouble",
                    count=1 if why == "crash" else 64,
                )
                await self.bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])
            if entries or poison:
                self._unsure[group] = why  # there may be more

    async def take_over(self, idle_ms: int) -> None:
        """Handle the entries that other replicas have held for so long: they crashed."""
        for group in self.groups:
            if group in self._unsure:
                continue  # recover our own first: they must not mix with those claimed here
            with self._unless_lost(group):
                entries, poison = await group.claim(idle_ms=idle_ms, most=self._attempts)
                await self.bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])

    @contextmanager
    def _unless_lost(self, *groups: Group) -> Iterator[None]:
        """Mark groups as unsure on an error: entries may have been delivered unnoticed."""
        try:
            yield
        except FedstreamError:
            self._unsure |= dict.fromkeys(groups, "trouble")
            raise

    async def _decided(self, read: list[Given]) -> list[Given]:
        """Decide on entries and read more in one round trip; return the entries read.

        Redis carries out the decisions before it waits for more; their outcomes are reported after
        the wait.
        """
        decisions = await self._decisions(read)
        try:
            *replies, news = await self._client.pipeline(
                [*[decision.command for decision, _ in decisions], self._next],
                wait_s=BLOCK_MS / 1000,
                most=_READ,
            )
        except BrokerError as error:
            # The entries of a reply that was too large were delivered all the same: claim them in
            # parts.
            if not isinstance(error, NoScript | ReplyTooLarge) and not lost(error):
                raise
            self.distrust()
            return []
        for (decision, tell), reply in zip(decisions, replies, strict=True):
            tell(decision.parsed(reply))
        return given(self.groups, news)

    async def _one_by_one(self, read: list[Given]) -> None:
        for each in read:
            for decision, tell in await self._decisions([each]):
                tell(await decision)

    async def _decisions(self, read: list[Given]) -> list[Decided]:
        """Decide on entries, and how to report each outcome; junk goes to ``dead``."""
        decisions: list[Decided] = []
        for group, entry in read:
            site = self._sites.get(group)
            try:
                if site is None:
                    decisions.append(self._entries.of_triggers(entry))
                    continue
                decided = await self._entries.of_site(site, entry)
                if isinstance(decided, Dead):
                    await self._bury(group, entry, decided.reason, decided.deliveries, decided)
                else:
                    decisions.append(decided)
            except BadMessage as error:
                await self._bury(group, entry, str(error))
        return decisions

    async def bury_all(self, group: Group, poison: list[tuple[Entry, int]], site: str = "") -> None:
        why = _CRASHED[group.group]
        for entry, deliveries in poison:
            await self._bury(group, entry, why, deliveries, site=site)

    async def _bury(
        self,
        group: Group,
        entry: Entry,
        reason: str,
        deliveries: int = 1,
        found: Dead | None = None,
        site: str = "",
    ) -> None:
        """Move an entry to ``dead``, and end its task if it names one.

        ``site``: whose stream it is, if not an inbox. ``found``: the unreadable entry that a
        trainer reports by this one.
        """
        task: Assignment | Trigger | Upload | GiveUp | None = None
        for kind in (Assignment, Trigger, Upload, GiveUp):
            with suppress(BadMessage):
                task = kind.decode(found.data if found else entry.data)
        self._context.log.error(
            "dead letter",
            stream=found.stream if found else group.stream,
            entry=entry.id,
            reason=reason[:200],
            task=task and task.task,
            deliveries=deliveries,
        )
        if group in self._sites:
            site = self._sites[group].name
        await self._ledger.bury(
            group.stream,
            group.group,
            entry,
            reason,
            task=task,
            deliveries=deliveries,
            found=found,
            site=site,
        )
