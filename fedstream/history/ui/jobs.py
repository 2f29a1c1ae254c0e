"""Work on the pages' questions: one question at a time, in a separate process.

So the pages stay fast, and cancelled work ends at once.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections import OrderedDict
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, RLock, Thread
from time import monotonic
from typing import TYPE_CHECKING

from fedstream.core.errors import FedstreamError
from fedstream.history.model_stats import MeasuredShares
from fedstream.history.ui.questions import Question
from fedstream.history.ui.work import (
    Failure,
    Headway,
    TaskAccess,
    WorkBounds,
    WorkResult,
    work,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

KEPT = 20  # answers
_LOOK_S = 1.0  # between two looks whether a process is still there
_REST_S = 30.0  # at most, to read what an ended process has sent: no more than a pipe holds
# What answering any question takes, and what takes long to import.
_PRELOADED = ["torch", "fedstream.history.ui.work", "fedstream.history.measuring"]


class Occupied(FedstreamError):
    """Another question is being worked on, or no more questions are accepted."""


@dataclass(frozen=True)
class Workplace:
    """The run that questions are about, and the rights and bounds of the work on them."""

    run: Path
    access: TaskAccess
    bounds: WorkBounds = WorkBounds()  # noqa: RUF009  (frozen)
    log: str = "the terminal of fedstream ui"  # where to find what the work prints
    preloads: bool = True  # keep a process that has imported torch, of some 220 MB


class PageJob:
    """A question, and the work on its answer, in progress or ended."""

    def __init__(self, question: Question, address: str) -> None:
        self.question = question
        self.address = address  # of the page that shows it
        self.part = 0.0  # of the work that is done, at least
        self.measured: dict[int, float] = {}  # value by version
        self.answer: WorkResult | None = None
        self.problem = ""  # why there is no answer
        self.seconds: float | None = None  # that the answer took
        self._began = monotonic()
        self._process: BaseProcess | None = None
        self._settling = Lock()  # of the answer and the problem, the first counts

    @property
    def is_going_on(self) -> bool:
        """Whether there may still be an answer."""
        return self.answer is None and not self.problem

    def as_it_is(self) -> PageJob:
        """A copy to draw a page from; an answer that arrives meanwhile doesn't change the copy."""
        found = copy(self)
        found.measured = dict(self.measured)
        return found

    def begin(self, where: Workplace) -> None:
        """Start the work, and return at once; ``problem`` tells later if the start failed."""
        # Starting takes seconds if torch has to be imported first: no page must wait for that.
        Thread(target=self._work, args=(where,), name="question", daemon=True).start()

    def _work(self, where: Workplace) -> None:
        """The life of the process, from its start to its end."""
        from multiprocessing.resource_tracker import ensure_running

        ensure_running()  # it sets signals free once it has started
        # What is started here inherits this: Ctrl-C is for the server, which ends it all.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            channel, process = self._start(where)
        except Exception as error:  # too many files or processes; or its parent was ended
            why = (error.strerror if isinstance(error, OSError) else str(error)) or repr(error)
            self._stop(f"it can't be started: {why}")
            return
        is_over, is_read = Event(), Event()
        watch = Thread(
            target=self._watch,
            args=(process, where, is_over, is_read),
            name="question's end",
            daemon=True,
        )
        watch.start()
        try:
            with channel:
                self._follow(channel, is_over)
        except Exception as error:  # what it sent can't be taken in
            self._stop(f"its answer can't be read: {type(error).__name__}: {error}")
        finally:
            is_read.set()
            watch.join()  # two threads must not ask for the exit code at once
            process.join(_LOOK_S)  # a task may have something to put away
            _kill(process)  # and whatever it has started
            process.join()
        self._stop(_ended(process, where))

    def _start(self, where: Workplace) -> tuple[Connection, BaseProcess]:
        from multiprocessing import get_context

        # Not a fork of this process: there are threads, and torch does not survive one. It is
        # forked from another, which imports torch for the first question, or a new one.
        context: ForkServerContext | SpawnContext = get_context("spawn")
        if where.preloads:
            context = get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=work,
            daemon=True,
            args=(theirs, self.question, where.run, where.access, where.bounds),
        )
        with theirs:
            try:
                process.start()
            except BaseException:
                ours.close()
                raise
        # At once, not where the work begins: importing what it needs takes long as well.
        if process.pid is not None:
            niceness = max(where.bounds.niceness, os.getpriority(os.PRIO_PROCESS, 0))
            with suppress(ProcessLookupError):  # it has ended: its exit code says why
                os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
        with self._settling:
            self._process = process
            if not self.is_going_on:  # cancelled meanwhile
                _kill(process)
        return ours, process

    def cancel(self) -> None:
        """End the work, unless it has ended."""
        self._stop("cancelled")

    def _stop(self, why: str) -> None:
        with self._settling:
            if self.is_going_on:
                self.problem = why
                if self._process is not None:
                    _kill(self._process)

    def _watch(
        self, process: BaseProcess, where: Workplace, is_over: Event, is_read: Event
    ) -> None:
        """End the work if it takes too long, or its process ends without the rest of an answer.

        Sets ``is_over`` when the process has ended; returns once ``is_read`` is set.
        """
        most = where.bounds.seconds
        while process.exitcode is None:
            left = _LOOK_S if most is None else self._began + most - monotonic()
            if most is not None and left <= 0:
                self._stop(f"it took longer than {most:g} s (page.question_s)")
                return
            if is_read.wait(min(_LOOK_S, left)):
                return
        # What the task started may hold the channel open. What was sent stays readable.
        _kill(process)
        is_over.set()
        if not is_read.wait(_REST_S):  # something that left the group holds it
            self._stop(_ended(process, where))

    def _follow(self, channel: Connection, is_over: Event) -> None:
        """Read all news until there is an answer, a problem, or no process any more."""
        while self.is_going_on:
            has_ended = is_over.is_set()  # before the look at what it left behind
            if not channel.poll(_LOOK_S):
                if has_ended:
                    return
                continue
            try:
                sent = channel.recv_bytes()
            except (EOFError, OSError):  # there is no more
                return
            self._take(pickle.loads(sent))  # noqa: S301  (of our own process)

    def _take(self, news: Headway | Failure | WorkResult) -> None:
        match news:
            case Headway():
                self.part = news.part
                if news.measured is not None:
                    version, value = news.measured
                    self.measured[version] = value
            case Failure():
                self._stop(news.text)
            case answer:
                with self._settling:
                    if self.is_going_on:  # not cancelled a moment ago
                        self.seconds = monotonic() - self._began
                        self.answer = answer


