"""What is remembered of every device: it outlives the updater, Redis and the segments it was in."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import BlobDamaged, ConfigError, Fenced
from fedstream.broker.layout import Floats, Layout, Model, vector_of
from fedstream.broker.messages import Upload
from fedstream.broker.scripts import Script
from fedstream.journal import (
    VECTORS,
    JournalDamaged,
    JournalError,
    JournalSettings,
    NotRecorded,
    Segment,
    SegmentHead,
    Standing,
    Taken,
    Writer,
    segments,
)
from fedstream.journal.progress import Progress, take
from fedstream.journal.rebuild import recovered, standing_of
from fedstream.journal.recorder import Recorder
from fedstream.journal.replay import Replayer
from fedstream.strategies import (
    AfaCdSettings,
    AfaCsSettings,
    DeviceVectors,
    FedAsyncSettings,
    FedBuffSettings,
    Memory,
    ScaffoldSettings,
    State,
    Strategy,
)
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, initial
from tests.journals import Scribe
from tests.support import Hand, Proxy, context, layout_of, model_of, running, wait_until
from tests.updater.journalled import fails, held, reasons, records

M = 10
AFA_CS = AfaCsSettings(buffer_size=2, server_lr=0.5)
SCAFFOLD = ScaffoldSettings(buffer_size=2)
BOTH = pytest.mark.parametrize("rule", [AFA_CS, SCAFFOLD], ids=lambda rule: rule.name)
FIRST, SECOND = "00000001-000000.journal", "00000001-000001.journal"


def layout_for(rule: Strategy, layout: Layout | None = None) -> Layout:
    """The layout of a run by the rule."""
    layout = layout or layout_of(4)
    return layout.with_controls() if rule.build(M).controls else layout


class Twin:
    """The same run without any updater: nothing ever interrupts it."""

    def __init__(self, rule: Strategy, layout: Layout) -> None:
        self.rule = rule.build(M)
        self.layout = layout
        self.progress = Progress(State(0, model_of(layout)))
        self.digests = {0: self.progress.state.model.digest()}
        self.taken = 0

    @property
    def version(self) -> int:
        return self.progress.state.version

    @property
    def vectors(self) -> DeviceVectors | None:
        return self.progress.state.memory.devices

    def values(self) -> list[float]:
        """What the next device sends."""
        drawn = np.random.default_rng(self.taken).standard_normal(self.layout.floats)
        return [float(value) for value in drawn.astype(np.float32)]

    def take(self, upload: Upload, values: list[float]) -> Taken:
        """The next update arrives: its record."""
        model, spare = model_of(self.layout, *values), Model(self.layout)
        step = take(self.rule, self.progress, upload, model, spare)
        self.progress, self.taken = step.after, self.taken + 1
        assert step.decision
        assert step.decision.outcome != "dropped"
        if step.made:
            self.digests[self.version] = step.after.state.model.digest()
        return Taken(
            entry=f"{self.taken}-0", upload=upload, outcome=step.decision.outcome,
            staleness=step.decision.staleness, weight=step.decision.weight, version=self.version,
            digest=self.digests[self.version] if step.made else None, time=1.0, received=1.0,
        )  # fmt: skip


def files(folder: Path) -> set[str]:
    """The segments that are there."""
    return {path.name for path in folder.glob("*.journal")}


def same(found: DeviceVectors | None, wanted: DeviceVectors | None) -> bool:
    """Whether both remember the same of every device, to the bit."""
    assert found is not None
    assert wanted is not None
    return found.heard == wanted.heard and all(
        found[device].tobytes() == wanted[device].tobytes() for device in range(M)
    )


def on_disk(folder: Path) -> DeviceVectors | None:
    """What an updater that begins now would remember."""
    chain = segments(folder)
    found = recovered(chain[-1])
    for segment in chain:
        segment.close()
    assert found.progress
    return found.progress.state.memory.devices


async def come(hand: Hand, twin: Twin, *devices: int) -> None:
    """These devices answer, one after the other, in the live run and in its twin."""
    for device in devices:
        [trigger] = await hand.open(device=device)
        values = twin.values()
        upload = await hand.trained(trigger, *values, sends="delta")
        await hand.slip_in(upload)
        twin.take(upload, values)
        await wait_until(lambda: so_far(hand, twin))


async def so_far(hand: Hand, twin: Twin) -> bool:
    head = await hand.ledger.head()
    at = (twin.version, len(twin.progress.held))
    return head is not None and (head.version, head.buffered) == at


async def as_the_twin(hand: Hand, twin: Twin) -> None:
    """Every version that was told is the twin's."""
    told = {version.version: version.digest for version in await hand.published()}
    assert told == {version: twin.digests[version] for version in told}
    assert max(told) == twin.version


