"""Deciding on queue entries: each update is checked and mixed in by the strategy.

The decisions are pure, except that :meth:`Decider.change` fetches an update between the update's
two checks. The simulation shares the checks. The updater alone decides on reasons that concern the
pipeline (the run is over, a blob is gone).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median_low
from typing import TYPE_CHECKING, Any

import numpy as np

from fedstream.broker.blobs import chunks_of
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.streams import Entry
from fedstream.core import reasons
from fedstream.core.digest import algorithm_of
from fedstream.core.errors import BlobDamaged, BlobMissing, Undecodable
from fedstream.core.formats import F32, Format, format_of
from fedstream.core.given import given
from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import (
    DevicesEvaluated,
    Event,
    Outcome,
    RoundEnd,
    Sends,
    SetQuarantine,
    StepProposed,
    Upload,
    Version,
)
from fedstream.journal import (
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    StepScaled,
    SumOpened,
    Taken,
)
from fedstream.journal.norms import WINDOW, sizes
from fedstream.journal.progress import (
    Progress,
    Step,
    close_round,
    forget,
    open_sum,
    take,
    weight_of,
)
from fedstream.journal.rebuild import end_of, unfit
from fedstream.journal.records import (
    DROPPED_ROUNDS,
    EVALUATIONS,
    QUARANTINES,
    WIRE_FORMATS,
    Counted,
)
from fedstream.runtime.service import Context
from fedstream.strategies import State, Strategy
from fedstream.strategies.mixing import norm
from fedstream.updater.buffers import BufferPool
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.state import Change, Ends, RunState

if TYPE_CHECKING:
    from fedstream.updater.sums import Opening, Sums

MOST_COUNTED = 1_000_000  # most minibatches that one update may add to a batch norm's counter
LARGEST = 1e37  # norm; the difference of two models within it cannot overflow float32,
LARGEST_DELTA = 1e30  # nor can a batch's sum of deltas within this, times its rate
LARGE = 4 << 20  # bytes; arithmetic on larger models runs in a thread
_AT_FIRST = (1,) * 20  # samples of updates before the first
_SAMPLES = 10  # times the median

QueueMessage = Upload | RoundEnd | SetQuarantine | DevicesEvaluated | StepProposed


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Turns queue entries into changes, each on top of a state."""

    context: Context
    metrics: UpdaterMetrics
    ledger: UpdaterLedger
    lease: Lease  # its epoch and nonce name the versions
    fetched: Callable[[Entry, Upload, Layout, Ends], Awaitable[Payload]]  # :meth:`Intake.fetched`
    unfetch: Callable[[Entry], Awaitable[None]]  # :meth:`Intake.unfetch`
    spares: BufferPool
    max_norm: float | None
    norm_factor: float
    max_samples: int | None  # None: bounded by other devices' claims
    weights: bool  # the journal keeps the updates' bytes
    sums: Sums | None = None  # of a private run
    format: Format  # of published models

    async def change(self, entry: Entry, message: QueueMessage, state: RunState) -> Change | None:
        """Decide on an entry on top of ``state``; None for an update that Redis doesn't expect.

        Afterwards only the returned change may follow ``state``, because the strategy's memory
        contains it already. Exception: while lost versions are being remade, the decision uses a
        copy of the memory, so a change that belongs to none of them leaves ``state`` unchanged.
        """
        if isinstance(message, SetQuarantine):
            return await _off_loop(state, partial(self._set_quarantine, entry, message, state))
        if isinstance(message, DevicesEvaluated):
            return self._end_evaluation(entry, message, state)
        if isinstance(message, StepProposed):
            return self._scale_step(entry, message, state)
        if isinstance(message, RoundEnd):
            return await _off_loop(state, partial(self._end_round, entry, message, state))
        # Checked before mixing into the strategy's memory, which cannot be undone.
        if (end := state.ends.get(message.task)) is not None:
            await self.unfetch(entry)
            self._warn("update already in the journal", message)
            return Change(entry.id, None, (), state.progress, end=end, blob=message.blob)
        upload, refusal = self._check(message, state)
        if refusal:
            await self.unfetch(entry)
        else:
            try:
                with self.metrics.timed("fetch"):
                    sent = await self.fetched(entry, upload, state.layout, state.ends)
            except BlobMissing:
                # If the update is not awaited, Redis fell back to a state before its admission, so
                # it may come again; or our successor has processed it.
                if not await self.ledger.awaits(upload):
                    self._warn("update no longer expected", upload)
                    return None
                refusal = reasons.BLOB_MISSING
            except BlobDamaged:
                refusal = reasons.DIGEST
        if refusal:
            change = self._refuse(entry, upload, state, refusal)
        else:
            change = await _off_loop(state, partial(self._mix_in, entry, upload, sent, state))
        if change.end is not None and change.end.reason:
            self._warn("update refused", upload, reason=change.end.reason)
        return change

    def _warn(self, event: str, upload: Upload, **about: str) -> None:
        self.context.log.warning(event, task=upload.task, device=upload.device, **about)

    # an update

    def _check(self, upload: Upload, state: RunState) -> tuple[Upload, str]:
        """The upload with its counted samples, and the reason to refuse it unread ('': none).

        For the counted samples see :func:`weighable`.
        """
        if state.strategy.masked:
            # The helper weighs an update by the version that its device has signed.
            upload = upload.model_copy(update={"handed": None})
        upload = weighable(upload, state.progress.norms.samples, self.max_samples)
        if state.is_over:
            return upload, reasons.RUN_FINISHED
        if upload.device in state.quarantines.by_device:
            return upload, reasons.DEVICE_QUARANTINED
        if upload.tau < state.forgotten:
            # The journal no longer shows whether the update was applied before.
            return upload, reasons.TOO_OLD
        refusal = refusal_by_metadata(upload, state.strategy, state.progress.state)
        if not refusal and self.sums is not None:
            refusal = self.sums.refusal(upload, state)
        return upload, refusal

    def _mix_in(self, entry: Entry, upload: Upload, sent: Payload, state: RunState) -> Change:
        """Decode a checked update, check its content, and mix it in.

        ``sent``: the update as received, a Model unless it is encoded.
        """
        spares, timed = self.spares, self.metrics.timed
        update = sent if isinstance(sent, Model) else spares.model(state.layout)
        spare, state = spares.model(state.layout), self._apart(state)
        unused: tuple[Payload, ...] = (update, spare, sent)
        if sent is not update:
            try:
                with timed("decode"):
                    format_of(upload.format).decode(sent.buffer, update)
            except Undecodable as error:
                return self._refuse(entry, upload, state, error.reason, used=unused)
        refusal: str = ""
        counted: Counted = ()
        with timed("check"):
            if self.sums is None:
                refusal, counted = refusal_by_content(
                    upload,
                    state.strategy,
                    update,
                    state.progress,
                    max_norm=self.max_norm,
                    norm_factor=self.norm_factor,
                )
            elif not self.sums.is_signed(upload, sent):  # values are checked in the opened sum
                refusal = reasons.SEAL
        if refusal:
            return self._refuse(entry, upload, state, refusal, counted, unused)
        with timed("mix"):
            before = state.progress.with_sizes(counted)
            step = take(state.strategy, before, upload, update, spare)
        if step.decision is None or step.decision.outcome == "dropped":
            reason = step.decision.reason if step.decision else reasons.TOO_STALE
            refused = self._refuse(entry, upload, state, reason, counted, unused)
            return replace(refused, suspects=step.suspects)
        version, payload, finish = self._made(state, step)
        record = Taken(
            entry=entry.id,
            upload=_as_recorded(upload),
            outcome="applied" if step.decision.outcome == "applied" else "buffered",
            staleness=step.decision.staleness,
            weight=step.decision.weight,
            version=step.after.state.version,
            digest=version.digest if version else None,
            given=version.given if version else None,
            time=version.time if version else self.ledger.now(),
            received=entry.time,
            finished=finish,
            counts=dict(state.besides),
            sizes=counted,
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
            given=payload,
            used=(before.state.model, *unused),
            suspects=step.suspects,
        )

    def _refuse(
        self,
        entry: Entry,
        upload: Upload,
        state: RunState,
        reason: str,
        counted: Counted = (),
        used: tuple[Payload, ...] = (),
    ) -> Change:
        """The change for a refused update, which never reaches the model."""
        outcome: Outcome = "given_up" if reason == reasons.RUN_FINISHED else "refused"
        record = Taken(
            entry=entry.id,
            upload=_as_recorded(upload),
            outcome=outcome,
            reason=reason,
            staleness=max(0, state.version - upload.since),
            version=state.version,
            time=self.ledger.now(),
            received=entry.time,
            counts=dict(state.besides),
            sizes=counted,
        )
        after, end = state.progress.with_sizes(counted), end_of(record)
        return Change(entry.id, record, (), after, end=end, blob=upload.blob, used=used)

    # the sum of a private batch

    async def open_sum(self, sums: Sums, state: RunState) -> tuple[Change, SetQuarantine | None]:
        """Have the batch that is due opened; also quarantine the device that the helper names.

        The journal must be on disk. Raises as :meth:`Sums.open`.
        """
        with self.metrics.timed("open"):
            opening = await sums.open(state)
        decided = partial(self._open_sum, sums, opening, self._apart(state))
        return await _off_loop(state, decided), opening.quarantine

    def _open_sum(self, sums: Sums, opening: Opening, state: RunState) -> Change:
        before, sent, masks = state.progress, None, None
        if opening.masks is not None:
            sent, masks = Payload.empty(len(opening.masks)), self.spares.model(state.layout)
            sent.buffer[:] = np.frombuffer(opening.masks, np.uint8)
            sums.format.decode(sent.buffer, masks)
        with self.metrics.timed("mix"):
            step = open_sum(state.strategy, before, masks, opening.refused)
        version, payload, finish = self._made(state, step)
        # A round may be smaller than the rule's batch.
        needed = sums.least if state.strategy.rounds == "always" else state.strategy.batch
        record = SumOpened(
            intent=opening.intent.digest,
            updates=len(before.in_sum),
            reason=step.dropped,
            format=sums.format.name,
            masks=sent.digest_like(state.digest) if sent is not None else None,
            version=step.after.state.version,
            digest=version.digest if version else None,
            given=version.given if version else None,
            time=version.time if version else self.ledger.now(),
            finished=finish or sums.exhausted(step.after, state.run.devices, needed) or None,
            counts=dict(state.besides),
        )
        used: list[Payload] = [*before.state.models()]
        if masks is not None:
            used.append(masks)
        event = Event(
            what="sum_dropped" if step.dropped else "sum_opened",
            service="updater",
            time=record.time,
            version=record.version,
            reason=step.dropped or None,
            text=f"{record.updates} updates",
        )
        return Change(
            "",
            record,
            (sent,) if sent is not None else (),
            step.after,
            version,
            finish=record.finished,
            given=payload,
            used=tuple(used),
            event=event,
        )

    # control entries

    def _end_round(self, entry: Entry, message: RoundEnd, state: RunState) -> Change:
        """End a round: make a version of the buffered updates, unless it was made already.

        A dropped round makes no version; the request is ignored if another round has begun.
        """
        state = self._apart(state)
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
        version, payload, finish = self._made(state, step)
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
            entry.id, record, (), step.after, version, finish=finish, used=used, given=payload
        )

    def _set_quarantine(self, entry: Entry, wanted: SetQuarantine, state: RunState) -> Change:
        """Put devices in quarantine or release them; without a record if nothing changes."""
        devices = state.quarantines.changed(wanted)
        if not devices or state.ends.obeyed(entry.id):
            return Change(entry.id, None, (), state.progress)
        record = QuarantineSet(
            entry=entry.id,
            devices=devices,
            release=wanted.release,
            why=wanted.why,
            version=state.version,
            time=self.ledger.now(),
            received=entry.time,
            counts=dict(state.besides),
        )
        if wanted.release:
            return Change(entry.id, record, (), state.progress)
        state = self._apart(state)
        after = forget(state.strategy, state.progress, devices)
        return Change(entry.id, record, (), after)

    def _end_evaluation(self, entry: Entry, ended: DevicesEvaluated, state: RunState) -> Change:
        """Record an evaluation on the devices; without a record if it has one.

        A Redis that fell back may end an evaluation once more. Observers are told again, as the
        updater may have died between the record and the commit.
        """
        before, record = state.progress, None
        if ended.evaluation > state.evaluation:
            record = EvaluationEnded(
                entry=entry.id,
                evaluation=ended.evaluation,
                measured=ended.version,
                base=ended.base,
                devices=ended.devices,
                outcomes=ended.outcomes,
                sums=ended.sums,
                metrics=ended.metrics,
                version=state.version,
                time=self.ledger.now(),
                received=entry.time,
                counts=dict(state.besides),
            )
        event = Event(
            what="devices_evaluated",
            service="updater",
            time=self.ledger.now(),
            version=ended.version,
            metrics=ended.metrics,
            text=ended.summary,
        )
        return Change(entry.id, record, (), before, event=event)

    def _scale_step(self, entry: Entry, proposed: StepProposed, state: RunState) -> Change:
        """Scale the rule's step within its bounds; without a record if the proposal is void.

        It is void if the rule doesn't adapt, if the proposal is of versions on which, or before
        which, an earlier one was obeyed (it is repeated, late, or another evaluator's), or if it
        changes nothing.
        """
        before, rule = state.progress, state.strategy
        void = Change(entry.id, None, (), before)
        if rule.adapt is None or state.is_over:
            return void
        now, scale = rule.bounded(before.scale), rule.bounded(proposed.scale)
        known = before.scaled_at < proposed.at <= state.version
        if not known or scale == now or state.ends.obeyed(entry.id):
            return void
        was, rate = rule.step_rate * now, rule.step_rate * scale
        record = StepScaled(
            entry=entry.id,
            at=proposed.at,
            scale=scale,
            key=rule.step_key,
            rate=rate,
            metric=proposed.metric,
            scores=proposed.scores,
            version=state.version,
            time=self.ledger.now(),
            received=entry.time,
            counts=dict(state.besides),
        )
        event = Event(
            what="step_scaled",
            service="updater",
            time=record.time,
            version=state.version,
            text=f"{rule.step_key} from {was:.4g} to {rate:.4g}",
        )
        after = replace(before, scale=scale, scaled_at=proposed.at)
        return Change(entry.id, record, (), after, event=event)

    # both

    def _apart(self, state: RunState) -> RunState:
        """The state whose memory may be written: a copy if the change may be dropped later."""
        if state.ahead is None:
            return state
        memory = state.progress.state.memory
        return state.apart(memory.model and self.spares.model(state.layout))

    def _made(
        self, state: RunState, step: Step
    ) -> tuple[Version | None, Payload | None, str | None]:
        """The version that a step made, its published payload, and why the version ends the run."""
        if step.made is None:
            return None, None, None
        model, number = step.after.state.model, step.after.state.version
        epoch = self.lease.number
        with self.metrics.timed("digest"):
            digest = model.digest_like(state.digest)
        with self.metrics.timed("encode"):
            version, payload = version_of(
                model,
                self.format,
                state.strategy.sends,
                self.spares.room,
                version=number,
                time=self.ledger.now(),
                epoch=epoch,
                parent=number - 1,
                digest=digest,
                blob=blob_of(number, epoch, self.lease.nonce),
                updates=step.made,
            )
        finish = f"version {number} reached" if number >= state.run.versions else None
        return version, payload, finish


