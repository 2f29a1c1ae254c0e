"""The leading updater's state of the run: changes decided on, journalled and committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

from fedstream.broker.layout import Model
from fedstream.broker.messages import Contribution
from fedstream.broker.records import End, Head, Run
from fedstream.journal.ended import Ended
from fedstream.journal.progress import Progress
from fedstream.strategies import Strategy
from fedstream.updater.changes import Change, Retained

_REMEMBERED = 10_000  # ended tasks that are recognised without an index look-up
_ROUNDS_REMEMBERED = 1000


@dataclass
class Course:
    """The state of the run, and the changes on their way through the updater.

    A change is decided on (``unwritten``), journalled (``pending``, and final from then on) and
    committed; its entry is retained until its record is on disk.
    """

    strategy: Strategy
    index: Ended  # ends of tasks that are no longer in `done`
    run: Run | None = None
    progress: Progress | None = None  # including everything in the journal
    digest: str = ""  # of its model
    time: float = 0.0  # of its version
    made: tuple[Contribution, ...] = ()  # the updates in it
    done: dict[str, End] = field(default_factory=dict)  # by task, oldest first
    rounds: dict[str, None] = field(default_factory=dict)  # entries that ended rounds, oldest first
    forgotten: int = 0  # the ends of tasks before this version may be forgotten
    told: dict[str, int] = field(default_factory=dict)  # the journal's ends as Redis counted them
    besides: dict[str, int] = field(default_factory=dict)  # the run's other counts, by coordinators
    unwritten: list[Change] = field(default_factory=list)  # not in the journal yet
    pending: deque[tuple[Change, int]] = field(default_factory=deque)  # not committed yet
    retained: list[Retained] = field(default_factory=list)  # oldest first
    epoch: int = 0  # in which Redis last had our newest version; 0: compare again
    ahead: Head | None = None  # Redis's head, while it has versions that the journal lost
    sealed: bool = False  # the journal's newest segment says that the run is over

    @property
    def finished(self) -> bool:
        """Whether the run is over: it made its last version, or someone ended it."""
        return self.run is not None and self.run.state == "finished"

    def is_over(self, version: int) -> bool:
        """Whether the run is over, so that ``version`` gets no successor.

        False while versions that the journal lost are being made again.
        """
        made_before = self.ahead is not None and version < self.ahead.version
        return self.finished and not made_before

    def decided(self, change: Change) -> None:
        """Add a change that was decided on; its entry is recognised if it comes again."""
        self.unwritten.append(change)
        if change.record is None:
            return
        if change.end is not None:
            self.remember(change.end)
        else:
            self.rounds[change.entry] = None
            if len(self.rounds) > _ROUNDS_REMEMBERED:
                del self.rounds[next(iter(self.rounds))]

    def remember(self, end: End) -> None:
        """Remember how a task ended; the oldest ends move to the index."""
        self.done[end.task] = end
        while len(self.done) > _REMEMBERED:
            self.index.add(self.done.pop(next(iter(self.done))))

    def ended(self, task: str) -> End | None:
        """How a task ended, if it has. Raises JournalError."""
        return self.done.get(task) or self.index.get(task)

    def journalled(self) -> dict[str, End]:
        """The remembered ends that are in the journal, by task, oldest first."""
        undone = {one.end.task for one in self.unwritten if one.end and one.record is not None}
        return {task: end for task, end in self.done.items() if task not in undone}

    def happened(self, change: Change, position: int) -> None:
        """Apply a change that is in the journal, up to ``position``, and therefore final."""
        self.pending.append((change, position))
        self.progress = change.after
        if change.version is not None:
            self.digest, self.time = change.version.digest, change.version.time
            self.made = change.version.updates

    @property
    def tally(self) -> dict[str, int]:
        """Number of tasks in the journal, by how they ended."""
        return reduce(lambda counts, one: one[0].counted(counts), self.pending, self.told)

    @property
    def counts(self) -> dict[str, int]:
        """The run's counts, including everything in the journal."""
        ends, besides = self.tally, self.besides
        return {name: besides.get(name, 0) + ends.get(name, 0) for name in besides | ends}

    def models(self) -> Iterator[Model]:
        """The models whose buffers are in use."""
        if self.progress is not None:
            yield from self.progress.state.models()
        for change in (*(change for change, _ in self.pending), *self.unwritten):
            yield from change.after.state.models()
            yield from change.used