async def handed_out(hand: Hand, device: int) -> Floats | None:
    """What Redis has of a device."""
    vector = vector_of(np.zeros(hand.layout.parameters, np.float32))
    there = await blobs.recall(hand.client, hand.keys.device(device), vector)
    return vector.floats if there else None


async def handed_out_as(hand: Hand, vectors: DeviceVectors | None) -> bool:
    """Whether Redis has of every device what the vectors say, and of no other."""
    assert vectors is not None
    for device in range(M):
        found = await handed_out(hand, device)
        if device not in vectors.heard:
            assert found is None
        elif found is None or found.tobytes() != vectors[device].tobytes():
            return False
    return True


@pytest.fixture
def twin(hand: Hand, rule: Strategy) -> Twin:
    """The run's twin."""
    hand.layout = layout_for(rule)
    return Twin(rule, hand.layout)


# a live run


@BOTH
async def test_updater_killed_between_checkpoints_gives_the_same_bits(
    make: Any, hand: Hand, folder: Path, rule: Strategy, twin: Twin
) -> None:
    few = {"segment_versions": 2}
    async with running(make(rule, **few), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2, 3, 0, 1, 0)  # the last one is buffered
    assert same(on_disk(folder), twin.vectors)
    async with running(make(rule, **few), context()):
        await come(hand, twin, 3, 2)
    async with running(make(rule, **few), context()):
        await come(hand, twin, 0, 2, 1, 0, 1)
    await as_the_twin(hand, twin)
    assert same(on_disk(folder), twin.vectors)
    chain = segments(folder)
    assert all(segment.head.needs == (VECTORS,) for segment in chain[1:])
    assert any(segment.standing.elsewhere for segment in chain)
    for before, segment in pairwise(chain):  # of each what changed, and no more
        written = [record.message for record in before.records(segment.follows)]
        assert {*segment.standing.here} == {
            message.upload.device for message in written if isinstance(message, Taken)
        }
    with Replayer(folder) as replayer:
        made = {m.version: m.model.digest() for m in replayer if m.identical}
    assert made == {n: digest for n, digest in twin.digests.items() if n}


@BOTH
async def test_vectors_of_silent_devices_outlive_deleted_segments(
    make: Any, hand: Hand, folder: Path, rule: Strategy, twin: Twin
) -> None:
    few = {"segment_versions": 1, "keep_segments": 2}
    async with running(make(rule, **few), context()):
        await hand.join()
        await come(hand, twin, 7, 8, *[0, 1] * 8)
        await wait_until(lambda: len(files(folder)) == 2)
    assert files(folder).isdisjoint({FIRST, SECOND})
    assert same(on_disk(folder), twin.vectors)
    async with running(make(rule, **few), context()):
        await come(hand, twin, 7, 8)  # at last: their vectors matter now
    await as_the_twin(hand, twin)


async def test_number_of_devices_cannot_change_on_restart(make: Any, hand: Hand) -> None:
    async with running(make(AFA_CS), context()):
        await hand.join()
    fewer = AFA_CS.model_copy(update={"devices": 4})
    await fails(make(fewer), ConfigError, r"strategy\.devices: run .* with 10, not 4")


