"""Small updates that are in the queue together share exchanges, records and commits."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.core.layout import PAGE
from fedstream.core.messages import Upload
from fedstream.core.records import Commit, Committed
from fedstream.journal import Taken
from fedstream.journal.recorder import Recorder
from fedstream.strategies import FedAvgSettings
from fedstream.updater.commit import Publisher
from fedstream.updater.intake import BATCH
from tests.journal.test_recorder import Disk, tasks
from tests.support import Hand, Proxy, context, layout_of, model_of, running, wait_until
from tests.updater.breaking import COMMIT, makes_more
from tests.updater.journalled import records

KEEP: dict[str, int] = {"keep_versions": 2, "keep_bytes": 1 << 30}


@pytest.fixture
def committed(monkeypatch: pytest.MonkeyPatch) -> list[Commit]:
    """All commits that are tried, in order."""
    tried: list[Commit] = []
    real = UpdaterLedger.commit

    async def commit(ledger: UpdaterLedger, token: str, commit: Commit, **more: Any) -> Committed:
        tried.append(commit)
        return await real(ledger, token, commit, **more)

    monkeypatch.setattr(UpdaterLedger, "commit", commit)
    return tried


async def queued(hand: Hand, make: Callable[..., Any], *values: float) -> list[Upload]:
    """Updates that wait in the queue for an updater: the run has begun."""
    async with running(make(), context()):
        await hand.join()
    uploads = [
        await hand.trained(trigger, value)
        for trigger, value in zip(await hand.open(len(values)), values, strict=True)
    ]
    assert await hand.admit(*uploads) == [("admitted", "")] * len(values)
    return uploads


def numbers(commits: Sequence[Commit]) -> list[list[int]]:
    return [[version.version for version in commit.versions] for commit in commits]


async def test_updates_that_wait_together_are_read_journalled_and_committed_together(
    make: Any,
    hand: Hand,
    client: Client,
    keys: Keys,
    folder: Path,
    committed: list[Commit],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each still has its record and its version, announced with the digest that it recorded.

    But only the newest model is written: nobody can ask for the others.
    """
    read, appended = [], []
    read_together, append = blobs.read_together, Recorder.append

    async def reading(own: Client, wanted: Sequence[blobs.Wanted]) -> Any:
        read.append(len(wanted))
        return await read_together(own, wanted)

    async def appending(recorder: Recorder, entries: Any) -> Any:
        appended.append(len(entries))
        return await append(recorder, entries)

    await queued(hand, make, 8.0, 4.0, 2.0)
    committed.clear()
    monkeypatch.setattr(blobs, "read_together", reading)
    monkeypatch.setattr(Recorder, "append", appending)
    async with running(make(), context()):
        await hand.reaches(3)
        await wait_until(hand.queue_is_empty)
    assert (read, appended, numbers(committed)) == ([3], [3], [[1, 2, 3]])
    published = await hand.published()
    assert [version.version for version in published] == [0, 1, 2, 3]
    assert [one.digest for one in records(folder)] == [one.digest for one in published[1:]]
    assert list((await hand.ledger.kept()).values()) == [0, 3]
    assert await client.call("EXISTS", *(keys.model(one.blob) for one in published)) == 2
    await hand.model(published[3])  # checks the digest
    assert len(await hand.events()) == 3
    await hand.balanced()


async def test_lost_reply_to_a_shared_commit_publishes_nothing_twice(
    make: Any, hand: Hand, redis: RedisSettings, committed: list[Commit]
) -> None:
    async with Proxy(redis) as proxy:
        await queued(hand, make, 8.0, 4.0)
        proxy.cut_reply_to = lambda data: COMMIT in data
        committed.clear()
        async with running(make(redis=proxy.settings), context()):
            await hand.reaches(2)
            await makes_more(hand, 1.0)
            await wait_until(hand.queue_is_empty)
        assert proxy.cut_replies == 1
    assert numbers(committed)[:2] == [[1, 2], [1, 2]]
    assert [version.version for version in await hand.published()] == [0, 1, 2, 3]
    await hand.balanced()


