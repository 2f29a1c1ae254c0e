"""The state of the run, as the leading updater knows it, and the changes that advance it.

A :class:`RunState` is frozen: each transition returns the next state. Whatever fails in between
leaves the state as it was, so nothing has to be rolled back. Only the strategy's memory is written
in place, by a change that follows for certain; one that may be dropped is decided on a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Contribution, Version
from fedstream.core.records import (
    NO_QUARANTINES,
    End,
    Head,
    Quarantines,
    Run,
    counted,
    without,
)
from fedstream.journal import EntryRecord, QuarantineSet, Taken
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import quarantines_after
from fedstream.strategies import Strategy

_REMEMBERED = 10_000  # ended tasks that are recognised without an index look-up
_CONTROLS_REMEMBERED = 1000


@dataclass(frozen=True)
class Change:
    """What one queue entry does: its journal record, and the contents of its commit."""

    entry: str
    record: EntryRecord | None  # None: it was recorded before, or changes nothing
    payload: tuple[Payload, ...]  # of the record
    after: Progress
    version: Version | None = None
    end: End | None = None
    blob: str | None = None  # of the update
    finish: str | None = None  # why this ends the run, if it does
    used: tuple[Payload, ...] = ()  # what it read or wrote: models, and the update as it was sent
    given: Payload | None = None  # the version as it is published

    def needs(self) -> Iterator[Payload]:
        """What must not be written to until it is committed."""
        yield from self.after.state.models()
        yield from self.leaves()

    def leaves(self) -> Iterator[Payload]:
        """What may be used again once it is committed, unless later ones need it."""
        yield from self.used
        if self.given is not None:
            yield self.given

    def remakes(self, ahead: Head, published_digest: str | None) -> bool:
        """Whether this can be a change that Redis already has and the journal lost.

        ``published_digest``: of the next version in Redis.
        """
        version, record = self.version, self.record
        if version is not None and version.version <= ahead.version:
            return published_digest == version.digest
        # An update trained from a version not yet made: others are missing before it.
        return not (isinstance(record, Taken) and record.upload.tau > record.version)


@dataclass(frozen=True)
class Undecided:
    """An entry that can be decided on only in a segment that tells its readers of ``need``."""

    need: str


class Ends:
    """The tasks that ended and the control entries taken: journalled, or by a change decided on.

    Grows in place, unlike the state that holds it: a copy for each update would cost more than the
    update.
    """

    def __init__(
        self, index: EndedTasks, done: Iterable[End] = (), controls: Iterable[str] = ()
    ) -> None:
        """``index`` knows the ends of tasks that no longer fit in memory."""
        self.index = index
        self._done: dict[str, End] = {}  # by task, oldest first
        self._controls = dict.fromkeys(controls)  # control entries, oldest first
        self._decided: dict[str, Change] = {}  # not in the journal yet, by task or entry
        for end in done:
            self.add(end)

    @property
    def done(self) -> tuple[End, ...]:
        """The newest ends of tasks in the journal, oldest first."""
        return tuple(self._done.values())

    @property
    def controls(self) -> tuple[str, ...]:
        """The newest control entries in the journal, oldest first."""
        return tuple(self._controls)

    def get(self, task: str) -> End | None:
        """How a task ended, if it has. Raises JournalError."""
        if (change := self._decided.get(task)) is not None:
            return change.end
        return self._done.get(task) or self.index.get(task)

    def obeyed(self, entry: str) -> bool:
        """Whether this control entry was taken before."""
        return entry in self._controls or entry in self._decided

    def decide(self, change: Change) -> None:
        """Add what a change ends; it is recognised if it comes again. Raises JournalError."""
        if change.record is not None:
            self._decided[change.end.task if change.end else change.entry] = change
            self._make_room()  # now: nothing may fail once the change is in the journal

    def journal(self, change: Change) -> None:
        """Take note that a change that was decided on is in the journal."""
        if change.record is None:
            return
        if change.end is not None:
            self._done[change.end.task] = change.end
            self._decided.pop(change.end.task, None)
        else:
            self._controls[change.entry] = None
            self._decided.pop(change.entry, None)
            if len(self._controls) > _CONTROLS_REMEMBERED:
                del self._controls[next(iter(self._controls))]

    def add(self, end: End) -> None:
        """Add how a task ended. Raises JournalError."""
        self._done[end.task] = end
        self._make_room()

    def _make_room(self) -> None:
        """Move the oldest ends in the journal to the index. Raises JournalError."""
        while self._done and len(self._done) + len(self._decided) > _REMEMBERED:
            self.index.add(self._done.pop(next(iter(self._done))))

    def copy(self) -> Ends:
        """The ends that are in the journal, to add others to."""
        return Ends(self.index, self.done, self.controls)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Where the run stands: everything in the journal, and how far Redis agrees with it."""

    run: Run
    strategy: Strategy
    progress: Progress
    digest: str  # of the newest version's model
    time: float  # of the newest version
    made: tuple[Contribution, ...] = ()  # the updates in the newest version
    ends: Ends
    journalled: Mapping[str, int] = field(default_factory=dict)  # tasks, by how they ended
    besides: Mapping[str, int] = field(default_factory=dict)  # the run's other counts, as in Redis
    forgotten: int = 0  # the ends of tasks before this version may be forgotten
    sealed: bool = False  # the journal's newest segment says that the run is over
    quarantines: Quarantines = NO_QUARANTINES
    ahead: Head | None = None  # Redis's head, while it has versions that the journal lost
    compared: int = 0  # epoch in which Redis was last compared with this; 0: compare again

    @property
    def version(self) -> int:
        """The newest version."""
        return self.progress.state.version

    @property
    def layout(self) -> Layout:
        """The layout of the run's models."""
        return self.progress.state.model.layout

    @property
    def finished(self) -> bool:
        """Whether the run is over: it made its last version, or someone ended it."""
        return self.run.state == "finished"

    @property
    def is_over(self) -> bool:
        """Whether the run is over, so that the newest version gets no successor.

        False while versions that the journal lost are being made again.
        """
        return self.finished and (self.ahead is None or self.version >= self.ahead.version)

    @property
    def counts(self) -> dict[str, int]:
        """The run's counts, including everything in the journal."""
        ends, besides = self.journalled, self.besides
        return {name: besides.get(name, 0) + ends.get(name, 0) for name in {**besides, **ends}}

    # transitions

    def after(self, change: Change) -> RunState:
        """The state with one more change."""
        digest, made_at, made, run = self.digest, self.time, self.made, self.run
        journalled = self.journalled
        if change.end is not None and change.record is not None:
            journalled = counted(journalled, change.end)
        if (version := change.version) is not None:
            digest, made_at, made = version.digest, version.time, version.updates
        if change.finish is not None:
            run = replace(run, state="finished", why=change.finish, finished=made_at)
        quarantines = self.quarantines
        if isinstance(change.record, QuarantineSet):
            quarantines = quarantines_after(quarantines, change.record)
        return replace(
            self,
            run=run,
            progress=change.after,
            digest=digest,
            time=made_at,
            made=made,
            journalled=journalled,
            quarantines=quarantines,
        )

    def apart(self, into: Model | None) -> RunState:
        """The same state with a memory of its own, its sum in ``into``."""
        progress = self.progress
        state = replace(progress.state, memory=progress.state.memory.copy(into))
        return replace(self, progress=replace(progress, state=state))

    def ended(self, run: Run) -> RunState:
        """The run is over, as this record of it says."""
        return replace(self, run=run)

    def in_segment(self, forgotten: int) -> RunState:
        """The journal's newest segment begins with this state."""
        return replace(self, sealed=self.finished, forgotten=forgotten)

    def counted(self, counts: Mapping[str, int], told: Mapping[str, int]) -> RunState:
        """Redis has these counts, ``told`` among them: those of the ends committed so far."""
        besides = without(counts, told)
        return replace(self, besides=besides) if besides != self.besides else self

    def agreeing(self, epoch: int) -> RunState:
        """Redis was compared in this epoch, and lacks nothing."""
        return replace(self, compared=epoch)

    def behind(self, ahead: Head) -> RunState:
        """Redis has versions that the journal lost, up to this head."""
        return replace(self, ahead=ahead)

    def caught_up(self) -> RunState:
        """Redis has no versions that the journal lost."""
        return replace(self, ahead=None)

    def to_compare(self) -> RunState:
        """Redis may differ: it has to be compared again."""
        return replace(self, compared=0)
