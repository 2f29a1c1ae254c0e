"""Versions stay float32; devices train from what they are given, and are known by that."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.core.errors import BlobMissing, ConfigError
from fedstream.core.formats import format_of
from fedstream.core.given import given
from fedstream.core.layout import Model
from fedstream.core.messages import RoundEnd, Version
from fedstream.journal import RoundClosed, segments
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAvgSettings
from fedstream.updater.service import Updater
from tests.support import Hand, context, counted, model_of, running, wait_until
from tests.updater.journalled import backed_up, go_back, records

LOSSY = ("bf16", "int8+zstd")
UPDATES = ((4.1, -1.3, 0.7, 0.11), (8.3, 0.3, -2.9, 1.7), (0.7, 5.1, 3.3, -0.9))


@pytest.fixture(params=LOSSY)
def name(request: pytest.FixtureRequest) -> str:
    """A format that loses something."""
    return str(request.param)


async def makes(hand: Hand, updater: Updater, *updates: tuple[float, ...]) -> None:
    """Runs an updater until it has made a version of each of these updates."""
    async with running(updater, context()):
        await hand.join()
        for floats in updates:
            version = await hand.version()
            await hand.admitted(*floats)
            await hand.reaches(version + 1)


async def test_devices_are_given_the_encoded_version(
    make: Any, hand: Hand, folder: Path, name: str
) -> None:
    await makes(hand, make(published_as=name), *UPDATES)
    how = format_of(name)
    told = await hand.published()
    assert [version.format for version in told] == [name] * 4
    for version, record in zip(told[1:], records(folder), strict=True):
        assert (version.digest, version.given) == (record.digest, record.given)
        assert version.given != version.digest
        assert version.given == await hand.ledger.given(version.version)
        assert version.digest == await hand.ledger.digest(version.version)
    # The master is float32, and only what is published is not.
    with Replayer(folder) as replayer:
        moments = list(replayer)
        exact = moments[-1].step.after.state.model
    assert exact.digest() == told[-1].digest
    assert all(moment.identical for moment in moments)
    one = given(exact, how, version=3, sends="model", digests="sha256")
    assert one.digest == told[-1].given
    expected = Model(hand.layout)
    how.decode(one.payload.buffer, expected)
    assert (await hand.model(told[-1])).floats.tolist() == expected.floats.tolist()
    assert segments(folder)[0].head.format == name


async def test_devices_are_known_by_what_they_were_given(make: Any, hand: Hand, name: str) -> None:
    async with running(make(published_as=name), context()):
        await hand.join()
        await hand.admitted(*UPDATES[0])
        await hand.reaches(1)
        head = await hand.ledger.head()
        assert head is not None
        assert head.given != head.digest
        [trigger] = await hand.open()
        await hand.take()
        upload = await hand.trained(trigger, 1.0, base=head.digest)
        assert await hand.admit(upload) == [("refused", "unknown base")]
        await hand.admitted(1.0)  # its base is `given`
        await hand.reaches(2)


@pytest.mark.parametrize("restarts", [False, True])
async def test_emptied_redis_gets_the_same_model_again(
    make: Any, hand: Hand, client: Client, name: str, *, restarts: bool
) -> None:
    """Devices that train from it go on: they know it by the same digest."""
    async with running(make(published_as=name), context()):
        await hand.join()
        for number, floats in enumerate(UPDATES, 1):
            await hand.admitted(*floats)
            await hand.reaches(number)
        before = (await hand.published())[-1]
        there = (await hand.model(before)).floats.tolist()
        if not restarts:
            await client.call("FLUSHALL")
            await hand.reaches(3)
    if restarts:
        await client.call("FLUSHALL")
        async with running(make(published_as=name), context()):
            await hand.reaches(3)
    [again] = await hand.published()
    assert (again.digest, again.given) == (before.digest, before.given)
    assert await hand.ledger.given(3) == before.given
    assert (await hand.model(again)).floats.tolist() == there


async def test_fallen_back_redis_is_brought_up_to_date(
    make: Any, hand: Hand, client: Client, name: str
) -> None:
    async with running(make(published_as=name), context()):
        await hand.join()
        await hand.admitted(*UPDATES[0])
        await hand.reaches(1)
        backup = await backed_up(client)
        await hand.admitted(*UPDATES[1])
        await hand.reaches(2)
        before = (await hand.published())[-1]
        await go_back(client, backup)
        await hand.reaches(2)
        again = (await hand.published())[-1]
        assert (again.version, again.given) == (2, before.given)
        await hand.balanced()


async def test_lost_end_of_the_journal_is_made_again(
    make: Any, hand: Hand, folder: Path, tmp_path: Path, name: str, monkeypatch: Any
) -> None:
    late = {"sync": "interval", "sync_s": 3600.0, "published_as": name}
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 3_600_000)  # it is never idle
    async with running(make(**late), context()):
        await hand.join()
        await hand.admitted(*UPDATES[0])
        await hand.reaches(1)
        shutil.copytree(folder, tmp_path / "copy")  # what a machine that dies has on disk
        await hand.admitted(*UPDATES[1])
        await hand.admitted(*UPDATES[2])
        await hand.reaches(3)
    shutil.rmtree(folder)
    shutil.move(tmp_path / "copy", folder)
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)
    told = await hand.published()
    async with running(make(**late), context()):
        await wait_until(lambda: len(records(folder)) == 3)
        await hand.balanced()
    assert await hand.published() == told
    assert [r.given for r in records(folder)] == [v.given for v in told[1:]]


async def test_adopted_copy_is_another_version(
    make: Any, hand: Hand, folder: Path, name: str
) -> None:
    """What Redis has is less than version 3: with its number it would have two digests."""
    await makes(hand, make(published_as=name), *UPDATES)
    last = (await hand.published())[-1]
    copy = await hand.model(last)
    shutil.rmtree(folder)
    async with running(make(published_as=name, adopt=True), context()):
        await hand.reaches(4)
        adopted = (await hand.published())[-1]
        assert adopted.digest == copy.digest() != last.digest
        # Who trains from version 3 was given the same, and is still known.
        await hand.admitted(1.0, tau=3, base=last.given)
        await hand.reaches(5)
        await hand.balanced()
    [segment] = segments(folder)
    assert (segment.standing.why, segment.standing.version) == ("adopted", 4)
    assert segment.standing.digest == copy.digest()
    await makes(hand, make(published_as=name), UPDATES[0])  # from then on a journal like any other


@pytest.mark.parametrize("versions", [2, 3])
async def test_adopted_copy_can_be_the_last_version(
    make: Any, hand: Hand, folder: Path, versions: int
) -> None:
    """It ends a run that was to have one more, and a finished run stays finished."""
    about = {"published_as": "bf16", "versions": versions}
    await makes(hand, make(**about), *UPDATES[:2])
    before = await hand.ledger.run()
    assert before.state == ("finished" if versions == 2 else "running")
    shutil.rmtree(folder)
    for adopt in (True, False):  # and when it starts again
        async with running(make(**about, adopt=adopt), context()):
            await hand.reaches(3)

            async def is_over() -> bool:
                return (await hand.ledger.run()).state == "finished"

            await wait_until(is_over)
        run = await hand.ledger.run()
        assert (run.versions, run.why) == (versions, f"version {versions} reached")
        assert await hand.version() == 3
    assert segments(folder)[-1].standing.finished == run.why


async def test_adopted_exact_copy_keeps_its_number(make: Any, hand: Hand, folder: Path) -> None:
    await makes(hand, make(published_as="f32+zstd"), *UPDATES)
    last = (await hand.published())[-1]
    assert last.given == last.digest
    shutil.rmtree(folder)
    await makes(hand, make(published_as="f32+zstd", adopt=True), UPDATES[0])
    [segment] = segments(folder)
    assert (segment.standing.version, segment.standing.digest) == (3, last.digest)


async def test_without_weights_versions_must_be_exact(make: Any) -> None:
    make(weights=False, published_as="f32+zstd")
    with pytest.raises(ConfigError, match=r"weights = false with wire\.model = bf16: after a rest"):
        make(weights=False, published_as="bf16")


async def test_format_may_change_between_restarts(make: Any, hand: Hand, folder: Path) -> None:
    await makes(hand, make(), UPDATES[0])
    await makes(hand, make(published_as="int8"), UPDATES[1])
    await makes(hand, make(published_as="bf16"), UPDATES[2])
    await makes(hand, make(), UPDATES[0])
    told = await hand.published()
    assert [version.format for version in told] == ["f32", "f32", "int8", "bf16", "f32"]
    head = await hand.ledger.head()
    assert head is not None
    assert (head.encoded, head.given) == (None, head.digest)
    with Replayer(folder, bases=True) as replayer:
        for moment in replayer:
            assert moment.identical
            assert moment.base is not None
            given_then = await hand.model(told[moment.message.version - 1])
            assert moment.base.floats.tolist() == given_then.floats.tolist()


async def test_older_releases_wait_for_encoded_models(make: Any, hand: Hand) -> None:
    """They look for the size of plain bytes, find none, and take the model for missing."""
    await makes(hand, make(published_as="bf16"), UPDATES[0])
    last = (await hand.published())[-1]
    key = hand.keys.model(last.blob)
    with pytest.raises(BlobMissing):
        await blobs.read(
            hand.client, key, Model(hand.layout), digest=last.digest, chunks=last.chunks
        )
    assert not await blobs.keep(hand.client, key, hand.layout.nbytes, chunks=last.chunks)


async def test_older_updater_publishes_plain_bytes_again(make: Any, hand: Hand) -> None:
    """It knows no field that says how the head's model is encoded, and leaves it there."""
    await makes(hand, make(published_as="bf16"), UPDATES[0])
    head = await hand.ledger.head()
    assert head is not None
    assert head.encoded is not None
    assert await hand.updater.acquire()
    model = model_of(hand.layout, 5.1)
    version = Version(
        version=1, time=2.0, epoch=9, digest=model.digest(), blob="1.9.old", size=16, chunks=1
    )
    await blobs.write(hand.client, hand.keys.model(version.blob), model, expire_s=60)
    said = await hand.ledger.create(hand.updater.token, hand.run(lineage="x"), version)
    assert said.what == "created"
    head = await hand.ledger.head()
    assert head is not None
    assert (head.encoded, head.given) == (None, model.digest())
    assert await hand.ledger.given(1) == await hand.ledger.digest(1) == model.digest()


