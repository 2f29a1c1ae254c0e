"""What is on disk is what was written, where it was written, in the order in which it was."""

from __future__ import annotations

import errno
import math
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest

from fedstream.core.layout import PAGE
from fedstream.journal import (
    Claim,
    JournalDamaged,
    JournalError,
    Place,
    Record,
    Segment,
    Taken,
    Tear,
    cuts,
    segments,
)
from fedstream.journal.frames import FRAME_BYTES, file_parts, frame_of, packed
from fedstream.journal.inspection import verify
from fedstream.journal.rebuild import recovered
from fedstream.journal.replay import Replayer
from fedstream.strategies import AfaCsSettings
from tests.journals import Scribe
from tests.support import layout_of


def written(folder: Path, updates: int = 6, **options: Any) -> Path:
    """A segment with so many updates: its path."""
    scribe = Scribe(folder, **options)
    for _ in range(updates):
        scribe.update()
    scribe.close()
    return scribe.writer.path


def found(path: Path) -> list[Record]:
    """The records behind the standing."""
    with Segment(path) as segment:
        return list(segment.records())


def exchange(path: Path, at: int, other: int, size: int) -> None:
    """So many bytes of two places change places."""
    data = bytearray(path.read_bytes())
    data[at : at + size], data[other : other + size] = (
        data[other : other + size],
        data[at : at + size],
    )
    path.write_bytes(data)


def rewrite(path: Path, record: Record, *, follows: bytes | None = None, **fields: Any) -> bytes:
    """Forges a record: other fields, and a checksum to match. Its length stays within its page."""
    data = bytearray(path.read_bytes())
    parts = file_parts(bytes(data))
    assert parts
    at = record.place.offset
    frame = frame_of(bytes(data[at:]))
    assert frame
    message = msgpack.unpackb(bytes(data[at + FRAME_BYTES : at + FRAME_BYTES + frame.length]))
    begin, checksum = packed(
        msgpack.packb(message | fields),
        payload=frame.payload,
        synced=frame.synced,
        offset=at,
        follows=frame.follows if follows is None else follows,
        salt=parts[1],
    )
    assert len(begin) <= PAGE
    data[at : at + PAGE] = begin + bytes(PAGE - len(begin))
    path.write_bytes(data)
    return checksum


def everyone_says(folder: Path, damage: str) -> None:
    """Verification, replay and recovery say so, in one line."""
    chain = segments(folder)
    verdicts = list(verify(chain))
    assert any(v.damage is not None and damage in v.damage for v in verdicts), verdicts
    for segment in chain:
        segment.close()
    with Replayer(folder) as replayer, pytest.raises(JournalDamaged, match=damage) as said:
        list(replayer)
    assert "\n" not in str(said.value)


def test_swapped_records_are_detected(tmp_path: Path) -> None:
    path = written(tmp_path)
    *_, one, other = found(path)  # nothing behind them says that they were on disk
    exchange(path, one.place.offset, other.place.offset, one.end - one.place.offset)
    everyone_says(
        tmp_path, f"at byte {one.place.offset}: holds the record of byte {other.place.offset}"
    )


def test_copied_record_is_detected(tmp_path: Path) -> None:
    path = written(tmp_path)
    first, *_, last = found(path)
    data = path.read_bytes()
    path.write_bytes(data + data[first.place.offset : first.end])
    everyone_says(tmp_path, f"at byte {last.end}: holds the record of byte {first.place.offset}")


def test_forged_record_breaks_the_chain(tmp_path: Path) -> None:
    """Whoever can write the file can mend a checksum, but not without all that follow."""
    path = written(tmp_path)
    _, second, third, *_ = found(path)
    rewrite(path, second, reason="forged")
    everyone_says(tmp_path, f"at byte {third.place.offset}: does not follow the record before it")