def need_of(entry: Entry, message: QueueMessage, state: RunState) -> str:
    """The feature whose need a segment's head must declare before this entry's record; '': none."""
    if isinstance(message, Upload):
        return WIRE_FORMATS if message.format != F32.name else ""
    if isinstance(message, RoundEnd):
        return DROPPED_ROUNDS if message.drops else ""
    if isinstance(message, DevicesEvaluated):
        return EVALUATIONS if message.evaluation > state.evaluation else ""
    if isinstance(message, StepProposed):
        return ""  # declared by a segment whose rule adapts
    changes = state.quarantines.changed(message) and not state.ends.obeyed(entry.id)
    return QUARANTINES if changes else ""


async def _off_loop(state: RunState, work: Callable[[], Change]) -> Change:
    """Run arithmetic on a large model in a thread, on a small one here."""
    return await asyncio.to_thread(work) if state.layout.nbytes > LARGE else work()


def _as_recorded(upload: Upload) -> Upload:
    """The upload without the fields that only a reader of its blob needs."""
    return upload.model_copy(update={"chunks": None})


# versions


def blob_of(version: int, epoch: int, nonce: str) -> str:
    """A unique name for the blob of a version's model, never reused for other bytes."""
    return f"{version}.{epoch}.{nonce}"


def version_of(
    model: Model,
    how: Format,
    sends: Sends,
    room: Callable[[int], Payload] = Payload.empty,
    *,
    version: int,
    **about: Any,
) -> tuple[Version, Payload]:
    """Make a version and its payload in the format ``how``. ``about``: the version's other fields.

    ``room``: allocates the payload if the format needs memory of its own.
    """
    one = given(
        model, how, room, version=version, sends=sends, digests=algorithm_of(about["digest"])
    )
    size, encoded = one.payload.buffer.nbytes, one.encoded
    if encoded is not None:
        about |= {"format": encoded.format, "given": encoded.digest}
    about |= {"size": size, "chunks": chunks_of(size)}
    return Version(version=version, **about), one.payload


