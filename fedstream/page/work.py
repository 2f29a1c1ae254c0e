"""The process that answers a question: it replays a journal and measures its models."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from fedstream.broker.errors import FedstreamError
from fedstream.broker.layout import Model
from fedstream.journal import journal_of, newest_version, opened
from fedstream.local.parent import VARIABLE, end_with_parent
from fedstream.page.questions import Bisection, OtherRule, Question
from fedstream.recordings.bisect import Search, search
from fedstream.runtime.plugins import allowing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fedstream.recordings.replay import ReplayResult
    from fedstream.settings.config import Settings

_BETWEEN_S = 0.1  # at least, from one piece of news to the next that says nothing but how far
_NICENESS = 5  # the pages come first


@dataclass(frozen=True)
class TaskAccess:
    """The task to measure with, and what a recording may run, as the command's options say."""

    task: str | None = None
    config: Path | None = None
    data_root: str | None = None
    trusted: bool = False
    changed: bool = False

    def settings(self, run: Path) -> Settings:
        """The run's settings, as far as measuring needs them. Raises FedstreamError."""
        from fedstream.settings.recording import settings_of

        return settings_of(
            run, self.config, trusted=self.trusted, task=self.task, data_root=self.data_root
        )


@dataclass(frozen=True)
class Headway:
    """How far the work has got."""

    part: float
    measured: tuple[int, float] | None = None  # version and value


@dataclass(frozen=True)
class Failure:
    """Why there is no answer."""

    text: str


WorkResult: TypeAlias = "Search | ReplayResult"


def work(channel: Connection, question: Question, run: Path, access: TaskAccess) -> None:
    """WorkResult a question about a run; all news of it go into ``channel``, the answer last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this
    os.environ[VARIABLE] = str(os.getppid())
    end_with_parent()
    os.nice(_NICENESS)
    with suppress(BrokenPipeError):  # nobody wants to know any more
        try:
            channel.send(answer(question, run, access, channel.send))
        except FedstreamError as error:
            channel.send(Failure(str(error)))


def answer(
    question: Question, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> WorkResult:
    """The answer to a question, as the command would give it. Raises FedstreamError."""
    with allowing(recorded=access.trusted, changed=access.changed):
        if isinstance(question, Bisection):
            return _bisected(question, run, access, tell)
        return _replayed(question, run, access, tell)


def _bisected(
    asked: Bisection, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> Search:
    from fedstream.recordings.measuring import judge

    with opened(run) as chain:
        first = chain[0].standing.version
        versions = max(1, newest_version(chain) - first)
        judged, reached = judge(access.settings(chain[0].path.parent), asked.metric), 0.0

        def measure(version: int, model: Model) -> float:
            nonlocal reached
            value = judged(version, model)
            reached = max(reached, (version - first) / versions)  # at the end it goes back
            tell(Headway(reached, (version, value)))
            return value

        return search(chain, measure, asked.limit.is_good, asked.every)


def _replayed(
    asked: OtherRule, run: Path, access: TaskAccess, tell: Callable[[Headway], object]
) -> ReplayResult:
    from fedstream.journal.replay import Replayer
    from fedstream.recordings.measuring import measuring
    from fedstream.recordings.replay import follow, rule_by

    with Replayer(
        journal_of(run), strategy=rule_by(asked.sets, asked.strategy), without=asked.without,
        from_version=asked.begin, beside=True,
    ) as replayer:  # fmt: skip
        measure = measuring(access.settings(run))
        versions, told = max(1, replayer.newest - replayer.begin), monotonic()

        def step(version: int) -> None:
            nonlocal told
            if monotonic() - told >= _BETWEEN_S:
                told = monotonic()
                tell(Headway((version - replayer.begin) / versions))

        return follow(replayer, asked.every, measure, step)