# handed out


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_is_in_redis_before_its_task_ends(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    commit = Script("commit")._sha.encode()
    async with Proxy(redis) as proxy, running(make(rule, redis=proxy.settings), context()):
        await hand.join()
        await come(hand, twin, 3)
        assert await handed_out_as(hand, twin.vectors)
        proxy.refuse = lambda data: commit in data
        [trigger] = await hand.open(device=4)
        values = twin.values()
        upload = await hand.trained(trigger, *values, sends="delta")
        await hand.slip_in(upload)
        twin.take(upload, values)
        await wait_until(lambda: handed_out_as(hand, twin.vectors))
        assert trigger.task in {task.task for task in (await hand.ledger.look()).open}
        proxy.refuse = None
        await hand.reaches(1)


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_controls_are_restored_after_a_restart_and_an_emptied_redis(
    make: Any, hand: Hand, client: Client, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule, lease_s=0.4), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2)
        await client.call("FLUSHALL")
        await hand.reaches(1)  # whoever sees the version finds the controls
        assert await handed_out_as(hand, twin.vectors)
    await client.call("HSET", hand.keys.device(1), "0", bytes(16))  # half-written when it died
    await client.call("DEL", hand.keys.device(2))
    async with running(make(rule, lease_s=0.4), context()):
        await wait_until(lambda: whole(hand))
        assert await handed_out_as(hand, twin.vectors)
        await hand.join()
        await come(hand, twin, 1)
        assert await handed_out_as(hand, twin.vectors)
    assert (await hand.published())[-1].digest == twin.digests[2]


async def whole(hand: Hand) -> bool:
    try:
        return await handed_out(hand, 1) is not None and await handed_out(hand, 2) is not None
    except BlobDamaged:
        return False


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_of_a_buffered_update_is_restored_with_it(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path, rule: Strategy, twin: Twin
) -> None:
    async with Proxy(redis) as proxy:
        async with running(make(rule, redis=proxy.settings), context()):
            await hand.join()
            proxy.refuse = lambda data: hand.keys.device(5).encode() in data
            [trigger] = await hand.open(device=5)
            values = twin.values()
            upload = await hand.trained(trigger, *values, sends="delta")
            await hand.slip_in(upload)
            twin.take(upload, values)
            await wait_until(lambda: len(records(folder)) == 1)
        assert await handed_out(hand, 5) is None
        assert not await held(hand, 1)  # journalled, and Redis knows nothing of it
    async with running(make(rule), context()):
        await wait_until(lambda: held(hand, 1))
        assert await handed_out_as(hand, twin.vectors)
        await wait_until(hand.queue_is_empty)
        await come(hand, twin, 5)
        assert await handed_out_as(hand, twin.vectors)
    await as_the_twin(hand, twin)
    assert len(records(folder)) == 2


