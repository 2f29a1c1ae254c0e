"""A disk that is full when a segment is begun."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.records import Head
from fedstream.journal import JournalError, segments
from fedstream.updater.recovery import Recovery
from fedstream.updater.state import Change, RunState
from tests.support import Hand, context, running, wait_until
from tests.updater.breaking import Disk, End, digests, floats, loses_its_end, makes_more, told
from tests.updater.journalled import makes, records


async def test_nothing_is_published_before_the_journal_starts(
    make: Any, hand: Hand, disk: Disk, folder: Path
) -> None:
    disk.full = True
    async with running(make(), context()):
        await wait_until(lambda: disk.refused > 2)
        assert (await hand.version(), segments(folder)) == (-1, [])
        disk.full = False
        await makes_more(hand, 4.0)
    assert await told(hand) == {0: (await hand.published())[0].digest} | digests(folder)
    await makes(hand, make(), 4.0)  # and it is a journal like any other
    await hand.balanced()


async def test_nothing_is_read_until_the_journal_continues(
    make: Any, hand: Hand, disk: Disk, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    disk.full = True
    async with running(make(), context()):
        await hand.admitted(8.0)
        await wait_until(lambda: disk.refused > 2)
        assert await hand.version() == 1
        disk.full = False
        await hand.reaches(2)
    assert [record.version for record in records(folder)] == [1, 2]
    assert await floats(hand) == [5.0] * 4


async def test_delayed_segment_names_its_predecessor(
    make: Any, hand: Hand, disk: Disk, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    disk.full = True
    async with running(make(), context()):
        await wait_until(lambda: disk.refused > 1)
        await hand.ledger.finish("enough")
        await wait_until(lambda: disk.refused > 4)
        disk.full = False
        await wait_until(lambda: segments(folder)[-1].standing.finished == "enough")
    assert [segment.standing.why for segment in segments(folder)][:2] == ["begun", "continued"]
    assert [record.version for record in records(folder)] == [1]


async def test_adopting_continues_after_a_full_disk(
    make: Any, hand: Hand, disk: Disk, end: End, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loses_its_end(make, hand, end, 4.0, 4.0)
    updater = make(adopt=True)
    real = Recovery._adopt

    async def adopt(*args: Any, **about: Any) -> RunState:
        disk.full = disk.refused < 3  # from now on
        return await real(*args, **about)

    monkeypatch.setattr(Recovery, "_adopt", adopt)
    async with running(updater, context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
        await hand.admitted(4.0)
        await hand.reaches(4)
    assert disk.refused >= 3
    assert await floats(hand) == [3.75] * 4
    await makes(hand, make(), 4.0)
    assert list(digests(folder)) == [1, 4, 5]


async def test_adopting_looks_again_for_a_missing_run(
    make: Any, hand: Hand, end: End, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis was emptied since, or answered for another moment."""
    await loses_its_end(make, hand, end, 4.0, 4.0)
    real, seen = Recovery.adopt, Recovery.seen
    times = 0

    async def nothing(_: Recovery) -> tuple[None, None]:
        return None, None

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        nonlocal times
        times += 1
        with monkeypatch.context() as patch:
            patch.setattr(Recovery, "seen", nothing if times == 1 else seen)
            return await real(recovery, state, ahead)

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(make(adopt=True), context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
    assert times == 2


async def test_failed_adoption_changes_nothing(
    make: Any, hand: Hand, disk: Disk, end: End, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a task that is in no journal it would say that it has ended."""
    await loses_its_end(make, hand, end, 4.0, 4.0)
    updater = make(adopt=True)
    real = Recovery.adopt
    kept: list[bool] = []

    def held() -> list[Any]:
        """All that it goes on from, if nothing is adopted."""
        loop, commits = updater._loop, updater._loop.commits
        queues = (loop.unwritten, commits.pending, commits.retained)
        return [loop.state, loop.state.ends.done, *(one for queue in queues for one in queue)]

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        if kept:
            return await real(recovery, state, ahead)
        updater._loop.unwritten = [Change("1-0", None, (), state.progress)]
        was, disk.full = held(), True
        try:
            return await real(recovery, state, ahead)
        finally:
            disk.full = False
            kept.append(was == held())
            updater._loop.unwritten = []

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(updater, context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
    assert kept == [True]


async def test_journal_deleted_while_running_is_a_one_line_error(
    make: Any, hand: Hand, folder: Path
) -> None:
    async with running(make(), context(), may_fail=True) as updater:
        await hand.join()
        await hand.reaches(0)
        shutil.rmtree(folder)
        await hand.admitted(4.0)
        await wait_until(updater.done, what="it ends")
        error = updater.exception()
        assert isinstance(error, BaseExceptionGroup)
        failed = error.subgroup(JournalError)
        assert failed is not None
        assert error.split(JournalError)[1] is None
        assert f"{folder}: cannot be read: No such file or directory" in str(failed.exceptions)
