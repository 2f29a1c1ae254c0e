"""Turning queue entries into changes: each is checked, and mixed in by the strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from fedstream.broker import reasons
from fedstream.broker.errors import BadMessage, BlobDamaged, BlobMissing
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Model
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.messages import RoundEnd, Upload, Version, decode
from fedstream.broker.records import End
from fedstream.broker.streams import Entry
from fedstream.journal.progress import Progress, Step, close_round, take
from fedstream.journal.records import Counted
from fedstream.runtime.service import Context
from fedstream.strategies import State
from fedstream.updater import changes, refusals
from fedstream.updater.changes import Change
from fedstream.updater.course import Course
from fedstream.updater.intake import Intake
from fedstream.updater.metrics import Metrics

T = TypeVar("T")

LARGE = 4 << 20  # bytes; arithmetic on larger models runs in a thread


@dataclass(frozen=True, kw_only=True)
class Decider:
    """Turns queue entries into changes, each on top of the one before."""

    context: Context
    metrics: Metrics
    course: Course
    intake: Intake
    keys: Keys
    ledger: UpdaterLedger
    lease: Lease
    max_norm: float | None
    norm_factor: float
    weights: bool  # the journal keeps the updates' bytes

    async def change(self, entry: Entry, before: Progress) -> Change | None:
        """Decide what a queue entry does; None if it is undecodable or no longer expected."""
        try:
            message = decode(entry.data, Upload, RoundEnd)
        except BadMessage as error:
            await self.ledger.bury(self.keys.queue, "", entry, str(error))
            return None
        if isinstance(message, RoundEnd):
            if entry.id in self.course.rounds:
                return Change(entry.id, None, (), before)
            return await self._round_end(entry, message, before)
        if (end := self.course.ended(message.task)) is not None:
            await self.intake.unfetch(entry)
            return self._found_again(entry, message, before, end)
        refusal, update, sizes = await self._checked(entry, message, before)
        before = before.with_sizes(sizes)
        if refusal == reasons.BLOB_MISSING and not await self.ledger.awaits(message):
            # Redis fell back to before the update was admitted, so it may come again; or our
            # successor has processed it.
            self.context.log.warning(
                "update not awaited any more", task=message.task, device=message.device
            )
            return None
        if update is None:
            return self._refused(entry, message, before, refusal, sizes)
        spare = self.intake.spare(update.layout)
        with self.metrics.seconds.labels("mix").time():
            step = await self._off_loop(
                lambda: take(self.course.strategy, before, message, update, spare)
            )
        used = (before.state.model, update, spare)
        if step.decision is None or step.decision.outcome == "dropped":
            stale = self._refused(entry, message, before, reasons.TOO_STALE, sizes)
            return replace(stale, used=(update, spare))
        return await self._taken(entry, message, step, update, used, sizes)

    async def _checked(
        self, entry: Entry, upload: Upload, before: Progress
    ) -> tuple[str, Model | None, Counted]:
        """Check an update: why it is refused ('' if it isn't), its content, its counted sizes."""
        refusal = self._refusal(upload, before.state)
        if refusal:
            await self.intake.unfetch(entry)
            return refusal, None, ()
        try:
            with self.metrics.seconds.labels("fetch").time():
                model = await self.intake.fetched(entry, upload, before.state.model.layout)
        except BlobMissing:
            return reasons.BLOB_MISSING, None, ()
        except BlobDamaged:
            return reasons.DIGEST, None, ()
        with self.metrics.seconds.labels("check").time():
            refusal, sizes = await self._off_loop(
                lambda: refusals.by_content(
                    upload, self.course.strategy, model, before,
                    max_norm=self.max_norm, norm_factor=self.norm_factor,
                )
            )  # fmt: skip
        if refusal:
            self.intake.free.append(model)
            return refusal, None, sizes
        return "", model, sizes

    def _refusal(self, upload: Upload, state: State) -> str:
        """Why an update is refused before its content is read; '' if it isn't."""
        if self.course.is_over(state.version):
            return reasons.RUN_FINISHED
        if upload.tau < self.course.forgotten:
            return reasons.TOO_OLD  # there is no telling whether it was applied before
        return refusals.by_word(upload, self.course.strategy, state)

    # the changes

    async def _taken(
        self,
        entry: Entry,
        upload: Upload,
        step: Step,
        update: Model,
        used: tuple[Model, ...],
        sizes: Counted,
    ) -> Change:
        """An update that was applied or buffered."""
        payload = (update,) if self.weights else ()
        return changes.taken(
            entry, upload, step, payload, version=await self._version(step),
            finish=self._end_of_run(step), counts=self.course.besides, used=used,
            sizes=sizes,
        )  # fmt: skip

    async def _round_end(self, entry: Entry, message: RoundEnd, before: Progress) -> Change:
        """End a round: make a version of what has arrived, unless it was made already."""
        late = self.course.is_over(before.state.version)
        step = Step(before) if late else close_round(self.course.strategy, before, message.version)
        version = await self._version(step)
        return changes.round_closed(
            entry, message, step, late=late, version=version, finish=self._end_of_run(step),
            counts=self.course.besides, used=(before.state.model,) if version is not None else (),
        )  # fmt: skip

    def _refused(
        self, entry: Entry, upload: Upload, before: Progress, reason: str, sizes: Counted
    ) -> Change:
        """An update that never reaches the model."""
        self.context.log.warning(
            "update refused", task=upload.task, device=upload.device, reason=reason
        )
        return changes.refused(entry, upload, before, reason, self.course.besides, sizes)

    def _found_again(self, entry: Entry, upload: Upload, before: Progress, end: End) -> Change:
        """A task that the journal has but Redis forgot."""
        self.context.log.warning("update found again", task=upload.task, device=upload.device)
        return changes.found_again(entry, upload, before, end)

    async def _version(self, step: Step) -> Version | None:
        """The version that a step made, if it made one."""
        if step.made is None:
            return None
        with self.metrics.seconds.labels("digest").time():
            digest = await self._off_loop(step.after.state.model.digest)
        return changes.version_of(step, digest, self.lease.number, self.lease.nonce)

    def _end_of_run(self, step: Step) -> str | None:
        run, version = self.course.run, step.after.state.version
        last = run is not None and step.made is not None and version >= run.versions
        return f"version {version} reached" if last else None

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Run arithmetic: in a thread if it would block the event loop, else here."""
        run = self.course.run
        large = run is not None and run.layout.nbytes > LARGE
        return await asyncio.to_thread(work) if large else work()
