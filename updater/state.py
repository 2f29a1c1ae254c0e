"""The leading updater's state of the run, and the changes that advance it.

A :class:`RunState` is frozen: each transition returns the next state, so a failure in between
leaves nothing to roll back. Only the strategy's memory is written in place, for a change that will
certainly be journalled; a change that may be dropped is decided on a copy of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Contribution, Event, Version
from fedstream.core.records import (
    NO_QUARANTINES,
    End,
    Head,
    Quarantines,
    Run,
    StepSize,
    counted,
    without,
)
from fedstream.journal import EntryRecord, EvaluationEnded, QuarantineSet, Taken
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import quarantines_after
from fedstream.strategies import Strategy

_REMEMBERED = 10_000  # ended tasks kept in memory; older ones need an index look-up
_CONTROLS_REMEMBERED = 1000


@dataclass(frozen=True)
class Change:
    """The effect of one queue entry: a journal record, and the contents of a commit."""

    entry: str  # of the queue; '': the opening of a private sum
    record: EntryRecord | None  # None: it was recorded before, or changes nothing
    payload: tuple[Payload, ...]  # of the record
    after: Progress
    version: Version | None = None
    end: End | None = None
    blob: str | None = None  # name of the update's blob
    finish: str | None = None  # why this ends the run, if it does
    used: tuple[Payload, ...] = ()  # payloads read or written: models, the received update
    given: Payload | None = None  # the version's published payload
    event: Event | None = None  # told with the commit
    suspects: tuple[int, ...] = ()  # devices with updates that stand out

    def events(self) -> Iterator[Event]:
        """The events that the commit tells."""
        if self.event is not None:
            yield self.event
        if (record := self.record) is not None:
            for device in self.suspects:
                yield Event(
                    what="suspect",
                    service="updater",
                    time=record.time,
                    version=record.version,
                    device=device,
                    text="its update stands out",
                )

    def needs(self) -> Iterator[Payload]:
        """The payloads that must not be overwritten before the commit."""
        yield from self.after.state.models()
        yield from self.leaves()

    def leaves(self) -> Iterator[Payload]:
        """The payloads that may be reused after the commit, unless later changes need them."""
        yield from self.used
        if self.given is not None:
            yield self.given

    def remakes(self, ahead: Head, published_digest: str | None) -> bool:
        """Whether this may be a change that Redis has and the journal lost.

        ``published_digest``: digest of Redis's next version.
        """
        version, record = self.version, self.record
        if version is not None and version.version <= ahead.version:
            return published_digest == version.digest
        # The update was trained from a version that is not remade yet, so others come before it.
        return not (isinstance(record, Taken) and record.upload.tau > record.version)


class Ends:
    """The ended tasks and processed control entries, of journalled and of decided changes.

    Grows in place, unlike the state that contains it: a copy would cost more than an update.
    """

    def __init__(
        self, index: EndedTasks, done: Iterable[End] = (), controls: Iterable[str] = ()
    ) -> None:
        """``index``: the ends of tasks that no longer fit in memory."""
        self.index = index
        self._done: dict[str, End] = {}  # by task, oldest first
        self._controls = dict.fromkeys(controls)  # control entries, oldest first
        self._decided: dict[str, Change] = {}  # not journalled yet, by task or entry
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
        """The end of a task; None if it hasn't ended. Raises JournalError."""
        if (change := self._decided.get(task)) is not None:
            return change.end
        return self._done.get(task) or self.index.get(task)

    def obeyed(self, entry: str) -> bool:
        """Whether this control entry was processed before."""
        return entry in self._controls or entry in self._decided

    def decide(self, change: Change) -> None:
        """Add the ends in a decided change, to recognise its repetition. Raises JournalError."""
        if change.record is not None and (change.end or change.entry):
            self._decided[change.end.task if change.end else change.entry] = change
            self._make_room()  # now, as nothing may fail once the change is journalled

    def journal(self, change: Change) -> None:
        """Note that a decided change is journalled."""
        if change.record is None:
            return
        if change.end is not None:
            self._done[change.end.task] = change.end
            self._decided.pop(change.end.task, None)
        elif change.entry:
            self._controls[change.entry] = None
            self._decided.pop(change.entry, None)
            if len(self._controls) > _CONTROLS_REMEMBERED:
                del self._controls[next(iter(self._controls))]

    def add(self, end: End) -> None:
        """Add the end of a task. Raises JournalError."""
        self._done[end.task] = end
        self._make_room()

    def _make_room(self) -> None:
        """Move the oldest journalled ends to the index. Raises JournalError."""
        while self._done and len(self._done) + len(self._decided) > _REMEMBERED:
            self.index.add(self._done.pop(next(iter(self._done))))

    def copy(self) -> Ends:
        """A copy with the journalled ends only, to which other ends can be added."""
        return Ends(self.index, self.done, self.controls)