async def test_models_of_a_commit_whose_reply_was_lost_are_deleted_in_their_turn(
    make: Any,
    hand: Hand,
    client: Client,
    keys: Keys,
    redis: RedisSettings,
    committed: list[Commit],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A third version joins the repetition: the second one was the newest, and was written."""
    append = Recorder.append
    parts = iter((2,))  # entries for which the disk has room, at first

    async def appending(recorder: Recorder, entries: Sequence[Any]) -> Any:
        return await append(recorder, entries[: next(parts, len(entries))])

    async with Proxy(redis) as proxy:
        await queued(hand, make, 8.0, 4.0, 2.0)
        proxy.cut_reply_to = lambda data: COMMIT in data
        committed.clear()
        monkeypatch.setattr(Recorder, "append", appending)
        async with running(make(keep_versions=2, redis=proxy.settings), context()):
            await hand.reaches(3)
            assert list((await hand.ledger.kept()).values()) == [0, 2, 3]
            await makes_more(hand, 1.0)
            await wait_until(hand.queue_is_empty)
    assert numbers(committed)[:2] == [[1, 2], [1, 2, 3]]
    kept = await hand.ledger.kept()
    assert list(kept.values()) == [3, 4]
    assert sorted(await client.call("KEYS", keys.model("*"))) == sorted(
        keys.model(blob).encode() for blob in kept
    )


async def test_shared_commit_whose_model_is_gone_writes_it_again(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ahead = UpdaterLedger.commit, []

    async def commit(ledger: UpdaterLedger, token: str, commit: Commit, **more: Any) -> Committed:
        if commit.versions:
            ahead.append(more["ahead"])
            if len(ahead) == 1:
                more["ahead"] = ()
        return await real(ledger, token, commit, **more)

    await queued(hand, make, 8.0, 4.0)
    monkeypatch.setattr(UpdaterLedger, "commit", commit)
    async with running(make(), context()):
        await hand.reaches(2)
        await hand.model((await hand.published())[-1])  # checks the digest
    assert ahead[1] == ahead[0], "it was not written again"


async def test_at_most_a_batch_is_committed_together(
    make: Any, hand: Hand, committed: list[Commit]
) -> None:
    await queued(hand, make, *range(1, BATCH + 2))
    committed.clear()
    async with running(make(), context()):
        await hand.reaches(BATCH + 1)
        await wait_until(hand.queue_is_empty)
    assert numbers(committed) == [list(range(1, BATCH + 1)), [BATCH + 1]]


async def test_newest_model_outlives_a_shared_commit(
    make: Any, hand: Hand, committed: list[Commit]
) -> None:
    """Whoever is reading it when the next versions are published can finish."""
    await queued(hand, make, 1.0, 2.0, 3.0, 4.0)
    committed.clear()
    async with running(make(keep_versions=2), context()):
        await hand.reaches(4)
        await wait_until(hand.queue_is_empty)
    assert numbers(committed) == [[1, 2, 3, 4]]
    assert list((await hand.ledger.kept()).values()) == [0, 4]


async def test_model_is_deleted_in_its_turn_though_the_reply_to_its_commit_was_lost(
    hand: Hand, client: Client
) -> None:
    """It was written, so it counts, even if it is superseded by the time the commit is repeated."""
    await hand.create()
    publisher = Publisher(client, hand.ledger, hand.updater, **KEEP)
    model = model_of(hand.layout, 1.0)
    await publisher.look()
    versions = [
        (await hand.publish(0)).model_copy(update={"version": number, "blob": f"{number}.1"})
        for number in (1, 2, 3)
    ]
    for version in (versions[0], versions[2]):  # the second is superseded from the start
        assert await publisher.prepare(version, model)
        assert not await publisher.prepare(version, model), "it is written already"
    publisher.published(versions, ["0.1"])
    assert publisher.outlived(model.buffer.nbytes) == ("1.1",)
    publisher.published([], ["1.1"])
    assert publisher.outlived(model.buffer.nbytes) == ()


async def test_model_that_never_arrived_is_written_again(hand: Hand, client: Client) -> None:
    await hand.create()
    publisher = Publisher(client, hand.ledger, hand.updater, **KEEP)
    model = model_of(hand.layout, 1.0)
    first, second = await hand.publish(1), await hand.publish(2)
    for version in (first, second):
        await publisher.prepare(version, model)
    publisher.unwritten(second)
    assert await publisher.prepare(second, model)
    assert not await publisher.prepare(first, model)


async def test_large_models_are_committed_alone(
    make: Any, hand: Hand, committed: list[Commit]
) -> None:
    """Memory for several is not meant to be taken."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    await queued(hand, make, 1.0, 2.0)
    committed.clear()
    async with running(make(), context()):
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    assert numbers(committed) == [[1], [2]]


async def test_buffered_and_refused_updates_share_a_commit(
    make: Any, hand: Hand, committed: list[Commit]
) -> None:
    rule = FedAvgSettings()
    async with running(make(rule), context()):
        await hand.join()
    triggers = await hand.open(3)
    uploads = [await hand.trained(trigger, 1.0) for trigger in triggers[:2]]
    assert await hand.admit(*uploads) == [("admitted", "")] * 2
    await hand.slip_in(await hand.trained(triggers[2], float("nan")))
    committed.clear()
    async with running(make(rule), context()):
        await wait_until(hand.queue_is_empty)
    [first, *_] = committed
    assert [end.outcome for end in first.ends] == ["buffered", "buffered", "refused"]
    assert (first.held, numbers(committed)[0]) == (tuple(up.device for up in uploads), [])
    await hand.balanced()


async def test_entry_whose_update_redis_forgot_is_skipped(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    """Its bytes and its admission are gone when it is fetched with the others."""
    first, lost, last = await queued(hand, make, 8.0, 4.0, 2.0)
    await client.call("UNLINK", hand.keys.queued(lost.blob))
    await client.call("HDEL", hand.keys.admitted, lost.task)
    async with running(make(), context()):
        await hand.reaches(2)
    taken = [record for record in records(folder) if isinstance(record, Taken)]
    assert [record.upload.task for record in taken] == [first.task, last.task]


async def test_updater_on_a_full_disk_makes_each_version_once(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batch is cut short where the disk is full, and goes on when there is room."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    async with running(make(), context()):
        await hand.join()
    uploads = [await hand.admitted(float(n)) for n in range(4)]
    updater = make()
    append = updater._recorder.append
    asked: list[int] = []

    async def meets_a_full_disk(batch: Any) -> list[int]:
        if not asked:
            disk.room = 3 * PAGE  # a small record is two pages
        asked.append(len(batch))
        if len(asked) == 3:
            disk.room = None
        return list(await append(batch))

    monkeypatch.setattr(updater._recorder, "append", meets_a_full_disk)
    async with running(updater, context()):
        await hand.reaches(4)
        await wait_until(hand.queue_is_empty)
    assert asked[:3] == [4, 3, 3]  # one was written, none, and then the rest
    assert tasks(folder) == [upload.task for upload in uploads]
    digests = {r.version: r.digest for r in records(folder) if r.digest}
    assert {v.version: v.digest for v in await hand.published() if v.version} == digests
    await hand.balanced()
