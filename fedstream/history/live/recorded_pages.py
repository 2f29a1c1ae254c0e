"""The recorded run's pages beside the live page, if the coordinator can read the journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from aiohttp import web

from fedstream.history.live.snapshot import SeenPushes
from fedstream.history.measurements import Measurement
from fedstream.history.model_stats import RecentPushes
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.http import Permission
from fedstream.history.ui.jobs import PageJobs, Workplace
from fedstream.history.ui.server import PageServer
from fedstream.history.ui.work import TaskAccess, WorkBounds
from fedstream.journal import SUFFIX
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG

_NICENESS = 19  # a question's process runs after all others


def has_journal(settings: Settings) -> bool:
    """Whether this process can read a journal."""
    try:
        return any(one.suffix == SUFFIX for one in Path(settings.journal.dir).iterdir())
    except OSError:
        return False


def recorded_pages(
    settings: Settings,
    permission: Callable[[web.Request], Permission],
    measured: Callable[[], Sequence[Measurement]],
    pushes: Callable[[], SeenPushes],
) -> PageServer:
    """The pages of a run's journal, which is opened with the first request.

    ``permission``: of a request's sender to have questions worked on. ``measured``: the
    measurements so far. ``pushes``: figures of the journal's newest updates.
    """
    journal = Path(settings.journal.dir)
    path = journal.parent if (journal.parent / CONFIG).is_file() else journal

    def recent_pushes(device: int) -> RecentPushes:
        seen = pushes()
        rows = seen.rows[seen.rows["device"] == device]
        return RecentPushes(rows, seen.version, seen.problem)

    def opened() -> RecordedRun:
        return RecordedRun(path, is_live=True, measured=measured, recent_pushes=recent_pushes)

    # Trusted: the programs that the journal names are in this coordinator's configuration, too.
    own = Settings(task=settings.task, evaluator=settings.evaluator)
    jobs = PageJobs(
        Workplace(
            path,
            TaskAccess(trusted=True, own=own),
            WorkBounds(settings.page.question_s, settings.page.question_bytes, _NICENESS),
            log="the coordinator's log",
            preloads=False,
        )
    )
    return PageServer(opened, jobs, permission)
