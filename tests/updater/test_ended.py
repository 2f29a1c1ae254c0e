"""A task has one record, however old the Redis is that brings it again."""

from __future__ import annotations

import resource
import sqlite3
import stat
from collections import Counter
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.core.records import End
from fedstream.journal import JournalError, JournalFull, Taken, segments
from fedstream.journal.ended_tasks import NAME, EndedTasks
from fedstream.strategies import FedAvgSettings
from tests.journals import Scribe
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import backed_up, go_back, held, records


def end(n: int, version: int | None = None) -> End:
    at = n if version is None else version
    return End(f"task-{n:04d}", "a1", "applied", device=n, version=at, staleness=1, weight=0.5)


@pytest.fixture
def index(tmp_path: Path) -> Any:
    index = EndedTasks(tmp_path)
    index.open("line-1", [])
    yield index
    index.close()


# the index


def test_index_knows_ends_before_and_after_writing(index: EndedTasks) -> None:
    index.add(end(1))
    assert index.get("task-0001") == end(1)
    index.write("line-1", "00000001-000001.journal", 0)
    index.add(end(3))
    assert [index.get(f"task-{n:04d}") for n in range(1, 5)] == [end(1), None, end(3), None]
    assert stat.S_IMODE(index.path.stat().st_mode) == 0o600


