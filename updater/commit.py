"""The updater's writes to Redis: models, devices' vectors, and the commits that name them.

Models and vectors are written before the script that names them, and deleted by such a script;
these scripts check the fencing token. A blob that no script ever names expires.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.published import read_newest
from fedstream.broker.streams import Look
from fedstream.core.errors import BlobDamaged, BlobMissing
from fedstream.core.formats import Format
from fedstream.core.layout import Layout, Model, Payload, Unshared, vector_of
from fedstream.core.messages import Version
from fedstream.core.records import Commit, Head, PrivacyLoss, ended, head_of
from fedstream.journal import RoundClosed, SumOpened
from fedstream.journal.progress import Progress
from fedstream.journal.recorder import Recorder
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context
from fedstream.strategies import DeviceVectors, Strategy
from fedstream.updater.decider import blob_of, version_of
from fedstream.updater.intake import is_small, together
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.state import Change, RunState, step_size

if TYPE_CHECKING:
    from fedstream.updater.sums import Sums

_LOST_S = 0.1  # between two looks at an emptied Redis
_UNNAMED_S = 600.0  # life of a blob that no script has named yet


@dataclass(frozen=True)
class Retained:
    """A processed entry that stays in the queue until its record is on disk."""

    position: int  # after the record
    entry: str
    blob: str | None


@dataclass(frozen=True)
class PendingCommit:
    """A change that is journalled but not committed yet."""

    change: Change
    position: int  # after the record
    journalled: Mapping[str, int]  # ended tasks up to this change, by outcome


@dataclass(kw_only=True)
class Commits:
    """The journalled changes that Redis has not accepted yet, and their commits."""

    context: Context
    metrics: UpdaterMetrics
    recorder: Recorder
    publisher: Publisher
    ledger: UpdaterLedger
    lease: Lease
    format: Format  # of published models
    sums: Sums | None = None  # of a private run
    pending: deque[PendingCommit] = field(default_factory=deque)  # oldest first
    retained: list[Retained] = field(default_factory=list)  # oldest first
    told: Mapping[str, int] = field(default_factory=dict)  # counts of committed ends
    told_quarantines: int = 0  # committed control entries about quarantines
    told_loss: PrivacyLoss | None = None  # committed; None: unknown

    def begin_from(self, state: RunState) -> None:
        """Start without pending changes, from a state that Redis has or is to be compared with."""
        self.pending.clear()
        self.retained.clear()
        self.told, self.told_quarantines = state.journalled, state.quarantines.taken
        self.told_loss = None
        self.publisher.forget_written()

    # one change

    async def settle(
        self, state: RunState, look: Look | None = None
    ) -> tuple[RunState, Sequence[Change]]:
        """Publish and commit the oldest pending changes, small ones together.

        Returns the changes if Redis accepted them. ``look``: a read of the queue in the same
        exchange.
        """
        due = self._due(state)
        publish = [one.change.version for one in due if one.change.version is not None]
        if state.ahead is not None and publish:
            if publish[0].version <= state.ahead.version:
                publish = []  # Redis already has this version
            else:
                state = state.caught_up()
        ends = [one.change.end for one in due if one.change.end is not None]
        with self.metrics.timed("publish"):
            used = {end.device for end in ends if end.device is not None and end.weight is not None}
            # The devices' vectors must be handed out before their next tasks.
            if used and not await self.hand_out(due[-1].change.after, state.strategy, used):
                return state, ()
            ahead: list[Command] = []
            if publish:  # only the last version's model is ever readable
                given = next(one.change.given for one in reversed(due) if one.change.version)
                ahead += await self.publisher.prepare(publish[-1], given)
            state, done = await self._commit(state, due, publish, ahead, look)
        if not done:
            return state, ()
        for _ in due:
            self.pending.popleft()
        for end in ends:
            self.metrics.updates.labels(end.outcome, end.reason).inc()
            if end.weight is not None:
                self.metrics.staleness.observe(end.staleness or 0)
                self.metrics.weight.observe(end.weight)
        for record in (one.change.record for one in due):
            if isinstance(record, RoundClosed) and record.dropped:
                self.metrics.dropped.inc()
                self.context.log.warning(
                    "round dropped: too few answers", version=record.round, answers=record.dropped
                )
            elif isinstance(record, SumOpened):
                self.metrics.sums.labels(record.reason or "opened").inc()
                if record.reason:
                    self.context.log.warning(
                        "sum dropped",
                        reason=record.reason,
                        updates=record.updates,
                        version=record.version,
                    )
        for version in publish:
            self.metrics.version.set(version.version)
            for update in version.updates:
                self.context.trace(
                    "published", task=update.task, device=update.device, version=version.version
                )
        return state, [one.change for one in due]

    def _due(self, state: RunState) -> Sequence[PendingCommit]:
        """The oldest pending changes that can be committed together."""
        if state.ahead is not None or not is_small(state.layout):
            return (self.pending[0],)
        return tuple(islice(self.pending, together(state.layout)))

    async def write_ahead(self, change: Change, state: RunState) -> None:
        """Write a large model of a change that is being journalled."""
        version = change.version
        if version is None or is_small(state.layout) or state.ahead is not None:
            return  # a small model: a later change may be committed with it
        if version.size > blobs.CHUNK:
            await self.publisher.prepare(version, change.given)

    async def release(self, state: RunState) -> RunState:
        """Delete the retained entries whose records are on disk by now."""
        state, _ = await self._commit(state)
        return state

    async def _commit(
        self,
        state: RunState,
        due: Sequence[PendingCommit] = (),
        publish: Sequence[Version] = (),
        ahead: Sequence[Command] = (),
        look: Look | None = None,
    ) -> tuple[RunState, bool]:
        """Commit once; return the state after that, and whether Redis accepted the commit.

        The commit deletes processed queue entries whose records are on disk, and retains the
        others.
        """
        changes = [one.change for one in due]
        progress, told = state.progress, self.told
        if due:
            progress, told = due[-1].change.after, due[-1].journalled
        done_with = [
            *self.retained,
            *(
                Retained(one.position, one.change.entry, one.change.blob)
                for one in due
                if one.change.entry
            ),
        ]
        ends = [(one.record is not None, one.end) for one in changes if one.end is not None]
        quarantines, loss = state.quarantines, self._loss(progress)
        on_disk = bisect_right(done_with, self.recorder.safe, key=lambda one: one.position)
        safe = done_with[:on_disk]
        commit = Commit(
            versions=publish,
            held=tuple(one.device for one in progress.held),
            retained=len(done_with) - on_disk,
            mean_staleness=progress.mean_staleness,
            at=progress.state.version,
            ends=[end for _, end in sorted(ends, key=lambda one: one[0])],
            journalled=told,
            before=ended(self.told),
            entries=tuple(one.entry for one in safe),
            updates=tuple(one.blob for one in safe if one.blob),
            retired=self.publisher.outlived(publish[-1].size) if publish else (),
            events=[event for change in changes for event in change.events()],
            finish=next((change.finish for change in changes if change.finish is not None), None),
            quarantines=quarantines if quarantines.taken != self.told_quarantines else None,
            quarantines_before=self.told_quarantines,
            privacy=loss if loss != self.told_loss else None,
            step=step_size(state.strategy, progress),
        )
        done = await self.ledger.commit(self.lease.token, commit, ahead=ahead, look=look)
        if done.what == "done":
            self.retained, self.told = done_with[on_disk:], told
            self.told_quarantines, self.told_loss = quarantines.taken, loss
            self.publisher.published(publish, [b for b in commit.retired if b not in done.spared])
            state = state.counted(done.counts, told)
            if done.finished != state.finished and len(self.pending) <= len(due):
                return state.to_compare(), True  # the run was ended, or Redis forgot its end
        elif done.what == "unwritten":
            self.publisher.unwritten(publish[-1])
        elif done.what == "lost":
            await pause(self.context.stop, _LOST_S)  # until the lease is taken again
        else:
            return state.to_compare(), False  # Redis is behind
        return state, done.what == "done"

    def _loss(self, progress: Progress) -> PrivacyLoss | None:
        return self.sums.loss(progress) if self.sums is not None else None

    # everything

    async def publish_again(self, state: RunState, why: str) -> RunState | None:
        """Publish the newest version and the counts again.

        ``why``: the loss to log; '': none. Returns None if Redis was emptied or fell back once more
        meanwhile.
        """
        # Make both now: after a retaken lease, the version would have another epoch.
        epoch, token = self.lease.number, self.lease.token
        if state.counts and why:
            self.context.log.error("Redis lost versions: publishing the newest", found=why)
        progress, model = state.progress, state.progress.state.model
        version, payload = await asyncio.to_thread(
            version_of,
            model,
            self.format,
            state.strategy.sends,
            version=state.version,
            time=state.time,
            epoch=epoch,
            digest=state.digest,
            blob=blob_of(state.version, epoch, self.lease.nonce),
            updates=state.made,
        )
        if model.layout.unshared is not None:
            await self.publisher.write_unshared(model.layout.unshared)
        await self.publisher.write(version, payload)
        # Readers of the version need the vectors.
        if not await self.hand_out(progress, state.strategy):
            return None
        reply = await self.ledger.create(
            token,
            state.run,
            version,
            counts=state.counts,
            journalled=state.journalled,
            done=state.ends.get,
            held=tuple(one.device for one in progress.held),
            mean_staleness=progress.mean_staleness,
            quarantines=state.quarantines,
            privacy=self._loss(progress),
            step=step_size(state.strategy, progress),
        )
        if reply.what != "created":
            await pause(self.context.stop, _LOST_S)
            return None
        if self.sums is not None:
            self.sums.renew_key()
        await self.publisher.look()
        return state.counted(reply.counts, state.journalled).agreeing(epoch)

    # devices' vectors

    async def hand_out(
        self, progress: Progress, strategy: Strategy, devices: Set[int] | None = None
    ) -> bool:
        """Hand out the vectors (SCAFFOLD's c_i) of ``devices``, or of all devices.

        Returns False if Redis was emptied meanwhile.
        """
        vectors = progress.state.memory.devices
        if vectors is None or not strategy.controls:
            return True
        among = vectors.heard if devices is None else vectors.heard & devices
        done = await self.publisher.hand_out(vectors, among)
        if not done:
            await pause(self.context.stop, _LOST_S)  # until the lease is taken again
        return done


class Publisher:
    """The models in Redis by blob name, and a vector for each device (SCAFFOLD's c_i)."""

    def __init__(
        self,
        client: Client,
        ledger: UpdaterLedger,
        lease: Lease,
        *,
        keep_versions: int,
        keep_bytes: int,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._lease = lease
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._kept: dict[str, int] = {}  # blob -> version, oldest first
        self._written: set[str] = set()  # completely written blobs of pending versions

    # models

    async def look(self) -> None:
        """Read the list of models that Redis has."""
        self._kept = await self._ledger.kept()

    async def prepare(self, version: Version | None, payload: Payload | None) -> Sequence[Command]:
        """Write a version's model, or return the commands that write it with the commit."""
        if version is None or payload is None or version.blob in self._written:
            return ()  # after a lost reply, the model may be published, and must not expire
        key = self._ledger.keys.model(version.blob)
        ahead = await blobs.prepare(
            self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded
        )
        self._written.add(version.blob)
        return ahead

    async def write(self, version: Version, payload: Payload) -> None:
        """Write a version's model, replacing any blob of this name."""
        key = self._ledger.keys.model(version.blob)
        await self._client.call("UNLINK", key)
        await blobs.write(self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded)

    async def keep(self, head: Head, layout: Layout) -> bool:
        """Remove any expiry of the newest version's model; return whether Redis has all its bytes.

        The same for the layout's unshared values.
        """
        heads = [head] if layout.unshared is None else [head, head_of(layout.unshared)]
        return all([await self._keep(one, layout.nbytes) for one in heads])

    async def _keep(self, head: Head, size: int) -> bool:
        key = self._ledger.keys.model(head.blob)
        size = head.encoded.size if head.encoded else size
        return await blobs.keep(self._client, key, size, chunks=head.chunks, encoded=head.encoded)

    async def write_unshared(self, unshared: Unshared) -> None:
        """Write the unshared values, for as long as the run is in Redis, unless they are there.

        Raises as :meth:`Unshared.model`.
        """
        head = head_of(unshared)
        key, size = self._ledger.keys.model(head.blob), unshared.layout.nbytes
        if await self._keep(head, size):
            return
        values = await asyncio.to_thread(unshared.model)
        await self._client.call("UNLINK", key)
        await blobs.write(self._client, key, values, expire_s=_UNNAMED_S, encoded=head.encoded)
        await self._keep(head, size)

    async def read(self, head: Head, model: Model) -> None:
        """Read the newest model as devices receive it. Raises BlobMissing or BlobDamaged."""
        await read_newest(self._client, self._ledger.keys, head, model)

    def forget_written(self) -> None:
        """Forget the prepared models, which will never be committed."""
        self._written.clear()

    def unwritten(self, version: Version) -> None:
        """Note that Redis lacks a version's prepared model: it expired or never arrived."""
        self._written.discard(version.blob)

    def published(self, versions: Sequence[Version], retired: Sequence[str]) -> None:
        """Note that versions were committed and the models ``retired`` deleted.

        Besides the last version's model, Redis keeps models that were written for an earlier try,
        as that try may have succeeded with a lost reply.
        """
        for version in versions:
            if version.blob in self._written:
                self._kept[version.blob] = version.version
                self._written.remove(version.blob)
        for blob in retired:
            self._kept.pop(blob, None)

    def _most(self, size: int) -> int:
        """The number of models of ``size`` bytes to keep."""
        by_bytes = self._keep_bytes // max(size, 1)
        # At least two: a download of the newest model must be able to finish after the next commit.
        return max(2, min(self._keep_versions, by_bytes))

    def outlived(self, size: int) -> tuple[str, ...]:
        """The models to delete before another one of ``size`` bytes is published."""
        surplus = len(self._kept) + 1 - self._most(size)
        return tuple(list(self._kept)[:surplus]) if surplus > 0 else ()

    async def make_room(self) -> int:
        """Delete all models but the newest, for a full Redis; return their number.

        The best version's is deleted too.
        """
        self._kept = await self._ledger.kept()
        older = list(self._kept)[:-1]
        if not older or await self._ledger.retire(self._lease.token, older) != "done":
            return 0
        for blob in older:
            del self._kept[blob]
        return len(older)

    # devices' vectors

    async def hand_out(self, vectors: DeviceVectors, devices: set[int]) -> bool:
        """Publish the vectors of ``devices`` to the trainers of these devices.

        Returns False if Redis was emptied meanwhile.
        """
        keys = self._ledger.keys
        for device in devices:
            vector = vector_of(vectors[device])
            digest, size = vector.digest(), vector.layout.nbytes
            staged = keys.staged(device, digest)
            ahead = await blobs.prepare(self._client, staged, vector, expire_s=_UNNAMED_S)
            token = self._lease.token
            if await self._ledger.hand_out(token, device, digest, size, ahead=ahead) != "done":
                return False
        return True

    async def recall(self, vectors: DeviceVectors) -> list[str]:
        """Replace the vectors by the published ones; return the reasons for lost vectors."""
        keys, lost = self._ledger.keys, []
        for device in range(vectors.devices):
            vector = Model(vector_of(vectors[device]).layout)
            try:
                if await blobs.recall(self._client, keys.device(device), vector):
                    vectors.write(device)[:] = vector.floats
            except (BlobDamaged, BlobMissing) as error:
                lost.append(str(error))
        return lost
