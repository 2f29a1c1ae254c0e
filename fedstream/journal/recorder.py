"""The table ``[journal]``, and the writer of the updater's journal.

Large models are written past the system's cache, in a thread. Small ones that need not be on disk
at once go through the cache. This takes less time than a switch to a thread, so it happens on the
event loop, unless the disk has just been slow: a blocked loop cannot renew a lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from fedstream.core.layout import Model, Payload
from fedstream.journal.claims import Claim, newest_epoch
from fedstream.journal.errors import JournalError, JournalFull
from fedstream.journal.records import (
    SUFFIX,
    VECTORS,
    EntryRecord,
    SegmentHead,
    Standing,
    name_of,
)
from fedstream.journal.segment import Segment, SegmentEnd
from fedstream.journal.writer import Writer
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.strategies import DeviceVectors


class JournalSettings(Section):
    """The table ``[journal]``: folder, syncing and retention."""

    dir: str = "journal"
    sync: Literal["always", "interval", "never"] = "interval"
    sync_s: Annotated[float, Field(gt=0)] = 1.0  # interval: at most this long after a write
    sync_bytes: Annotated[int, Field(gt=0)] = 64 << 20  # interval: or after this many bytes
    weights: bool = True  # false: don't record the updates' bytes
    segment_versions: Annotated[int, Field(ge=1)] = 4000  # a checkpoint after this many versions,
    segment_s: Annotated[float, Field(gt=0)] = 600.0  # this long
    segment_bytes: Annotated[int, Field(gt=0)] = 1 << 30  # or this many bytes
    keep_bytes: Annotated[int, Field(gt=0)] = 10 << 30  # the newest segment is kept at any size
    keep_segments: Annotated[int, Field(ge=1)] | None = None
    keep_s: Annotated[float, Field(gt=0)] | None = None
    adopt: bool = False  # continue from Redis's model if the journal's end is lost
    changed_rules: bool = False  # resume although the source of a rule isn't the recorded one


T = TypeVar("T")

SMALL = 1 << 20  # bytes of a model that goes through the system's cache
SLOW_S = 0.02  # after a slower append, the next one runs in the thread


@dataclass
class _Since:
    """Additions to the segment since its beginning."""

    begun: float = 0.0  # monotonic
    size: int = 0  # of its beginning
    versions: int = 0


class Recorder:
    """Appends in order. A position counts bytes over all segments of this process."""

    def __init__(
        self, settings: JournalSettings, synced: Callable[[float], object] | None = None
    ) -> None:
        """``synced``: called with the seconds of every sync, from any thread."""
        self.folder = Path(settings.dir)
        self._settings = settings
        self._told = synced
        self._writer: Writer | None = None
        self._before = 0  # position at which the segment begins
        self._since = _Since()
        self._begun: dict[str, float] = {}  # segment -> beginning, Redis's clock
        self.stored: dict[int, str] = {}  # device -> the segment that holds its vector
        self._claim: Claim | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._now = asyncio.Event()  # set: sync without waiting any longer
        self._appending = ThreadPoolExecutor(1, "journal")
        self._is_cached = False  # the segment is written through the system's cache
        self._took_s = 0.0  # duration of the last append

    @property
    def head(self) -> SegmentHead | None:
        """The head of the segment being written."""
        return self._writer.head if self._writer else None

    @property
    def epoch(self) -> int:
        """The epoch that claimed the journal; 0: none."""
        return self._claim.epoch if self._claim else 0

    @property
    def ending(self) -> SegmentEnd | None:
        """The end of the segment being written."""
        writer = self._writer
        return SegmentEnd(writer.path, writer.size, writer.chain) if writer else None

    @property
    def appended(self) -> int:
        """The position after the last record."""
        return self._before + (self._writer.size if self._writer else 0)

    @property
    def safe(self) -> int:
        """The position up to which records are safe according to the settings."""
        if self._settings.sync == "never" or self._writer is None:
            return self.appended
        return self.appended - self._writer.unsynced

    @property
    def is_full(self) -> bool:
        """Whether a new segment is due."""
        s, since = self._settings, self._since
        new = self._writer.size - since.size if self._writer else 0
        if not new:
            return False
        return (
            since.versions >= s.segment_versions
            or new >= s.segment_bytes
            or time.monotonic() - since.begun >= s.segment_s
        )

    def says(self, need: str) -> bool:
        """Whether the segment's head declares this need of its readers."""
        return self.head is not None and need in self.head.needs

    async def newest_epoch(self) -> int:
        """The newest epoch with a segment or another's claim in the folder; -1: none."""
        return await self._in_thread(lambda: newest_epoch(self.folder, besides=self._claim))

    async def claim(self, epoch: int) -> None:
        """Claim the journal for an epoch, before reading it.

        After that, the leader of an older epoch can commit no record that the reading misses.
        Raises Fenced, JournalError.
        """
        if self._claim is not None and self._claim.epoch == epoch:
            return
        self._claim = await self._in_thread(lambda: Claim(self.folder, epoch))

    async def begin(
        self,
        head: SegmentHead,
        standing: Standing,
        *models: Model,
        vectors: DeviceVectors | None = None,
    ) -> str:
        """Begin a segment, and delete the oldest ones above the limits.

        Returns the reason why one could not be deleted, or ''. Closes and syncs our previous
        segment under any settings, as its counted part must be on disk. The new segment has the
        device vectors that changed or whose segment is deleted.
        """
        await self._synced()
        cached = self._settings.sync != "always" and models[0].buffer.nbytes <= SMALL
        before, claim = self._writer, self._claim
        if claim is None:
            raise RuntimeError("the journal was not claimed")

        def begun() -> tuple[Writer, str]:
            # An updater that has a successor must not begin a segment.
            claim.check(before.path if before is not None else None)
            if before is not None:
                self._sync(before)
            name = name_of(head.epoch, head.number)
            outlived = self._outlived(name, head.time)
            changed, gone = self._due(vectors, {path.name for path in outlived})
            here = changed | gone
            elsewhere = {d: where for d, where in self.stored.items() if d not in here}
            said = standing.model_copy(
                update={
                    "here": tuple(sorted(here)),
                    "again": tuple(sorted(gone - changed)),
                    "elsewhere": tuple(elsewhere.items()),
                }
            )
            needs = (*head.needs, VECTORS) if vectors is not None else head.needs
            complete = head.model_copy(update={"needs": needs})
            writer = Writer(self.folder, complete, said, *models, vectors=vectors, cached=cached)
            self.stored = elsewhere | dict.fromkeys(here, name)
            if vectors is not None:
                vectors.changed.clear()
            try:
                claim.settle()
                for path in outlived:
                    claim.check()  # nor delete segments that the successor needs
                    _delete(path)
            except JournalError as error:  # the new segment exists: go on with it
                return writer, str(error)
            return writer, ""

        position = self.appended
        writer, left = await self._in_thread(begun)
        self._writer, self._is_cached = writer, cached
        self._before = position
        if before is not None:
            before.close()
        self._since = _Since(time.monotonic(), writer.size)
        return left

    def _due(self, vectors: DeviceVectors | None, outlived: set[str]) -> tuple[set[int], set[int]]:
        """The devices with changed vectors, and with lost ones; a new segment must have both.

        A vector is lost if its segment is about to be deleted, or was deleted by an operator.
        """
        if vectors is None:
            self.stored = {}
            return set(), set()
        names = set(self.stored.values())
        gone = {name for name in names if name in outlived or not (self.folder / name).exists()}
        return set(vectors.changed), {d for d, name in self.stored.items() if name in gone}

    async def append(
        self, records: Sequence[tuple[EntryRecord | None, Sequence[Payload]]]
    ) -> list[int]:
        """Append records with their payloads, synced together; return the position after each.

        For a None in ``records``, nothing is appended and the position before is returned. On a
        full disk, fewer positions than records are returned; the remaining records were not added.
        Added records stay, as a successor may have read them. Raises JournalFull if not even the
        first fits.
        """
        writer, claim = self._writer, self._claim
        if writer is None or claim is None:
            raise RuntimeError("no segment was started")

        at_once = self._is_cached and self._took_s < SLOW_S
        append = partial(self._append, writer, claim, records)
        sizes = append() if at_once else await self._in_thread(append)
        self._since.versions += sum(
            one is not None and one.digest is not None for one, _ in records[: len(sizes)]
        )
        if self._settings.sync == "interval":
            await self._sync_in_time(writer)
        return [self._before + size for size in sizes]

    def _append(
        self,
        writer: Writer,
        claim: Claim,
        records: Sequence[tuple[EntryRecord | None, Sequence[Payload]]],
    ) -> list[int]:
        """Append records, then check for a newer claim; return the size after each record."""
        sizes: list[int] = []
        before, began = writer.size, time.monotonic()
        try:
            for message, blocks in records:
                sizes.append(writer.append(message, *blocks) if message else writer.size)
        except JournalFull:
            if not sizes:
                raise
        finally:
            self._took_s = time.monotonic() - began
        if self._settings.sync == "always" and writer.size > before:
            self._sync(writer)
        claim.check(writer.path)  # after the record, and before the commit
        return sizes

    async def check_last(self) -> None:
        """Raise Fenced if another updater has continued the journal.

        Needed because Redis may have forgotten that leader.
        """
        writer, claim = self._writer, self._claim
        if writer is not None and claim is not None:
            await self._in_thread(lambda: claim.check(writer.path))

    async def _sync_in_time(self, writer: Writer) -> None:
        """Start a due sync; wait only if the disk does not keep up."""
        if self._syncing is not None and self._syncing.done():
            await self._synced()
        if self._syncing is None:
            self._now = asyncio.Event()
            self._syncing = asyncio.create_task(self._sync_after(writer, self._now), name="sync")
        if writer.unsynced >= self._settings.sync_bytes:
            self._now.set()
        if writer.unsynced >= 2 * self._settings.sync_bytes:
            await self._synced()

    async def _sync_after(self, writer: Writer, now: asyncio.Event) -> None:
        """Sync until everything is on disk, in a thread of its own so that appends don't wait."""
        while writer.unsynced:
            await pause(now, self._settings.sync_s)
            now.clear()
            await asyncio.to_thread(self._sync, writer)

    async def _synced(self) -> None:
        """Finish the due sync without delay. Raises the sync's error."""
        syncing, self._syncing = self._syncing, None
        self._now.set()
        if syncing is not None:
            await syncing

    def _sync(self, writer: Writer) -> None:
        began = time.monotonic()
        writer.sync()
        if self._told is not None:
            self._told(time.monotonic() - began)

    async def flush(self) -> None:
        """Sync everything, unless the settings forbid syncing."""
        await self._synced()
        writer = self._writer
        if writer is not None and writer.unsynced and self._settings.sync != "never":
            await self._in_thread(lambda: self._sync(writer))

    async def close(self) -> None:
        """Flush and close. A claim under which no segment was started is withdrawn."""
        try:
            await self.flush()
            if self._claim is not None and self._writer is None:
                await self._in_thread(self._claim.withdraw)
        finally:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
            self._claim = None
            self._appending.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run work in the appending thread, and wait for its end even if cancelled.

        Otherwise the file could be closed in the middle of a record.
        """
        running = asyncio.get_running_loop().run_in_executor(self._appending, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            with suppress(Exception):
                await running
            raise

    def _outlived(self, newest: str, now: float) -> list[Path]:
        """The segments above the limits once ``newest``, which is kept, begins at ``now``.

        Oldest first, so that an interrupted deletion leaves no gap. Also deletes leftovers of
        crashed writers.
        """
        s = self._settings
        if not self.folder.is_dir():
            return []
        for aside in self.folder.glob("*.tmp"):  # its writer crashed before it was complete
            if aside.name < newest:
                _delete(aside)
        paths = sorted(
            (p for p in self.folder.iterdir() if p.name.endswith(SUFFIX) and p.name < newest),
            reverse=True,
        )
        kept_bytes, ended = 0, now  # a segment ends when the next one begins
        for number, path in enumerate(paths, 1):
            try:
                about = path.stat()
            except FileNotFoundError:  # an operator is making room
                continue
            kept_bytes += about.st_size
            if (
                kept_bytes > s.keep_bytes
                or (s.keep_segments is not None and number >= s.keep_segments)
                or (s.keep_s is not None and now - ended > s.keep_s)
            ):
                return paths[number - 1 :][::-1]
            if s.keep_s is not None:
                ended = self._time_of(path)
        return []

    def _time_of(self, path: Path) -> float:
        """The beginning of a segment in seconds since 1970; infinity if unreadable."""
        if path.name not in self._begun:
            try:
                with Segment(path) as segment:
                    self._begun[path.name] = segment.head.time
            except JournalError:
                return inf
        return self._begun[path.name]


def _delete(path: Path) -> None:
    """Delete a file. Raises JournalError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(f"{path}: cannot be deleted: {error.strerror}") from error
