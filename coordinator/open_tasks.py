"""The open tasks, indexed for a plan's questions, so that no plan goes through all tasks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import itemgetter

from fedstream.core.messages import Trigger
from fedstream.core.reasons import DEADLINE_PASSED, TIMED_OUT, Overdue

# Tasks sorted by a time, then by order of addition. An insertion moves the tasks after it: none if
# times rise, and otherwise 8 bytes a task.
_Times = list[tuple[float, int, str]]


class OpenTasks(Collection[Trigger]):
    """Tasks by id, with their opening times, sorted by their time-outs."""

    def __init__(
        self, triggers: Iterable[Trigger] = (), since: Mapping[str, float] | None = None
    ) -> None:
        """``since``: opening times, in seconds since 1970; a task without one never times out."""
        self._tasks = {trigger.task: trigger for trigger in triggers}
        self._since = {task: (since or {}).get(task, math.inf) for task in self._tasks}
        self._number = {task: n for n, task in enumerate(self._tasks)}  # by order of addition
        self._added = len(self._tasks)
        self._at_work: dict[int, int] = {}  # device -> number of its tasks
        self._opened: _Times = []  # tasks without a deadline, by opening time
        self._deadlines: _Times = []  # tasks with a deadline, by deadline
        self._rounds: dict[int, _Times] = {}  # version -> its round's tasks, by deadline
        for trigger in self._tasks.values():
            for times, time in self._places(trigger):
                times.append((time, self._number[trigger.task], trigger.task))
            self._at_work[trigger.device] = self._at_work.get(trigger.device, 0) + 1
        for times in (self._opened, self._deadlines, *self._rounds.values()):
            times.sort()

    def open(self, trigger: Trigger, since: float) -> None:
        """Add a task, opened at ``since`` (seconds since 1970), or replace it."""
        self.end(trigger.task)
        self._tasks[trigger.task] = trigger
        self._since[trigger.task] = since
        self._number[trigger.task] = self._added
        self._added += 1
        self._at_work[trigger.device] = self._at_work.get(trigger.device, 0) + 1
        for times, time in self._places(trigger):
            insort(times, (time, self._number[trigger.task], trigger.task))

    def end(self, task: str) -> Trigger | None:
        """Remove a task and return it; None if it is not there."""
        trigger = self._tasks.pop(task, None)
        if trigger is None:
            return None
        for times, time in self._places(trigger):
            del times[bisect_left(times, (time, self._number[task], task))]
        if trigger.version is not None and not self._rounds[trigger.version]:
            del self._rounds[trigger.version]
        del self._since[task], self._number[task]
        left = self._at_work[trigger.device] - 1
        if left:
            self._at_work[trigger.device] = left
        else:
            del self._at_work[trigger.device]
        return trigger

    def _places(self, trigger: Trigger) -> Iterator[tuple[_Times, float]]:
        """The lists that contain a task, and its time in each."""
        if trigger.deadline is None:
            yield self._opened, self._since[trigger.task]
        else:
            yield self._deadlines, trigger.deadline
        if trigger.version is not None:
            deadline = math.inf if trigger.deadline is None else trigger.deadline
            yield self._rounds.setdefault(trigger.version, []), deadline

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Trigger]:
        return iter(self._tasks.values())

    def __contains__(self, trigger: object) -> bool:
        return isinstance(trigger, Trigger) and self._tasks.get(trigger.task) == trigger

    def since(self, task: str) -> float | None:
        """The opening time of a task; None if the task is not there."""
        return self._since.get(task)

    @property
    def at_work(self) -> Mapping[int, int]:
        """The devices with tasks, and the number of their tasks."""
        return self._at_work

    def in_round(self, version: int) -> list[str]:
        """The tasks of the round that trains from ``version``."""
        return [task for *_, task in self._rounds.get(version, ())]

    def count(self, version: int, now: float = -math.inf) -> int:
        """The number of tasks of a version's round whose deadline is after ``now``."""
        deadlines = self._rounds.get(version, [])
        return len(deadlines) - bisect_right(deadlines, now, key=itemgetter(0))

    def of_past_rounds(self, version: int) -> list[str]:
        """The tasks of rounds that train from versions before ``version``."""
        return [task for v in sorted(self._rounds) if v < version for task in self.in_round(v)]

    def overdue(self, now: float, timeout_s: float) -> list[tuple[str, Overdue]]:
        """The overdue tasks, each with the reason. ``timeout_s``: for tasks without a deadline."""
        old = self._opened[: self._due(self._opened, now, timeout_s)]
        late = self._deadlines[: self._due(self._deadlines, now, 0.0)]
        return [(task, TIMED_OUT) for *_, task in old] + [(t, DEADLINE_PASSED) for *_, t in late]

    def next_end(self, now: float, timeout_s: float) -> float:
        """The time, after ``now``, at which the next task is overdue; infinity: never."""
        old, late = self._due(self._opened, now, timeout_s), self._due(self._deadlines, now, 0.0)
        return min(
            self._opened[old][0] + timeout_s if old < len(self._opened) else math.inf,
            self._deadlines[late][0] if late < len(self._deadlines) else math.inf,
        )

    def _due(self, times: _Times, now: float, timeout_s: float) -> int:
        """The number of overdue tasks in a list."""
        if not times or times[0][0] + timeout_s > now:  # the usual case
            return 0
        return bisect_right(times, now, key=lambda each: each[0] + timeout_s)


class AtWork(Collection[int]):
    """The devices with an open task, once per task, and the devices that get a task now."""

    def __init__(self, tasks: OpenTasks) -> None:
        self._tasks = tasks
        self._more: list[int] = []

    def add(self, device: int) -> None:
        """Count a task that is about to be opened."""
        self._more.append(device)

    def __len__(self) -> int:
        return len(self._tasks) + len(self._more)

    def __iter__(self) -> Iterator[int]:
        yield from (trigger.device for trigger in self._tasks)
        yield from self._more

    def __contains__(self, device: object) -> bool:
        return device in self._tasks.at_work or device in self._more
