"""The journal's files."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.layout import PAGE, Model
from fedstream.journal import JournalDamaged, JournalError, Segment, Tear, segments
from fedstream.journal.frames import BEGINNING, packed
from fedstream.journal.inspection import verify
from fedstream.journal.rebuild import recovered
from fedstream.strategies import FedAvgSettings
from tests.journals import Scribe
from tests.support import Hand, Proxy, context, layout_of, model_of, running, wait_until
from tests.updater.breaking import LATE, digests, ext4, makes_more, zero
from tests.updater.journalled import fails, held, makes, records


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


async def test_altered_synced_update_is_damage(make: Any, hand: Hand, folder: Path) -> None:
    await makes(hand, make(), 4.0, 8.0, 1.0)
    [segment] = segments(folder)
    _, second, third = segment.records()
    assert third.synced > second.place.offset
    zero(segment.path, second.payload)
    await fails(make(), JournalDamaged, "the update does not match its digest")
    assert len(segments(folder)) == 1


@pytest.mark.parametrize("told", [True, False])
async def test_what_a_failed_sync_lost_is_made_again(
    make: Any,
    hand: Hand,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    told: bool,
) -> None:
    """Linux takes pages that it failed to write for written, and keeps them in its cache."""

    async def killed() -> None:
        """Nothing is synced at the end."""

    with ext4(folder, tmp_path / "disk") as disk:
        first = make(sync="interval", sync_s=0.02 if told else 3600.0)
        if not told:  # of the failure: the kernel wrote back by itself, and nobody synced
            monkeypatch.setattr(first._recorder, "flush", killed)
            monkeypatch.setattr(first._recorder, "_synced", killed)
        async with running(first, context(), may_fail=True) as updater:
            await makes_more(hand, 4.0)
            disk.fill()
            await makes_more(hand, 8.0)
            if told:
                await wait_until(updater.done, what="it ends, for its sync failed")
        with suppress(OSError):
            os.sync()
        before = await hand.published()
        disk.make_room()
        async with running(make(), context()):
            await wait_until(hand.queue_is_empty)
            await makes_more(hand, 1.0)
        disk.forget_the_cache()
        assert (await hand.published())[:3] == before
        assert [verdict.damage for verdict in verify(segments(folder))] == [None, None]
        assert digests(folder) == {v.version: v.digest for v in await hand.published() if v.version}


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
        stems = [name.partition(".")[0] for name in synced]
        assert [*dict.fromkeys(stems)] == [before.stem, mine.stem]
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
    monkeypatch.setattr("fedstream.journal.writer.LONGEST", 500)
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
