"""Replay: remaking a journal's versions in order, by the recorded rule or by another one.

    with Replayer(Path("runs/demo/journal")) as replayer:
        for moment in replayer:
            print(moment.version, moment.message.upload.device, moment.model.floats.max())

Raises JournalDamaged unless every update (with ``check_updates``) and checkpoint has its recorded
digest. With the recorded rule, raises Diverged unless every version has its recorded digest, every
outcome is the recorded one, and every weight is equal up to its last bits. Another rule gets the
same updates in the same order with the same staleness; refused updates stay refused, and rounds end
where they ended. If one rule takes deltas and the other models, each update is converted by its
recorded x_tau. Nothing is ever written to a journal.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from mmap import mmap
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeAlias

from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Sends, Upload
from fedstream.journal.base_models import BaseModels
from fedstream.journal.chain import check_joint, cuts, segments
from fedstream.journal.errors import ONLY_SUMS, JournalDamaged, JournalError, NotRecorded
from fedstream.journal.frames import Place
from fedstream.journal.progress import Progress, Step
from fedstream.journal.rebuild import Rebuild, check_checkpoint, format_in, recorded, rule_of
from fedstream.journal.records import (
    EntryRecord,
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    StepScaled,
    SumOpened,
    Taken,
    dropped_by,
    is_used,
)
from fedstream.journal.segment import Chunk, Cut, Record, Segment, Tear, chunk_bytes
from fedstream.journal.updates import check_digest, decoded, update_of
from fedstream.journal.what_if import Unused, WhatIf
from fedstream.runtime.plugins import allowed, allowing
from fedstream.strategies import Strategy

CutSegment: TypeAlias = tuple[Segment, Cut | None]  # a segment and its cut

_CONTROLS: dict[type, str] = {
    RoundClosed: "the end of a round",
    QuarantineSet: "a change of a quarantine",
    EvaluationEnded: "the end of an evaluation on the devices",
    StepScaled: "a change of the step's scale",
    SumOpened: "the opening of a private sum",
}
_LONG = 1 << 20  # bytes of an update that is worth checking in a thread
_AHEAD = 8 << 20  # bytes that are read ahead; for large models, one update


@dataclass(frozen=True, slots=True)
class Moment:
    """One record, and the run after it. Copy the models: they are valid until the next step."""

    message: EntryRecord
    place: Place
    step: Step  # by the replayed rule: its decision, and the progress after it
    original: Progress | None  # by the recorded rule; None if only another rule is replayed
    identical: bool | None  # whether the version has the recorded digest; None: unchecked
    base: Model | None  # x_tau of the update, if asked for or needed, and if the journal has it
    unused: Unused  # why another rule did not get this update; '' if it did
    _segment: Segment
    _record: Record

    @property
    def version(self) -> int:
        """The newest version after the record, by the replayed rule's own count."""
        return self.step.after.state.version

    @property
    def model(self) -> Model:
        """The model of that version."""
        return self.step.after.state.model

    def update(self) -> Model:
        """The update, read again as a new copy. Call this before the replayer is closed.

        Raises JournalError if the record has no update, or no bytes of it but masked ones.
        """
        where = self.place.where
        if not self._record.payload_bytes:
            if not isinstance(self.message, Taken):
                what = _CONTROLS[type(self.message)]
                raise NotRecorded(f"{where}: is {what}, not an update")
            if not is_used(self.message):
                raise NotRecorded(f"{where}: a {self.message.outcome} update's bytes are not kept")
            recorded(self._record, None)
        if self._segment.head.masked:
            raise NotRecorded(f"{where}: {ONLY_SUMS}")
        model = Model(self._segment.layout)
        return update_of(self._segment, self._record, model)


