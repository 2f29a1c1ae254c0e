"""Devices' vectors in the journal, without any service."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.core.errors import Fenced
from fedstream.journal import (
    VECTORS,
    JournalDamaged,
    JournalError,
    JournalSettings,
    Segment,
    Standing,
    Writer,
    segments,
)
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import recovered, standing_of
from fedstream.journal.recorder import Recorder
from fedstream.journal.replay import Replayer
from fedstream.strategies import DeviceVectors, Memory, State, Strategy
from tests.journals import Scribe
from tests.support import layout_of, model_of
from tests.updater.states import head_of, upload_of
from tests.updater.vectors.twin import (
    AFA_CS,
    EACH,
    FIRST,
    SCAFFOLD,
    SECOND,
    M,
    Twin,
    files,
    layout_for,
    on_disk,
    same,
    two,
)


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
        head = head_of(
            self.layout,
            self._rule,
            devices=M,
            number=mine.number + 1 if mine else 0,
            predecessor=before.path.name if before else None,
            cut=before.at if before else None,
            follows=before.chain.hex() if before else None,
        )
        standing, models = standing_of(
            twin.progress,
            "continued" if mine else "begun",
            digest=twin.digests[twin.version],
            time=1.0,
        )
        return await self.recorder.begin(head, standing, *models, vectors=twin.vectors)

    async def comes(self, device: int) -> None:
        """An update of the device arrives."""
        values = self.twin.values()
        model = model_of(self.layout, *values)
        upload = upload_of(
            f"task-{self.twin.taken}",
            device=device,
            tau=self.twin.version,
            layout=self.layout.signature,
            digest=model.digest(),
            size=self.layout.nbytes,
            sends="delta",
        )
        await self.recorder.append([(self.twin.take(upload, values), [model])])


@EACH
@pytest.mark.parametrize("keep", [1, 3])
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


async def test_vector_stored_again_serves_earlier_segments(folder: Path) -> None:
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


async def test_running_updater_compensates_for_a_deleted_segment(folder: Path) -> None:
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


async def test_integers_of_devices_are_in_every_standing(folder: Path) -> None:
    """Also those that a copy of the vectors has changed, as another rule's on the same journal."""
    kept = Kept(folder, AFA_CS, keep_segments=1)
    await kept.segment()
    await kept.comes(7)
    for number in range(3):
        assert kept.twin.vectors
        kept.twin.vectors.numbers[3 - number] = 5 + number
        kept.twin.vectors.copy().numbers[number] = 9
        await kept.segment()
        assert same(on_disk(folder), kept.twin.vectors)
    found = on_disk(folder)
    assert found
    assert [*found.numbers.items()] == [(3, 5), (2, 6), (1, 7)]
    await kept.recorder.close()


async def test_integer_of_an_unknown_device_is_located(folder: Path) -> None:
    kept = Kept(folder, AFA_CS)
    await kept.segment()
    await kept.comes(0)
    assert kept.twin.vectors
    kept.twin.vectors.numbers[M] = 1
    await kept.segment()
    await kept.recorder.close()
    with pytest.raises(JournalDamaged, match=f"has an integer of vector {M}, but the"):
        on_disk(folder)


@EACH
def test_missing_segment_is_named_with_its_dependant(folder: Path, rule: Strategy) -> None:
    two(folder, rule)
    (folder / FIRST).unlink()  # nobody needs it: it began with nothing
    (folder / SECOND).unlink()
    [newest] = segments(folder)
    with pytest.raises(JournalError) as raised:
        recovered(newest)
    assert str(raised.value) == (
        f"{folder / SECOND}: is missing, but {newest.path.name} needs it for 4 vectors, "
        "such as the vector of device 0: restore it"
    )


@EACH
def test_damaged_vector_is_located(folder: Path, rule: Strategy) -> None:
    two(folder, rule)
    with Segment(folder / SECOND) as segment:
        found = {message.device: record for record, message in segment.vectors()}
    assert [device for device in found if device < M] == [0, 1, 2, 3]
    data = bytearray((folder / SECOND).read_bytes())
    data[found[2].payload + 5] ^= 1
    (folder / SECOND).write_bytes(data)
    for name in (SECOND, "00000001-000002.journal"):  # its own, and one that refers to it
        with (
            Segment(folder / name) as segment,
            pytest.raises(
                JournalDamaged, match="the vector of device 2 does not match its digest"
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
        with pytest.raises(JournalDamaged, match=f"{SECOND}: lacks the vector of device 9"):
            recovered(segment)
    assert scribe.stored[0] == SECOND


@pytest.mark.parametrize("floats", [1024, 1000])
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
