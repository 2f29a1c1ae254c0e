"""A replica of a gateway: what its parts share, and its copy of the run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.errors import ConfigError, NoRun
from fedstream.core.formats import F32, Format
from fedstream.core.records import Head
from fedstream.private import importing
from fedstream.protocol.messages import OfferedPrivacy

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.gateway import GatewayLedger
    from fedstream.broker.ledger.trainer import Outbox
    from fedstream.broker.streams import Group
    from fedstream.coordinator.gateway.device_sessions import DeviceSessions
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.core.messages import Evaluation
    from fedstream.core.records import Run
    from fedstream.runtime.task_settings import LeaseSettings

_REMEMBERED = 1000  # newest versions whose models devices may request
_WAIT_S = 2.0  # Retry-After before the run has begun


class RunCache:
    """The run's record and newest version, unknown before the first read."""

    def __init__(self, ledger: GatewayLedger, update: Format, *, supernodes: bool = False) -> None:
        """``update``: the wanted format of updates.

        ``supernodes``: whether Flower's supernodes take part: these report no steps.
        """
        self._ledger = ledger
        self._update = update
        self._supernodes = supernodes
        self._known: dict[str, Head] = {}  # by digest of the published model, the newest last
        self._turn = asyncio.Lock()
        self._begun = self._done = 0  # started and finished reads
        self._seen = 0  # number of heads read
        self._run: Run | None = None
        self._epoch_key: bytes | None = None  # of a private run's helper
        self._masked: Format | None = None  # the format of updates in a private run
        self._head: Head | None = None

    @property
    def run(self) -> Run:
        """The run's record. Raises Refusal before the first read."""
        if self._run is None:
            raise self._not_begun()
        return self._run

    @property
    def head(self) -> Head:
        """The newest version. Raises Refusal before the first."""
        if self._head is None:
            raise self._not_begun()
        return self._head

    @property
    def update(self) -> Format:
        """The wanted format of updates."""
        return self._masked or self._update

    @property
    def formats(self) -> dict[str, Format]:
        """The formats of updates that devices may send, by name."""
        return {one.name: one for one in ((self._masked,) if self._masked else (F32, self._update))}

    @property
    def private(self) -> OfferedPrivacy | None:
        """What an offer tells of the run's privacy; None: the run is not private.

        Raises Refusal before the helper's key is known.
        """
        run = self.run
        if not run.policy:
            return None
        if self._epoch_key is None:
            raise Refusal(
                503,
                "unavailable",
                "the key of the run's helper is not known yet",
                retry_after_s=_WAIT_S,
            )
        return OfferedPrivacy.of(run.policy, run.lineage, self._epoch_key)

    def _not_begun(self) -> Refusal:
        text = f"run {self._ledger.keys.name!r} has not begun yet"
        return Refusal(503, "unavailable", text, retry_after_s=_WAIT_S)

    @property
    def has_begun(self) -> bool:
        """Whether there is a run with a model."""
        return self._run is not None and self._head is not None

    @property
    def is_over(self) -> bool:
        """Whether the run is finished."""
        return self._run is not None and self._run.state == "finished"

    async def look(self) -> None:
        """Read run and newest version anew; concurrent calls share one read.

        Raises ConfigError if devices can't take part in this run.
        """
        wanted = self._begun + 1  # a read that began earlier may be outdated
        async with self._turn:
            if self._done < wanted:
                self._begun += 1
                number, seen = self._begun, self._seen
                await self._look(seen)
                self._done = number

    async def _look(self, seen: int) -> None:
        """Read run and newest version. ``seen``: the number of versions read before this look."""
        try:
            run = await self._ledger.run()
        except NoRun:
            self._run = self._head = None
            self._known.clear()
            return
        if self._run is None or run.created != self._run.created:
            self._check(run)
            self._known.clear()
            self._head = None
        self._run = run
        if run.policy:
            self._epoch_key = await self._ledger.epoch_key()
        head = await self._ledger.head()
        # Accept an older version, as Redis may have fallen back, unless a later read saw a newer.
        if seen == self._seen:
            self._head = None
        if head is not None:
            self.saw(head)

    def saw(self, head: Head) -> None:
        """Note a version that came with a task; it never replaces a newer one.

        A task must not be trained from an older version than the version it was sent with.
        """
        if self._head is None or head.version >= self._head.version:
            self._head = head
            self._seen += 1
        self._know(head)

    def evaluated(self, task: Evaluation) -> Head:
        """The version that a task is to measure, whose model devices may then request."""
        head = Head(
            version=task.version,
            digest=task.digest,
            blob=task.blob,
            time=0.0,  # this and the epoch are unknown
            epoch=0,
            chunks=task.chunks,
            encoded=task.encoded,
        )
        self._know(head)
        return head

    def _know(self, head: Head) -> None:
        self._known.pop(head.given, None)
        self._known[head.given] = head
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    async def version_of(self, digest: str) -> Head | None:
        """The version whose published model has this digest; None unless it is recent.

        Also that of the evaluation under way, which another replica may have offered.
        """
        if digest not in self._known:
            await self.look()
        if digest not in self._known and (evaluation := await self._ledger.evaluation_under_way()):
            self.evaluated(evaluation.task(evaluation.id, 0))
        return self._known.get(digest)

    def forget(self, digest: str) -> None:
        """Note that Redis no longer has the model of this digest."""
        self._known.pop(digest, None)

    def _check(self, run: Run) -> None:
        name = self._ledger.keys.name
        self._masked = None
        if run.policy:
            self._masked = _masked_format(run, name)
            if self._supernodes:
                raise ConfigError(
                    f"gateway.flower_app: run {name!r} is private, and supernodes do not mask "
                    "their updates: use a gateway without gateway.flower_app"
                )
            if not self._update.is_plain:
                raise ConfigError(
                    f"wire.update = {self._update.name!r}: run {name!r} is private, and masked "
                    "updates have a format of their own: leave it out"
                )
        if run.layout.controls:
            raise ConfigError(
                f"run {name!r} was made with strategy {run.strategy!r}, whose control variates a "
                "gateway does not give to devices: use another strategy for devices over HTTPS"
            )
        if run.by_steps and self._supernodes:
            raise ConfigError(
                f"gateway.flower_app: run {name!r} was made with strategy {run.strategy!r}, which "
                "divides by local steps and learning rate, and supernodes report neither: use "
                "fedasync, fedbuff or fedavg, or a gateway without gateway.flower_app"
            )
        if run.layout.unshared is not None and self._supernodes:
            raise ConfigError(
                f"gateway.flower_app: run {name!r} has frozen or local parameters, which "
                "supernodes do not know: train and share all of it, or use a gateway without "
                "gateway.flower_app"
            )
        if run.sends == "model" and self._update.of_changes:
            raise ConfigError(
                f"wire.update = {self._update.name!r}: run {name!r} was made with strategy "
                f"{run.strategy!r}, which takes models, and {self._update.kind} is too coarse for "
                "them: use bf16 or int8"
            )


def _masked_format(run: Run, name: str) -> Format:
    """The format of a private run's updates. Raises ConfigError."""
    with importing("a private run"):
        from fedstream.private.policy import PrivacyPolicy

    return PrivacyPolicy.parsed(run.policy.encode(), f"the policy of run {name!r}").format


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica's settings, connections and state, which its parts share."""

    name: str
    settings: GatewaySettings
    lease: LeaseSettings
    update: Format  # the wanted format of updates
    keys: Keys
    client: Client
    ledger: GatewayLedger
    outbox: Outbox
    group: Group  # of the replica's own stream of tasks
    sessions: DeviceSessions
    run_cache: RunCache
