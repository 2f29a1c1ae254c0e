"""The updater: processes the queue in order and publishes model versions.

Every queue entry becomes one change: the strategy's decision (pure), a journal record, and one
commit that publishes the version, ends tasks and deletes processed entries. Once in the journal, a
change is final: if Redis fails, the updater repeats the commit, which is idempotent, and never the
update. A restarted updater resumes from the journal, publishes what it had not yet published, and
recognises queue entries that it has already processed. An entry leaves the queue only once its
record is on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

from aiohttp import web
from pydantic import Field

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.core.digest import DigestAlgorithm
from fedstream.core.errors import ConfigError
from fedstream.core.formats import F32, Format
from fedstream.core.layout import Model
from fedstream.core.records import Run
from fedstream.journal import JournalSettings
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.journal.recorder import Recorder
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.config import Section
from fedstream.runtime.plugins import allowing
from fedstream.runtime.service import Context, lead, repeat
from fedstream.strategies import StrategySettings
from fedstream.updater.commit import Commits, Publisher
from fedstream.updater.decider import Decider
from fedstream.updater.intake import Intake
from fedstream.updater.loop import Loop, Upkeep
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.recovery import Recovery
from fedstream.updater.suspects import Suspicions

if TYPE_CHECKING:
    from fedstream.updater.sums import Sums


class UpdaterSettings(Section):
    """The table ``[updater]``: models to keep, and updates to refuse."""

    keep_versions: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # the newest two are kept at any size
    max_norm: Annotated[float, Field(gt=0)] | None = None  # Euclidean norm of an update's vector
    norm_factor: Annotated[float, Field(ge=0)] = 30.0  # times the usual size; 0: no limit
    max_samples: Annotated[int, Field(ge=1)] | None = None  # that an untrusted device may count as
    # A device is quarantined once its updates stood out so often in a row; 0: never.
    quarantine_after: Annotated[int, Field(ge=0)] = 0
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 20.0


class Updater:
    """The updater service. ``create_run`` makes the record and version 0 of a missing run.

    ``versions``: a run with fewer versions is extended to this number, even if it is finished.
    """

    role = "updater"

    def __init__(
        self,
        settings: UpdaterSettings,
        strategy: StrategySettings,
        journal: JournalSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        create_run: Callable[[], tuple[Run, Model]],
        versions: int = 0,
        stop_metric: str | None = None,
        published_as: Format = F32,
        digests: DigestAlgorithm = "sha256",
        parts: dict[str, str] | None = None,
        private: PrivateSettings | None = None,
    ) -> None:
        """``published_as``: the format of published versions. ``digests``: the digest algorithm of
        models and updates, for a new run. ``private``: how to reach the helper, for a strategy
        whose updates are masked. ``parts``: digests of the user's own solvers and other
        plug-ins, for the journal's heads. ``stop_metric``: the metric that may end the run.
        """
        if not journal.weights and strategy.has_memory:
            raise ConfigError(
                f"journal.weights = false: {strategy.name} has a memory, which can only be rebuilt "
                "from the updates' weights"
            )
        if not journal.weights and not published_as.is_exact:
            raise ConfigError(
                f"journal.weights = false with wire.model = {published_as.name}: after a restart "
                "only Redis has the newest model, and what it has is less than the version"
            )
        self._settings = settings
        self._rule = strategy
        self._journal = journal
        self._create_run = create_run
        self._versions, self._stop_metric = versions, stop_metric
        self._parts = parts or {}
        self._format, self._digests = published_as, digests
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = UpdaterLedger(self._client, keys, name)
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        self._recorder = Recorder(journal, self._synced)
        self._publisher = Publisher(
            self._client,
            self._ledger,
            self._lease,
            keep_versions=settings.keep_versions,
            keep_bytes=settings.keep_bytes,
        )
        self._intake = Intake(self._client, keys)
        self._sums: Sums | None = None
        if strategy.masked:
            from fedstream.private.policy import PrivacyPolicy
            from fedstream.updater.sums import Sums

            policy = PrivacyPolicy.parsed(strategy.policy.encode(), "strategy.private.policy")
            self._sums = Sums(policy, private or PrivateSettings(), self._client, keys)

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The updater serves no routes."""
        return ()

    async def run(self, context: Context) -> None:
        """Acquire the lease, and process the queue until told to stop."""
        recorder, publisher, intake = self._recorder, self._publisher, self._intake
        ledger, lease, metrics = self._ledger, self._lease, UpdaterMetrics(context.registry)
        self._metrics = metrics
        metrics.journal.set_function(lambda: recorder.appended)
        metrics.unsynced.set_function(lambda: recorder.appended - recorder.safe)
        context.watch(self._client)
        index = EndedTasks(recorder.folder)
        recovery = Recovery(
            context=context,
            metrics=metrics,
            index=index,
            recorder=recorder,
            publisher=publisher,
            rule=self._rule,
            journal=self._journal,
            keys=self._keys,
            client=self._client,
            ledger=ledger,
            lease=lease,
            create_run=self._create_run,
            versions=self._versions,
            stop_metric=self._stop_metric,
            parts=self._parts,
            format=self._format,
            digests=self._digests,
        )
        decider = Decider(
            context=context,
            metrics=metrics,
            ledger=ledger,
            lease=lease,
            fetched=intake.fetched,
            unfetch=intake.unfetch,
            spares=intake.spares,
            max_norm=self._settings.max_norm,
            norm_factor=self._settings.norm_factor,
            max_samples=self._settings.max_samples,
            weights=self._journal.weights,
            format=self._format,
            sums=self._sums,
        )
        commits = Commits(
            context=context,
            metrics=metrics,
            recorder=recorder,
            publisher=publisher,
            ledger=ledger,
            lease=lease,
            format=self._format,
            sums=self._sums,
        )
        upkeep = Upkeep(context=context, client=self._client, ledger=ledger, publisher=publisher)
        self._loop = loop = Loop(
            context=context,
            metrics=metrics,
            ledger=ledger,
            lease=lease,
            recorder=recorder,
            publisher=publisher,
            intake=intake,
            decider=decider,
            commits=commits,
            recovery=recovery,
            upkeep=upkeep,
            suspicions=Suspicions(self._settings.quarantine_after),
            sums=self._sums,
        )

        async def process() -> None:
            with closing(index):
                try:
                    for step in (loop.begin, loop.step):
                        await repeat(context, "queue", step, within_s=120.0)
                finally:
                    await recorder.close()

        async def work() -> None:
            if self._sums is None:
                await process()
                return
            async with asyncio.TaskGroup() as group:
                keeping = group.create_task(self._sums.keep_key(context))
                try:
                    await process()
                finally:
                    keeping.cancel()

        try:
            with allowing(changed=self._journal.changed_rules):
                await lead(context, lease, work)
        finally:
            await intake.close()
            await self._client.close()

    def _synced(self, seconds: float) -> None:
        self._metrics.sync.observe(seconds)
