"""What is appended stays, what is said to be on disk is, and nothing is half done."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.errors import Fenced
from fedstream.core.layout import PAGE, Model
from fedstream.journal import Claim, JournalError, JournalFull, JournalSettings, Segment, Taken
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import standing_of
from fedstream.journal.recorder import Recorder
from fedstream.strategies import FedAsyncSettings, State
from tests.journals import Scribe
from tests.support import layout_of, model_of, wait_until
from tests.updater.journalled import records
from tests.updater.states import head_of, upload_of

FIRST = "00000001-000000.journal"
LAYOUT = layout_of(PAGE)  # a payload of four pages


def taken(n: int) -> tuple[Taken, tuple[Model, ...]]:
    """The n-th record, and its payload."""
    model = model_of(LAYOUT, float(n))
    upload = upload_of(
        f"task-{n}",
        device=n,
        layout=LAYOUT.signature,
        digest=model.digest(),
        size=LAYOUT.nbytes,
    )
    record = Taken(
        entry=f"{n}-0",
        upload=upload,
        outcome="refused",
        staleness=0,
        version=0,
        time=1.0,
        received=1.0,
    )
    return record, (model,)


@asynccontextmanager
async def recording(folder: Path, **settings: Any) -> AsyncIterator[Recorder]:
    """A recorder whose segment has begun."""
    recorder = Recorder(JournalSettings(dir=str(folder), **settings))
    await recorder.claim(1)
    model = model_of(LAYOUT)
    head = head_of(LAYOUT, FedAsyncSettings())
    standing, models = standing_of(
        Progress(State(0, model)), "begun", digest=model.digest(), time=1.0
    )
    await recorder.begin(head, standing, *models)
    try:
        yield recorder
    finally:
        await recorder.close()


def tasks(folder: Path) -> list[str]:
    """The tasks whose records are whole, in order."""
    return [record.upload.task for record in records(folder) if isinstance(record, Taken)]


class Disk:
    """A disk that has room for so many bytes more, and then says ``why`` not."""

    def __init__(self, why: int = errno.ENOSPC) -> None:
        self.room: int | None = None
        self._why = why
        self._real = os.pwritev

    def pwritev(self, file: int, parts: list[Any], at: int) -> int:
        """In place of the system's: writes what there is room for first, as it does."""
        if self.room is None:
            return self._real(file, parts, at)
        fits = []
        for part in parts:
            size = min(len(part), self.room) // PAGE * PAGE
            self.room -= size
            fits.append(part[:size])
        if not any(fits):
            raise OSError(self._why, os.strerror(self._why))
        return self._real(file, [part for part in fits if len(part)], at)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk that the journal is on."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    return disk


RECORD = PAGE + LAYOUT.nbytes  # bytes of one on disk


async def test_full_disk_keeps_the_complete_records_of_a_batch(tmp_path: Path, disk: Disk) -> None:
    """A successor may have read it; and the rest is written once there is room."""
    async with recording(tmp_path, sync="always") as recorder:
        begun = recorder.appended
        disk.room = RECORD + 2 * PAGE
        batch = [taken(n) for n in range(3)]
        assert await recorder.append(batch) == [begun + RECORD]
        assert tasks(tmp_path) == ["task-0"]
        assert (recorder.appended, recorder.safe) == (begun + RECORD, begun + RECORD)
        disk.room = 2 * PAGE
        with pytest.raises(JournalFull, match="no space: No space left on device; make room"):
            await recorder.append(batch[1:])
        assert tasks(tmp_path) == ["task-0"]
        disk.room = None
        assert await recorder.append(batch[1:]) == [begun + 2 * RECORD, begun + 3 * RECORD]
    assert tasks(tmp_path) == ["task-0", "task-1", "task-2"]


async def test_partial_record_is_truncated_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    async with recording(tmp_path) as recorder:
        path = tmp_path / FIRST
        size = path.stat().st_size
        disk.room = 3 * PAGE
        with pytest.raises(JournalFull):
            await recorder.append([taken(0)])
        assert path.stat().st_size == size


def test_segment_that_fails_to_start_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    disk.room = 3 * PAGE
    with pytest.raises(JournalFull):
        Scribe(tmp_path)
    assert listed(tmp_path) == []


