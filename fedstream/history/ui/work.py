"""The process that answers a question: it replays a journal and measures its models."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.history.bisect import Search, search
from fedstream.history.model_stats import AHEAD, MeasuredShares
from fedstream.history.ui.questions import Bisection, Distances, OtherRule, Question
from fedstream.journal import counted_bytes, journal_of, newest_version, opened
from fedstream.journal.contributions import stats
from fedstream.runtime.plugins import allowing
from fedstream.runtime.process import PARENT_VARIABLE, death_with_parent, end_with_parent

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fedstream.history.replay import ReplayResult
    from fedstream.settings.config import Settings

_BETWEEN_S = 0.1  # at least, from one piece of news to the next that says nothing but how far
# How torch, and the system's loader, say that there is no memory.
_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "failed to map segment")
_OURS = "FEDSTREAM_"  # what the names of our environment variables begin with


@dataclass(frozen=True)
class TaskAccess:
    """The task to measure with, and whether a recording's programs may run; from the options."""

    task: str | None = None
    config: Path | None = None
    data_root: str | None = None
    trusted: bool = False
    changed: bool = False
    own: Settings | None = None  # a service's, whose task is the run's; the others don't count then

    def settings(self, run: Path) -> Settings:
        """The run's settings, as far as measuring needs them. Raises FedstreamError."""
        if self.own is not None:
            return self.own
        from fedstream.settings.recording import settings_of

        return settings_of(
            run, self.config, trusted=self.trusted, task=self.task, data_root=self.data_root
        )


@dataclass(frozen=True)
class WorkBounds:
    """Limits of the work's time, memory and priority."""

    seconds: float | None = None  # None: as long as it needs
    memory: int | None = None  # bytes; None: as much as it needs
    niceness: int = 5  # the pages come first


@dataclass(frozen=True)
class Headway:
    """How far the work has got."""

    part: float
    measured: tuple[int, float] | None = None  # version and value


@dataclass(frozen=True)
class Failure:
    """Why there is no answer."""

    text: str


WorkResult: TypeAlias = "Search | ReplayResult | MeasuredShares"


def work(
    channel: Connection, question: Question, run: Path, access: TaskAccess, bounds: WorkBounds
) -> None:
    """Answer a question about a run; all news of it go into ``channel``, the answer last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # All that the task starts can be ended with it. Not a session: where the system schedules by
    # sessions (autogroups), niceness counts within one alone.
    os.setpgid(0, 0)
    _end_with_server(access)
    if bounds.memory is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        least = bounds.memory if most == resource.RLIM_INFINITY else min(bounds.memory, most)
        resource.setrlimit(resource.RLIMIT_DATA, (least, most))
    with suppress(BrokenPipeError):  # nobody wants to know any more
        channel.send(_tried(channel, question, run, access, bounds))


def _end_with_server(access: TaskAccess) -> None:
    """End this process with the one that began it, even if the latter is killed."""
    if access.own is not None:  # a service's passwords are no business of the task's
        for name in [name for name in os.environ if name.startswith(_OURS)]:
            del os.environ[name]
    os.environ[PARENT_VARIABLE] = str(os.getppid())  # the server, or what ends with it
    end_with_parent()
    # The system means the thread that began it: the question's own, which outlasts this process.
    if (die := death_with_parent()) is not None:
        die()
    server = parent_process()
    if server is not None and not server.is_alive():  # it ended before that
        os._exit(0)


def _tried(
    channel: Connection, question: Question, run: Path, access: TaskAccess, bounds: WorkBounds
) -> WorkResult | Failure:
    try:
        return answer(question, run, access, channel.send)
    except (FedstreamError, MemoryError, ImportError) as error:
        if bounds.memory is not None and _lacks_memory(error):
            return Failure(f"it took more than {bounds.memory >> 20:,} MiB (page.question_bytes)")
        if isinstance(error, ModuleNotFoundError):
            return Failure(
                f"this takes the package {error.name}, which is not installed here: ask where the "
                "run can be measured, with fedstream ui"
            )
        return Failure(str(error) or type(error).__name__)


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether too little memory caused an error; torch says this only in its messages."""
    while error is not None:
        if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
            return True
        error = error.__cause__
    return False


def answer(
    question: Question, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> WorkResult:
    """The answer to a question, as the command would give it. Raises FedstreamError."""
    with allowing(recorded=access.trusted, changed=access.changed):
        if isinstance(question, Bisection):
            return _bisected(question, run, access, tell)
        if isinstance(question, Distances):
            return _shared(question, run, tell)
        return _replayed(question, run, access, tell)


def _bisected(
    asked: Bisection, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> Search:
    from fedstream.history.measuring import judge

    with opened(run) as chain:
        first = chain[0].standing.version
        last = newest_version(chain) if asked.until is None else asked.until
        versions = max(1, last - first)
        judged, reached = judge(access.settings(chain[0].path.parent), asked.metric), 0.0

        def measure(version: int, model: Model) -> float:
            nonlocal reached
            value = judged(version, model)
            reached = max(reached, (version - first) / versions)  # at the end it goes back
            tell(Headway(reached, (version, value)))
            return value

        return search(chain, measure, asked.limit.is_good, asked.every, last, asked.recorded)


def _shared(asked: Distances, run: Path, tell: Callable[[Headway], object]) -> MeasuredShares:
    with opened(run) as chain:
        last = newest_version(chain) if asked.until is None else asked.until
        total, passed, say = counted_bytes(chain), 0, _now_and_then(tell)

        def read(length: int) -> None:
            nonlocal passed
            passed += length
            say(passed / total)

        return MeasuredShares(stats(chain, AHEAD, read, last), last)


def _replayed(
    asked: OtherRule, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> ReplayResult:
    from fedstream.history.measuring import measuring
    from fedstream.history.replay import follow, rule_by
    from fedstream.journal.replay import Replayer

    with Replayer(
        journal_of(run),
        strategy=rule_by(asked.sets, asked.strategy),
        without=asked.without,
        from_version=asked.begin,
        until=asked.until,
        beside=True,
    ) as replayer:
        measure = measuring(access.settings(run))
        last = replayer.newest if asked.until is None else asked.until
        versions, say = max(1, last - replayer.begin), _now_and_then(tell)

        def step(version: int) -> None:
            say((version - replayer.begin) / versions)

        return follow(replayer, asked.every, measure, step)


def _now_and_then(tell: Callable[[Headway], object]) -> Callable[[float], None]:
    """A function that passes the part done to ``tell``, at most once in ``_BETWEEN_S``."""
    told = monotonic()

    def say(part: float) -> None:
        nonlocal told
        if monotonic() - told >= _BETWEEN_S:
            told = monotonic()
            tell(Headway(part))

    return say