class Replayer:
    """Steps through a journal; each iteration starts over.

    ``strategy``: another rule, or a function that makes one from the parameters in a segment's
    head. ``without``: devices whose updates are left out. Both apply from ``from_version`` on; up
    to there the run is as recorded. ``beside``: replay the recorded rule too, as
    ``Moment.original``. ``from_version``: only yield moments after this version. ``until``: the
    version to stop at. Both are the journal's versions. ``bases``: set every ``Moment.base``.
    ``check_updates``: check the digest of every update. No other check finds a flipped bit that
    rounding hides in the versions.

    Holds at most three models (four, if updates are encoded) and the strategy's memory, and 8 MB
    read ahead if models are small; ``beside`` takes two more models and the other rule's memory.
    ``bases``, or a rule that takes models where the devices sent deltas or the reverse, takes as
    many models as devices trained at the same time, and replays the recorded rule too.
    """

    def __init__(
        self,
        folder: Path,
        *,
        strategy: Strategy | Callable[[Mapping[str, Any]], Strategy] | None = None,
        without: frozenset[int] = frozenset(),
        from_version: int | None = None,
        until: int | None = None,
        beside: bool = False,
        bases: bool = False,
        check_updates: bool = True,
    ) -> None:
        """Open the journal.

        Raises JournalError if there is none, or it lacks these versions or devices.
        """
        chain = segments(folder)
        if not chain:
            raise JournalError(f"{folder}: there is no journal")
        self.folder = folder
        self.head = chain[-1].head
        self.checkpoints = 0  # checkpoints of later segments that matched the state reached
        self.adopted: list[int] = []  # versions adopted from Redis
        self._chain = list(cuts(chain))
        self._strategy = strategy
        self._without = without
        self._beside = beside
        self._bases = bases
        self.check_updates = check_updates
        self._until = until
        self._allowed = allowed()
        self.begin = chain[0].standing.version if from_version is None else from_version
        try:
            for version in (from_version, until):
                if version is not None:
                    self._check_version(version)
            if until is not None and self.begin > until:
                raise JournalError(
                    f"{folder}: version {until} is before the first version, {self.begin}"
                )
            self._check_devices()
        except BaseException:
            self.close()
            raise

    @property
    def oldest(self) -> int:
        """The oldest version that was kept."""
        return self._chain[0][0].standing.version

    @cached_property
    def newest(self) -> int:
        """The newest version; if the journal's end is damaged, the newest before the damage."""
        segment, cut = self._chain[-1]
        version = segment.standing.version
        try:
            for record in segment.records(cut):
                if isinstance(record.message, EntryRecord):
                    version = record.message.version
        except JournalDamaged:
            pass  # reported when the replay gets there, if it does
        return version

    @cached_property
    def influenced(self) -> int | None:
        """The first version in the journal that contains an update from a left-out device.

        That update influences every later version, and every update trained from one. None if
        there is no such version; versions that were not kept are not considered.
        """
        held = False
        try:
            for segment, cut in self._chain if self._without else ():
                for record in segment.records(cut):
                    message = record.message
                    held = held or (is_used(message) and message.upload.device in self._without)
                    held = held and not dropped_by(message)
                    if not held or not isinstance(message, EntryRecord):
                        continue
                    if message.digest is not None:
                        return message.version
        except JournalDamaged:
            pass  # reported when the replay gets there
        return None

    def _check_version(self, version: int) -> None:
        """Raise JournalError for a version that is not in the journal."""
        if version < self.oldest:
            raise JournalError(
                f"{self.folder}: version {version} is no longer kept; the oldest is {self.oldest}"
            )
        if version > self.newest:
            raise JournalError(
                f"{self.folder}: version {version} does not exist yet; the newest is {self.newest}"
            )

    def _check_devices(self) -> None:
        """Raise JournalError for a left-out device that never took part."""
        missing = set(self._without)
        if missing and rule_of(self._chain[-1][0]).masked:
            raise NotRecorded(f"{self.folder}: {ONLY_SUMS}: no device can be left out of a sum")
        for segment, cut in self._chain if missing else ():
            for record in segment.records(cut):
                if is_used(record.message):
                    missing.discard(record.message.upload.device)
                if not missing:
                    return
        if missing:
            raise JournalError(
                f"{self.folder}: device {min(missing)} never took part (the run has "
                f"{self.head.devices} devices)"
            )

    def close(self) -> None:
        """Close the files."""
        for segment, _ in self._chain:
            segment.close()

    def __enter__(self) -> Replayer:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def changed(self) -> bool:
        """Whether another rule than the recorded one is replayed."""
        return self._strategy is not None or bool(self._without)

    @cached_property
    def converts_to(self) -> Sends | None:
        """The kind that updates are converted to for the replayed rule; None for no conversion.

        Raises JournalError.
        """
        rules = ((self._rule(segment), rule_of(segment)) for segment, _ in self._chain)
        return next((rule.sends for rule, was in rules if rule.sends != was.sends), None)

    @property
    def torn(self) -> Tear | None:
        """The place of a record torn by a crash; known once the replay gets there."""
        return self._chain[-1][0].torn

    def __iter__(self) -> Iterator[Moment]:
        """Yield a moment for each record in order. Raises JournalError, including Diverged.

        Loads rules that are allowed here or were allowed where the replayer was made
        (``runtime.plugins.allowing``).
        """
        made = self._allowed
        with closing(self._played()) as moments:
            while True:
                with allowing(recorded=made.recorded, changed=made.changed):
                    moment = next(moments, None)
                if moment is None:
                    return
                yield moment

    def _played(self) -> Generator[Moment]:
        self.checkpoints, self.adopted = 0, []
        first, bases = self._nearest(), None
        if self._bases or self.converts_to is not None:
            bases = BaseModels(self._uploads(first))
            oldest = self.begin if bases.oldest is None else bases.oldest
            while first and self._chain[first][0].standing.version > oldest:
                first -= 1
        reading = _Ahead(self._chain[first:], check=self.check_updates)
        try:
            yield from self._moments(reading, bases)
        finally:
            reading.stop()

    def _uploads(self, first: int) -> Iterator[Upload]:
        """The used updates that will be yielded, read from the segment with number ``first`` on."""
        begun = False
        try:
            for segment, cut in self._chain[first:]:
                version = segment.standing.version
                for record in segment.records(cut):
                    begun = begun or version >= self.begin
                    if self._until is not None and version >= self._until:
                        return
                    if begun and is_used(record.message):
                        yield record.message.upload
                    version = record.entry.version
        except JournalDamaged:
            pass  # reported when the replay gets there

    def _nearest(self) -> int:
        """The number of the segment to begin with: the nearest checkpoint that splits no round."""
        return max(
            n
            for n, said in enumerate(segment.standing for segment, _ in self._chain)
            if n == 0
            or said.version < self.begin
            or (said.version == self.begin > self.oldest and not said.held)
        )

    def _moments(self, reading: _Ahead, bases: BaseModels | None) -> Iterator[Moment]:
        was: Rebuild | None = None  # None again once only the other rule is replayed
        what_if: WhatIf | None = None
        version, begun = -1, False
        for segment, record, update in reading:
            if record is None:
                if version < 0 or segment.standing.why == "adopted":
                    if version >= 0:
                        self.adopted.append(segment.standing.version)
                    was, what_if = Rebuild(segment), None
                    version = segment.standing.version
                    if bases is not None:
                        _add(bases, was)
                else:
                    if was is not None:
                        self._continue(was, segment)
                    check_checkpoint(segment)
                if what_if is not None:
                    what_if.change(self._rule(segment), rule_of(segment))
            else:
                message, base = record.entry, None
                if is_used(message):
                    recorded(record, update)
                    base = bases.of(message.upload) if bases is not None and begun else None
                done = was.take(record, update) if was is not None else None
                other = what_if.take(record, update, base) if what_if is not None else None
                reading.free()
                if was is not None and done is not None:
                    was.check(record, done)
                    if bases is not None and done.made is not None:
                        _add(bases, was)
                version = message.version
                step = other or done
                if begun and step is not None:
                    yield Moment(
                        message=message,
                        place=record.place,
                        step=step,
                        original=was.progress if was is not None else None,
                        identical=True if was is not None and message.digest else None,
                        base=base,
                        unused=what_if.unused if what_if is not None else "",
                        _segment=segment,
                        _record=record,
                    )
            if self._until is not None and version >= self._until:
                return
            begun = begun or version >= self.begin
            if begun and self.changed and what_if is None and was is not None:
                goes_on = self._beside or bases is not None
                start = _copied(was.progress) if goes_on else was.progress
                rule = self._rule(segment)
                memory = rule.taken_over(start.state.memory, was.strategy)
                held = start.held if memory.arrivals or memory.opened else ()
                start = replace(start, state=replace(start.state, memory=memory), held=held)
                what_if = WhatIf(rule, was.strategy, start, self._without)
                was = was if goes_on else None

    def _continue(self, was: Rebuild, segment: Segment) -> None:
        """Continue with the next segment, which must begin at this one's end. Raises Diverged."""
        check_joint(segment, (was.progress.state.version, was.digest))
        self.checkpoints += 1
        was.strategy, was.format = rule_of(segment), format_in(segment)

    def _rule(self, segment: Segment) -> Strategy:
        """The rule to replay a segment by. Raises NotRecorded if it needs control variates."""
        recorded_as, devices = segment.head.strategy, segment.head.devices
        was = rule_of(segment)
        if self._strategy is None:
            return was
        rule = self._strategy(recorded_as) if callable(self._strategy) else self._strategy
        other = rule.build(devices)
        other = other if other.masked else was.replaced(other)
        if other.masked and not was.masked:
            raise NotRecorded(
                f"{self.folder}: this run's updates are not masked, so it has no sums to open"
            )
        if other.controls and not was.controls:
            raise NotRecorded(
                f"{self.folder}: {rule.name} also takes control variates, which this "
                f"{recorded_as['name']} run's devices did not send: choose a rule without them, "
                "such as strategy.name=fedbuff"
            )
        if was.controls and not other.controls:
            raise NotRecorded(
                f"{self.folder}: this {recorded_as['name']} run's devices corrected their steps by "
                f"control variates, which {rule.name} does not keep: change only other keys of "
                "strategy"
            )
        return other