async def test_rounds_are_published_encoded_too(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    """A round that ends early, with half of its updates."""
    async with running(make(FedAvgSettings(clients_per_round=2), published_as="int8"), context()):
        await hand.join()
        await hand.admitted(*UPDATES[0])
        await client.call("XADD", hand.keys.queue, "*", "m", RoundEnd(version=0).encode())
        await hand.reaches(1)
    [_, version] = await hand.published()
    closed = records(folder)[-1]
    assert isinstance(closed, RoundClosed)
    assert (version.format, version.given) == ("int8", closed.given)
    assert closed.given not in (None, closed.digest)


async def test_missing_model_is_rewritten(make: Any, hand: Hand, client: Client) -> None:
    about = context()
    async with running(make(published_as="bf16"), about):
        await hand.join()
        await hand.admitted(*UPDATES[0])
        await hand.reaches(1)
        last = (await hand.published())[-1]
        floats = (await hand.model(last)).floats.tolist()
        await client.call("HSET", hand.keys.model(last.blob), 0, b"short")
        await wait_until(lambda: counted(about, "fedstream_models_repaired_total") == 1)

        async def there() -> bool:
            return len(await hand.published()) == 3

        await wait_until(there)
        again = (await hand.published())[-1]
        assert again.given == last.given
        assert (await hand.model(again)).floats.tolist() == floats
