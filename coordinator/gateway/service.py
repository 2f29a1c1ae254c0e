"""The gateway: devices over HTTPS, served as the trainer of a site of its own.

Any number of replicas serve one run, each with a stable name; a restarted replica takes up its
earlier tasks. Devices get the same data as trainers, and their messages are never trusted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from fedstream.broker.bounded_client import BoundedClient
from fedstream.broker.keys import TRAINERS, Keys, member
from fedstream.broker.ledger.gateway import GatewayLedger
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.streams import Group
from fedstream.coordinator.gateway.app import GatewayApp, Opened
from fedstream.coordinator.gateway.attestation import NoVerifier
from fedstream.coordinator.gateway.auth import Auth
from fedstream.coordinator.gateway.certificate import ServedCertificate
from fedstream.coordinator.gateway.check_ins import CheckIns
from fedstream.coordinator.gateway.device_sessions import DeviceSessions
from fedstream.coordinator.gateway.handover import HandOvers
from fedstream.coordinator.gateway.measurements import Measurements
from fedstream.coordinator.gateway.metrics import GatewayMetrics
from fedstream.coordinator.gateway.models import ModelCopies
from fedstream.coordinator.gateway.replica import Replica, RunCache
from fedstream.coordinator.gateway.settings import OTHER_FILES
from fedstream.coordinator.gateway.tasks import Tasks
from fedstream.coordinator.gateway.uploads import Uploads
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.messages import OWNED
from fedstream.runtime.backoff import pause
from fedstream.runtime.process import allow_files, short_pauses
from fedstream.runtime.service import Context, repeat

if TYPE_CHECKING:
    from fedstream.broker.client import RedisSettings
    from fedstream.coordinator.gateway.app import Recognition
    from fedstream.coordinator.gateway.fleet.routes import FleetRoutes
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.core.formats import Format
    from fedstream.runtime.task_settings import LeaseSettings

_LOOK_S = 1.0  # between two checks of the run and of absent devices
_ANNOUNCE_S = 2.0  # between two announcements of the same devices
_CHANGED_S = 0.2  # the same after a change
_LONG = 1000  # devices: changes of a longer list are not announced early
_GROWING = 8  # growing announcements in a row that mean that no coordinator reads
_LINKS = 64  # most connections to Redis
_GOODBYE_S = 2.0  # time-out of the last message, shorter than the drain


class Gateway:
    """The gateway service. Replicas differ only in ``name``."""

    role = "gateway"

    def __init__(
        self,
        settings: GatewaySettings,
        lease: LeaseSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        update: Format,
        identity: Recognition | None = None,
    ) -> None:
        """``update``: the wanted format of updates. ``identity``: identifies a request's device;
        None: by the request's token.
        """
        self._settings = settings
        self._client = BoundedClient(redis, name, links=_LINKS, loads_scripts=False)
        ledger = GatewayLedger(self._client, keys, name, settings.site)
        stream = keys.tasks_of(member(settings.site, name))
        self.replica = replica = Replica(
            name=name,
            settings=settings,
            lease=lease,
            update=update,
            keys=keys,
            client=self._client,
            ledger=ledger,
            outbox=Outbox(self._client, keys, settings.site),
            group=Group(self._client, stream, TRAINERS, name),
            sessions=DeviceSessions(
                away_s=settings.away_s, lease_s=settings.lease_s, most=settings.devices
            ),
            run_cache=RunCache(ledger, update, supernodes=settings.flower_app is not None),
        )
        self._models = ModelCopies(self._client, keys, replica.run_cache, settings)
        self._served = ServedCertificate(settings) if settings.tls_cert is not None else None
        self._auth = Auth(ledger, settings, self._served)
        self._app = GatewayApp(replica, self._models, identity or self._auth)
        self._fleet = self._flower() if settings.flower_app else None
        self._announced: tuple[int, ...] = ()
        self._announced_at = 0.0
        self._unread = 0  # messages in the inbox, at the last announcement
        self._growing = 0  # announcements in a row with more unread messages each

    def _flower(self) -> FleetRoutes:
        """Make the routes for Flower's supernodes. Raises ConfigError."""
        try:
            from fedstream.coordinator.gateway.fleet.files import FlowerApp, Roster
            from fedstream.coordinator.gateway.fleet.routes import FleetRoutes
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"gateway.flower_app needs the package {error.name}: "
                "pip install 'fedstream[supernodes]'"
            ) from error
        return FleetRoutes(
            self.replica,
            self._app,
            FlowerApp.read(str(self._settings.flower_app)),
            Roster.read(str(self._settings.flower_keys)),
        )

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The routes for devices, and the routes for supernodes if configured."""
        fleet = self._fleet.routes() if self._fleet else ()
        return [*fleet, *self._app.routes(*self._auth.routes())]

    async def run(self, context: Context) -> None:
        """Serve until stopped, and then until the uploads in progress have ended.

        Held tasks stay leased to this replica's name, so its next process takes them up.
        """
        context.watch(self._client)
        drained = asyncio.Event()
        lasting = context.until(drained)
        metrics = GatewayMetrics(context.registry, self.replica, self._models)
        if self._served is not None:
            context.certificates.append(self._served.ends)
        tasks = Tasks(self.replica, context)
        moves = HandOvers(self.replica, tasks, lasting)
        if self._served is None:
            context.log.warning(
                "no gateway.tls_cert: devices are served plain HTTP, so put a proxy in front that "
                "ends TLS, and set gateway.names to the host of the devices' URL",
                names=list(self._settings.names),
            )
        if isinstance(self._settings.attestation, NoVerifier):
            context.log.info(
                "attestation is not checked: any device with an invite may enrol "
                "(gateway.attestation)"
            )
        wanted = self._settings.connections + OTHER_FILES
        files = allow_files(wanted)
        if files is not None and files < wanted:
            context.log.warning(
                "fewer open files than gateway.connections needs: raise the limit (ulimit -Hn), or "
                "lower gateway.connections",
                files=files,
                wanted=wanted,
            )
        try:
            await repeat(context, "run", partial(self._join, context, tasks))
            if context.stop.is_set():
                return
            uploads = Uploads(self.replica, tasks, moves, metrics, self._auth.revoked)
            check_ins = CheckIns(self.replica, self._models, tasks, metrics, context)
            measurements = Measurements(self.replica, tasks, moves)
            self._app.open(Opened(context, check_ins, tasks, moves, uploads, measurements, metrics))
            within_s = max(30.0, self.replica.lease.seconds)
            with short_pauses():
                async with asyncio.TaskGroup() as group:
                    for name, step in (
                        ("tasks", tasks.take),
                        ("leases", partial(self._renew, lasting, tasks)),
                        ("devices", partial(self._sweep, lasting, tasks)),
                        ("heartbeat", partial(self._announce, lasting, tasks, moves)),
                        ("moves", moves.follow),
                    ):
                        group.create_task(repeat(lasting, name, step, within_s=within_s))
                    group.create_task(self._drain(context, uploads, drained))
        finally:
            await self._leave(context)
            await self._client.close()

    async def _join(self, context: Context, tasks: Tasks) -> bool:
        """Wait for the run and recover our earlier tasks; False if stopped before.

        Raises ConfigError if devices can't join the run.
        """
        self._look_at_certificate(context)
        await self.replica.run_cache.look()
        if self.replica.run_cache.has_begun:
            await tasks.take()
            return True
        await pause(context.stop, 0.2)
        return False

    async def _renew(self, context: Context, tasks: Tasks) -> None:
        await tasks.renew()
        await pause(context.stop, self.replica.lease.seconds / 4)

    async def _sweep(self, context: Context, tasks: Tasks) -> None:
        self._look_at_certificate(context)
        await tasks.turn_away(await self._auth.revoked())
        await tasks.sweep()
        await pause(context.stop, _LOOK_S)

    def _look_at_certificate(self, context: Context) -> None:
        if self._served is not None and context.tls is not None:
            self._served.look(context.tls, context.log)

    async def _announce(self, context: Context, tasks: Tasks, moves: HandOvers) -> None:
        """Announce present devices every 2 s; up to 1,000 devices also soon after a change."""
        replica, outbox = self.replica, self.replica.outbox
        present, now = replica.sessions.present(), time.monotonic()
        if len(present) > OWNED:  # devices with tasks from before a restart, plus new ones
            present = present[:OWNED]
        if not present and self._announced and not await replica.group.is_empty():
            # Other replicas hold tasks of our stream, which is deleted with our last device.
            present = self._announced[:1] if len(self._announced) > 1 else self._announced
        changed_s = _CHANGED_S if len(present) <= _LONG else _ANNOUNCE_S
        since_s = now - self._announced_at
        if since_s >= (_ANNOUNCE_S if present is self._announced else changed_s):
            if present:
                await outbox.announce(replica.name, present, answers=tasks.answers, concurrent=True)
                self._growing = self._growing + 1 if outbox.unread > self._unread else 0
                self._unread = outbox.unread
                if self._growing == _GROWING:
                    context.log.warning(
                        "no coordinator reads this gateway's inbox, so its devices get no tasks: "
                        "is its site in coordinator.sites, and does a coordinator run?",
                        site=self._settings.site,
                        unread=self._unread,
                    )
            elif self._announced:
                await outbox.goodbye(replica.name)  # a site's trainer must have devices
            self._announced, self._announced_at = present, now
        await moves.tell()
        if self._fleet:  # only the Fleet routes need the list of replicas
            await moves.greet()
        await pause(context.stop, _CHANGED_S)

    async def _drain(self, context: Context, uploads: Uploads, drained: asyncio.Event) -> None:
        await context.stop.wait()
        self.replica.sessions.release_all()
        await uploads.end()  # uploads in progress; devices continue the others later
        drained.set()

    async def _leave(self, context: Context) -> None:
        """Sign off if our stream is empty; else our next process serves its tasks."""
        if not self._announced:
            return
        self._client.hurry(_GOODBYE_S)
        try:
            if await self.replica.group.is_empty():
                await self.replica.outbox.goodbye(self.replica.name)
        except FedstreamError as error:
            context.log.warning("could not announce that it is leaving", reason=str(error))