def test_waiting_ends_use_bounded_memory(
    index: EndedTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.journal.ended_tasks._WAITING", 4)
    for n in range(10):
        index.add(end(n))
    assert len(index._waiting) == 2
    assert [index.get(f"task-{n:04d}") for n in range(10)] == [end(n) for n in range(10)]


def test_ends_added_during_a_write_still_wait(
    index: EndedTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write goes on in its thread when nobody waits for it any more."""
    using = Lock()

    class Handing:
        def __enter__(self) -> None:
            using.acquire()

        def __exit__(self, *_: object) -> None:
            using.release()
            if not added:
                added.append(end(1))
                index.add(added[0])

    added: list[End] = []
    index.add(end(0))
    monkeypatch.setattr(index, "_using", Handing())
    index.write("line-1", "00000001-000001.journal", 0)
    assert index.get("task-0001") == end(1)


def test_ends_before_the_oldest_segment_are_deleted(tmp_path: Path, index: EndedTasks) -> None:
    for n in range(6):
        index.add(end(n))
    for number, version in enumerate((0, 3, 6)):
        name = f"00000001-{number:06d}.journal"
        index.write("line-1", name, version)
        (tmp_path / name).touch()
    assert index.forgotten == 0
    (tmp_path / "00000001-000000.journal").unlink()
    index.write("line-1", "00000001-000003.journal", 6)
    assert [n for n in range(6) if index.get(f"task-{n:04d}")] == [3, 4, 5]
    assert index.forgotten == 3


def journal(folder: Path) -> list[str]:
    """Two segments with five ends each: the tasks."""
    scribe = Scribe(folder)
    tasks = [scribe.update().upload.task for _ in range(4)]
    tasks.append(scribe.refuse().upload.task)
    scribe.segment()
    tasks += [scribe.update().upload.task for _ in range(5)]
    scribe.close()
    return tasks


def opened(folder: Path) -> tuple[EndedTasks, list[str]]:
    chain = segments(folder)
    index = EndedTasks(folder)
    unread = index.open(chain[-1].head.lineage, chain)
    for segment in chain:
        segment.close()
    return index, unread


def _missing(path: Path) -> None:
    path.unlink()


def _damaged(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0 and then nothing of the kind" * 100)


def _damaged_in_a_page(path: Path) -> None:
    """Behind what is read first: a cell says that it is longer than its page."""
    with closing(sqlite3.connect(path)) as database, database:
        root = "SELECT rootpage FROM sqlite_master WHERE name = 'ended'"
        [page] = database.execute(root).fetchone()
        [size] = database.execute("PRAGMA page_size").fetchone()
    data = bytearray(path.read_bytes())
    at = (page - 1) * size
    cell = at + int.from_bytes(data[at + 8 : at + 10])
    data[cell : cell + 2] = b"\xff\x7f"
    path.write_bytes(data)


def _of_another_journal(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE journal SET lineage = 'another'")


def _behind(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE journal SET through = '00000001-000000.journal'")
        database.execute("DELETE FROM ended")


@pytest.mark.parametrize(
    "lost", [_missing, _damaged, _damaged_in_a_page, _of_another_journal, _behind]
)
def test_index_is_rebuilt_from_the_journal(tmp_path: Path, lost: Any) -> None:
    tasks = journal(tmp_path)
    index, unread = opened(tmp_path)
    index.close()
    lost(tmp_path / NAME)
    index, unread = opened(tmp_path)
    assert unread == []
    found = [index.get(task) for task in tasks]
    assert [one and one.outcome for one in found[:5]] == ["applied"] * 4 + ["refused"]
    assert [one and one.task for one in found[:5]] == tasks[:5]
    assert found[5:] == [None] * 5, "who recovers from the newest segment has its ends in memory"
    index.close()


def test_index_closed_while_it_opens_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread opens it; an updater that loses its lease meanwhile doesn't wait for the thread."""
    tasks = journal(tmp_path)
    real, index = sqlite3.connect, EndedTasks(tmp_path)
    connections: list[sqlite3.Connection] = []

    def connect(*arguments: Any, **more: Any) -> sqlite3.Connection:
        index.close()
        connections.append(real(*arguments, **more))
        return connections[-1]

    monkeypatch.setattr(sqlite3, "connect", connect)
    index.open("line-1", [])
    assert index.get(tasks[0]) is None
    with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
        connections[0].execute("SELECT 1")


def test_intact_index_is_not_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = journal(tmp_path)
    opened(tmp_path)[0].close()
    monkeypatch.setattr(EndedTasks, "_made_of", None)
    index, _ = opened(tmp_path)
    assert index.get(tasks[0])
    index.close()


def test_damaged_index_is_rebuilt_on_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = journal(tmp_path)
    index, _ = opened(tmp_path)

    class Damaged:
        def execute(self, *_: object) -> None:
            raise sqlite3.DatabaseError("database disk image is malformed")

    monkeypatch.setattr(index, "_database", Damaged())
    with pytest.raises(JournalError, match="the next start rebuilds it from the journal"):
        index.get(tasks[0])
    assert not (tmp_path / NAME).exists()
    monkeypatch.undo()
    index.close()


def test_ends_missing_from_the_journal_are_reported(tmp_path: Path) -> None:
    journal(tmp_path)
    first = min(tmp_path.glob("*.journal"))
    third = list(segments(tmp_path)[0].records())[2]
    data = bytearray(first.read_bytes())
    data[third.place.offset + 100] ^= 1
    first.write_bytes(data)
    index, [why] = opened(tmp_path)
    assert first.name in why
    assert index.forgotten == segments(tmp_path)[-1].standing.version == 4
    index.close()


def _many() -> list[End]:
    return [end(n) for n in range(1000)]  # more than a page


def test_full_disk_is_waited_out(index: EndedTasks) -> None:
    database = index._database
    assert database
    [pages] = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    for one in _many():
        index.add(one)
    with pytest.raises(JournalFull, match=r"ended\.sqlite: database or disk is full"):
        index.write("line-1", "00000001-000001.journal", 0)
    assert index.get("task-0001") == end(1)  # it still waits
    database.execute("PRAGMA max_page_count = 1000000")
    index.write("line-1", "00000001-000001.journal", 0)
    assert [index.get(one.task) for one in _many()] == _many()


def test_index_that_could_not_be_written_is_rebuilt_on_the_next_start(index: EndedTasks) -> None:
    """Nobody knows what of it is on disk: the cache may have pages that the disk never got."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for one in _many():
        index.add(one)
    resource.setrlimit(resource.RLIMIT_FSIZE, (index.path.stat().st_size, limits[1]))
    try:
        with pytest.raises(JournalError, match=r"ended\.sqlite: disk I/O.*next start rebuilds it"):
            index.write("line-1", "00000001-000001.journal", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not index.path.exists()


# in the updater


@pytest.mark.parametrize("restarted", [False, True])
async def test_redis_fallback_causes_no_second_record(
    make: Any,
    hand: Hand,
    client: Client,
    folder: Path,
    restarted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 2)
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)
    async with running(make(segment_versions=3, lease_s=0.5), context()):
        await hand.join()
        tasks = await hand.open(8)
        uploads = [await hand.trained(task, float(n)) for n, task in enumerate(tasks)]
        backup = await backed_up(client)
        for upload in uploads:
            assert await hand.admit(upload) == [("admitted", "")]
        await hand.reaches(8)
        await wait_until(hand.queue_is_empty)
        if not restarted:
            await _again(hand, client, backup, uploads)
    if restarted:
        await go_back(client, backup)
        async with running(make(lease_s=0.5), context()):
            await _again(hand, client, None, uploads)
    counted = Counter(one.upload.task for one in records(folder) if isinstance(one, Taken))
    assert counted == {upload.task: 1 for upload in uploads}


async def _again(hand: Hand, client: Client, backup: Any, uploads: Any) -> None:
    """Redis is as it was before any of these, and their answers come once more."""
    if backup is not None:
        await go_back(client, backup)
    for upload in uploads:
        await hand.slip_in(upload)
    await hand.reaches(8)
    await wait_until(hand.queue_is_empty)
    view = await hand.ledger.look()
    assert view.outcomes["applied"] == 8
    assert view.open == ()
    await hand.balanced()


async def test_buffered_update_is_not_a_duplicate_of_itself(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end carries its tau: no version was made by it."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 1)
    async with running(make(FedAvgSettings(clients_per_round=9)), context()):
        await hand.join()
        first = await hand.admitted(1.0)
        await hand.admitted(2.0)
        await hand.admitted(3.0)
        await wait_until(lambda: held(hand, 3))
        for _ in range(3):
            await hand.slip_in(first)
            await wait_until(hand.queue_is_empty)
        assert await held(hand, 3)
    assert [record.kind for record in records(folder)] == ["taken"] * 3