async def test_unsynced_records_of_a_failing_disk_are_left_to_the_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what was written: it may be whole, and read already."""
    disk = Disk(errno.EIO)
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    async with recording(tmp_path) as recorder:
        path = tmp_path / FIRST
        size = path.stat().st_size
        disk.room = 3 * PAGE
        with pytest.raises(JournalError, match="cannot be written: Input/output error"):
            await recorder.append([taken(0)])
        assert path.stat().st_size == size + 3 * PAGE
        assert tasks(tmp_path) == []


async def test_segment_name_is_on_disk_before_the_first_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    real, link = os.fsync, os.link

    def fsync(file: int) -> None:
        happened.append(f"synced {Path(f'/proc/self/fd/{file}').readlink().name}")
        real(file)

    def linked(one: Any, other: Any) -> None:
        happened.append(f"linked {Path(other).name}")
        link(one, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", linked)
    Scribe(tmp_path).close()
    assert happened == ["linked 00000001-000000.journal", f"synced {tmp_path.name}"]


def test_sync_covers_what_was_there_when_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe = Scribe(tmp_path)
    writer = scribe.writer
    scribe.update()
    size, real = writer.size, os.fdatasync

    def fdatasync(file: int) -> None:
        real(file)
        scribe.update()  # the disk may not have it

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert writer.sync() == size
    assert writer.unsynced == writer.size - size > 0
    monkeypatch.setattr(os, "fdatasync", real)
    scribe.close()


def test_overtaken_sync_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    real = os.fdatasync

    def fdatasync(file: int) -> None:
        monkeypatch.setattr(os, "fdatasync", real)
        scribe.update()
        scribe.writer.sync()  # a second thread's, of more
        real(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    assert scribe.writer.sync() == scribe.writer.size
    assert scribe.writer.unsynced == 0
    scribe.close()


def test_failed_sync_covers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    unsynced, real = scribe.writer.unsynced, os.fdatasync

    def fails(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(JournalError, match="not written to disk: Input/output error"):
        scribe.writer.sync()
    monkeypatch.setattr(os, "fdatasync", real)  # Linux reports a failure once
    with pytest.raises(JournalError, match="not written to disk: Input/output error"):
        scribe.writer.sync()
    assert scribe.writer.unsynced == unsynced > 0
    scribe.writer.close()


class Held:
    """A call of the system that waits until the test lets it go on."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.go_on = threading.Event()
        self._real: Callable[..., Any] = getattr(os, name)
        monkeypatch.setattr(os, name, self)

    def __call__(self, *given: Any) -> Any:
        self.calls += 1
        assert self.go_on.wait(60)
        return self._real(*given)


async def test_writer_waits_for_a_slow_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = RECORD  # behind so much a sync begins, behind twice that it is waited for
    async with recording(tmp_path, sync="interval", sync_s=3600.0, sync_bytes=bound) as recorder:
        held = Held("fdatasync", monkeypatch)
        await recorder.append([taken(0)])
        await wait_until(lambda: held.calls)
        appending = asyncio.create_task(recorder.append([taken(1)]))
        await wait_until(lambda: tasks(tmp_path) == ["task-0", "task-1"])
        done, _ = await asyncio.wait({appending}, timeout=0.2)
        assert not done
        held.go_on.set()
        await appending
        assert recorder.safe == recorder.appended


@pytest.mark.parametrize(("sync", "syncs"), [("interval", 1), ("never", 0)])
async def test_closing_syncs_everything_unless_disabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str, syncs: int
) -> None:
    async with recording(tmp_path, sync=sync, sync_s=3600.0) as recorder:
        held = Held("fdatasync", monkeypatch)
        held.go_on.set()
        await recorder.append([taken(0)])
        assert held.calls == 0
    assert held.calls == syncs


def can_bypass(folder: Path) -> bool:
    """Whether files in a folder can be written past the system's cache."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


class Watched:
    """The disk that the journal is on: who writes to it, and whether past the system's cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writers: list[str] = []
        self.direct: set[bool] = set()
        self.takes_s = 0.0
        self._real = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, file: int, parts: list[Any], at: int) -> int:
        self.writers.append(threading.current_thread().name.partition("_")[0])
        self.direct.add(bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT))
        time.sleep(self.takes_s)
        return self._real(file, parts, at)


@pytest.mark.parametrize(
    ("sync", "small", "writer", "is_direct"),
    [
        pytest.param("interval", 1 << 20, "MainThread", False, id="small"),
        pytest.param("never", 1 << 20, "MainThread", False, id="small-never-synced"),
        pytest.param("always", 1 << 20, "journal", True, id="small-synced"),
        pytest.param("interval", LAYOUT.nbytes - 1, "journal", True, id="large"),
    ],
)
async def test_only_small_unsynced_updates_are_written_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sync: str,
    small: int,
    writer: str,
    is_direct: bool,
) -> None:
    """All else would stop the renewal of leases meanwhile."""
    monkeypatch.setattr("fedstream.journal.recorder.SMALL", small)
    disk = Watched(monkeypatch)
    async with recording(tmp_path, sync=sync) as recorder:
        disk.writers.clear()
        await recorder.append([taken(0)])
        assert (disk.writers, disk.direct) == ([writer], {is_direct and can_bypass(tmp_path)})


