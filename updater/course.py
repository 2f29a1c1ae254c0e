"""Where the run is, as its leading updater has it: decided on, in the journal, committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

from fedstream.broker.layout import Model
from fedstream.broker.messages import Contribution
from fedstream.broker.records import End, Head, Run
from fedstream.updater.changes import Change, Retained
from fedstream.updater.ended import Ended
from fedstream.updater.progress import Progress
from fedstream.updater.strategies import Strategy

_REMEMBERED = 10_000  # tasks that are recognised without asking the index
_ROUNDS_REMEMBERED = 1000


@dataclass
class Course:
    """An entry's change is decided on (``unwritten``), journalled (``pending``: from then on it is
    what is), committed, and retained until its record is on disk.
    """

    strategy: Strategy
    index: Ended  # how those ended that are in `done` no more
    run: Run | None = None
    progress: Progress | None = None  # with everything that is in the journal
    digest: str = ""  # of its model
    time: float = 0.0  # of its version
    made: tuple[Contribution, ...] = ()  # the updates in it
    done: dict[str, End] = field(default_factory=dict)  # by task, oldest first
    rounds: dict[str, None] = field(default_factory=dict)  # entries that ended rounds, oldest first
    forgotten: int = 0  # of a task that ended before this version nobody may know any more
    told: dict[str, int] = field(default_factory=dict)  # the journal's ends as Redis counted them
    besides: dict[str, int] = field(default_factory=dict)  # the run's other counts, of coordinators
    unwritten: list[Change] = field(default_factory=list)  # not in the journal yet
    pending: deque[tuple[Change, int]] = field(default_factory=deque)  # not committed yet
    retained: list[Retained] = field(default_factory=list)  # oldest first
    epoch: int = 0  # in which Redis was last seen to have our newest version
    ahead: Head | None = None  # Redis has versions that the journal lost
    sealed: bool = False  # the journal's newest segment says that the run is over

    @property
    def finished(self) -> bool:
        """Whether the run is over: by its last version, or because somebody said so."""
        return self.run is not None and self.run.state == "finished"

    def is_over(self, version: int) -> bool:
        """Whether the run ended before ``version`` has a successor; a lost end is made again."""
        made_before = self.ahead is not None and version < self.ahead.version
        return self.finished and not made_before

    def decided(self, change: Change) -> None:
        """From now on its entry is known, should it be found again."""
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
        """How a task ended."""
        self.done[end.task] = end
        while len(self.done) > _REMEMBERED:
            self.index.add(self.done.pop(next(iter(self.done))))

    def ended(self, task: str) -> End | None:
        """How a task ended, if it has. Raises JournalError."""
        return self.done.get(task) or self.index.get(task)

    def journalled(self) -> dict[str, End]:
        """What is remembered and in the journal, by task, oldest first."""
        undone = {one.end.task for one in self.unwritten if one.end and one.record is not None}
        return {task: end for task, end in self.done.items() if task not in undone}

    def happened(self, change: Change, position: int) -> None:
        """A change is in the journal, up to ``position``: it is now what is."""
        self.pending.append((change, position))
        self.progress = change.after
        if change.version is not None:
            self.digest, self.time = change.version.digest, change.version.time
            self.made = change.version.updates

    @property
    def tally(self) -> dict[str, int]:
        """Tasks by how they ended, of all that is in the journal."""
        return reduce(lambda counts, one: one[0].counted(counts), self.pending, self.told)

    @property
    def counts(self) -> dict[str, int]:
        """Of the run, with what is in the journal."""
        ends, besides = self.tally, self.besides
        return {name: besides.get(name, 0) + ends.get(name, 0) for name in besides | ends}

    def models(self) -> Iterator[Model]:
        """The models whose buffers are in use."""
        if self.progress is not None:
            yield from self.progress.state.models()
        for change in (*(change for change, _ in self.pending), *self.unwritten):
            yield from change.after.state.models()
            yield from change.used