def _ended(process: BaseProcess, where: Workplace) -> str:
    """The error text for a process that ended without an answer."""
    return (
        f"the process that worked on it ended with exit code {process.exitcode}: what it "
        f"printed is in {where.log}"
    )


def _kill(process: BaseProcess) -> None:
    """End a process with its group, to which all processes belong that it has started.

    This is safe just after the process was waited for: the system does not reuse a number while its
    process group has members, nor for a while after.
    """
    if process.pid is None:
        return
    with suppress(ProcessLookupError):  # it has ended, or has not made its group yet
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


class PageJobs:
    """The questions about one run, and their answers.

    The newest answers are kept, but only the newest distances, which take 50 bytes an update.
    """

    def __init__(self, where: Workplace) -> None:
        self._where = where
        self._is_over = False
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()  # by address, the newest last
        self._changing = RLock()  # questions begin in one thread, and end in another

    @property
    def current(self) -> PageJob | None:
        """The job in progress; None if there is none."""
        with self._changing:
            return next((job for job in self._jobs.values() if job.is_going_on), None)

    def at(self, address: str) -> PageJob | None:
        """The job of the question at this address; None if it isn't kept."""
        return self._jobs.get(address)

    @property
    def shares(self) -> MeasuredShares | None:
        """The newest answer about all devices' distances; None if there is none."""
        with self._changing:
            answers = [job.answer for job in reversed(self._jobs.values())]
        return next((one for one in answers if isinstance(one, MeasuredShares)), None)

    def begin(self, question: Question, address: str) -> None:
        """Work on a question, also if it was answered before. Raises Occupied."""
        with self._changing:
            if self.current is not None:
                if self.current.address == address:
                    return
                raise Occupied("another question is being worked on")
            if self._is_over:
                raise Occupied("no question is taken any more: the server is stopping")
            job = self._jobs[address] = PageJob(question, address)
            self._jobs.move_to_end(address)
            distances = [
                at for at, one in self._jobs.items() if isinstance(one.answer, MeasuredShares)
            ]
            for one in [*distances[:-1], *list(self._jobs)[:-KEPT]]:
                self._jobs.pop(one, None)
            job.begin(self._where)

    def end(self) -> None:
        """Cancel the current job, and accept no more questions."""
        with self._changing:
            self._is_over = True
            current = self.current
            if current is not None:
                current.cancel()
