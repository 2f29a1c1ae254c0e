"""What is being worked on for the pages: one question at a time, in a process of its own.

So the pages answer as fast as ever, and what is cancelled ends at once, whatever it does.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError
from fedstream.page.questions import Question
from fedstream.page.work import (
    Failure,
    Headway,
    MeasuredShares,
    TaskAccess,
    WorkBounds,
    WorkResult,
    work,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

_KEPT = 20  # answers
# What answering any question takes, and what takes long to import.
_PRELOADED = ["torch", "fedstream.page.work", "fedstream.recordings.measuring"]


class Occupied(FedstreamError):
    """Another question is being worked on, or none is taken any more."""


@dataclass(frozen=True)
class Workplace:
    """Where questions about a run are worked on, and what that may take."""

    run: Path
    access: TaskAccess
    bounds: WorkBounds = WorkBounds()  # noqa: RUF009  (frozen)
    log: str = "the terminal of fedstream ui"  # where to find what the work prints
    preloads: bool = True  # keep a process that has imported torch, of some 220 MB


class PageJob:
    """A question that is being answered, or was."""

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

    @property
    def is_going_on(self) -> bool:
        """Whether there may still be an answer."""
        return self.answer is None and not self.problem

    def as_it_is(self) -> PageJob:
        """A copy to make a page of: an answer that comes meanwhile must not be on half of it."""
        found = copy(self)
        found.measured = dict(self.measured)
        return found

    def begin(self, where: Workplace) -> None:
        """Start the work; that it can't be started is its problem."""
        try:
            self._start(where)
        except OSError as error:  # too many files or processes
            self._stop(f"it can't be started: {error.strerror}")

    def _start(self, where: Workplace) -> None:
        from multiprocessing import get_context

        # Not a fork of this process: there are threads, and torch does not survive one. It is
        # forked from another, which imports torch for the first question, or a new one.
        context: ForkServerContext | SpawnContext = get_context("spawn")
        if where.preloads:
            context = get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
        ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(
            target=work, daemon=True,
            args=(theirs, self.question, where.run, where.access, where.bounds),
        )  # fmt: skip
        self._process.start()
        # At once, not where the work begins: importing what it needs takes long as well.
        if self._process.pid is not None:
            niceness = max(where.bounds.niceness, os.getpriority(os.PRIO_PROCESS, 0))
            os.setpriority(os.PRIO_PROCESS, self._process.pid, niceness)
        theirs.close()
        Thread(target=self._follow, args=(ours, self._process, where), daemon=True).start()

    def cancel(self) -> None:
        """End the work, unless it has ended."""
        self._stop("cancelled")

    def _stop(self, why: str) -> None:
        if self.is_going_on:
            self.problem = why
            if self._process is not None and self._process.pid is not None:
                self._process.kill()

    def _follow(self, channel: Connection, process: BaseProcess, where: Workplace) -> None:
        until = None if where.bounds.seconds is None else self._began + where.bounds.seconds
        with channel:
            try:
                while True:
                    if until is not None and not channel.poll(max(0.0, until - monotonic())):
                        self._stop(
                            f"it took longer than {where.bounds.seconds:g} s (page.question_s)"
                        )
                        until = None
                    match channel.recv():
                        case Headway() as news:
                            self.part = news.part
                            if news.measured is not None:
                                version, value = news.measured
                                self.measured[version] = value
                        case Failure() as news:
                            self.problem = news.text
                        case answer:  # its process may take a while to end
                            self.seconds = monotonic() - self._began
                            self.answer = answer
            except (EOFError, OSError):  # there is no more
                process.join()
        if self.answer is not None:
            self.problem = ""  # too late to cancel
        elif not self.problem:
            self.problem = (
                f"the process that worked on it ended with exit code {process.exitcode}: what it "
                f"printed is in {where.log}"
            )


class PageJobs:
    """The questions about one run, and their answers."""

    def __init__(self, where: Workplace) -> None:
        self._where = where
        self._is_over = False
        self._jobs: OrderedDict[str, PageJob] = OrderedDict()  # by address, the newest last

    @property
    def current(self) -> PageJob | None:
        """The one that is being worked on."""
        return next((job for job in self._jobs.values() if job.is_going_on), None)

    def at(self, address: str) -> PageJob | None:
        """What became of a question."""
        return self._jobs.get(address)

    @property
    def shares(self) -> MeasuredShares | None:
        """What was measured last of all devices' updates."""
        answers = [job.answer for job in self._jobs.values()]
        return next((one for one in reversed(answers) if isinstance(one, MeasuredShares)), None)

    def begin(self, question: Question, address: str) -> None:
        """Work on a question, also if it was answered before. Raises Occupied."""
        if self.current is not None:
            if self.current.address == address:
                return
            raise Occupied("another question is being worked on")
        if self._is_over:
            raise Occupied("no question is taken any more: the server is stopping")
        job = self._jobs[address] = PageJob(question, address)
        self._jobs.move_to_end(address)
        while len(self._jobs) > _KEPT:
            self._jobs.popitem(last=False)
        job.begin(self._where)

    def end(self) -> None:
        """Cancel what is being worked on, and take no more."""
        self._is_over = True
        current = self.current
        if current is not None:
            current.cancel()
