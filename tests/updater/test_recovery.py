"""Exactly once: what the updater journalled has happened, whatever becomes of it or of Redis."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.scripts import Script
from fedstream.core.errors import ConfigError, Fenced
from fedstream.core.layout import Model
from fedstream.core.messages import CloseRound
from fedstream.journal import JournalError, JournalSettings, Segment, Taken, Writer, segments
from fedstream.journal import writer as writing
from fedstream.journal.ended_tasks import NAME
from fedstream.journal.rebuild import recovered
from fedstream.journal.recorder import Recorder
from fedstream.strategies import AfaCdSettings, FedAvgSettings
from tests.support import Hand, Proxy, context, counted, running, wait_until
from tests.updater.journalled import backed_up, fails, go_back, held, makes, reasons, records


@contextmanager
def nothing_gets_to_the_disk() -> Iterator[None]:
    """Inside the block every sync waits."""
    may, real = threading.Event(), os.fdatasync

    def fdatasync(file: int) -> None:
        assert may.wait(60)
        real(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        try:
            yield
        finally:
            may.set()


# what is recorded


async def test_journal_records_every_entry_exactly(make: Any, hand: Hand, folder: Path) -> None:
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        bad = await hand.admitted(float("inf"))
        await wait_until(lambda: reasons(hand, "refused", {"not finite": 1}))
        await hand.admitted(8.0, tau=0, base=await hand.ledger.digest(0))
        await hand.reaches(2)
    [segment] = segments(folder)
    assert (segment.standing.why, segment.standing.version) == ("begun", 0)
    assert (segment.head.run, segment.head.epoch, segment.head.seed) == (hand.keys.name, 1, 0)
    first, refused, second = records(folder)
    assert isinstance(second, Taken)
    assert [(r.outcome, r.reason) for r in (first, refused, second) if isinstance(r, Taken)] == [
        ("applied", ""),
        ("refused", "not finite"),
        ("applied", ""),
    ]
    assert isinstance(refused, Taken)
    assert refused.upload.task == bad.task
    assert (second.staleness, second.weight, second.version, second.upload.tau) == (1, 0.5, 2, 0)
    published = await hand.published()
    assert [first.digest, second.digest] == [version.digest for version in published[1:]]
    found = recovered(segment)
    assert found.progress is not None
    assert found.progress.state.model.floats.tolist() == [5.0] * 4
    counts = (await hand.ledger.look()).counts
    assert found.counts == {"issued": 2}  # the last that it heard of
    assert found.journalled | {"issued": 3} == counts
    segment.close()


# restarts


async def test_updater_continues_from_the_journal_after_an_emptied_redis(
    make: Any, hand: Hand, client: Client
) -> None:
    await makes(hand, make(), 4.0, 4.0)
    await hand.open(3)
    before = (await hand.published())[-1]
    await client.call("FLUSHALL")
    async with running(make(), context()):
        await hand.reaches(2)
        [again] = await hand.published()
        assert (again.version, again.digest, again.parent) == (2, before.digest, None)
        assert again.updates == before.updates
        view = await hand.ledger.look()
        # The counts are those that the journal has: of before the three that nobody answered.
        assert (view.issued, view.outcomes["applied"], view.open) == (2, 2, ())
        await hand.balanced()
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(3)
        await hand.balanced()
    assert (await hand.model((await hand.published())[-1])).floats.tolist() == [3.5] * 4


async def test_emptied_redis_hears_again_that_updates_are_divided_by_their_steps(
    make: Any, hand: Hand, client: Client
) -> None:
    rule = AfaCdSettings(buffer_size=1)
    async with running(make(rule), context()):
        await hand.reaches(0)
    await client.call("FLUSHALL")
    async with running(make(rule), context()):
        await hand.reaches(0)
        assert (await hand.ledger.run()).by_steps


async def test_open_tasks_of_an_emptied_redis_are_counted(
    make: Any, hand: Hand, client: Client
) -> None:
    async with running(make(lease_s=0.4), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.open(3)
        await hand.admitted(4.0)
        await hand.reaches(2)
        await client.call("FLUSHALL")
        await wait_until(lambda: reasons(hand, "given_up", {"lost with Redis": 3}))
        view = await hand.ledger.look()
        assert (view.head.version, view.issued, view.outcomes["applied"]) == (2, 5, 2)
        await hand.balanced()


async def test_journalled_version_is_published_once(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    commit = Script("commit")._sha.encode()
    async with Proxy(redis) as proxy:
        async with running(make(redis=proxy.settings), context()):
            await hand.join()
            await hand.admitted(4.0)
            await hand.reaches(1)
            proxy.refuse = lambda data: commit in data
            upload = await hand.admitted(8.0)
            await wait_until(lambda: len(records(folder)) == 2)
        assert await hand.version() == 1
    async with running(make(), context()):
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
        version = (await hand.published())[-1]
        assert [update.task for update in version.updates] == [upload.task]
        assert (await hand.model(version)).floats.tolist() == [5.0] * 4
        view = await hand.ledger.look()
        assert (view.outcomes["applied"], view.open) == (2, ())
        await hand.admitted(5.0)
        await hand.reaches(3)
        await hand.balanced()
    assert len(records(folder)) == 3


async def test_queue_restores_what_the_journal_lost(
    make: Any, hand: Hand, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = {"sync": "interval", "sync_s": 3600.0}
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 3_600_000)  # it is never idle
    async with running(make(**late), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        shutil.copytree(folder, tmp_path / "copy")  # what a machine that dies has on disk
        await hand.admitted(8.0)
        await hand.admitted(float("nan"))
        await hand.admitted(0.0)
        await hand.reaches(3)
        assert (await hand.ledger.look()).head.retained == 4
    shutil.rmtree(folder)
    shutil.move(tmp_path / "copy", folder)
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)
    told = await hand.published()
    async with running(make(**late), context()) as updater:
        await wait_until(lambda: len(records(folder)) == 4)
        assert await hand.version() == 3
        await hand.admitted(2.5)
        await hand.reaches(4)
        assert not updater.done()
        view = await hand.ledger.look()
        assert (view.outcomes["applied"], view.reasons("refused")) == (4, {"not finite": 1})
        await hand.balanced()
    assert (await hand.published())[: len(told)] == told
    digests = {r.version: r.digest for r in records(folder) if r.digest}
    assert digests == {v.version: v.digest for v in await hand.published() if v.version}


async def test_permanently_lost_journal_end_is_an_error(
    make: Any, hand: Hand, folder: Path, tmp_path: Path
) -> None:
    await makes(hand, make(), 4.0)
    shutil.copytree(folder, tmp_path / "copy")
    await makes(hand, make(name="updater-1"), 4.0, 4.0)
    shutil.rmtree(folder)
    shutil.move(tmp_path / "copy", folder)
    await fails(make(), JournalError, "ends with version 1, .* has 3.*--adopt")
    async with running(make(adopt=True), context()):
        await wait_until(lambda: segments(folder)[-1].standing.why == "adopted")
        await hand.admitted(4.0)
        await hand.reaches(4)
    assert (await hand.model((await hand.published())[-1])).floats.tolist() == [3.75] * 4


async def test_lost_journal_is_an_error(make: Any, hand: Hand, folder: Path) -> None:
    await makes(hand, make(), 4.0, 4.0)
    shutil.rmtree(folder)
    await fails(make(), ConfigError, r"journal\.dir: there is no journal .*--adopt")
    await makes(hand, make(adopt=True), 4.0)
    [segment] = segments(folder)
    assert (segment.standing.why, segment.standing.version) == ("adopted", 2)
    assert (await hand.model((await hand.published())[-1])).floats.tolist() == [3.5] * 4
    await makes(hand, make(), 4.0)  # from then on it is a journal like any other


async def test_journal_of_another_run_is_refused(make: Any, hand: Hand, client: Client) -> None:
    await makes(hand, make(), 4.0)
    await client.call("HSET", hand.keys.run, "lineage", "another")
    await fails(make(), ConfigError, "a run of a different lineage")


async def test_task_older_than_the_journal_is_refused(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was applied before, in a segment that is gone, nobody could say."""
    monkeypatch.setattr("fedstream.updater.state._REMEMBERED", 1)
    async with running(make(segment_versions=1, keep_segments=1), context()):
        await hand.join()
        for number in range(1, 8):
            await hand.admitted(1.0)
            await hand.reaches(number)
        base = await hand.ledger.digest(2)
        await hand.admitted(9.0, tau=2, base=base)
        await wait_until(lambda: reasons(hand, "refused", {"too old": 1}))


