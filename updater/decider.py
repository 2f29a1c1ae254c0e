"""Deciding on queue entries: each update is checked and mixed in by the strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.streams import Entry
from fedstream.core import reasons
from fedstream.core.errors import BadMessage, BlobDamaged, BlobMissing, Undecodable
from fedstream.core.formats import F32, Format, format_of
from fedstream.core.layout import Model, Payload
from fedstream.core.messages import (
    Outcome,
    RoundEnd,
    SetQuarantine,
    Upload,
    Version,
)
from fedstream.journal import QuarantineSet, RoundClosed, Taken
from fedstream.journal.progress import Progress, Step, close_round, take
from fedstream.journal.rebuild import end_of
from fedstream.journal.records import DROPPED_ROUNDS, QUARANTINES, WIRE_FORMATS, Counted
from fedstream.runtime.service import Context
from fedstream.updater import refusals
from fedstream.updater.intake import LARGE, Intake, Queued
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.publisher import blob_of, version_of
from fedstream.updater.state import Change, RunState, Undecided


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Makes a change of each queue entry, on top of a state."""

    context: Context
    metrics: UpdaterMetrics
    intake: Intake
    keys: Keys
    ledger: UpdaterLedger
    lease: Lease
    max_norm: float | None
    norm_factor: float
    max_samples: int | None  # None: bounded by other devices' claims
    weights: bool  # the journal keeps the updates' bytes
    said: Callable[[str], bool]  # whether the segment's head declares a need to its readers
    format: Format  # of published models

    async def change(self, queued: Queued, state: RunState) -> Change | Undecided | None:
        """Decide on a queue entry; None if the entry is undecodable or no longer expected.

        Afterwards only the returned change may follow ``state``, because the strategy's memory
        contains it already. Exception: while lost versions are being remade, the decision uses a
        copy of the memory, so a change that belongs to none of them leaves ``state`` unchanged.
        """
        entry, message = queued.entry, queued.message
        if isinstance(message, BadMessage):
            await self.ledger.bury(self.keys.queue, "", entry, str(message))
            return None
        if isinstance(message, RoundEnd):
            if message.drops and not self.said(DROPPED_ROUNDS):
                return Undecided(DROPPED_ROUNDS)
            apart = self._apart(state)
            return await self._off_loop(state, lambda: self._round_end(entry, message, apart))
        if isinstance(message, SetQuarantine):
            changed = _quarantined(entry, message, state, self.ledger.now())
            is_said = changed.record is None or self.said(QUARANTINES)
            return changed if is_said else Undecided(QUARANTINES)
        # Checked before mixing into the strategy's memory, which cannot be undone.
        if message.format != F32.name and not self.said(WIRE_FORMATS):
            return Undecided(WIRE_FORMATS)
        if (end := state.ends.get(message.task)) is not None:
            await self.intake.unfetch(entry)
            self._warn("update already in the journal", message)
            return Change(entry.id, None, (), state.progress, end=end, blob=message.blob)
        change = await self._update(entry, message, state)
        if change is None:
            self._warn("update no longer expected", message)
        elif change.end is not None and change.end.reason:
            self._warn("update refused", message, reason=change.end.reason)
        return change

    def _warn(self, event: str, upload: Upload, **about: str) -> None:
        self.context.log.warning(event, task=upload.task, device=upload.device, **about)

    async def _update(self, entry: Entry, upload: Upload, state: RunState) -> Change | None:
        """Check an update and mix it in; None if Redis no longer expects it."""
        upload = state.progress.norms.weighable(upload, self.max_samples)
        refusal = (
            reasons.RUN_FINISHED
            if state.is_over
            else reasons.DEVICE_QUARANTINED
            if upload.device in state.quarantines.by_device
            # The journal no longer shows whether the update was applied before.
            else reasons.TOO_OLD
            if upload.tau < state.forgotten
            else refusals.by_word(upload, state.strategy, state.progress.state)
        )
        if refusal:
            await self.intake.unfetch(entry)
            return self._refused(entry, upload, state.progress, refusal, state.besides)
        try:
            with self.metrics.timed("fetch"):
                update = await self.intake.fetched(entry, upload, state.layout, state.ends)
        except BlobMissing:
            # If the update is not awaited, Redis fell back to a state before its admission, so
            # it may come again; or our successor has processed it.
            refusal = reasons.BLOB_MISSING
            if not await self.ledger.awaits(upload):
                return None
        except BlobDamaged:
            refusal = reasons.DIGEST
        if refusal:
            return self._refused(entry, upload, state.progress, refusal, state.besides)
        spares = self.intake.spares
        into = update if isinstance(update, Model) else spares.model(state.layout)
        spare, apart = spares.model(state.layout), self._apart(state)
        return await self._off_loop(
            state, lambda: self._mixed_in(entry, upload, update, into, spare, apart)
        )

    def _apart(self, state: RunState) -> RunState:
        """The state whose memory may be written: a copy if the change may be dropped later."""
        if state.ahead is None:
            return state
        memory = state.progress.state.memory
        return state.apart(memory.model and self.intake.spares.model(state.layout))

    # arithmetic

    def _mixed_in(
        self,
        entry: Entry,
        upload: Upload,
        sent: Payload,
        update: Model,
        spare: Model,
        state: RunState,
    ) -> Change:
        """Decode an update into ``update``, check its content, and mix it in."""
        before, timed, unused = state.progress, self.metrics.timed, (update, spare, sent)
        if sent is not update:
            try:
                with timed("decode"):
                    format_of(upload.format).decode(sent.buffer, update)
            except Undecodable as error:
                return self._refused(
                    entry, upload, before, error.reason, state.besides, used=unused
                )
        with timed("check"):
            refusal, sizes = refusals.by_content(
                upload,
                state.strategy,
                update,
                before,
                max_norm=self.max_norm,
                norm_factor=self.norm_factor,
            )
        before = before.with_sizes(sizes)
        if refusal:
            return self._refused(entry, upload, before, refusal, state.besides, sizes, unused)
        with timed("mix"):
            step = take(state.strategy, before, upload, update, spare)
        if step.decision is None or step.decision.outcome == "dropped":
            return self._refused(
                entry, upload, before, reasons.TOO_STALE, state.besides, sizes, unused
            )
        version, given, finish = self._made(state, step)
        outcome: Outcome = "applied" if step.decision.outcome == "applied" else "buffered"
        record = Taken(
            entry=entry.id,
            upload=_as_recorded(upload),
            outcome=outcome,
            staleness=step.decision.staleness,
            weight=step.decision.weight,
            version=step.after.state.version,
            digest=version.digest if version else None,
            given=version.given if version else None,
            time=version.time if version else self.ledger.now(),
            received=entry.time,
            finished=finish,
            counts=dict(state.besides),
            sizes=sizes,
        )
        return Change(
            entry.id,
            record,
            (sent,) if self.weights else (),
            step.after,
            version,
            end_of(record),
            upload.blob,
            finish,
            given=given,
            used=(before.state.model, update, spare, sent),
        )

    def _round_end(self, entry: Entry, message: RoundEnd, state: RunState) -> Change:
        """End a round: make a version of the buffered updates, unless it was made already.

        A dropped round makes no version; the request is ignored if another round has begun.
        """
        before = state.progress
        if state.ends.obeyed(entry.id):
            return Change(entry.id, None, (), before)
        drops, held = message.drops, tuple(one.device for one in before.held)
        is_past = message.version != state.version or held[: len(drops)] != drops
        late, dropped = state.is_over or (bool(drops) and is_past), 0
        if drops and not late:
            dropped = len(held)
        step = (
            Step(before)
            if late
            else close_round(state.strategy, before, message.version, drops=dropped > 0)
        )
        version, given, finish = self._made(state, step)
        record = RoundClosed(
            entry=entry.id,
            round=message.version,
            why=message.why,
            late=late,
            dropped=dropped,
            version=step.after.state.version,
            digest=version.digest if version else None,
            given=version.given if version else None,
            time=version.time if version else self.ledger.now(),
            received=entry.time,
            finished=finish,
            counts=dict(state.besides),
        )
        used = tuple(before.state.models()) if version is not None or dropped else ()
        return Change(
            entry.id, record, (), step.after, version, finish=finish, used=used, given=given
        )

    def _made(
        self, state: RunState, step: Step
    ) -> tuple[Version | None, Payload | None, str | None]:
        """The version that a step made, its published payload, and why the version ends the run."""
        if step.made is None:
            return None, None, None
        model = step.after.state.model
        with self.metrics.timed("digest"):
            digest = model.digest_like(state.digest)
        number, epoch = step.after.state.version, self.lease.number
        with self.metrics.timed("encode"):
            version, given = version_of(
                model,
                self.format,
                state.strategy.sends,
                self.intake.spares.room,
                version=number,
                time=self.ledger.now(),
                epoch=epoch,
                parent=number - 1,
                digest=digest,
                blob=blob_of(number, epoch, self.lease.nonce),
                updates=step.made,
            )
        return version, given, f"version {number} reached" if number >= state.run.versions else None

    def _refused(
        self,
        entry: Entry,
        upload: Upload,
        before: Progress,
        reason: str,
        counts: Mapping[str, int],
        sizes: Counted = (),
        used: tuple[Payload, ...] = (),
    ) -> Change:
        """The change for a refused update, which never reaches the model."""
        outcome: Outcome = "given_up" if reason == reasons.RUN_FINISHED else "refused"
        version = before.state.version
        record = Taken(
            entry=entry.id,
            upload=_as_recorded(upload),
            outcome=outcome,
            reason=reason,
            staleness=max(0, version - upload.since),
            version=version,
            time=self.ledger.now(),
            received=entry.time,
            counts=dict(counts),
            sizes=sizes,
        )
        return Change(entry.id, record, (), before, end=end_of(record), blob=upload.blob, used=used)

    async def _off_loop(self, state: RunState, work: Callable[[], Change]) -> Change:
        """Run arithmetic on a large model in a thread, on a small one here."""
        return await asyncio.to_thread(work) if state.layout.nbytes > LARGE else work()


def _quarantined(entry: Entry, wanted: SetQuarantine, state: RunState, now: float) -> Change:
    """Put devices in quarantine or release them; without a record if nothing changes."""
    before, devices = state.progress, state.quarantines.changed(wanted)
    if not devices or state.ends.obeyed(entry.id):
        return Change(entry.id, None, (), before)
    record = QuarantineSet(
        entry=entry.id,
        devices=devices,
        release=wanted.release,
        why=wanted.why,
        version=state.version,
        time=now,
        received=entry.time,
        counts=dict(state.besides),
    )
    return Change(entry.id, record, (), before)


def _as_recorded(upload: Upload) -> Upload:
    """The upload without the fields that only a reader of its blob needs."""
    return upload.model_copy(update={"chunks": None})
