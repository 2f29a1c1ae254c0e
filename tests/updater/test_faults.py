"""Faults that a strict reading of the journal found: each came back wrong before it was mended."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import ConfigError
from fedstream.broker.layout import PAGE, Model
from fedstream.broker.messages import CloseRound, Upload
from fedstream.broker.records import End as Ended
from fedstream.broker.records import Head
from fedstream.broker.scripts import Script
from fedstream.journal import (
    JournalDamaged,
    JournalError,
    RoundClosed,
    Segment,
    Taken,
    Tear,
    segments,
)
from fedstream.journal.frames import BEGINNING, packed
from fedstream.journal.rebuild import recovered
from fedstream.strategies import FedAvgSettings
from fedstream.updater.loop import Loop
from fedstream.updater.recovery import Recovery
from fedstream.updater.state import Change, RunState
from tests.journals import Scribe
from tests.support import (
    Hand,
    Proxy,
    at_rest,
    context,
    full,
    layout_of,
    model_of,
    running,
    wait_until,
)
from tests.updater.journalled import (
    backed_up,
    fails,
    forget_newest,
    go_back,
    held,
    makes,
    reasons,
    records,
)

LATE = {"sync": "interval", "sync_s": 3600.0}  # what is done stays in the queue until it is idle
COMMIT = Script("commit")._sha.encode()
CREATE = Script("create")._sha.encode()
ROUNDS = FedAvgSettings(clients_per_round=3)


@pytest.fixture(autouse=True)
def idle_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets for how many milliseconds the queue is empty before the updater is idle: 20."""

    def idle_after(milliseconds: int) -> None:
        monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", milliseconds)

    idle_after(20)
    return idle_after


@pytest.fixture
def never_idle(idle_after: Callable[[int], None]) -> None:
    """The updater is never idle, unless ``idle_after`` is told otherwise."""
    idle_after(3_600_000)


class Disk:
    """A disk that can be full."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0
        self._real = os.pwritev

    def pwritev(self, file: int, parts: Any, at: int) -> int:
        """In place of the system's."""
        if not self.full:
            return self._real(file, parts, at)
        self.refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk that the journal is on."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    return disk


class End:
    """The end of a journal, to be lost."""

    def __init__(self, folder: Path, aside: Path) -> None:
        self._folder = folder
        self._aside = aside

    def begins(self) -> None:
        """What is journalled from now on will be lost."""
        shutil.copytree(self._folder, self._aside)

    def is_lost(self) -> None:
        """The journal is as it was."""
        shutil.rmtree(self._folder)
        shutil.move(self._aside, self._folder)


async def loses_its_end(make: Any, hand: Hand, end: End, *lost: float) -> None:
    """A journal of version 1, where Redis has one more for each of the values ``lost``."""
    await makes(hand, make(), 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), *lost)
    end.is_lost()


@pytest.fixture
def end(folder: Path, tmp_path: Path) -> End:
    """The end of the journal."""
    return End(folder, tmp_path / "aside")


def digests(folder: Path) -> dict[int, str]:
    """What the journal says of every version that it made."""
    return {record.version: record.digest for record in records(folder) if record.digest}


async def told(hand: Hand) -> dict[int, str]:
    """The digests of the versions that were published."""
    return {version.version: version.digest for version in await hand.published()}


async def floats(hand: Hand) -> list[float]:
    """What the newest version is made of."""
    found: list[float] = (await hand.model((await hand.published())[-1])).floats.tolist()
    return found


async def limited(hand: Hand, room: int) -> None:
    """Redis takes so many bytes more than it has, or is over the limit by so many."""
    await hand.client.call("CONFIG", "SET", "maxmemory", await at_rest(hand) + room)


# a disk that is full when a segment is begun


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


async def makes_more(hand: Hand, *values: float) -> list[Upload]:
    """The updater that runs makes a version of each update: these."""
    await hand.join()
    uploads = []
    for value in values:
        version = await hand.version()
        uploads.append(await hand.admitted(value))
        await hand.reaches(version + 1)
    return uploads


