"""Reading journals ahead, in processes of their own: a fork has to be a process's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedstream.history.index import columns_of, index_of
from fedstream.history.table import Columns

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