def _add(bases: BaseModels, was: Rebuild) -> None:
    state = was.progress.state
    bases.add(state.version, was.digest, state.model, was.format, was.strategy.sends)


def _copied(progress: Progress) -> Progress:
    return replace(progress, state=progress.state.copy())


Found: TypeAlias = tuple[Segment, Record | None, Model | None]


class _Ahead:
    """The records of segments, read a few megabytes ahead by a thread.

    The thread passes unparsed chunks of the file: passing each small update alone would wait for
    the thread and the interpreter lock each time. For large models, it holds one update and reads
    the next one while the version is compared.
    """

    def __init__(self, chain: Sequence[CutSegment], *, check: bool) -> None:
        self._chain = chain
        self._check = check  # the digests of updates
        self._free: SimpleQueue[mmap | None] = SimpleQueue()  # None: stop
        self._read: SimpleQueue[Chunk | Exception | None] = SimpleQueue()  # None: segment's end
        self._checker = ThreadPoolExecutor(1, "check")
        self._checking: Future[None] | None = None  # a long payload, while it is replayed
        self._used: mmap | None = None  # returned to `_free` once its last record was processed
        size = chunk_bytes(chain[0][0].layout)
        for _ in range(max(1, _AHEAD // size)):
            self._free.put(mmap(-1, size))
        self._thread = Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Found]:
        """Yield each segment's beginning, then its records with their payloads.

        A payload is valid until :meth:`free`, which checks its digest.
        """
        for segment, cut in self._chain:
            yield segment, None, None
            room = Model(segment.layout)  # takes memory only once something is decoded into it
            for chunk, record, sent in segment.found(self._chunks(), cut):
                if record.end == chunk.end:
                    self._used = chunk.memory
                if sent is not None and self._check:
                    self._begin_check(record, sent, segment.layout)
                yield segment, record, decoded(record, sent, room) if sent is not None else None

    def _begin_check(self, record: Record, sent: Payload, layout: Layout) -> None:
        """Check an update's digest, of a long one in a thread. Raises UpdateAltered."""
        if sent.buffer.nbytes >= _LONG:
            self._checking = self._checker.submit(check_digest, record, sent, layout)
        else:
            check_digest(record, sent, layout)

    def _chunks(self) -> Iterator[Chunk]:
        """The chunks of the next segment."""
        while (chunk := self._read.get()) is not None:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    def free(self) -> None:
        """Release the last yielded payload. Raises UpdateAltered if its digest differs."""
        if self._checking is not None:
            checking, self._checking = self._checking, None
            checking.result()
        if self._used is not None:
            self._free.put(self._used)
            self._used = None

    def stop(self) -> None:
        """End the threads."""
        self._free.put(None)
        self._thread.join()
        self._checker.shutdown()

    def _run(self) -> None:
        memory = iter(self._free.get, None)
        try:
            for segment, cut in self._chain:
                for chunk in segment.chunks(cut, memory):
                    self._read.put(chunk)
                self._read.put(None)
        except Exception as error:  # raised in the thread that iterates
            self._read.put(error)