@pytest.mark.parametrize("rule", [SCAFFOLD.model_copy(update={"max_staleness": 0})])
async def test_refused_update_hands_out_nothing(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    hand_out = Script("hand_out")._sha.encode()
    handed_out = 0

    def counted(data: bytes) -> bool:
        nonlocal handed_out
        handed_out += hand_out in data
        return False

    async with Proxy(redis) as proxy, running(make(rule, redis=proxy.settings), context()):
        proxy.refuse = counted
        await hand.join()
        await come(hand, twin, 3, 4)
        before = handed_out
        assert before >= 2
        [trigger] = await hand.open(device=3)
        base = (await hand.published())[0]
        await hand.slip_in(
            await hand.trained(trigger, *twin.values(), sends="delta", tau=0, base=base.digest)
        )
        await wait_until(lambda: reasons(hand, "refused", {"too stale": 1}))
        assert handed_out == before
        assert await handed_out_as(hand, twin.vectors)


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_trainers_ignore_a_fenced_updaters_vectors(
    make: Any, hand: Hand, redis: RedisSettings, rule: Strategy, twin: Twin
) -> None:
    """It sleeps past its lease between its record and its commit; what it had sent comes late."""
    hand_out = Script("hand_out")._sha.encode()
    late: list[bytes] = []

    def asleep(data: bytes) -> bool:
        if hand_out in data:
            late.append(data)
            proxy.reading.clear()
        return hand_out in data

    async with Proxy(redis) as proxy:
        sleeper = make(rule, name="sleeper", redis=proxy.settings, lease_s=0.4)
        async with running(sleeper, context(), may_fail=True) as work:
            await hand.join()
            await come(hand, twin, 3)
            proxy.refuse = asleep
            [trigger] = await hand.open(device=3)
            values = twin.values()
            upload = await hand.trained(trigger, *values, sends="delta")
            await hand.slip_in(upload)
            twin.take(upload, values)
            await wait_until(lambda: late)
            async with running(make(rule, name="successor"), context()):
                await wait_until(lambda: so_far(hand, twin))
                await come(hand, twin, 3)
                await arrives(hand, late[0])
                assert await handed_out_as(hand, twin.vectors)
                proxy.refuse = None
                proxy.reading.set()
                await wait_until(work.done, what="it ends")
                error = work.exception()
                assert isinstance(error, BaseExceptionGroup)
                assert error.split(Fenced)[1] is None
                assert await handed_out_as(hand, twin.vectors)
                assert await hand.client.call("PTTL", hand.keys.device(3)) == -1
    await as_the_twin(hand, twin)


async def arrives(hand: Hand, data: bytes) -> None:
    """What was under way when its sender's connection was cut; Redis says that it is fenced."""
    host, _, port = hand.client.address.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        async with asyncio.timeout(60):
            while b"fenced" not in await reader.readline():
                assert not reader.at_eof()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("rule", [SCAFFOLD])
@pytest.mark.parametrize("lost", ["its end", "all of it"])
async def test_adopting_redis_model_adopts_its_controls(
    lost: str, make: Any, hand: Hand, folder: Path, tmp_path: Path, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await come(hand, twin, 0, 1)
        shutil.copytree(folder, tmp_path / "copy")
        await come(hand, twin, 1, 2)
    shutil.rmtree(folder)
    if lost == "its end":
        shutil.move(tmp_path / "copy", folder)
    async with running(make(rule, adopt=True), context()):
        await wait_until(lambda: adopted(folder))
        assert await handed_out_as(hand, twin.vectors)
        await come(hand, twin, 0, 2)
    assert same(on_disk(folder), twin.vectors)
    assert (await hand.published())[-1].digest == twin.digests[3]


@pytest.mark.parametrize("rule", [SCAFFOLD])
async def test_control_is_the_mean_again_after_an_abandoned_batch(
    make: Any, hand: Hand, folder: Path, rule: Strategy, twin: Twin
) -> None:
    async with running(make(rule), context()):
        await hand.join()
        await come(hand, twin, 0, 1, 2)  # the last one is buffered
    shutil.rmtree(folder)
    async with running(make(rule, adopt=True), context()):
        await wait_until(lambda: adopted(folder))
    async with running(make(rule), context()):  # which has it from the segment's beginning
        for device in (3, 0):
            [trigger] = await hand.open(device=device)
            await hand.slip_in(await hand.trained(trigger, *twin.values(), sends="delta"))
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    vectors = on_disk(folder)
    assert vectors is not None
    assert vectors.heard == {0, 1, 2, 3}
    c = (await hand.model((await hand.published())[-1])).controls
    mean = np.mean([vectors[device] for device in range(M)], axis=0)
    assert c.tolist() == pytest.approx(mean.tolist(), abs=1e-6)
    with Replayer(folder) as replayer:  # from the adopted version on
        assert [m.version for m in replayer if m.identical] == [2]


def adopted(folder: Path) -> bool:
    chain = segments(folder)
    return bool(chain) and chain[-1].standing.why == "adopted"


# the journal, without any service


class Kept:
    """A recorder under an updater's part that is played by hand, beside its twin."""

    def __init__(self, folder: Path, rule: Strategy, **settings: Any) -> None:
        self.layout = layout_for(rule)
        self.twin = Twin(rule, self.layout)
        self._rule = rule
        self.recorder = Recorder(JournalSettings(dir=str(folder), sync="never", **settings))

    async def segment(self) -> str:
        """The next segment begins where this one ends: why an old one stays."""
        mine, twin, before = self.recorder.head, self.twin, self.recorder.ending
        if mine is None:
            await self.recorder.claim(1)
        head = SegmentHead(
            epoch=1, number=mine.number + 1 if mine else 0,
            predecessor=before.path.name if before else None, cut=before.at if before else None,
            follows=before.chain.hex() if before else None,
            lineage="line", run="demo", task="digits", devices=M,
            versions=100, seed=0, created=1.0, strategy=self._rule.model_dump(mode="json"),
            layout=self.layout.encode(), release="tests", time=1.0,
        )  # fmt: skip
        standing, models = standing_of(
            twin.progress, "continued" if mine else "begun",
            digest=twin.digests[twin.version], time=1.0,
        )  # fmt: skip
        return await self.recorder.begin(head, standing, *models, vectors=twin.vectors)

    async def comes(self, device: int) -> None:
        """An update of the device arrives."""
        values = self.twin.values()
        model = model_of(self.layout, *values)
        upload = Upload(
            task=f"task-{self.twin.taken}", attempt="a", device=device, trainer="t",
            tau=self.twin.version, base="base", layout=self.layout.signature,
            digest=model.digest(), size=self.layout.nbytes, samples=10, steps=5, lr=0.1,
            sends="delta",
        )  # fmt: skip
        await self.recorder.append([(self.twin.take(upload, values), [model])])


@BOTH
@pytest.mark.parametrize("keep", [1, 2, 4])
async def test_retained_segments_can_be_rebuilt_and_replayed(
    keep: int, folder: Path, rule: Strategy
) -> None:
    """At every moment, whoever was silent, and from every version that is said to be there."""
    kept = Kept(folder, rule, keep_segments=keep)
    rng = np.random.default_rng(keep)
    most = 0
    for round_ in range(14):
        await kept.segment()
        # Some come often, some were heard once and never again, one comes back after long.
        for device in (
            round_ % M if round_ < 6 else 0,
            9 if round_ == 11 else int(rng.integers(3)),
        ):
            await kept.comes(device)
        assert len(files(folder)) == min(keep, round_ + 1)
        assert same(on_disk(folder), kept.twin.vectors)
        with Replayer(folder) as replayer:
            most = max(most, replayer.newest - replayer.oldest)
            made = {m.version: m.model.digest() for m in replayer if m.identical}
            wanted = range(replayer.oldest + 1, kept.twin.version + 1)
        assert made == {version: kept.twin.digests[version] for version in wanted}
    assert most == keep  # and it is not the newest alone
    await kept.recorder.close()


async def test_vector_stored_again_serves_earlier_segments(
    folder: Path,
) -> None:
    kept = Kept(folder, AFA_CS, keep_segments=3)
    await kept.segment()
    await kept.comes(9)  # never again
    await kept.comes(0)
    for _ in range(3):
        await kept.segment()
        await kept.comes(0)
        await kept.comes(1)
    await kept.segment()  # the second segment goes, in which device 9's was
    await kept.recorder.close()
    chain = segments(folder)
    assert [segment.standing.version for segment in chain] == [2, 3, 4]
    oldest, middle, newest = chain
    assert [9 in segment.standing.again for segment in chain] == [False, False, True]
    assert dict(oldest.standing.elsewhere)[9] == SECOND
    assert dict(middle.standing.elsewhere)[9] == SECOND
    assert oldest.elsewhere[9] == middle.elsewhere[9] == newest.path.name
    assert not (folder / SECOND).exists()


async def test_running_updater_compensates_for_a_deleted_segment(
    folder: Path,
) -> None:
    kept = Kept(folder, SCAFFOLD)
    for devices in ((7, 8), (0, 1), (0, 1)):
        await kept.segment()
        for device in devices:
            await kept.comes(device)
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()  # which held 7 and 8
    await kept.segment()
    await kept.recorder.close()
    assert same(on_disk(folder), kept.twin.vectors)
    with Replayer(folder) as replayer:  # and they are found for the one before it too
        assert [m.version for m in replayer if m.identical] == [3]
        assert replayer.oldest == 2


async def test_fenced_updater_neither_starts_nor_deletes_segments(folder: Path) -> None:
    """The successor's segments may need the vectors in those before them."""
    kept = Kept(folder, SCAFFOLD, keep_segments=1)
    await kept.segment()
    await kept.comes(7)
    (folder / "00000002-000000.journal").touch()
    before = files(folder)
    with pytest.raises(Fenced, match="another updater has taken over"):
        await kept.segment()
    assert files(folder) == before
    await kept.recorder.close()


async def test_undeletable_segment_is_kept_until_the_next_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each restart would write a checkpoint more, and end by the same segment."""
    kept = Kept(folder, SCAFFOLD, keep_segments=1)
    await kept.segment()
    await kept.comes(7)

    real = Path.unlink

    def refused(path: Path, *, missing_ok: bool = False) -> None:
        if path.name == FIRST:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        left = await kept.segment()
    assert left == f"{folder / FIRST}: cannot be deleted: Operation not permitted"
    assert sorted(files(folder)) == [FIRST, SECOND]
    await kept.comes(8)
    assert await kept.segment() == ""
    await kept.recorder.close()
    assert len(files(folder)) == 1
    assert same(on_disk(folder), kept.twin.vectors)


def two(folder: Path, rule: Strategy, **options: Any) -> Scribe:
    """Three segments; the third has devices 4 and 5, and device 0 to 3 are in the second."""
    scribe = Scribe(folder, rule, layout=layout_for(rule, options.pop("layout", None)), **options)
    for devices in (range(4), (4, 5), (0, 4, 1)):
        for device in devices:
            scribe.update(device, sends="delta")
        if devices != (0, 4, 1):
            scribe.segment()
    scribe.close()
    return scribe


@BOTH
def test_missing_segment_is_named_with_its_dependant(folder: Path, rule: Strategy) -> None:
    two(folder, rule)
    (folder / FIRST).unlink()  # nobody needs it: it began with nothing
    (folder / SECOND).unlink()
    [newest] = segments(folder)
    with pytest.raises(JournalError) as raised:
        recovered(newest)
    assert str(raised.value) == (
        f"{folder / SECOND}: is missing, but {newest.path.name} needs it for the vectors of 4 "
        "devices, such as device 0: restore it"
    )


@BOTH
def test_damaged_vector_is_located(folder: Path, rule: Strategy) -> None:
    two(folder, rule)
    with Segment(folder / SECOND) as segment:
        found = {message.device: record for record, message in segment.vectors()}
    assert [*found] == [0, 1, 2, 3]
    data = bytearray((folder / SECOND).read_bytes())
    data[found[2].payload + 5] ^= 1
    (folder / SECOND).write_bytes(data)
    for name in (SECOND, "00000001-000002.journal"):  # its own, and one that refers to it
        with (
            Segment(folder / name) as segment,
            pytest.raises(
                JournalDamaged, match="the device's vector does not match its digest"
            ) as raised,
        ):
            recovered(segment)
        assert found[2].place.where in str(raised.value)
    data[found[2].place.offset + 40] ^= 1  # and now what is said of it
    (folder / SECOND).write_bytes(data)
    with pytest.raises(JournalDamaged, match="is not a device's vector") as raised:
        Segment(folder / SECOND)
    assert found[2].place.where in str(raised.value)


def test_misplaced_vector_is_an_error(folder: Path) -> None:
    scribe = two(folder, AFA_CS)
    with Segment(folder / "00000001-000002.journal") as segment:
        segment.elsewhere[9] = SECOND
        with pytest.raises(JournalDamaged, match=f"{SECOND}: has no vector of device 9"):
            recovered(segment)
    assert scribe.stored[0] == SECOND


@pytest.mark.parametrize("floats", [1024, 1000, 2048])
@pytest.mark.parametrize("in_memory", [0, 1 << 30])
def test_page_aligned_vectors_are_written_unchanged(
    in_memory: int, floats: int, folder: Path
) -> None:
    """A row of a large array is no block of pages of its own, wherever it lies."""
    layout = layout_of(floats)
    vectors = DeviceVectors(M, floats, in_memory=in_memory)
    rng = np.random.default_rng(0)
    for device in range(M):
        vectors.write(device)[:] = rng.standard_normal(floats)
    scribe = Scribe(folder, AFA_CS, layout=layout)
    scribe.close()
    model = model_of(layout)
    progress = Progress(State(3, model, Memory(model_of(layout), devices=vectors)))
    standing, models = standing_of(progress, "continued", digest=model.digest(), time=1.0)
    standing = standing.model_copy(update={"here": tuple(range(M))})
    assert isinstance(standing, Standing)
    head = scribe.head.model_copy(update={"number": 1, "needs": (VECTORS,)})
    writer = Writer(folder, head, standing, *models, vectors=vectors)
    writer.close()
    with Segment(writer.path) as segment:
        assert segment.beginning.at == segment.size
        found = recovered(segment).progress
    assert found
    assert same(found.state.memory.devices, vectors)


def test_release_without_vectors_refuses_the_journal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(folder, AFA_CS)
    monkeypatch.setattr("fedstream.journal.segment.KNOWN", set())
    with pytest.raises(JournalError, match=r"needs 'device vectors', .* read it with a newer one"):
        segments(folder)


# replay


@BOTH
def test_replay_from_the_middle_is_identical(folder: Path, rule: Strategy) -> None:
    scribe = two(folder, rule)
    for begin in range(scribe.version + 1):
        with Replayer(folder, from_version=begin) as replayer:
            made = {m.version: m.model.digest() for m in replayer if m.identical}
        assert made == {n: scribe.digests[n] for n in range(begin + 1, scribe.version + 1)}


@BOTH
@pytest.mark.parametrize("begin", [0, 1, 2, 3])
def test_other_rule_does_not_affect_the_recorded_one(
    begin: int, folder: Path, rule: Strategy
) -> None:
    """They share no vector: what one remembers of a device, the other does not."""
    scribe = two(folder, rule)
    before = {path.name: path.read_bytes() for path in folder.glob("*.journal")}
    faster = rule.model_copy(update={"server_lr": 3.0})
    alone: list[list[float]] = []
    for beside in (False, True):
        with Replayer(folder, strategy=faster, from_version=begin, beside=beside) as replayer:
            models = []
            for moment in replayer:
                models.append(moment.model.floats.tolist())
                if moment.original is None:
                    continue
                version = moment.original.state.version
                assert moment.original.state.model.digest() == scribe.digests[version]
        alone = alone or models
        assert models == alone
    without = frozenset({4})
    with Replayer(folder, without=without, from_version=begin, beside=True) as replayer:
        for moment in replayer:
            original = moment.original
            assert original
            assert original.state.memory.devices is not moment.step.after.state.memory.devices
            version = original.state.version
            assert original.state.model.digest() == scribe.digests[version]
    assert {path.name: path.read_bytes() for path in folder.glob("*.journal")} == before


def test_other_rule_does_not_inherit_an_incompatible_sum(folder: Path) -> None:
    """AFA-CS keeps the sum over all devices; FedBuff's begins with zero, from any version."""
    two(folder, AFA_CS)
    buffered = FedBuffSettings(buffer_size=2)
    with Replayer(folder, from_version=2) as replayer:
        updates = [moment.update() for moment in replayer]
        x = next(iter(Replayer(folder, from_version=2))).model
        before = {m.version: m.model.floats.copy() for m in Replayer(folder, until=2)}[2]
    assert x is not None
    with Replayer(folder, strategy=buffered, from_version=2) as replayer:
        found = {m.version: m.model.floats.copy() for m in replayer}
    wanted = before + (updates[0].floats + updates[1].floats) / 2
    assert found[3] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("recorded", "wanted", "said"),
    [
        (FedAsyncSettings(), SCAFFOLD, "scaffold also .* this fedasync run's devices did not"),
        (AFA_CS, SCAFFOLD, "scaffold also .* control variates, which this afa-cs run's"),
        (SCAFFOLD, AFA_CS, "this scaffold run's devices .* which afa-cs does not keep: change"),
    ],
)
def test_incompatible_rule_is_a_one_line_error(
    recorded: Strategy, wanted: Strategy, said: str, folder: Path
) -> None:
    scribe = Scribe(folder, recorded, layout=layout_for(recorded))
    scribe.update()
    scribe.close()
    with (
        pytest.raises(NotRecorded, match=said) as raised,
        Replayer(folder, strategy=wanted) as replayer,
    ):
        list(replayer)
    assert "\n" not in str(raised.value)


def test_other_rule_drops_updates_a_live_updater_would_refuse(folder: Path) -> None:
    scribe = Scribe(folder, FedBuffSettings(buffer_size=1))
    scribe.update(7)
    scribe.update(1, steps=0)
    scribe.update(2)
    scribe.close()
    for rule, used in (
        (AfaCdSettings(buffer_size=1), [7, 2]),  # it divides by the steps
        (AfaCsSettings(buffer_size=1, devices=5), [2]),  # it has no place for device 7
    ):
        with Replayer(folder, strategy=rule) as replayer:
            steps = [moment.step for moment in replayer]
        assert [one.device for step in steps for one in step.made or ()] == used


def test_servers_control_is_always_the_mean_of_the_devices(folder: Path) -> None:
    scribe = Scribe(folder, SCAFFOLD, layout=layout_for(SCAFFOLD))
    rng = np.random.default_rng(1)
    for n in range(40):
        scribe.update(int(rng.integers(M)), late=n % 3, sends="delta")
        if n % 9 == 8:
            scribe.segment()
    scribe.close()
    scribe_began = model_of(layout_for(SCAFFOLD))
    with Segment(folder / FIRST) as segment:
        segment.load(segment.standing_record, scribe_began)
    compared = 0
    with Replayer(folder) as replayer:
        for moment in replayer:
            vectors = moment.step.after.state.memory.devices
            if moment.step.made is None or vectors is None:
                continue
            mean = np.mean([vectors[device] for device in range(M)], axis=0)
            c = moment.model.controls - scribe_began.controls  # a scribe draws version 0
            assert c == pytest.approx(mean, abs=1e-5)
            compared += 1
    assert compared == 20


# the commands


Journal = Callable[..., tuple[int, str, str]]


@BOTH
def test_journal_commands_read_vectors(journal: Journal, rule: Strategy, folder: Path) -> None:
    scribe = two(folder, rule)
    for command in ("verify", "show", "stats"):
        code, out, error = journal(command, folder)
        assert (code, error) == (0, ""), (command, error)
        assert out
    code, out, _ = journal("diff", folder, folder)
    assert code == 0
    assert f"identical, versions 0 to {scribe.version}" in out


@BOTH
def test_export_contains_only_the_modules_tensors(
    journal: Journal, tmp_path: Path, rule: Strategy, folder: Path
) -> None:
    digits = initial(load_task("digits", TaskSettings()), 0).layout
    scribe = two(folder, rule, layout=digits)
    assert journal("export", folder, "--out", tmp_path / "x.safetensors")[0] == 0
    with safe_open(str(tmp_path / "x.safetensors"), framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {*tensors} == {tensor.name for tensor in digits.tensors}
    model = scribe.progress.state.model
    assert np.concatenate([tensors[t.name].ravel() for t in digits.tensors]).tobytes() == (
        model.parameters.tobytes()
    )


@BOTH
def test_verify_finds_a_damaged_vector_and_continues(
    journal: Journal, folder: Path, rule: Strategy
) -> None:
    two(folder, rule)
    newest = folder / "00000001-000002.journal"
    with Segment(newest) as segment:
        record, message = next(segment.vectors())
    data = bytearray(newest.read_bytes())
    data[record.payload] ^= 1
    newest.write_bytes(data)
    code, out, error = journal("verify", folder)
    assert code == 1
    assert message.device == 4
    assert "the device's vector does not match its digest" in " ".join((out + error).split())