async def test_slow_disk_is_waited_for_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is fast again: a loop that waits for a disk renews no lease."""
    monkeypatch.setattr("fedstream.journal.recorder.SLOW_S", 0.2)
    async with recording(tmp_path) as recorder:
        disk = Watched(monkeypatch)
        for n, takes_s in enumerate((0.0, 0.2, 0.2, 0.0, 0.0)):
            disk.takes_s = takes_s
            await recorder.append([taken(n)])
        here, there = "MainThread", "journal"
        assert disk.writers == [here, here, there, there, here]
    assert tasks(tmp_path) == [f"task-{n}" for n in range(5)]


async def test_cancelled_append_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tmp_path, sync="always") as recorder:
        begun = recorder.appended
        held = Held("pwritev", monkeypatch)
        appending = asyncio.create_task(recorder.append([taken(0), taken(1)]))
        await wait_until(lambda: held.calls)
        appending.cancel()
        await asyncio.sleep(0)
        assert not appending.done()
        held.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await appending
        assert recorder.appended == begun + 2 * RECORD
        await recorder.append([taken(2)])
    assert tasks(tmp_path) == ["task-0", "task-1", "task-2"]


async def test_record_is_written_before_checking_for_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that take-overs rest on: who claims later than that look reads the record."""
    seen: list[list[str]] = []
    real = Claim.check

    def check(self: Claim, segment: Path | None = None) -> None:
        seen.append(tasks(tmp_path))
        real(self, segment)

    async with recording(tmp_path) as recorder:
        monkeypatch.setattr(Claim, "check", check)
        await recorder.append([taken(0)])
        assert seen == [["task-0"]]
        Claim(tmp_path, 2)
        with pytest.raises(Fenced, match="another updater has taken over"):
            await recorder.append([taken(1)])
        with pytest.raises(Fenced):
            await recorder.check_last()
    with Segment(tmp_path / FIRST) as segment:
        assert len(list(segment.records())) == 2


async def begins_the_next(recorder: Recorder, at: float = 1.0) -> None:
    """A segment behind the one that is written. ``at``: Redis's time."""
    model, before, mine = model_of(LAYOUT), recorder.ending, recorder.head
    assert before
    assert mine
    standing, models = standing_of(
        Progress(State(0, model)), "continued", digest=model.digest(), time=1.0
    )
    head = mine.model_copy(
        update={
            "number": mine.number + 1,
            "predecessor": before.path.name,
            "cut": before.at,
            "follows": before.chain.hex(),
            "time": at,
        }
    )
    await recorder.begin(head, standing, *models)


async def test_oldest_segments_are_deleted_beyond_the_size_limit(tmp_path: Path) -> None:
    async with recording(tmp_path / "one"):
        size = (tmp_path / "one" / FIRST).stat().st_size
    folder = tmp_path / "journal"
    async with recording(folder, keep_bytes=size * 5 // 2) as recorder:
        for _ in range(4):
            await begins_the_next(recorder)
    assert listed(folder) == [f"00000001-00000{n}.journal" for n in (2, 3, 4)]  # 2, and its own


async def test_segments_are_deleted_once_their_last_record_is_too_old(tmp_path: Path) -> None:
    """By Redis's clock: the disk's may differ from it, and from this machine's."""
    async with recording(tmp_path, keep_s=10) as recorder:
        for at, kept in ((2.0, "01"), (3.0, "012"), (12.0, "0123"), (13.5, "234")):
            for name in listed(tmp_path):
                os.utime(tmp_path / name, (0, 0))
            await begins_the_next(recorder, at)
            assert listed(tmp_path) == [f"00000001-00000{number}.journal" for number in kept]


async def test_fenced_writer_starts_no_segment(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        Claim(tmp_path, 2)
        with pytest.raises(Fenced):
            await begins_the_next(recorder)
        assert listed(tmp_path) == ["00000001-000000.journal", "00000002.claim"]


async def test_writer_fenced_while_starting_a_segment_deletes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor may read it."""
    async with recording(tmp_path, keep_segments=1) as recorder:
        link = os.link

        def linked(one: Any, other: Any) -> None:
            link(one, other)
            Claim(tmp_path, 2)

        monkeypatch.setattr(os, "link", linked)
        with pytest.raises(Fenced):
            await begins_the_next(recorder)
    assert listed(tmp_path) == [
        "00000001-000000.journal",
        "00000001-000001.journal",
        "00000002.claim",
    ]


def listed(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(path.name for path in folder.iterdir())


async def test_nothing_is_written_without_a_claim(tmp_path: Path) -> None:
    recorder = Recorder(JournalSettings(dir=str(tmp_path / "journal")))
    with pytest.raises(RuntimeError, match="no segment was started"):
        await recorder.append([taken(0)])
    assert (await recorder.newest_epoch(), recorder.epoch) == (-1, 0)
    await recorder.close()
    assert not (tmp_path / "journal").exists()