def tasks(folder: Path) -> list[str]:
    """Of the updates in the journal, in order."""
    return [record.upload.task for record in records(folder) if isinstance(record, Taken)]


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


# a journal that lost its end


@pytest.mark.usefixtures("never_idle")
async def test_lost_end_of_a_finished_run_is_remade_from_the_queue(
    make: Any, hand: Hand, end: End, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(versions=3, **LATE), context()):
        await makes_more(hand, 4.0)
        end.begins()
        await makes_more(hand, 8.0, 0.0)
    end.is_lost()
    before = await hand.published()
    assert len(await hand.queue()) == 3
    idle_after(20)
    async with running(make(versions=3, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    made = [record for record in records(folder) if isinstance(record, Taken)]
    assert [(record.outcome, record.version) for record in made] == [
        ("applied", 1), ("applied", 2), ("applied", 3),
    ]  # fmt: skip
    assert made[-1].finished == "version 3 reached"
    assert await hand.published() == before
    assert await told(hand) == {0: before[0].digest} | digests(folder)
    view = await hand.ledger.look()
    assert (view.outcomes["applied"], view.outcomes["given_up"]) == (3, 0)
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
async def test_adopting_uses_exactly_the_unfinished_updates(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(**LATE), context()):
        await makes_more(hand, 4.0)
    waiting = await hand.admitted(8.0)
    assert len(await hand.queue()) == 2
    shutil.rmtree(folder)
    idle_after(20)
    async with running(make(adopt=True, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    assert await hand.version() == 2
    assert [update.task for update in (await hand.published())[-1].updates] == [waiting.task]
    assert await floats(hand) == [5.0] * 4
    assert (await hand.ledger.look()).outcomes["applied"] == 2
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
@pytest.mark.parametrize("base", [None, 1], ids=["on-the-newest", "on-what-the-journal-has"])
async def test_published_version_is_never_remade_differently(
    make: Any,
    hand: Hand,
    end: End,
    folder: Path,
    idle_after: Callable[[int], None],
    base: int | None,
) -> None:
    """Of versions 2 to 4 that the journal lost, the queue has only the last two updates."""
    await makes(hand, make(), 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), 8.0)
    about = {} if base is None else {"tau": base, "base": await hand.ledger.digest(base)}
    async with running(make(name="updater-2", **LATE), context()):
        for version, value in ((3, 2.0), (4, 16.0)):
            await hand.admitted(value, **about)
            await hand.reaches(version)
    end.is_lost()
    assert len(await hand.queue()) == 2
    idle_after(20)
    await fails(make(**LATE), JournalError, "ends with version 1, .* has 4, .*--adopt")
    assert list(digests(folder)) == [1]
    assert len(records(folder)) == 1
    model = (await floats(hand))[0]
    async with running(make(adopt=True, **LATE), context()):
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 4
    await makes(hand, make(), 0.0)  # an update on version 4, whatever that is
    await makes(hand, make(), 0.0)
    assert await floats(hand) == [model / 4] * 4
    published = await told(hand)
    made = digests(folder)
    assert made == {version: published[version] for version in (1, 5, 6)}
    await hand.balanced()


async def test_redis_emptied_while_remaking_follows_the_journal(
    make: Any, hand: Hand, client: Client, end: End, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loses_its_end(make, hand, end, 8.0, 8.0)
    updater = make(lease_s=0.4)
    emptied = False

    async def flush() -> None:
        nonlocal emptied
        if updater._loop.state.ahead is not None and not emptied:
            await client.call("FLUSHALL")
            emptied = True

    monkeypatch.setattr(updater._recorder, "flush", flush)
    async with running(updater, context()):
        await wait_until(lambda: emptied)
        await makes_more(hand, 4.0)
    assert await floats(hand) == [3.0] * 4
    assert await hand.version() == 2


@pytest.mark.usefixtures("never_idle")
async def test_update_counts_once_in_a_remade_round(
    make: Any,
    hand: Hand,
    redis: RedisSettings,
    end: End,
    folder: Path,
    idle_after: Callable[[int], None],
) -> None:
    async with running(make(ROUNDS, **LATE), context()):
        await hand.join()
        await hand.reaches(0)
        end.begins()
        for value in (4.0, 8.0, 0.0):
            await hand.admitted(value)
        await hand.reaches(1)
    end.is_lost()
    published = await told(hand)
    idle_after(20)
    asked = 0

    def refuse(data: bytes) -> bool:
        nonlocal asked
        asked += hand.keys.lineage.encode() in data
        return hand.keys.lineage.encode() in data and asked in (1, 4)

    async with Proxy(redis) as proxy:
        proxy.refuse = refuse
        async with running(make(ROUNDS, redis=proxy.settings, **LATE), context()):
            await wait_until(lambda: digests(folder))
        assert asked > 1
    assert published == {0: published[0]} | digests(folder)
    assert [record.outcome for record in records(folder) if isinstance(record, Taken)] == [
        "buffered", "buffered", "applied",
    ]  # fmt: skip


async def test_interrupted_adoption_is_completed(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    shutil.rmtree(folder)
    async with Proxy(redis) as proxy:
        proxy.refuse = lambda data: CREATE in data or COMMIT in data
        async with running(make(redis=proxy.settings, adopt=True), context()):
            await wait_until(lambda: segments(folder))
    await makes(hand, make(adopt=True), 4.0)
    await makes(hand, make(), 4.0)
    lineage = (await hand.ledger.run()).lineage
    assert {segment.head.lineage for segment in segments(folder)} == {lineage}


# what is found again


@pytest.mark.usefixtures("never_idle")
async def test_repeated_round_end_ends_no_other_round(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(ROUNDS, **LATE), context()):
        await hand.join()
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="nobody"))
        assert await hand.dispatch() == ["closed"]
        await wait_until(lambda: len(records(folder)) == 1)
        await hand.admitted(3.0)
        await wait_until(lambda: held(hand, 1))
    assert len(await hand.queue()) == 2
    idle_after(20)
    async with running(make(ROUNDS, **LATE), context()):
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 0
        assert await held(hand, 1)
        assert len(records(folder)) == 2


@pytest.mark.usefixtures("never_idle")
async def test_segment_remembers_earlier_round_ends(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(ROUNDS, segment_bytes=1, **LATE), context()):
        await hand.join()
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="nobody"))
        assert await hand.dispatch() == ["closed"]
        await wait_until(lambda: len(segments(folder)) == 2)
    assert len(await hand.queue()) == 1
    idle_after(20)
    async with running(make(ROUNDS, **LATE), context()):
        await wait_until(hand.queue_is_empty)
    assert [type(record) for record in records(folder)] == [RoundClosed]


async def test_duplicate_updates_read_together_are_applied_once(
    make: Any, hand: Hand, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    first = await hand.admitted(8.0)
    second = await hand.trained(hand.trigger(task=first.task), 100.0, attempt="a2")
    await hand.slip_in(second)
    assert len(await hand.queue()) == 2
    updater = make()
    async with running(updater, context()):
        await wait_until(hand.queue_is_empty)
        # The second one's, begun before the first was decided on.
        assert updater._intake.arrived == {}
    assert await hand.version() == 2
    assert await floats(hand) == [5.0] * 4
    assert len(records(folder)) == 2
    await hand.balanced()


async def test_memory_stays_bounded_across_restarts(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 2)
    for _ in range(3):
        updater = make()
        await makes(hand, updater, 1.0, 1.0, 1.0)
        assert len(updater._loop.state.ends.done) == 2
        assert len(segments(folder)[-1].done()) <= 2
    async with running(make(), context()):
        await wait_until(lambda: len(segments(folder)) == 4)
        newest = segments(folder)[-1]
        assert (len(newest.done()), newest.standing.forgotten) == (2, 0)


async def test_prefetches_are_dropped_when_redis_falls_back(
    make: Any, hand: Hand, client: Client, disk: Disk, folder: Path
) -> None:
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    updater = make(lease_s=0.4)
    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        await client.pipeline(
            [
                ("MULTI",),
                ("HSET", hand.keys.head, "version", 0),
                ("HDEL", hand.keys.tokens, "updater"),
                ("DEL", hand.keys.leader("updater")),
                ("EXEC",),
            ]
        )
        await wait_until(lambda: updater._lease.number > 1)
        disk.full = False
        await hand.reaches(2)
        await makes_more(hand, 1.0, 1.0)
        await wait_until(hand.queue_is_empty)
        assert updater._intake.fetches == {}
    assert [record.version for record in records(folder)] == [1, 2, 3, 4]


async def test_update_lost_with_its_entry_is_not_refused(
    make: Any,
    hand: Hand,
    client: Client,
    disk: Disk,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a fail-over to a replica that lags does it, before the updater had it."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    updater = make()
    read_new = updater._intake.read

    async def both_at_once(block_ms: int) -> bool:
        return len(await hand.queue()) == 3 and bool(await read_new(block_ms))

    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        with monkeypatch.context() as patched:
            patched.setattr(updater._intake, "read", both_at_once)
            patched.setattr(Loop, "_look", lambda self: None)
            await hand.admitted(3.0)
            lost = await hand.admitted(4.0)
            # Of which one is being fetched.
            await wait_until(lambda: len(updater._intake.backlog) == 2)
        await forget_newest(hand, lost)
        disk.full = False
        await hand.reaches(3)
        await blobs.write(
            client, hand.keys.update(lost.blob), model_of(hand.layout, 4.0), expire_s=60
        )
        assert await hand.admit(lost) == [("admitted", "")]  # it comes again
        await hand.reaches(4)
    taken = [record for record in records(folder) if isinstance(record, Taken)]
    assert [(one.upload.task == lost.task, one.outcome) for one in taken] == [
        (False, "applied"), (False, "applied"), (False, "applied"), (True, "applied"),
    ]  # fmt: skip
    await hand.balanced()


# a Redis that is full


async def test_idle_updater_frees_a_full_redis(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(250_000)
    updater = make(**LATE)
    real, limits = updater._recorder.flush, 0

    async def flush() -> None:
        """It is idle."""
        nonlocal limits
        if updater._loop.commits.retained and updater._loop.state.version == 4 and not limits:
            await limited(hand, -2_500_000)
            limits += 1
        await real()

    monkeypatch.setattr(updater._recorder, "flush", flush)
    async with running(updater, context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        await wait_until(lambda: limits)
        await wait_until(hand.queue_is_empty)
        assert list((await hand.ledger.kept()).values()) == [4]


async def test_full_redis_is_freed_to_republish(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    hand.layout = layout_of(250_000)
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        proxy.refuse = lambda data: COMMIT in data
        await hand.admitted(5.0)
        await wait_until(lambda: len(records(folder)) == 5)
    await limited(hand, 500_000)  # enough for a lease, not for a model
    async with running(make(), context()):
        await hand.reaches(5)
        assert list((await hand.ledger.kept()).values()) == [4, 5]
    await hand.balanced()


async def test_lost_reply_to_republishing_keeps_no_extra_models(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    async with Proxy(redis) as proxy:
        async with running(make(redis=proxy.settings, keep_versions=3), context()):
            await makes_more(hand, 1.0, 1.0)
            proxy.refuse = lambda data: COMMIT in data
            await hand.admitted(1.0)
            await wait_until(lambda: len(records(folder)) == 3)
        proxy.refuse = None
        proxy.cut_reply_to = lambda data: CREATE in data
        async with running(make(redis=proxy.settings, keep_versions=3), context()):
            await hand.reaches(3)
            await makes_more(hand, 1.0, 1.0, 1.0)
        assert proxy.cut_replies == 1
    assert list((await hand.ledger.kept()).values()) == [4, 5, 6]


# without weights


async def test_without_weights_unpublished_updates_come_from_the_queue(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    async with (
        Proxy(redis) as proxy,
        running(make(redis=proxy.settings, weights=False), context()),
    ):
        await makes_more(hand, 4.0)
        proxy.refuse = lambda data: COMMIT in data
        await hand.admitted(8.0)
        await wait_until(lambda: len(records(folder)) == 2)
    async with running(make(weights=False), context()):
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    assert await floats(hand) == [5.0] * 4
    assert [record.version for record in records(folder)] == [1, 2]
    await hand.balanced()


@pytest.mark.usefixtures("never_idle")
async def test_without_weights_adopting_continues_from_redis_newer_version(
    make: Any, hand: Hand, end: End, folder: Path, idle_after: Callable[[int], None]
) -> None:
    about = {"weights": False, **LATE}
    async with running(make(**about), context()):
        [first] = await makes_more(hand, 4.0)
        end.begins()
        await makes_more(hand, 8.0)
    end.is_lost()
    idle_after(20)
    await fails(make(**about), ConfigError, "ends with version 1, .* has version 2: .*--adopt")
    async with running(make(adopt=True, **about), context()):
        await wait_until(hand.queue_is_empty)
        newest = segments(folder)[-1].standing
        assert (newest.why, newest.version, await hand.version()) == ("adopted", 2, 2)
        assert newest.sizes == ((8.0, 0.0, 0.0),)  # of the journal's one update: all 4 from 0
        await hand.slip_in(first)  # which the journal has
        await wait_until(hand.queue_is_empty)
        await hand.admitted(1.0, tau=1, base=await hand.ledger.digest(1))
        await wait_until(lambda: reasons(hand, "refused", {"too old": 1}))
        await hand.admitted(1.0)
        await hand.reaches(3)
    assert await floats(hand) == [3.0] * 4
    assert tasks(folder).count(first.task) == 1
    await makes(hand, make(**about), 1.0)
    await hand.balanced()


@pytest.mark.parametrize("remembered", [1, 100])
async def test_journalled_updates_are_not_recorded_again_after_adopting(
    make: Any, hand: Hand, end: End, folder: Path, remembered: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Whether it was in memory or in the index."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", remembered)
    async with running(make(), context()):
        uploads = await makes_more(hand, 4.0, 4.0, 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), 4.0)
    end.is_lost()
    async with running(make(adopt=True), context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
        for upload in uploads:
            await hand.slip_in(upload)
        await wait_until(hand.queue_is_empty)
        assert await hand.version() == 4
    assert tasks(folder) == [one.task for one in uploads]
    assert len(segments(folder)[-1].standing.sizes) == 3
    await hand.balanced()


async def test_unjournalled_decisions_are_undone_by_adopting(
    make: Any, hand: Hand, end: End, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await loses_its_end(make, hand, end, 4.0)
    updater = make(adopt=True)
    real, adopted = Recovery.adopt, list[RunState | None]()

    async def adopt(recovery: Recovery, state: RunState, ahead: Head) -> RunState | None:
        state.ends.add(Ended("found again", "1", "applied"))
        for task, record in (("found again", None), ("new", records(folder)[0])):
            end = Ended(task, "1", "applied")
            updater._loop.unwritten.append(Change("1-0", record, (), state.progress, end=end))
            state.ends.decide(updater._loop.unwritten[-1])
        adopted.append(await real(recovery, state, ahead))
        return adopted[-1]

    monkeypatch.setattr(Recovery, "adopt", adopt)
    async with running(updater, context()):
        await wait_until(lambda: adopted)
        assert adopted[0] is not None
        assert adopted[0].ends.get("found again")
        assert not adopted[0].ends.get("new")
        assert updater._loop.unwritten == []


async def test_rediscovered_task_is_counted_once_despite_a_fallback(
    make: Any, hand: Hand, client: Client, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the journal, but nothing is written of its being found again."""
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings)
        real, found = Loop._decide, asyncio.Event()
        async with running(updater, context()):
            await hand.join()
            proxy.reading.clear()
            upload = await hand.admitted(4.0)
            backup = await backed_up(client)  # there it is open
            proxy.reading.set()
            await hand.reaches(1)
            await wait_until(hand.queue_is_empty)

            async def decide(loop: Loop) -> None:
                await real(loop)
                if loop.unwritten and not found.is_set():
                    assert [one.change.record for one in loop.unwritten] == [None]
                    await go_back(client, backup)
                    loop.state = loop.state.to_compare()  # as if the lease had been taken again
                    found.set()

            monkeypatch.setattr(Loop, "_decide", decide)
            await hand.slip_in(upload)
            await wait_until(found.is_set)
            await hand.reaches(1)
            await wait_until(hand.queue_is_empty)
            view = await hand.ledger.look()
            assert (view.issued, view.outcomes["applied"], view.open) == (1, 1, ())


# a run that somebody ends


async def test_externally_finished_run_stays_finished_despite_a_fallback(
    make: Any, hand: Hand, client: Client, redis: RedisSettings, folder: Path
) -> None:
    """They say it again before the updater sees that Redis went back."""
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings)
        async with running(updater, context()):
            await hand.join()
            backup = await backed_up(client)
            await hand.admitted(4.0)
            await hand.reaches(1)
            proxy.reading.clear()
            await go_back(client, backup)
            await hand.ledger.finish("target")
            proxy.reading.set()
            await hand.reaches(1)
            await wait_until(lambda: updater._loop.state.finished)
            await wait_until(lambda: segments(folder)[-1].standing.finished == "target")
            run = await hand.ledger.run()
            assert (run.state, run.why) == ("finished", "target")


async def test_externally_finished_run_is_finished_again_if_redis_forgot(
    make: Any, hand: Hand, client: Client
) -> None:
    updater = make()
    async with running(updater, context()):
        await makes_more(hand, 4.0)
        await wait_until(hand.queue_is_empty)
        backup = await backed_up(client)
        await hand.ledger.finish("target")
        await wait_until(lambda: updater._loop.state.finished)
        await go_back(client, backup)

        async def ended() -> bool:
            run = await hand.ledger.run()
            return (run.state, run.why) == ("finished", "target")

        await wait_until(ended)
        assert await hand.version() == 1


# the files


@pytest.mark.usefixtures("never_idle")
async def test_update_that_never_reached_the_disk_comes_from_the_queue(
    make: Any, hand: Hand, folder: Path, idle_after: Callable[[int], None]
) -> None:
    async with running(make(**LATE), context()):
        await makes_more(hand, 4.0, 8.0)
    before = await hand.published()
    [segment] = segments(folder)
    *_, last = segment.records()
    zero(segment.path, last.payload)
    idle_after(20)
    async with running(make(**LATE), context()):
        await wait_until(hand.queue_is_empty)
        await makes_more(hand, 1.0)
    assert (await hand.published())[:3] == before
    assert digests(folder) == {v.version: v.digest for v in await hand.published() if v.version}
    assert segments(folder)[-1].head.cut == last.place.offset
    await hand.balanced()


def zero(path: Path, at: int) -> None:
    """A page of a file is zeros: the file had grown when the machine died, and no more."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(PAGE))


async def test_altered_synced_update_is_damage(make: Any, hand: Hand, folder: Path) -> None:
    await makes(hand, make(), 4.0, 8.0, 1.0)
    [segment] = segments(folder)
    _, second, third = segment.records()
    assert third.synced > second.place.offset
    zero(segment.path, second.payload)
    await fails(make(), JournalDamaged, "the update does not match its digest")
    assert len(segments(folder)) == 1


@pytest.mark.usefixtures("never_idle")
async def test_successors_cut_is_on_disk(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed() -> None:
        """Nothing is synced at the end."""

    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        real(file)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    first = make(**LATE)
    monkeypatch.setattr(first._recorder, "flush", killed)
    monkeypatch.setattr(first._recorder, "_synced", killed)
    async with running(first, context()):
        await makes_more(hand, 4.0)
    synced.clear()
    async with running(make(sync="never", segment_versions=1), context()):
        await wait_until(lambda: len(segments(folder)) == 2)
        before, mine = (segment.path for segment in segments(folder))
        assert [name.partition(".")[0] for name in synced] == [before.stem, mine.stem]
        synced.clear()
        await hand.admitted(4.0)
        await wait_until(lambda: len(segments(folder)) == 3)
        after = segments(folder)[-1].path
        assert [name.partition(".")[0] for name in synced] == [mine.stem, after.stem]


@pytest.mark.usefixtures("never_idle")
async def test_syncs_are_on_time_while_redis_is_away(
    make: Any, hand: Hand, redis: RedisSettings
) -> None:
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings, sync="interval", sync_s=0.2)
        async with running(updater, context()):
            await makes_more(hand, 4.0)
            proxy.reading.clear()
            proxy.cut()
            recorder = updater._recorder
            await wait_until(lambda: recorder.safe == recorder.appended)
            proxy.reading.set()


async def test_segments_end_by_size_even_without_versions(
    make: Any, hand: Hand, folder: Path
) -> None:
    rounds = FedAvgSettings(clients_per_round=100)
    async with running(make(rounds, segment_bytes=20_000), context()):
        await hand.join()
        for _ in range(6):
            await hand.admitted(1.0)
        await wait_until(lambda: held(hand, 6))
        await wait_until(lambda: len(segments(folder)) > 1)
    newest = segments(folder)[-1]
    found = recovered(newest)
    newest.close()
    assert found.progress is not None
    assert len(found.progress.held) == 6
    assert len(records(folder)) == 6


async def test_large_checkpoint_does_not_fill_a_segment(
    make: Any, hand: Hand, folder: Path
) -> None:
    async with running(make(segment_bytes=1), context()):
        await makes_more(hand, 1.0, 1.0)
        await wait_until(lambda: len(segments(folder)) == 3)
    assert [segment.standing.version for segment in segments(folder)] == [0, 1, 2]


def test_unreadable_message_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(tmp_path)
    size = scribe.writer.size
    monkeypatch.setattr("fedstream.journal.writer.MOST", 500)
    with pytest.raises(JournalError, match=r"a message of \d+ bytes; the limit is 500"):
        scribe.refuse(reason="x" * 500)
    scribe.close()
    assert scribe.writer.path.stat().st_size == size


@pytest.mark.parametrize("knows", [False, True], ids=["as-it-can", "knowing-the-salt"])
def test_record_bytes_inside_an_update_are_ignored(tmp_path: Path, *, knows: bool) -> None:
    """A device sends it; who believed it would take a torn tail for damage, and never start."""
    scribe = Scribe(tmp_path, layout=layout_of(PAGE // 2))
    scribe.update()
    salt = scribe.writer._salt if knows else 0
    message = scribe.head.encode()
    at = scribe.writer.size + PAGE  # a record says where it stands
    planted, _ = packed(message, payload=0, synced=1 << 40, offset=at, follows=BEGINNING, salt=salt)
    update = model_of(scribe.layout)
    update.buffer.data[: len(planted)] = planted
    scribe._taken(scribe._upload(None, update, 0), update, outcome="refused", reason="planted")
    scribe.close()
    [segment] = segments(tmp_path)
    *_, last = segment.records()
    zero(segment.path, last.place.offset)  # its payload got to the disk first
    with Segment(segment.path) as torn:
        if knows:  # a record it is, then
            with pytest.raises(JournalDamaged):
                list(torn.records())
        else:
            assert len(list(torn.records())) == 1
            assert torn.torn == Tear(last.place)
            read = Model(torn.layout)
            torn.load(last, read)
            assert read.digest() == update.digest()
    segment.close()


async def test_updater_leads_even_in_a_full_redis(make: Any, hand: Hand, client: Client) -> None:
    await makes(hand, make(), 1.0)
    async with full(client):
        updater = make()
        async with running(updater, context()):
            await wait_until(lambda: updater._lease.number and updater._recorder.head)


def test_journal_is_readable_while_its_oldest_segment_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scribe = Scribe(tmp_path)
    for _ in range(2):
        scribe.update()
        scribe.segment()
    scribe.close()
    oldest, real = min(tmp_path.iterdir()), Segment.__init__

    def retired(self: Segment, path: Path) -> None:
        oldest.unlink(missing_ok=True)  # between the listing and the reading
        real(self, path)

    monkeypatch.setattr(Segment, "__init__", retired)
    chain: list[Any] = segments(tmp_path)  # JournalError: cannot be read: No such file
    assert len(chain) == 2
