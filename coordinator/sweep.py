"""Periodic clean-up after silent trainers, crashed replicas, poison tasks and careless sites."""

from __future__ import annotations

import time
from contextlib import suppress
from math import inf

from prometheus_client import Counter

from fedstream.broker.cleanup import (
    cap_workspaces,
    drop_copies,
    expire_forgotten,
    expire_unowned,
    foreign,
    mend,
    registers,
    some_keys,
    trim_registers,
)
from fedstream.broker.client import Client
from fedstream.broker.clock import uptime
from fedstream.broker.keys import TRAINERS, Keys, site_of
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.streams import Group
from fedstream.coordinator.intake import EntryIntake
from fedstream.coordinator.metrics import RunMetrics, Seen
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.errors import Foreign, NoRun
from fedstream.core.messages import POOL
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context
from fedstream.runtime.task_settings import LeaseSettings

_SWEEP_S = 1.0
_SEARCH_S = 5.0  # between two searches for open tasks without an entry
_CERTIFICATES_S = 600.0  # between two checks of Redis's certificates
_DEAF_S = 3.0  # pause between sweeps after which silence counts anew


class Sweep:
    """One replica's clean-up. Every step is idempotent, so replicas need no coordination."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        lease: LeaseSettings,
        intake: EntryIntake,
        context: Context,
        *,
        client: Client,
        ledger: CoordinatorLedger,
        keys: Keys,
        sites: tuple[str, ...],
    ) -> None:
        self._settings = settings
        self._lease = lease
        self._intake = intake
        self._context = context
        self._client = client
        self._ledger = ledger
        self._keys = keys
        self._sites = sites
        self._lost = Counter(
            "fedstream_trainers_lost",
            "Trainers removed because they were silent.",
            registry=context.registry,
        )
        self._metrics = RunMetrics(context.registry, ledger.now)
        context.certificates.append(
            lambda: {f"{host}:{port}": ends for (host, port), ends in client.certificates.items()}
        )
        self._certificates_at = -inf  # time of the last check; uptime
        self._ended = 0.0  # end of the last sweep; uptime, as the machine may sleep
        self._hears_since = 0.0
        self._searched = 0.0  # end of the last whole search for tasks without an entry
        self._without_entry: dict[str, str] = {}  # result of the last whole search
        self._found: dict[str, str] = {}  # partial result of the present search
        self._task_at = b"0"  # cursor of the search through open tasks
        self._owner_at = b"0"  # cursor of the search through owners
        self._scanned = b"0"  # cursor of the scan of the run's keys
        self._held: dict[str, int] = {}  # bytes of workspaces by site, in this scan
        self._named: set[tuple[str, str]] = set()  # already logged keys of the wrong type

    async def step(self) -> None:
        """Clean up periodically after silent trainers, poison tasks and crashed coordinators."""
        owners = await self._owners()
        await self._mend(owners)
        await self._clear_away(owners)  # works even if Redis is full, unlike the next step
        await self._find_lost()
        if gone := await self._ledger.age_letters(self._settings.letter_days):
            self._context.log.warning("old dead letters deleted", letters=gone)
        await self._strike_off_the_silent(owners)
        lease_ms = round(self._lease.seconds * 1000)
        if owners := await self._owners():
            await self._ledger.settle_unserved(lease_ms)
        leased, lapsed = await self._ledger.leases(lease_ms, owners)
        sites = {self._keys.tasks_of(owner): site_of(owner) for owner in owners}
        for stream in lapsed:
            tasks = Group(self._client, stream, TRAINERS, "")
            _, poison = await tasks.claim(idle_ms=lease_ms, most=self._lease.attempts)
            await self._intake.bury_all(tasks, poison, sites.get(stream, POOL))
        await self._intake.take_over(round(self._settings.redeliver_s * 1000))
        pool = Group(self._client, self._keys.tasks, TRAINERS, "")
        for group in (*self._intake.groups, pool):
            await group.reap(idle_ms=round(self._settings.trainer_silence_s * 1000))
        self._metrics.saw(await self._seen(leased))
        if uptime() - self._certificates_at >= _CERTIFICATES_S:
            await self._client.read_certificates()
            self._certificates_at = uptime()
        self._ended = uptime()
        await pause(self._context.stop, _SWEEP_S)

    async def _owners(self) -> set[str]:
        """Find trainers that own devices; none if the register has the wrong type.

        Unregistered owners are found over several sweeps.
        """
        try:
            found, self._owner_at = await self._ledger.owning(self._owner_at)
        except Foreign:
            return set()
        return found

    async def _mend(self, owners: set[str]) -> None:
        """Quarantine foreign values; log keys of the run's state with the wrong type."""
        mended = await mend(
            self._client,
            self._keys,
            inboxes=self._sites,
            owners=owners,
            most=self._settings.inbox_limit,
        )
        for key, why in mended:
            self._context.log.error(
                "foreign value moved aside", key=key, why=why, aside=self._keys.quarantine(key)
            )
        if mended:
            self._intake.distrust()
        found = set(await foreign(self._client, self._keys))
        for key, why in sorted(found - self._named):
            self._context.log.error(
                "a key of the run's state holds a foreign value: restore it from a backup, or "
                "delete the run's keys (fedstream purge) and resume from the journal",
                key=key,
                why=why,
            )
        self._named = found

    async def _clear_away(self, owners: set[str]) -> None:
        """Expire or delete leftovers of sites, a few keys per sweep."""
        if self._scanned == b"0":  # before the first step, as the steps may fail
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
                keys=len(found),
                first=min(found),
            )
        if names := registers(self._keys, some):
            with suppress(NoRun):
                devices = (await self._ledger.run()).devices
                for name in await trim_registers(self._client, self._keys, names, devices):
                    self._context.log.warning(
                        "gateway wrote into its register what no device needs: deleted", key=name
                    )

    async def _find_lost(self) -> None:
        """Give up open tasks whose entry was deleted, searching a part in each sweep."""
        if self._task_at == b"0" and time.monotonic() - self._searched < _SEARCH_S:
            return
        lost, found, self._task_at = await self._ledger.find_lost(
            self._without_entry, self._task_at
        )
        self._found |= found
        if self._task_at == b"0":
            self._without_entry, self._found = self._found, {}
            self._searched = time.monotonic()
        if lost:
            self._context.log.warning("open tasks without an entry: given up", tasks=lost)

    async def _strike_off_the_silent(self, owners: set[str]) -> None:
        """Deregister trainers that left or fell silent, and ``owners`` that were never heard.

        Silence counts only while this coordinator runs its sweeps.
        """
        for name in await self._ledger.left():
            await self._ledger.leave(name, silent_s=self._settings.trainer_silence_s)
        for owner in await self._ledger.unheard(owners):
            await self._ledger.leave(owner.encode())
        now, silence_s = uptime(), self._settings.trainer_silence_s
        if now - self._ended > _DEAF_S:
            self._hears_since = now
        if now - self._hears_since < silence_s:
            return
        for name in await self._ledger.silent(silence_s):
            given_up = await self._ledger.leave(name, silent_s=silence_s)
            if given_up is not None:
                self._lost.inc()
                shown = name.decode(errors="replace")
                self._context.log.warning("trainer lost", trainer=shown, tasks_given_up=given_up)

    async def _seen(self, training: int) -> Seen:
        """Read the run for the metrics. ``training``: tasks under a trainer's lease."""
        memory, limit = await self._ledger.memory()
        try:
            view = await self._ledger.tally()
        except NoRun:  # the updater has not created it yet
            return Seen(self._ledger.now(), memory, limit)
        self._intake.saw(view.tasks, view.trainers)
        event_ms = view.told[self._keys.events].partition("-")[0]
        return Seen(self._ledger.now(), memory, limit, view, training, int(event_ms) / 1000)