# the checks of updates


def weighable(upload: Upload, newest: Sequence[int], most: int | None) -> Upload:
    """The upload with its counted samples: if its site is trusted, all that it claims.

    An untrusted site's device may claim any number of samples, and some rules weigh its update by
    them. So an untrusted update counts with at most

        10 * max(1, median)

    samples. The median is of the samples that the newest updates counted with, as if 20 updates of
    one sample had come before the first. So the first untrusted updates count alike, and later the
    limit grows at most tenfold each time that half of the newest updates have reached it.

    ``newest``: samples of the newest updates. ``most``: the operator's limit in place of this one.
    """
    if upload.handed is None:
        return upload
    if most is None:
        most = _SAMPLES * max(1, median_low((*_AT_FIRST, *newest)[-WINDOW:]))
    if upload.samples <= most:
        return upload
    return upload.model_copy(update={"samples": most, "claimed": upload.samples})


def refusal_by_metadata(upload: Upload, rule: Strategy, state: State) -> str:
    """The reason to refuse an update by its metadata, before it is read; '' for none."""
    limit = rule.max_staleness
    if upload.tau > state.version:
        return reasons.UNKNOWN_BASE
    if limit is not None and state.version - upload.since > limit:
        return reasons.TOO_STALE
    if (why := unfit(rule, upload)) != "":
        return why
    if upload.sends != rule.sends:
        return reasons.sends(upload.sends)
    layout = state.model.layout
    if upload.layout != layout.signature:
        return reasons.LAYOUT
    if (refusal := refusal_by_format(upload, layout)) != "":
        return refusal
    return "" if format_of(upload.format).is_masked == rule.masked else reasons.WIRE_FORMAT


