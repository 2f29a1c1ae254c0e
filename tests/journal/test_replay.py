"""Replay: the same bits as were recorded, by any start, and clear errors."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstream.core.layout import PAGE, Layout, Model
from fedstream.journal import (
    Diverged,
    JournalDamaged,
    JournalError,
    NotRecorded,
    Place,
    RoundClosed,
    Segment,
    Taken,
    Tear,
    segments,
)
from fedstream.journal import segment as reading
from fedstream.journal.replay import Replayer
from fedstream.journal.segment import Record
from fedstream.journal.updates import update_of
from fedstream.strategies import (
    AfaCsSettings,
    FedAsyncSettings,
    FedAvgSettings,
    FedBuffSettings,
    Strategy,
)
from tests.journal.replaying import FEDAVG, LARGE, digests, fedasync, fedavg, values
from tests.journals import GOLDEN, LAYOUT, Scribe
from tests.support import layout_of

# as it was


@pytest.mark.parametrize("layout", [LAYOUT, layout_of(5, 2, 3), LARGE])
@pytest.mark.parametrize("run", [fedasync, fedavg])
def test_replay_makes_the_same_versions(
    run: Callable[..., Scribe], folder: Path, layout: Any
) -> None:
    scribe = run(folder, layout=layout)
    scribe.digests.pop(0)
    assert digests(folder) == scribe.digests


def test_every_record_is_a_moment_of_the_replay(folder: Path) -> None:
    scribe = fedavg(folder)
    with Replayer(folder) as replayer:
        moments = list(replayer)
        assert replayer.checkpoints == 1
        assert (replayer.oldest, replayer.newest) == (0, scribe.version)
    assert [type(moment.message) for moment in moments] == [Taken] * 8 + [RoundClosed] * 2 + [Taken]
    assert [moment.version for moment in moments] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [moment.identical for moment in moments] == [
        None,
        None,
        True,
        None,
        None,
        True,
        None,
        None,
        True,
        None,
        None,
    ]
    taken = [moment.message for moment in moments if isinstance(moment.message, Taken)]
    assert [one.outcome for one in taken][6] == "refused"
    assert str(moments[5].place).startswith("00000002-000000.journal at byte ")


@pytest.mark.parametrize("pages", [1, 3])
def test_records_may_span_read_chunks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, pages: int
) -> None:
    """At its end, across it, and longer than the memory that is there for it."""
    monkeypatch.setattr(reading, "_CHUNK", pages * PAGE)
    scribe = Scribe(folder, layout=layout_of(1500))
    for n in range(12):
        scribe.update()
        if n % 3 == 0:
            scribe.refuse(reason=n * PAGE * "so long ")
        if n == 8:
            scribe.segment()
    scribe.close()
    with Replayer(folder) as replayer:
        assert len(list(replayer)) == scribe.records
    scribe.digests.pop(0)
    assert digests(folder) == scribe.digests


def test_replay_can_be_abandoned_and_restarted(folder: Path) -> None:
    fedasync(folder, layout=LARGE)
    with Replayer(folder) as replayer:
        first = next(iter(replayer)).message
        assert next(iter(replayer)).message == first
        assert [thread.name for thread in threading.enumerate()].count("read ahead") == 0


@pytest.mark.parametrize("begin", [0, 3, 4, 7])
def test_replay_starts_and_ends_at_any_version(folder: Path, begin: int) -> None:
    scribe = fedasync(folder)
    for end in range(begin, 10):
        wanted = {n: scribe.digests[n] for n in range(begin + 1, end + 1)}
        assert digests(folder, from_version=begin, until=end) == wanted


def test_replay_starts_at_the_nearest_checkpoint(folder: Path) -> None:
    """What lies before is not even looked at."""
    scribe = fedasync(folder)
    _damage(folder / "00000001-000000.journal", -8)
    assert list(digests(folder, from_version=5)) == [6, 7, 8, 9]
    (folder / "00000001-000000.journal").unlink()  # too old
    assert list(digests(folder)) == [5, 6, 7, 8, 9]
    with pytest.raises(JournalError, match="version 3 is no longer kept; the oldest is 4"):
        Replayer(folder, from_version=3)
    assert scribe.version == 9


def test_fenced_writers_records_are_ignored(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.update()
    scribe.segment(epoch=2)
    late = folder / "00000001-000000.journal"
    scribe.update()
    scribe.close()
    with late.open("ab") as file:
        file.write(b"what a writer that lost its lease goes on to write")
    scribe.digests.pop(0)
    assert digests(folder) == scribe.digests


def test_adopted_model_starts_a_new_lineage(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.update()
    scribe.adopt()
    scribe.update()
    scribe.close()
    with Replayer(folder) as replayer:
        assert [moment.version for moment in replayer] == [1, 5]
        assert (replayer.adopted, replayer.checkpoints) == ([4], 0)
    [_, other] = values(folder, strategy=FedAsyncSettings(alpha=1.0))
    assert other != scribe.progress.state.model.floats.tolist()


# what is wrong is said


def _damage(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("layout", [LAYOUT, LARGE])
@pytest.mark.parametrize("left", [1, PAGE, PAGE + 3, -5])
def test_torn_tail_ends_the_replay(folder: Path, layout: Any, left: int) -> None:
    scribe = Scribe(folder, layout=layout)
    scribe.update()
    begin = scribe.writer.size
    scribe.update()
    path, end = scribe.writer.path, scribe.writer.size
    scribe.close()
    os.truncate(path, begin + left if left > 0 else end + left)
    with Replayer(folder) as replayer:
        assert [moment.version for moment in replayer] == [1]
        assert replayer.torn == Tear(Place(path, begin))


@pytest.mark.parametrize("layout", [LAYOUT, LARGE])
def test_disk_error_names_the_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    scribe = Scribe(folder, layout=layout)
    for _ in range(3):
        scribe.update()
    path, bad = scribe.writer.path, scribe.writer.size
    scribe.update()
    scribe.close()
    read = os.preadv

    def failing(file: int, into: Any, at: int) -> int:
        if at + len(into[0]) > bad:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, into, at)

    monkeypatch.setattr(reading, "_CHUNK", PAGE)
    monkeypatch.setattr(os, "preadv", failing)
    with Replayer(folder) as replayer:
        replay = iter(replayer)
        assert [next(replay).version for _ in range(3)] == [1, 2, 3]
        said = f"^{path} at byte {bad}: cannot be read: Input/output error$"
        with pytest.raises(JournalError, match=said):
            next(replay)


def test_update_of_the_wrong_size_is_damage(folder: Path) -> None:
    scribe = Scribe(folder)
    record = scribe.update()
    path, at = scribe.writer.path, scribe.writer.size
    larger = Model(layout_of(5))
    larger.floats[:] = 0.0
    upload = record.upload.model_copy(update={"digest": larger.digest()})
    scribe.writer.append(record.model_copy(update={"upload": upload}), larger)
    scribe.close()
    said = f"^{path} at byte {at}: a payload of {larger.layout.nbytes} bytes, which does not"
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match=said):
        list(replayer)


def test_altered_update_shows_in_no_version(folder: Path) -> None:
    """With so little weight, the bit is lost in rounding."""
    with_third_update_altered(folder, LAYOUT)
    with Replayer(folder, check_updates=False) as replayer:
        assert [moment.identical for moment in replayer] == [True] * 4


def with_third_update_altered(folder: Path, layout: Layout) -> tuple[Path, Record]:
    """Record four updates and flip a bit of the third; returns the file and the record."""
    scribe = Scribe(folder, FedAsyncSettings(alpha=1e-5), layout=layout)
    for _ in range(4):
        scribe.update()
    scribe.close()
    with Segment(scribe.writer.path) as segment:
        third = list(segment.records())[2]
    _damage(scribe.writer.path, third.payload)
    return scribe.writer.path, third


@pytest.mark.parametrize("layout", [LAYOUT, LARGE])
@pytest.mark.parametrize("options", [{}, {"strategy": FedAsyncSettings(alpha=0.3)}])
def test_altered_update_is_found_at_its_version(folder: Path, layout: Any, options: Any) -> None:
    path, third = with_third_update_altered(folder, layout)
    with Replayer(folder, **options) as replayer:
        replay = iter(replayer)
        assert [next(replay).message.version, next(replay).message.version] == [1, 2]
        at = f"{path} at byte {third.place.offset}"
        said = rf"{at}: the update does not match its digest \(device 2, version 3\)"
        with pytest.raises(JournalDamaged, match=said):
            next(replay)
        with pytest.raises(JournalDamaged, match=said):
            replayed_update(folder, 3)


def replayed_update(folder: Path, version: int) -> Model:
    """The update of a version, read by itself."""
    [segment] = segments(folder)
    with segment:
        [record] = [one for one in segment.records() if one.entry.version == version]
        return update_of(segment, record, Model(segment.layout))


@pytest.mark.parametrize(
    ("strategy", "part", "said"),
    [
        (FedAsyncSettings(), 0, "the checkpoint's model"),
        (FedBuffSettings(buffer_size=3), 1, "the checkpoint's memory"),
        (AfaCsSettings(devices=10), 2, "a vector"),
    ],
)
def test_altered_checkpoint_of_a_later_segment_is_found(
    folder: Path, strategy: Strategy, part: int, said: str
) -> None:
    """A replay goes on without it; a recovery would not."""
    scribe = Scribe(folder, strategy)
    scribe.update(1)
    scribe.segment()
    scribe.update(2)
    scribe.close()
    path = scribe.writer.path
    with Segment(path) as segment:
        standing = segment.standing_record
        places = [standing.payload, standing.payload + segment.layout.nbytes]
        places += [record.payload for record, _ in segment.vectors()]
    _damage(path, places[part])
    said = f"{said} does not match its digest"
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match=said):
        list(replayer)


def test_a_damaged_record_is_named(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.update()
    path, at = scribe.writer.path, scribe.writer.size
    scribe.update()
    scribe.writer.sync()
    scribe.update()
    scribe.close()
    _damage(path, at + 60)
    said = f"damaged record: {path} at byte {at}"
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match=said):
        list(replayer)
    with Replayer(folder, until=1) as replayer:
        assert len(list(replayer)) == 1


def test_segment_that_starts_with_another_model_is_found(folder: Path) -> None:
    scribe = Scribe(folder)
    scribe.update()
    scribe.digests[1] = "0" * 64
    scribe.segment()
    scribe.close()
    with pytest.raises(Diverged, match="the checkpoint's model does not match its digest"):
        digests(folder, from_version=1, until=1)
    with pytest.raises(Diverged, match="the segment begins with version 1"):
        digests(folder)


def test_journal_without_weights_cannot_be_replayed(folder: Path) -> None:
    scribe = Scribe(folder, weights=False)
    scribe.update()
    scribe.close()
    where = f"{scribe.writer.path} at byte"
    with pytest.raises(NotRecorded, match=rf"^{where} \d+: an update was recorded without its"):
        digests(folder)


def test_records_without_bytes_say_why(folder: Path) -> None:
    scribe = Scribe(folder, FEDAVG)
    scribe.update()
    scribe.weights = False
    scribe.refuse()
    scribe.close_round()
    scribe.close()
    said = []
    with Replayer(folder) as replayer:
        for moment in replayer:
            try:
                moment.update()
            except NotRecorded as error:
                said.append(str(error).partition(": ")[2])
    assert said == ["a refused update's bytes are not kept", "is the end of a round, not an update"]


def test_differing_outcome_is_described(folder: Path) -> None:
    scribe = Scribe(folder, FedAsyncSettings(alpha=0.3))
    scribe.strategy = FedAsyncSettings(alpha=0.2)  # not what the segment's head says
    scribe.update()
    scribe.close()
    said = rf"^{scribe.writer.path} at byte \d+: version 1 is not reproduced: weight 0.3, "
    with pytest.raises(Diverged, match=said + r"the journal says weight 0\.2"):
        digests(folder)


def test_version_whose_model_differs_is_not_reproduced(folder: Path) -> None:
    """Outcome, version and weight agree: only the digest tells."""
    scribe = Scribe(folder, FedBuffSettings(buffer_size=1))
    scribe.strategy = FedBuffSettings(buffer_size=1, server_lr=0.5)
    scribe.update()
    scribe.close()
    said = r"version 1 is not reproduced: digest [\w:]+, the journal says [\w:]+$"
    with pytest.raises(Diverged, match=said):
        digests(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"until": 12}, "version 12 does not exist yet; the newest is 9"),
        ({"from_version": 10}, "version 10 does not exist yet; the newest is 9"),
        ({"from_version": 5, "until": 3}, "version 3 is before the first version, 5"),
        ({"without": frozenset({77})}, "device 77 never took part"),
    ],
)
def test_missing_versions_and_devices_are_named(folder: Path, options: Any, said: str) -> None:
    fedasync(folder)
    with pytest.raises(JournalError, match=said):
        Replayer(folder, **options)


def test_replay_writes_nothing(folder: Path) -> None:
    fedasync(folder)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    digests(folder)
    digests(folder, strategy=FEDAVG, beside=True)
    assert before == {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()
    }


# any journal


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 9), st.integers(0, 3)),
        st.just(("refuse",)),
        st.just(("close_round",)),
        st.just(("segment",)),
        st.just(("take_over",)),
    ),
    max_size=30,
)
RULES = st.sampled_from(
    [
        FedAsyncSettings(),
        FedAsyncSettings(max_staleness=1, alpha=1.0),
        FEDAVG,
        FedAvgSettings(clients_per_round=1),
    ]
)


@given(steps=STEPS, rule=RULES)
@settings(max_examples=60)
def test_any_sequence_of_records_replays_to_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any], rule: Any
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    scribe = Scribe(folder, rule)
    for what, *about in steps:
        match what:
            case "update":
                scribe.update(about[0], late=about[1])
            case "refuse":
                scribe.refuse()
            case "close_round":
                scribe.close_round()
            case "segment":
                scribe.segment()
            case "take_over":
                scribe.segment(epoch=scribe.head.epoch + 3)
    scribe.close()
    scribe.digests.pop(0)
    assert digests(folder) == scribe.digests
    assert digests(folder, strategy=rule) == scribe.digests
    with Replayer(folder) as replayer:
        assert len(list(replayer)) == scribe.records
    shutil.rmtree(folder)


# journals of earlier releases


@pytest.mark.process
@pytest.mark.parametrize("threads", ["7"])
def test_bits_do_not_depend_on_threads_or_load(folder: Path, threads: str) -> None:
    """A process of its own, because libraries read these variables when they are loaded."""
    scribe = Scribe(folder, FedAvgSettings(clients_per_round=3), layout=layout_of(200_001, 3, 1))
    for _ in range(9):
        scribe.update()
    scribe.close()
    variables = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    replayed = subprocess.Popen(
        [sys.executable, "-m", "fedstream", "replay", str(folder)],
        env=os.environ | dict.fromkeys(variables, threads),
        stdout=subprocess.PIPE,
        text=True,
    )
    load = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        said, _ = replayed.communicate(timeout=100)
    finally:
        with replayed:  # closes its pipe: an open one fails a later test
            replayed.kill()
        for process in load:
            process.kill()
            process.wait()
    assert said.startswith("3 of 3 versions identical")


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.json")))
def test_old_journals_stay_replayable(name: str, folder: Path) -> None:
    """Made once by ``python -m tests.journals``, those of private runs by
    ``tests.private.journalled``; packed, since records fill pages."""
    folder.mkdir()
    for packed in (GOLDEN / name).iterdir():
        (folder / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    wanted = json.loads((GOLDEN / f"{name}.json").read_text())
    assert {str(n): digest for n, digest in digests(folder).items()} == wanted


def test_quarantine_changes_no_replay(folder: Path) -> None:
    """By the recorded rule or another: what was used before stays used."""
    scribe = Scribe(folder)
    for n in range(8):
        if n == 4:
            scribe.quarantine(1, why="poison")
            scribe.refuse(1, "device quarantined")
        scribe.update(n % 4 if n < 4 else 5)
    scribe.close()
    with Replayer(folder) as replayer:
        moments = [moment for moment in replayer if moment.identical is not None]
        assert [moment.version for moment in moments] == list(range(1, 9))
    assert digests(folder) == {n: d for n, d in scribe.digests.items() if n}
    with Replayer(folder, without=frozenset({1})) as replayer:
        assert replayer.influenced == 2
        assert [type(moment.message).__name__ for moment in replayer].count("QuarantineSet") == 1


def test_no_journal(folder: Path) -> None:
    with pytest.raises(JournalError, match="there is no journal"):
        Replayer(folder)


def test_each_segment_has_its_own_parameters(folder: Path) -> None:
    scribe = Scribe(folder, FedAsyncSettings(alpha=0.5))
    scribe.update()
    scribe.segment(FedAsyncSettings(alpha=0.1), epoch=2)
    scribe.update()
    scribe.close()
    with Replayer(folder) as replayer:
        weights = [moment.step.decision and moment.step.decision.weight for moment in replayer]
    assert weights == [0.5, 0.1]