def test_next_segment_detects_a_forged_end(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    path = scribe.writer.path
    scribe.segment(epoch=2)
    scribe.update()
    scribe.close()
    with Segment(path) as segment:
        *_, last = segment.records()
    rewrite(path, last, reason="forged")
    everyone_says(
        tmp_path, "00000002-000000.journal follows a different record from the one that ends"
    )


def test_next_segment_detects_a_lost_end(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    for _ in range(3):
        scribe.update()
    path, size = scribe.writer.path, scribe.writer.size
    scribe.segment()
    scribe.close()
    _, second, third = found(path)
    os.truncate(path, second.end)
    there = third.place.offset
    lost = f"at byte {there}: truncated: .* expects {size} bytes of it, {there} are there"
    with Replayer(tmp_path) as replayer, pytest.raises(JournalDamaged, match=lost):
        list(replayer)
    chain = segments(tmp_path)
    first, other = verify(chain)
    assert "truncated" in str(first.damage)
    assert other.damage is None
    for segment in chain:
        segment.close()


@pytest.mark.parametrize("parameters", [4, 1_100_000], ids=["small", "large"])
def test_intact_records_after_a_torn_one_are_reported(tmp_path: Path, parameters: int) -> None:
    """A machine's death may take one write and keep a later one; so may a bit that flipped."""
    path = written(tmp_path, layout=layout_of(parameters))
    records = found(path)
    third = records[2]
    flip(path, third.place.offset + FRAME_BYTES + 3)
    tear = Tear(third.place, behind=3, version=6)
    with Segment(path) as segment:
        assert len(list(segment.records())) == 2
        assert segment.torn == tear
        assert recovered(segment).torn == tear
        [verdict] = verify([segment])
    assert verdict.damage == (
        f"torn record: {third.place.where}; 3 whole records after it, up to version 6 cannot be "
        "used"
    )
    with Replayer(tmp_path) as replayer:
        assert [moment.version for moment in replayer] == [1, 2]
        assert replayer.torn == tear


def test_successors_cut_at_the_tear_makes_the_journal_intact(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.update()
    before, at, chain = scribe.writer.path.name, scribe.writer.size, scribe.writer.chain.hex()
    standing = scribe.progress
    scribe.update()
    scribe.close()
    scribe.progress = standing
    scribe.head = scribe.head.model_copy(
        update={"epoch": 2, "predecessor": before, "cut": at, "follows": chain}
    )
    scribe._begin("continued")
    scribe.close()
    flip(tmp_path / before, at + FRAME_BYTES)
    chain_of = segments(tmp_path)
    assert [verdict.damage for verdict in verify(chain_of)] == [None, None]
    for segment, cut in cuts(chain_of):
        list(segment.records(cut))
        assert segment.torn is None
        segment.close()


def flip(path: Path, at: int) -> None:
    """A bit flips."""
    with path.open("r+b") as file:
        file.seek(at)
        [byte] = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_read_error_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = written(tmp_path)
    third = found(path)[2]
    wanted = third.place.offset if call == "pread" else third.payload
    real: Callable[..., Any] = getattr(os, call)

    def fails(file: int, what: Any, at: int) -> Any:
        if at == wanted:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, what, at)

    monkeypatch.setattr(os, call, fails)
    said = f"^{path} at byte {wanted}: cannot be read: Input/output error$"
    with Segment(path) as segment, pytest.raises(JournalError, match=said):
        recovered(segment)
    with Segment(path) as segment:
        [verdict] = verify([segment])
    assert verdict.damage == f"{path} at byte {wanted}: cannot be read: Input/output error"


def test_previous_releases_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(4, "little"))
    with pytest.raises(JournalError) as said:
        segments(tmp_path)
    assert str(said.value) == (
        f"{path}: has journal format 1, but this release reads format 2: use 0.1.0 to read it"
    )


def test_journal_is_private_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "journal"
    before = os.umask(0)
    try:
        Claim(folder, 1)
        written(folder, updates=1)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        "00000001-000000.journal": 0o600,
        "00000001.claim": 0o600,
    }


def test_claimed_number_of_devices_allocates_nothing(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, AfaCsSettings(buffer_size=2), devices=2**31 - 1)
    for n in range(4):
        scribe.update(device=5 * 10**8 * n)
    scribe.segment()
    scribe.close()
    chain = segments(tmp_path)
    assert [verdict.damage for verdict in verify(chain)] == [None, None]
    assert recovered(chain[-1]).version == 2
    for segment in chain:
        segment.close()


def test_unknown_device_is_reported(tmp_path: Path) -> None:
    path = written(tmp_path, strategy=AfaCsSettings(buffer_size=2))
    second = found(path)[1]
    message = second.message
    assert isinstance(message, Taken)
    rewrite(path, second, upload=message.upload.model_dump() | {"device": 10})
    with Segment(path) as segment:
        [verdict] = verify([segment])
    assert verdict.damage == (
        f"{second.place.where}: an update was used that should not have been: unknown device"
    )


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (
            {"tau": 9},
            "an update was used that should not have been: it was trained from version 9",
        ),
        ({"layout": "another"}, "an update was used that should not have been: its layout differs"),
        ({"sends": "delta"}, "an update was used that should not have been: sends a delta"),
    ],
)
def test_unusable_update_is_reported(tmp_path: Path, about: dict[str, Any], said: str) -> None:
    path = written(tmp_path)
    second = found(path)[1]
    message = second.message
    assert isinstance(message, Taken)
    rewrite(path, second, upload=message.upload.model_dump() | about)
    with Segment(path) as segment, pytest.raises(JournalDamaged, match=said):
        recovered(segment)


@pytest.mark.parametrize(
    "about",
    [
        {"staleness": -1},
        {"weight": -0.5},
        {"weight": math.nan},
        {"time": -1.0},
        {"received": math.nan},
        {"outcome": "eaten"},
        {"digest": ""},
    ],
    ids=str,
)
def test_out_of_range_field_is_reported(tmp_path: Path, about: dict[str, Any]) -> None:
    path = written(tmp_path)
    second = found(path)[1]
    rewrite(path, second, **about)
    [name] = about
    with pytest.raises(JournalDamaged, match=rf"at byte {second.place.offset}: taken: {name}"):
        found(path)


def test_layout_larger_than_the_file_allocates_nothing(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path)
    scribe.close()
    path = scribe.writer.path
    with Segment(path) as segment:
        standing = segment.standing_record
        head = replace(standing, place=Place(path, PAGE))
    follows = rewrite(path, head, layout=layout_of(10**8).encode())
    rewrite(path, standing, follows=follows)
    said = f"at byte {standing.place.offset}: a payload of 16 bytes, which does not fit the layout"
    tracemalloc.start()
    try:
        with pytest.raises(JournalDamaged, match=said):
            Segment(path)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