def step_size(rule: Strategy, progress: Progress) -> StepSize | None:
    """The length of the rule's steps; None if it does not adapt."""
    if rule.adapt is None:
        return None
    scale = rule.bounded(progress.scale)
    return StepSize(rule.step_key, rule.step_rate * scale, scale)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of the run after all journalled changes, and how far Redis agrees."""

    run: Run
    strategy: Strategy
    progress: Progress
    digest: str  # of the newest version's model
    time: float  # of the newest version
    made: tuple[Contribution, ...] = ()  # the updates in the newest version
    ends: Ends
    journalled: Mapping[str, int] = field(default_factory=dict)  # ended tasks by outcome and reason
    besides: Mapping[str, int] = field(default_factory=dict)  # Redis's other counts
    forgotten: int = 0  # ends of tasks that began before this version may be lost
    sealed: bool = False  # the newest segment records the end of the run
    quarantines: Quarantines = NO_QUARANTINES
    evaluation: str = ""  # the newest evaluation on the devices that has a record
    ahead: Head | None = None  # Redis's head, while it has versions that the journal lost
    compared: int = 0  # epoch of the last comparison with Redis; 0: compare again

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
        """Whether the run made its last version or was ended early."""
        return self.run.state == "finished"

    @property
    def is_over(self) -> bool:
        """Whether the run is over and the newest version gets no successor.

        False while lost versions are being remade.
        """
        return self.finished and (self.ahead is None or self.version >= self.ahead.version)

    @property
    def is_due(self) -> bool:
        """Whether a private batch is complete, so that its sum is opened before anything else."""
        return not self.is_over and self.strategy.is_due(self.progress.state)

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
        quarantines, evaluation = self.quarantines, self.evaluation
        if isinstance(change.record, QuarantineSet):
            quarantines = quarantines_after(quarantines, change.record)
        elif isinstance(change.record, EvaluationEnded):
            evaluation = change.record.evaluation
        return replace(
            self,
            run=run,
            progress=change.after,
            digest=digest,
            time=made_at,
            made=made,
            journalled=journalled,
            quarantines=quarantines,
            evaluation=evaluation,
        )

    def apart(self, into: Model | None) -> RunState:
        """The same state with a copy of the strategy's memory. ``into``: takes the copy's sum."""
        progress = self.progress
        state = replace(progress.state, memory=progress.state.memory.copy(into))
        return replace(self, progress=replace(progress, state=state))

    def ended(self, run: Run) -> RunState:
        """The state after the end of the run, with this record."""
        return replace(self, run=run)

    def in_segment(self, forgotten: int) -> RunState:
        """The state at the beginning of the journal's newest segment."""
        return replace(self, sealed=self.finished, forgotten=forgotten)

    def counted(self, counts: Mapping[str, int], told: Mapping[str, int]) -> RunState:
        """The state with Redis's counts. ``told``: the counts of committed ends among them."""
        besides = without(counts, told)
        return replace(self, besides=besides) if besides != self.besides else self

    def agreeing(self, epoch: int) -> RunState:
        """The state after a comparison in this epoch, in which Redis lacked nothing."""
        return replace(self, compared=epoch)

    def behind(self, ahead: Head) -> RunState:
        """The state if Redis has versions, up to this head, that the journal lost."""
        return replace(self, ahead=ahead)

    def caught_up(self) -> RunState:
        """The state once all lost versions are remade."""
        return replace(self, ahead=None)

    def to_compare(self) -> RunState:
        """The state if Redis must be compared again."""
        return replace(self, compared=0)