def refusal_by_format(upload: Upload, layout: Layout) -> str:
    """The reason to refuse an update by its format and encoded size; '' for none."""
    try:
        how = format_of(upload.format)
    except Undecodable as error:
        return error.reason
    if how.of_changes and upload.sends == "model":
        return reasons.WIRE_FORMAT
    least, most = how.sizes(layout)
    return "" if least <= upload.size <= most else reasons.SIZE


def refusal_by_content(
    upload: Upload,
    rule: Strategy,
    update: Model,
    before: Progress,
    *,
    max_norm: float | None,
    norm_factor: float,
) -> tuple[str, Counted]:
    """The reason to refuse, by its content, an update with right metadata; '' for none.

    Also returns the update's sizes, by which later updates are judged; () if they don't count.
    Raises ConfigError if the rule can't weigh the update.
    """
    x = before.state.model
    size = norm(update.floats)
    refusal = refusal_by_norm(upload, rule, size, max_norm) or refusal_by_integers(update, x)
    if not refusal and rule.sends == "delta":  # whose weighted sum could overflow float32
        weight = weight_of(rule, before.state.version, upload)
        refusal = reasons.NORM_TOO_LARGE if weight * size > LARGEST_DELTA else ""
    if refusal or not norm_factor:
        return refusal, ()
    usual, counted = before.norms.judged(sizes(upload, rule, update, x), norm_factor, x)
    return "" if usual else reasons.NORM_TOO_LARGE, counted


def refusal_by_integers(update: Model, x: Model) -> str:
    """The reason to refuse an update by its integers, compared with model ``x``; '' for none."""
    layout, new, old = x.layout, update.integers, x.integers
    stay, counters = slice(layout.counters.start), layout.counters
    allowed = not layout.integers or (
        np.array_equal(new[stay], old[stay])
        and np.all(new[counters] >= 0)
        and np.all(new[counters] - old[counters] <= MOST_COUNTED)
        and all(
            np.all((least <= new[at]) & (new[at] <= largest))
            for at, least, largest in layout.variables
        )
    )
    return "" if allowed else reasons.INTEGERS


def refusal_by_norm(upload: Upload, rule: Strategy, size: float, max_norm: float | None) -> str:
    """The reason to refuse, by its norm, an update with right metadata; '' for none."""
    if not math.isfinite(size):
        return reasons.NOT_FINITE
    largest = LARGEST if rule.sends == "model" else LARGEST_DELTA
    scaled = size / (upload.lr * upload.steps) if rule.by_steps else size
    if size > (max_norm or largest) or max(size, scaled) > largest:
        return reasons.NORM_TOO_LARGE
    return ""
