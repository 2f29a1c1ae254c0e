"""The coordinator: admission to the queue, the HTTP API, and the security boundary.

A coordinator admits answers to the queue by their metadata, hands out tasks that devices and
operators ask for, deregisters silent trainers, and moves tasks that crash their trainers to `dead`.
All state is in Redis and every change is one script, so any number of replicas share the work.
:mod:`fedstream.coordinator.intake` reads entries, :mod:`fedstream.coordinator.entries` decides on
them, and :mod:`fedstream.coordinator.sweep` cleans up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aiohttp import web

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import COORDINATORS, Keys
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.streams import Group
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.app import App
from fedstream.coordinator.entries import LARGEST, Entries
from fedstream.coordinator.intake import EntryIntake
from fedstream.coordinator.settings import CoordinatorSettings, MakePage
from fedstream.coordinator.sites import served
from fedstream.coordinator.sweep import Sweep
from fedstream.runtime.service import Context, repeat
from fedstream.runtime.task_settings import LeaseSettings

_SWEPT_WITHIN_S = 120.0  # a dozen round trips: no restart because Redis is slow


class Coordinator:
    """The coordinator service. Replicas differ only in ``name``."""

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
        lr_of: Callable[[int, int], float] | None = None,
        tokens: Tokens | None = None,
        page: MakePage | None = None,
    ) -> None:
        """``anarchic``: devices decide for themselves when to train. ``lr_of``: the configured
        learning rate of a device, for a rule that divides by it. ``page``: None for no live page.
        """
        self._settings = settings
        self._anarchic = anarchic
        self._lr_of = lr_of
        self._lease = lease
        self._keys = keys
        self._name = name
        self._client = Client(redis, name)
        self._ledger = CoordinatorLedger(self._client, keys, name)
        self._app = App(self._client, self._ledger, keys, settings.downloads, tokens)
        self._page = None if page is None else page(self._client, tokens)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The routes of the status, the models and the live page."""
        return (*self._app.routes(), *(self._page.routes() if self._page else ()))

    async def run(self, context: Context) -> None:
        """Work until stop."""
        settings, lease, client, keys = self._settings, self._lease, self._client, self._keys
        sites = served(settings.sites, settings.trusted_sites).values()
        intake = EntryIntake(
            client,
            self._ledger,
            Entries(self._ledger, settings, context, anarchic=self._anarchic, lr_of=self._lr_of),
            context,
            triggers=Group(client, keys.triggers, COORDINATORS, self._name),
            inboxes={
                Group(client, keys.inbox(one.name), COORDINATORS, self._name, largest=LARGEST): one
                for one in sites
            },
            attempts=lease.attempts,
        )
        sweep = Sweep(
            settings,
            lease,
            intake,
            context,
            client=client,
            ledger=self._ledger,
            keys=keys,
            sites=tuple(site.name for site in sites),
        )
        context.watch(client)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(repeat(context, "entries", intake.step))
                group.create_task(repeat(context, "sweep", sweep.step, within_s=_SWEPT_WITHIN_S))
                if self._page is not None:
                    group.create_task(self._page.run(context))
        finally:
            await client.close()