async def test_round_end_after_the_run_does_nothing(make: Any, hand: Hand) -> None:
    rounds = FedAvgSettings(clients_per_round=3)
    updater = make(rounds)
    async with running(updater, context()):
        await hand.join()
        await hand.admitted(3.0)
        await wait_until(lambda: held(hand, 1))
        await hand.ledger.finish("enough")
        await wait_until(lambda: updater._loop.state.finished)
        await hand.ledger.ask(CloseRound(version=0, tasks=(), why="round over"))
        assert await hand.dispatch() == ["closed"]
        await wait_until(hand.queue_is_empty)
    async with running(make(rounds), context()):
        await wait_until(lambda: held(hand, 1))
        assert await hand.version() == 0


# without weights


async def test_without_weights_only_redis_has_the_newest_model(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    await makes(hand, make(weights=False), 4.0, 4.0)
    await makes(hand, make(weights=False), 4.0)
    chain = segments(folder)
    assert sum(r.payload_bytes for segment in chain for r in segment.records()) == 0
    await client.call("FLUSHALL")
    said = "without weights .* version 3, .* has no version.* of version 2"
    await fails(make(weights=False), ConfigError, said)
    async with running(make(weights=False, adopt=True), context()):
        await hand.reaches(4)  # no version goes back, though its model does
        assert (await hand.model((await hand.published())[-1])).floats.tolist() == [3.0] * 4
    # How large updates are lately comes from all that the journal has, not from the checkpoint.
    assert [len(segment.standing.sizes) for segment in segments(folder)] == [0, 2, 3]


async def test_strategy_with_memory_needs_the_weights(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"journal\.weights = false"):
        make(FedAvgSettings(), weights=False)


# two that believe to be the only one


async def test_expired_writer_is_fenced_in_redis_and_on_disk(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    async with Proxy(redis) as proxy:
        old = make(name="updater-0", redis=proxy.settings, lease_s=0.4)
        async with running(old, context(), may_fail=True) as first:
            await hand.join()
            await hand.admitted(4.0)
            await hand.reaches(1)
            proxy.answering.clear()  # it is away: its commit will be late
            await hand.admitted(8.0)
            async with running(make(name="updater-1", lease_s=0.4), context()):
                await wait_until(lambda: len(segments(folder)) == 2)
                await hand.reaches(2)
                proxy.answering.set()
                await hand.admitted(1.0)
                await hand.reaches(3)
                await wait_until(first.done, what="it ends")
                error = first.exception()
                assert isinstance(error, BaseExceptionGroup)
                assert error.split(Fenced)[1] is None
                # Believing itself the only one, it had written on: nobody reads that.
                with (folder / "00000001-000000.journal").open("ab") as file:
                    file.write(b"more")
                await hand.admitted(3.0)
                await hand.reaches(4)
    taken = [record for record in records(folder) if isinstance(record, Taken)]
    assert [record.version for record in taken] == [1, 2, 3, 4]
    assert len({record.upload.task for record in taken}) == 4
    await hand.balanced()


# the disk


async def test_full_disk_pauses_without_applying_twice(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    real, full = os.pwritev, False

    def pwritev(file: int, parts: Any, at: int) -> int:
        if not full:
            return real(file, parts, at)
        real(file, [parts[0][:512]], at)  # the beginning had room
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", pwritev)
    watched = context()
    async with running(make(), watched):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        full = True
        await hand.admitted(8.0)
        await wait_until(lambda: counted(watched, "fedstream_retries_total", loop="queue") > 1)
        assert await hand.version() == 1
        full = False
        await hand.reaches(2)
        await hand.admitted(1.0)
        await hand.reaches(3)
    assert [record.version for record in records(folder)] == [1, 2, 3]
    assert (await hand.model((await hand.published())[-1])).floats.tolist() == [3.0] * 4


async def test_failing_disk_ends_the_updater(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows what is on disk then; the next one begins with what is."""

    def broken(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with running(make(), context(), may_fail=True) as updater:
        await hand.join()
        await hand.reaches(0)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            await hand.admitted(4.0)
            await wait_until(updater.done, what="it ends")
        error = updater.exception()
        assert isinstance(error, BaseExceptionGroup)
        assert error.subgroup(JournalError)
    async with running(make(), context()):
        await hand.reaches(1)
        await hand.balanced()


async def test_entry_stays_queued_until_its_record_is_on_disk(
    make: Any, hand: Hand, client: Client
) -> None:
    async with running(make(sync="interval", sync_s=0.1), context()):
        await hand.join()
        with nothing_gets_to_the_disk():
            upload = await hand.admitted(4.0)
            await hand.reaches(1)
            assert [message for _, message in await hand.queue()] == [upload]
            view = await hand.ledger.look()
            assert (view.queue, view.head.retained, view.backlog) == (1, 1, 0)
        await wait_until(hand.queue_is_empty)
        assert await client.call("EXISTS", hand.keys.queued(upload.blob)) == 0
        assert (await hand.ledger.look()).head.retained == 0


async def test_task_that_redis_forgot_has_ended_counts_once(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis forgets the ends with the lowest names first, so a straggler's end at once.

    Its entry is still queued when an updater starts, which commits it again with the next update.
    """
    late = {"sync": "interval", "sync_s": 3600.0}
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 3_600_000)  # it is never idle
    async with running(make(**late), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
    assert await hand.client.call("ZREMRANGEBYRANK", hand.keys.ended, 0, -1) == 1
    await hand.admitted(8.0)
    assert len(await hand.queue()) == 2
    async with running(make(**late), context()):
        await hand.reaches(2)
        view = await hand.ledger.look()
        assert (view.issued, view.outcomes["applied"]) == (2, 2)


def listed(folder: Path) -> list[str]:
    """The names in a folder, less the index."""
    return sorted(path.name for path in folder.iterdir() if path.name != NAME)


async def test_segments_are_limited_in_versions_and_number(
    make: Any, hand: Hand, folder: Path
) -> None:
    async with running(make(segment_versions=3, keep_segments=2), context()):
        await hand.join()
        for number in range(1, 13):
            await hand.admitted(float(number))
            await hand.reaches(number)
        newest = [f"00000001-{number:06}.journal" for number in (3, 4)]
        await wait_until(lambda: sorted(path.name for path in folder.glob("*.journal")) == newest)
        assert [segment.standing.version for segment in segments(folder)] == [9, 12]


# Redis forgets more than we do


async def test_finished_run_is_finished_again_despite_endless_updates(
    make: Any, hand: Hand, client: Client
) -> None:
    async with running(make(versions=2), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        backup = await backed_up(client)
        await hand.admitted(4.0)
        await hand.reaches(2)
        await go_back(client, backup)

        async def finished() -> bool:
            if (await hand.ledger.run()).state == "finished":
                return True
            # For Redis the run is running, so the queue never is empty.
            await hand.slip_in(await hand.trained(hand.trigger(), 4.0))
            return False

        await wait_until(finished)
        assert await hand.version() == 2


async def test_retained_entry_ends_a_forgotten_task_again(
    make: Any, hand: Hand, client: Client
) -> None:
    rounds = FedAvgSettings(clients_per_round=3)
    async with running(make(rounds, sync="interval", sync_s=0.1), context()):
        await hand.join()
        with nothing_gets_to_the_disk():
            [trigger] = await hand.open()
            upload = await hand.trained(trigger, 4.0)
            backup = await backed_up(client)
            await hand.admit(upload)
            await wait_until(lambda: held(hand, 1))
            await go_back(client, backup)
            await hand.admit(upload)
        await wait_until(hand.queue_is_empty)
        assert (await hand.ledger.look()).open == ()
        await hand.balanced()


@asynccontextmanager
async def superseded(make: Any, hand: Hand, redis: RedisSettings) -> AsyncIterator[list[bytes]]:
    """An updater made version 1 and sleeps; its successor has made the second and is gone.

    Inside the block Redis may forget something; after it the sleeper wakes up, and has to find out.
    What it was given to lead with: the run's tokens, as they were then.
    """
    async with Proxy(redis) as proxy:
        sleeper = make(name="sleeper", redis=proxy.settings, lease_s=0.4)
        async with running(sleeper, context(), may_fail=True) as work:
            await hand.join()
            await hand.admitted(4.0)
            await hand.reaches(1)
            tokens = await hand.client.call("HGETALL", hand.keys.tokens)
            proxy.reading.clear()  # asleep, as far as Redis can tell
            proxy.cut()
            async with running(make(name="successor", lease_s=0.4), context(), may_fail=True):
                await hand.admitted(8.0)
                await hand.reaches(2)
            yield tokens
            proxy.reading.set()
            await wait_until(work.done, what="it ends")
            error = work.exception()
            assert isinstance(error, BaseExceptionGroup)
            assert error.subgroup(Fenced)
            assert error.split(Fenced)[1] is None


async def test_fencing_survives_an_emptied_redis(
    make: Any, hand: Hand, client: Client, redis: RedisSettings
) -> None:
    async with superseded(make, hand, redis):
        await client.call("FLUSHALL")
    assert await hand.ledger.head() is None
    async with running(make(name="third"), context()):
        await hand.reaches(2)


async def test_successors_versions_are_not_taken_for_a_lost_journal_end(
    make: Any, hand: Hand, client: Client, redis: RedisSettings
) -> None:
    async with superseded(make, hand, redis) as tokens:
        # Redis went back to when the sleeper led, but for the versions, which it does not know.
        await client.call("HSET", hand.keys.tokens, *tokens)


async def test_last_version_stays_last_despite_a_fallback(
    make: Any, hand: Hand, client: Client, redis: RedisSettings, folder: Path
) -> None:
    commit = Script("commit")._sha.encode()
    async with (
        Proxy(redis) as proxy,
        running(make(redis=proxy.settings, versions=2), context()),
    ):
        await hand.join()
        backup = await backed_up(client)
        await hand.admitted(4.0)
        await hand.reaches(1)
        proxy.refuse = lambda data: commit in data
        await hand.admitted(4.0)
        await wait_until(lambda: len(records(folder)) == 2)
        await go_back(client, backup)
        proxy.refuse = None
        await hand.reaches(2)
        assert (await hand.ledger.run()).state == "finished"


async def test_one_of_two_updaters_in_an_epoch_is_fenced(
    make: Any, hand: Hand, folder: Path
) -> None:
    await makes(hand, make(), 4.0)
    [segment] = segments(folder)
    model = Model(segment.layout)
    segment.load(segment.standing_record, model)
    head = segment.head.model_copy(update={"number": 7})
    Writer(folder, head, segment.standing, model).close()
    with pytest.raises(Fenced, match="another updater has started"):
        Writer(folder, head, segment.standing, model)
    with Segment(folder / "00000001-000007.journal") as whole:
        assert whole.standing == segment.standing
    written = ["00000001-000000.journal", "00000001-000007.journal"]
    assert listed(folder) == written


async def test_updater_whose_new_segment_was_removed_is_fenced(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A successor takes what is written aside for what a crashed writer left."""
    await makes(hand, make(), 4.0)
    await makes(hand, make(name="successor"), 4.0)
    chain = segments(folder)
    real = writing._named

    def slept(aside: Path, path: Path) -> None:
        recorder._outlived(chain[-1].path.name, 1.0)
        real(aside, path)

    monkeypatch.setattr(writing, "_named", slept)
    head = chain[0].head.model_copy(update={"number": 7})
    model = Model(chain[0].layout)
    chain[0].load(chain[0].standing_record, model)
    recorder = Recorder(JournalSettings(dir=str(folder)))
    with pytest.raises(Fenced, match="another updater took over"):
        Writer(folder, head, chain[0].standing, model)
    written = [segment.path.name for segment in chain]
    assert listed(folder) == written
    await recorder.close()
    for segment in chain:
        segment.close()
