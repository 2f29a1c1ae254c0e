"""The coordinator: the front door, the gatekeeper of the queue, and the security boundary.

It turns triggers into tasks, admits answers to the queue by their metadata, strikes off silent
trainers, and moves tasks that crash their trainers to `dead`. All state is in Redis and every
change is one script, so any number of replicas share the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated

from aiohttp import web
from prometheus_client import Counter
from pydantic import Field, SecretStr, model_validator

from fedstream.broker import reasons
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.custody import (
    cap_workspaces,
    drop_copies,
    expire_forgotten,
    expire_unowned,
    foreign,
    mend,
    some_keys,
)
from fedstream.broker.errors import (
    BadMessage,
    BrokerError,
    ConfigError,
    FedstreamError,
    Foreign,
    NoRun,
    NoScript,
    ReplyTooLarge,
)
from fedstream.broker.keys import COORDINATORS, POOL, TRAINERS, Keys, site_of
from fedstream.broker.ledger import Ledger
from fedstream.broker.messages import Dead, GiveUp, Task, Trigger, Upload
from fedstream.broker.streams import BLOCK_MS, PARTS, Entry, Group, given, lost, reading
from fedstream.coordinator.app import App
from fedstream.coordinator.entries import LARGEST, Decided, Entries
from fedstream.coordinator.metrics import RunMetrics, Seen
from fedstream.coordinator.sites import served
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.runtime.service import Context, repeat
from fedstream.runtime.tasks import LeaseSettings

_READ = PARTS * LARGEST  # bytes read at once from all inboxes
_USUAL = 4096  # bytes that few entries exceed
_SWEEP_S = 1.0
_SEARCH_S = 5.0  # between two searches for open tasks without an entry
_SWEPT_WITHIN_S = 120.0  # a dozen round trips: a slow Redis must not get us restarted
_CRASHED = {TRAINERS: reasons.CRASHED_TRAINERS, COORDINATORS: reasons.CRASHED_COORDINATORS}
_DEAF_S = 3.0  # without a sweep: trainers may have gone unheard

Given = tuple[Group, Entry]


class CoordinatorSettings(Section):
    """What is admitted, and when trainers, entries and letters expire."""

    max_update_bytes: Annotated[int, Field(gt=0)] = 4 << 30
    sites: tuple[str, ...] = (POOL,)  # served: "name", or "name:0-9" with its devices
    trusted_sites: tuple[str, ...] = (POOL,)  # believed about how stale an update is
    site_trainers: Annotated[int, Field(ge=1)] = 10_000  # per site
    announce_rate: Annotated[int, Field(ge=1)] = 50_000  # trainers and devices per second and site
    site_workspace_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # per site, except the pool
    inbox_limit: Annotated[int, Field(ge=1)] = 1_000_000  # entries; a longer inbox is deleted
    # What devices may ask for if they decide for themselves (scheduler.policy "none").
    open_limit: Annotated[int, Field(ge=1)] = 10_000  # concurrent tasks, all devices together
    trigger_rate: Annotated[int, Field(ge=1)] = 1000  # per second and site
    most_steps: Annotated[int, Field(ge=1)] = 1_000_000
    most_epochs: Annotated[int, Field(ge=1)] = 1000
    most_seconds: Annotated[float, Field(gt=0)] = 86_400.0
    letter_days: Annotated[float, Field(gt=0, le=10_000)] = 30.0  # then a dead letter is deleted
    trainer_silence_s: Annotated[float, Field(gt=0)] = 10.0  # then a trainer is struck off
    redeliver_s: Annotated[float, Field(gt=0)] = 15.0  # then crashed replicas' entries are claimed
    downloads: Annotated[int, Field(ge=1)] = 16  # concurrent, of models over HTTP
    drain_s: Annotated[float, Field(gt=0)] = 15.0  # beyond redis.timeout_s

    @model_validator(mode="after")
    def _sites_are_named(self) -> CoordinatorSettings:
        try:
            served(self.sites, self.trusted_sites)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class Coordinator:
    """The service. Replicas differ only in ``name``."""

    role = "coordinator"

    def __init__(
        self,
        settings: CoordinatorSettings,
        lease: LeaseSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        anarchic: bool = False,
        token: SecretStr | None = None,
    ) -> None:
        """``anarchic``: devices decide for themselves when to train."""
        self._settings = settings
        self._anarchic = anarchic
        self._lease = lease
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = Ledger(self._client, keys, name)
        self._app = App(self._client, self._ledger, keys, settings.downloads, token)
        self._triggers = Group(self._client, keys.triggers, COORDINATORS, name)
        self._sites = {
            Group(self._client, keys.inbox(site.name), COORDINATORS, name, largest=LARGEST): site
            for site in served(settings.sites, settings.trusted_sites).values()
        }
        self._groups = (self._triggers, *self._sites)
        self._count = max(1, min(64, _READ // _USUAL // len(self._groups)))  # entries of each
        # Groups in which we may hold entries that we don't know of, and why: a crash before this
        # start counts as a delivery, a failure of Redis since then does not.
        self._unsure = dict.fromkeys(self._groups, "crash")
        self._read: list[Given] = []  # and not yet decided on
        self._swept = 0.0  # when the last sweep ended
        self._hears_since = 0.0
        self._searched = 0.0  # when last, for open tasks without an entry
        self._without_entry: dict[str, str] = {}  # what the last search found
        self._scanned = b"0"  # the cursor of the scan of the run's keys
        self._held: dict[str, int] = {}  # bytes of each site's workspaces in this scan
        self._named: set[tuple[str, str]] = set()  # keys of the wrong type, already logged

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Status and models, over HTTP."""
        return self._app.routes()

    async def run(self, context: Context) -> None:
        """Work until stop."""
        self._context = context
        self._entries = Entries(self._ledger, self._settings, context, anarchic=self._anarchic)
        self._lost = Counter(
            "fedstream_trainers_lost", "Trainers removed because they were silent.",
            registry=context.registry,
        )  # fmt: skip
        self._run_metrics = RunMetrics(context.registry)
        context.watch(self._client)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(repeat(context, "entries", self._step))
                group.create_task(repeat(context, "sweep", self._sweep, within_s=_SWEPT_WITHIN_S))
        finally:
            await self._client.close()

    async def _step(self) -> None:
        """Decide on the entries read last and read more, or first recover pending entries."""
        if self._unsure:
            await self._recover()
            return
        with self._unless_lost(*self._groups):
            read, self._read = self._read, []
            self._read = await self._decided(read)
            if self._context.stop.is_set():
                await self._one_by_one(self._read)

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
                    idle_ms=0, most=self._lease.attempts, own=True, quiet=why == "trouble",
                    count=1 if why == "crash" else 64,
                )  # fmt: skip
                await self._bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])
            if entries or poison:
                self._unsure[group] = why  # there may be more

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
                [
                    *(decision.command for decision, _ in decisions),
                    reading(self._groups, count=self._count, block_ms=BLOCK_MS),
                ],
                wait_s=BLOCK_MS / 1000, most=_READ,
            )  # fmt: skip
        except BrokerError as error:
            # The entries of a reply that was too large were delivered all the same: claim them in
            # parts.
            if not isinstance(error, NoScript | ReplyTooLarge) and not lost(error):
                raise
            self._unsure |= dict.fromkeys(self._groups, "trouble")
            return []
        for (decision, tell), reply in zip(decisions, replies, strict=True):
            tell(decision.parsed(reply))
        return given(self._groups, news)

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
                decided = self._entries.of_site(site, entry)
                if isinstance(decided, Dead):
                    await self._bury(group, entry, decided.reason, decided.deliveries, decided)
                else:
                    decisions.append(decided)
            except BadMessage as error:
                await self._bury(group, entry, str(error))
        return decisions

    async def _bury_all(
        self, group: Group, poison: list[tuple[Entry, int]], site: str = ""
    ) -> None:
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
        task: Task | Trigger | Upload | GiveUp | None = None
        for kind in (Task, Trigger, Upload, GiveUp):
            with suppress(BadMessage):
                task = kind.decode(found.data if found else entry.data)
        self._context.log.error(
            "dead letter", stream=found.stream if found else group.stream, entry=entry.id,
            reason=reason[:200], task=task and task.task, deliveries=deliveries,
        )  # fmt: skip
        if group in self._sites:
            site = self._sites[group].name
        await self._ledger.bury(
            group.stream, group.group, entry, reason, task=task, deliveries=deliveries,
            found=found, site=site,
        )  # fmt: skip

    async def _mend(self, owners: set[str]) -> None:
        """Quarantine foreign data in the run's keys; log keys of its state with the wrong type."""
        sites = [site.name for site in self._sites.values()]
        mended = await mend(
            self._client, self._keys, inboxes=sites, owners=owners,
            most=self._settings.inbox_limit,
        )  # fmt: skip
        for key, why in mended:
            self._context.log.error(
                "foreign value moved aside", key=key, why=why, aside=self._keys.quarantine(key)
            )
        if mended:
            self._unsure |= dict.fromkeys(self._groups, "trouble")
        found = set(await foreign(self._client, self._keys))
        for key, why in sorted(found - self._named):
            self._context.log.error(
                "a key of the run's state holds a foreign value: restore it from a backup, or "
                "delete the run's keys (fedstream purge) and resume from the journal",
                key=key, why=why,
            )  # fmt: skip
        self._named = found

    async def _owners(self) -> set[str]:
        """Trainers that own devices; none if the register itself needs mending."""
        try:
            return set((await self._ledger.owners()).values())
        except Foreign:
            return set()

    async def _clear_away(self, owners: set[str]) -> None:
        """Expire or delete keys that sites left behind for good or no longer need, some a sweep."""
        if self._scanned == b"0":  # not after the last step, as what follows may fail
            self._held.clear()
        self._scanned, some = await some_keys(self._client, self._keys, self._scanned)
        await drop_copies(self._client, self._keys, some)
        most = self._settings.site_workspace_bytes
        for site in await cap_workspaces(self._client, self._keys, some, self._held, most):
            self._context.log.warning(
                "site over its workspace limit: some were deleted", site=site, most=most
            )
        await expire_unowned(self._client, self._keys, some, owners)
        if found := await expire_forgotten(self._client, self._keys, some):
            self._context.log.warning(
                "site left keys without an expiry: they now expire",
                keys=len(found), first=min(found),
            )  # fmt: skip

    async def _find_lost(self) -> None:
        """Give up open tasks whose entry was deleted."""
        if time.monotonic() - self._searched < _SEARCH_S:
            return
        lost, self._without_entry = await self._ledger.find_lost(self._without_entry)
        self._searched = time.monotonic()
        if lost:
            self._context.log.warning("open tasks without an entry: given up", tasks=lost)

    async def _sweep(self) -> None:
        """Clean up periodically after silent trainers, poison tasks and crashed coordinators."""
        owners = await self._owners()
        await self._mend(owners)
        await self._clear_away(owners)  # works even if Redis is full; the next fails then
        await self._find_lost()
        if gone := await self._ledger.age_letters(self._settings.letter_days):
            self._context.log.warning("old dead letters deleted", letters=gone)
        await self._strike_off_the_silent(owners)
        lease_ms = round(self._lease.seconds * 1000)
        if owners := set((await self._ledger.owners()).values()):
            await self._ledger.settle_unserved(lease_ms)
        leased, lapsed = await self._ledger.leases(lease_ms, owners)
        sites = {self._keys.tasks_of(owner): site_of(owner) for owner in owners}
        for stream in lapsed:
            tasks = Group(self._client, stream, TRAINERS, "")
            _, poison = await tasks.claim(idle_ms=lease_ms, most=self._lease.attempts)
            await self._bury_all(tasks, poison, sites.get(stream, POOL))
        for group in self._groups:
            if group in self._unsure:
                continue  # recover our own first: they must not mix with those claimed here
            with self._unless_lost(group):
                entries, poison = await group.claim(
                    idle_ms=round(self._settings.redeliver_s * 1000), most=self._lease.attempts
                )
                await self._bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])
        pool = Group(self._client, self._keys.tasks, TRAINERS, "")
        for group in (*self._groups, pool):
            await group.reap(idle_ms=round(self._settings.trainer_silence_s * 1000))
        self._run_metrics.saw(await self._seen(leased))
        self._swept = time.time()
        await pause(self._context.stop, _SWEEP_S)

    async def _seen(self, training: int) -> Seen:
        """Look at the run for the metrics. ``training``: tasks under a trainer's lease."""
        memory, limit = await self._ledger.memory()
        try:
            view = await self._ledger.look()
        except NoRun:  # the updater has not created it yet
            return Seen(time.time(), memory, limit)
        event_ms = view.told[self._keys.events].partition("-")[0]
        return Seen(time.time(), memory, limit, view, training, int(event_ms) / 1000)

    async def _strike_off_the_silent(self, owners: set[str]) -> None:
        """Strike off trainers that left or fell silent, and ``owners`` that were never heard.

        Silence counts only while the coordinator was listening.
        """
        for name in await self._ledger.left():
            await self._ledger.leave(name, silent_s=self._settings.trainer_silence_s)
        for owner in await self._ledger.unheard(owners):
            await self._ledger.leave(owner.encode())
        now, silence_s = time.time(), self._settings.trainer_silence_s
        if now - self._swept > _DEAF_S:  # wall clock: the machine may have slept
            self._hears_since = now
        if now - self._hears_since < silence_s:
            return
        for name in await self._ledger.silent(silence_s):
            given_up = await self._ledger.leave(name, silent_s=silence_s)
            if given_up is not None:
                self._lost.inc()
                shown = name.decode(errors="replace")
                self._context.log.warning("trainer lost", trainer=shown, tasks_given_up=given_up)
