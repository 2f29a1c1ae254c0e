"""`fedstream doctor`'s checks of the journal and its volume."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from fedstream.core.errors import FedstreamError
from fedstream.core.records import Run
from fedstream.doctor.findings import Finding, ok, problem, size, warning
from fedstream.journal import Segment, segments, stored_bytes
from fedstream.terminal import counted

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

_SYNCS = 5
_SYNC_BYTES = 1 << 20


def disk(settings: Settings, model_bytes: int | None) -> Iterator[Finding]:
    """Check the journal's volume, existing or planned: write access, sync time and free space."""
    about, folder = "journal volume", Path(settings.journal.dir)
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        seconds, past_cache = _synced(there)
        free = _free(there)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        change = (
            "free some space, or lower journal.keep_bytes"
            if full
            else "let the updater's user write there, or set journal.dir to another folder"
        )
        yield problem(
            about, f"{there} has no space left" if full else f"{there}: {error.strerror}", change
        )
        return
    where = str(folder) if there == folder else f"{folder} does not exist yet; {there}"
    cache = (
        "past the cache"
        if past_cache
        else "through the cache, because the file system lacks O_DIRECT"
    )
    text = f"{where} can be written, {cache}; a sync of 1 MiB takes {1000 * seconds:.1f} ms"
    if settings.journal.sync == "interval" and seconds > settings.journal.sync_s:
        yield warning(
            about,
            f"{text}, more than journal.sync_s = {settings.journal.sync_s:g}",
            "use a faster disk, or raise journal.sync_s",
        )
    elif settings.journal.sync == "always":
        yield ok(about, f"{text}: at most {1 / seconds:.0f} syncs a second (journal.sync)")
    else:
        yield ok(about, text)
    yield _space(settings, folder, free, model_bytes)


def _space(settings: Settings, folder: Path, free: int, model_bytes: int | None) -> Finding:
    about, journal = "journal space", settings.journal
    present = stored_bytes(folder)
    # The journal grows one segment beyond keep_bytes before retention deletes.
    wanted = max(0, journal.keep_bytes + journal.segment_bytes - present)
    text = f"{size(free)} free; the journal has {size(present)} and may grow by {size(wanted)}"
    if model_bytes is not None and free < 2 * model_bytes:
        return problem(
            about,
            f"{size(free)} free: no room to start a segment with a model of {size(model_bytes)}",
            "free some space, or lower journal.keep_bytes",
        )
    if free < wanted:
        return warning(
            about,
            text,
            "enlarge the volume, or lower journal.keep_bytes (versions stop when it is full)",
        )
    return ok(about, text)


def _free(there: Path) -> int:
    found = os.statvfs(there)
    return found.f_bavail * found.f_frsize


def _synced(folder: Path) -> tuple[float, bool]:
    """Measure syncs of an unnamed temporary file.

    Returns the median in seconds, and whether the writes bypassed the page cache.
    """
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, mmap(-1, _SYNC_BYTES) as pages:
        past_cache = _past_cache(file.fileno())
        pages[:] = os.urandom(_SYNC_BYTES)
        took = []
        for n in range(_SYNCS):
            begun = time.perf_counter()
            os.pwrite(file.fileno(), pages, n * _SYNC_BYTES)
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - begun)
    return median(took), past_cache


def _past_cache(file: int) -> bool:
    """Bypass the page cache for a file, as for large models; return whether that is possible."""
    import fcntl

    if not hasattr(os, "O_DIRECT"):
        return False
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def journal(settings: Settings, run: Run | None, *, asked: bool) -> Finding:
    """Check that the journal belongs to this run.

    ``run``: the run in Redis; ``asked``: whether Redis could be asked.
    """
    about, folder = "journal", Path(settings.journal.dir)
    name = settings.run.name
    try:
        chain = segments(folder)
    except FedstreamError as error:
        return problem(about, str(error))
    for segment in chain:
        segment.close()
    if chain:
        return _of_run(settings, chain[-1], len(chain), run)
    if run is not None and not settings.journal.adopt:
        return problem(
            about,
            f"none in {folder}, but run {name!r} is in Redis",
            "set journal.dir to its folder, or start a new one with Redis's newest model: "
            "fedstream updater --adopt",
        )
    return ok(
        about, "there is none" + (": the updater creates the run and the journal" if asked else "")
    )


def _of_run(settings: Settings, newest: Segment, count: int, run: Run | None) -> Finding:
    about, head, name = "journal", newest.head, settings.run.name
    if head.run != name:
        return problem(
            about,
            f"{newest.path.parent} is the journal of run {head.run!r}, not {name!r}",
            "correct run.name or journal.dir",
        )
    if run is not None and run.lineage != head.lineage:
        return problem(
            about,
            f"{newest.path.parent} and Redis hold two different runs named {name!r}",
            "correct journal.dir, or purge the run in Redis to continue from the journal",
        )
    if (was := head.strategy.get("name")) != settings.strategy.name:
        return problem(
            about,
            f"strategy.name = {settings.strategy.name!r}, the journal's run was made with {was!r}",
            "restore it, or choose another run.name and journal.dir",
        )
    return ok(
        about,
        f"{counted(count, 'segment')} of run {name!r}, the newest from version "
        f"{newest.standing.version} on",
    )
