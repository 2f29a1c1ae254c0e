"""The columns of a journal, and the file that keeps them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedstream.history import index
from fedstream.history.index import columns_of, index_of
from fedstream.history.table import NONE, Columns
from fedstream.journal import JournalError
from fedstream.strategies import FedAvgSettings, FedBuffSettings
from tests.fedstream.history.scribes import FIRST, SECOND, flip, two_segments
from tests.journals import Scribe


def same(one: Columns, other: Columns) -> bool:
    tables = ((one.made, other.made), (one.updates, other.updates))
    return all(a.tobytes() == b.tobytes() for a, b in tables) and one.reasons == other.reasons


@pytest.mark.timeout(60)
def test_index_is_not_read_from_a_pipe(recorded: Path, tmp_path: Path) -> None:
    """Whoever opened it would wait for somebody who writes into it."""
    shutil.copytree(recorded / "journal", tmp_path / "journal")
    kept = index_of(tmp_path / "journal")
    os.mkfifo(kept)
    assert same(columns_of(tmp_path / "journal"), columns_of(recorded / "journal"))
    assert kept.is_file()


@pytest.mark.parametrize(
    "rule", [FedBuffSettings(buffer_size=3), FedAvgSettings(clients_per_round=3)]
)
def test_buffered_updates_belong_to_the_version_they_ended_in(
    tmp_path: Path, rule: FedBuffSettings | FedAvgSettings
) -> None:
    """Also where a segment ends in the middle of a buffer."""
    scribe = Scribe(tmp_path, rule)
    for n in range(8):
        scribe.update(n)
        if n == 3:
            scribe.segment()
    scribe.close()
    assert columns_of(tmp_path).contained.tolist() == [1, 1, 1, 2, 2, 2, NONE, NONE]


def test_what_was_buffered_before_an_adopted_model_is_in_no_version(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path, FedBuffSettings(buffer_size=2))
    for _ in range(3):
        scribe.update()
    scribe.adopt()
    for _ in range(2):
        scribe.update()
    scribe.close()
    found = columns_of(tmp_path)
    assert found.contained.tolist() == [1, 1, NONE, 5, 5]
    assert found.numbers.tolist() == [0, 1, 4, 5]
    assert found.since_previous(4) == (3, 3)
    assert found.nearest(2) == 1
    assert found.nearest(99) == 5


def test_second_look_reads_no_record(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(recorded, tmp_path / "run")
    journal = tmp_path / "run" / "journal"
    once = columns_of(journal)
    assert index_of(journal) == tmp_path / "run" / "journal.index"
    assert index_of(journal).stat().st_mode & 0o077 == 0
    monkeypatch.setattr(index, "opened", None)  # calling it would fail
    assert same(columns_of(journal), once)


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal")
    for _ in range(5):
        scribe.update()
    scribe.segment()
    scribe.update()
    scribe.writer.sync()
    columns_of(tmp_path / "journal")
    scribe.update()
    scribe.close()
    passed: list[int] = []
    found = columns_of(tmp_path / "journal", passed.append)
    assert found.numbers.tolist() == list(range(8))
    second = (tmp_path / "journal" / SECOND).stat().st_size
    assert 0 < sum(passed) <= second  # the first segment is not read again
    index_of(tmp_path / "journal").unlink()
    assert same(columns_of(tmp_path / "journal"), found)


def test_a_run_that_goes_on_has_its_index_written_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "_FEW", 3)
    scribe, journal = Scribe(tmp_path / "journal"), tmp_path / "journal"
    written = []
    for n in range(12):
        scribe.update()
        scribe.writer.sync()
        assert len(columns_of(journal).updates) == n + 1
        written.append(index_of(journal).stat().st_mtime_ns)
        if n == 8:
            scribe.segment()
    scribe.close()
    assert [n + 1 for n in range(12) if written.index(written[n]) == n] == [1, 4, 7, 10]


def test_a_deleted_first_segment_leaves_a_journal_that_begins_later(tmp_path: Path) -> None:
    two_segments(tmp_path / "journal")
    columns_of(tmp_path / "journal")
    (tmp_path / "journal" / FIRST).unlink()
    assert columns_of(tmp_path / "journal").numbers.tolist() == list(range(6, 13))


def test_a_spoiled_index_is_made_anew(tmp_path: Path) -> None:
    """Cut off anywhere, of another format, or with lengths that nothing can have."""
    two_segments(tmp_path / "journal")
    found = columns_of(tmp_path / "journal")
    file = index_of(tmp_path / "journal")
    whole = file.read_bytes()
    begin = whole.index(b"\n") + 1
    spoiled = [whole[:n] for n in (0, 10, begin, begin + 5, begin + 20, len(whole) // 2, -1)]
    spoiled += [whole.replace(b"index 3", b"index 9"), b"something else"]
    spoiled += [whole[:begin] + bytes([255]) * 8 + whole[begin + 8 :]]
    spoiled += [whole.replace(b'"made": 7', made) for made in (b'"made":-7', b'"made": 1e9')]
    spoiled += [re.sub(rb'"parts": \[.', b'"parts": 5,', whole), whole.replace(b"mark", b"work")]
    assert len({*spoiled, whole}) == len(spoiled) + 1
    for content in spoiled:
        file.write_bytes(content)
        assert same(columns_of(tmp_path / "journal"), found), content[:60]
        assert file.read_bytes() == whole


def test_an_index_that_came_with_a_recording_is_not_believed(tmp_path: Path) -> None:
    """A copy has the same names, sizes and times of modification."""
    two_segments(tmp_path / "theirs" / "journal")
    columns_of(tmp_path / "theirs" / "journal")
    index_of(tmp_path / "theirs" / "journal").write_bytes(
        index_of(tmp_path / "theirs" / "journal").read_bytes().replace(b"not finite", b"not at all")
    )
    assert "not at all" in columns_of(tmp_path / "theirs" / "journal").reasons  # so it is used
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    assert "not at all" not in columns_of(tmp_path / "ours" / "journal").reasons


def test_a_place_that_is_not_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_segments(tmp_path / "journal")
    index_of(tmp_path / "journal").mkdir()
    assert len(columns_of(tmp_path / "journal").numbers) == 13
    segment = tmp_path / "journal" / SECOND
    assert len(columns_of(segment).numbers) == 7
    assert not index_of(segment).exists()


def test_damage_ends_a_segment_and_is_told(tmp_path: Path) -> None:
    two_segments(tmp_path)
    with_damage = tmp_path / FIRST
    _, record = columns_of(tmp_path).at(3)
    flip(with_damage, record + 200)
    found = columns_of(tmp_path)
    assert found.numbers.tolist() == [0, 1, 2, 3, *range(7, 13)]
    [told] = found.damage
    assert f"damaged record: {with_damage} at byte {record}" in told


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "00000001-000000.journal").write_bytes(b"something else")
    with pytest.raises(JournalError, match="is not a journal segment"):
        columns_of(tmp_path)


BEGIN = """
import os, sys
from pathlib import Path
from fedstream.history import index
from fedstream.runtime import process

