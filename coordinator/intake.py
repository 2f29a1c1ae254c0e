"""Reading triggers and the sites' inboxes, and deciding on each entry once.

An entry stays pending in its group until the script that carries out its decision acknowledges it.
So a crash loses nothing: the next replica claims the entry and decides anew.
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

_AMPLE = 4  # open tasks per trainer, above which a loop waits
# The part of the open tasks that passes during one wait. A task passes two waits, or three after a
# trigger, so most tasks are always with the trainers.
_SHARE = 1 / 8
_MOST_S = 0.02
_RECENT = 32  # tasks in the moving average


class Gathering:
    """Short waits of one loop, so that the loop handles several entries at once.

    Entries and versions that follow one another within a moment then share a wake-up, an exchange
    with Redis and a script. A loop waits only while many tasks are open for each trainer, so no
    trainer waits for its next task.
    """

    def __init__(self) -> None:
        self._ended: float | None = None  # end of the last wait
        self._each_s = 0.0  # mean time between two tasks
        self._since = 0.0  # time of the last count

    async def more(self, tasks: int, trainers: int, done: int) -> None:
        """Wait a moment, counted from the end of the last wait, if many tasks are open.

        ``tasks``: open; ``trainers``: alive; ``done``: tasks handled since the last call.
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
_USUAL = 4096  # bytes of an entry that few exceed
_CRASHED = {TRAINERS: reasons.CRASHED_TRAINERS, COORDINATORS: reasons.CRASHED_COORDINATORS}

Given = tuple[Group, Entry]


class EntryIntake:
    """Reads entries in batches; a script carries out each decision or buries the entry."""

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
        """``attempts``: deliveries after which an entry counts as crashing its readers."""
        self._client = client
        self._ledger = ledger
        self._entries = entries
        self._context = context
        self._sites = dict(inboxes)
        self._attempts = attempts
        self.groups = (triggers, *inboxes)
        count = max(1, min(64, _READ // _USUAL // len(self.groups)))  # entries per group
        self._next = reading(self.groups, count=count, block_ms=BLOCK_MS)
        # Groups in which we may hold unknown entries, and why: a crash before this start counts as
        # a delivery, a failure of Redis since then does not.
        self._unsure = dict.fromkeys(self.groups, "crash")
        self._read: list[Given] = []  # read but undecided entries
        self._gathering = Gathering()
        self._open = (0, 0)  # last counts of open tasks and trainers

    def saw(self, tasks: int, trainers: int) -> None:
        """Note the numbers of open tasks and live trainers."""
        self._open = (tasks, trainers)

    def distrust(self) -> None:
        """Look for our pending entries in every group, as a group may have been recreated."""
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
        """Handle our pending entries, which were delivered but never acknowledged.

        After a crash, entries are claimed one at a time: if one crashes us again, no other entry
        counts as delivered.
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
                self._unsure[group] = why  # more may follow

    async def take_over(self, idle_ms: int) -> None:
        """Handle the entries of crashed replicas, pending for ``idle_ms``."""
        for group in self.groups:
            if group in self._unsure:
                continue  # recover our own entries first, so as not to mix them with claimed ones
            with self._unless_lost(group):
                entries, poison = await group.claim(idle_ms=idle_ms, most=self._attempts)
                await self.bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])

    @contextmanager
    def _unless_lost(self, *groups: Group) -> Iterator[None]:
        """Mark groups as unsure if the block raises: an unread reply may have delivered entries."""
        try:
            yield
        except FedstreamError:
            self._unsure |= dict.fromkeys(groups, "trouble")
            raise

    async def _decided(self, read: list[Given]) -> list[Given]:
        """Decide on entries and read the next ones in one round trip; return the next ones.

        Redis carries out the decisions before it waits for entries; the outcomes are reported
        after the wait.
        """
        decisions = await self._decisions(read)
        try:
            *replies, news = await self._client.pipeline(
                [*[decision.command for decision, _ in decisions], self._next],
                wait_s=BLOCK_MS / 1000,
                most=_READ,
            )
        except BrokerError as error:
            # The entries of a too large reply were delivered all the same: claim them in parts.
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
        """Decide on entries; bury invalid ones.

        Returns each decision, with the function that reports the decision's outcome.
        """
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

        ``site``: the site of the entry's stream, unless that is an inbox. ``found``: the report in
        this entry about an unreadable entry, by a trainer.
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