journal = Path(sys.argv[1])

def no_child():
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return True
"""
READ = """
with index.reading_ahead([journal]) as is_reading:
    assert not is_reading  # it is small
index.LEAST = 0
with index.reading_ahead([journal]) as is_reading:
    assert not is_reading  # the process may be a notebook's
process.take()
with index.reading_ahead([journal]) as is_reading:
    assert is_reading
assert index.index_of(journal).exists() and no_child()
with index.reading_ahead([journal]) as is_reading:
    assert not is_reading  # it has an index
"""
FAILED = """
index.LEAST = 0
process.take()
try:
    with index.reading_ahead([journal]) as is_reading:
        assert is_reading
        raise KeyboardInterrupt
except KeyboardInterrupt:
    assert no_child()
index.index_of(journal).unlink(missing_ok=True)
(journal / "ffffffffffffffff-000001.journal").write_bytes(b"nothing")
with index.reading_ahead([journal]) as is_reading:
    assert is_reading
assert not index.index_of(journal).exists() and no_child()
"""


@pytest.fixture
def journal(tmp_path: Path, recorded: Path) -> Path:
    shutil.copytree(recorded, tmp_path / "run")
    index_of(tmp_path / "run" / "journal").unlink(missing_ok=True)
    return tmp_path / "run" / "journal"


def run(script: str, journal: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, journal], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.process
def test_a_large_journal_without_an_index_is_read_during_the_block(
    journal: Path, recorded: Path
) -> None:
    assert run(READ, journal) == ""
    found, expected = columns_of(journal), columns_of(recorded / "journal")
    assert isinstance(found, Columns)
    assert found.updates.tobytes() == expected.updates.tobytes()


@pytest.mark.process
def test_what_goes_wrong_is_left_to_who_reads_next(journal: Path) -> None:
    assert run(FAILED, journal) == ""
