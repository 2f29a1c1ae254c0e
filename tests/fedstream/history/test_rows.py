"""A segment's rows are the same however they are read."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fedstream.history import table
from fedstream.history.table import Reasons, SegmentRows, rows_of
from fedstream.journal import JournalError, cuts, opened, record_batches
from tests.fedstream.history.scribes import FIRST, two_segments
from tests.journals import GOLDEN, Scribe


def read(folder: Path) -> list[tuple[SegmentRows, tuple[str, ...]]]:
    found = []
    with opened(folder) as chain:
        for segment, cut in cuts(chain):
            reasons = Reasons()
            part = rows_of(segment, cut, reasons, first=segment is chain[0])
            found.append((part, tuple(sorted(reasons.names))))
    return found


def names(part: SegmentRows, reasons: tuple[str, ...]) -> object:
    """A part without the numbers of its reasons, which depend on the order of reading."""
    updates = part.updates.copy()
    updates["reason"] = 0
    return part.made.tobytes(), updates.tobytes(), part.finished, part.damage, reasons


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_about: object) -> SegmentRows:
        raise JournalError("read one by one")

    with monkeypatch.context() as patch:
        patch.setattr(table, "_one_by_one", None)  # calling it would fail
        together = read(folder)
    with monkeypatch.context() as patch:
        patch.setattr(table, "_together", never)
        one_by_one = read(folder)
    assert [names(*one) for one in together] == [names(*one) for one in one_by_one]


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_every_strategy_and_format(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for packed in (GOLDEN / name).glob("*.gz"):
        (tmp_path / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    check(tmp_path, monkeypatch)


def test_many_updates_of_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are read together, with refusals, and an end."""
    monkeypatch.setattr(record_batches, "BATCH", 100)
    scribe = Scribe(tmp_path)
    rng = np.random.default_rng(1)
    for n in range(450):
        scribe.update(
            int(rng.integers(0, 300)),
            late=int(rng.integers(0, 4)),
            samples=int(rng.integers(10**6)),
            seconds=float(rng.random()),
            loss=None if n % 9 == 0 else float(rng.random()),
        )
        if n % 40 == 0:
            scribe.refuse(reason=("too stale", "not finite", "norm too large")[n % 3])
    scribe.close()
    check(tmp_path, monkeypatch)
    monkeypatch.undo()
    check(tmp_path, monkeypatch)


def test_a_count_that_no_array_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scribe = Scribe(tmp_path)
    for n in range(80):
        scribe.update(samples=2**64 - 1 - n)
    scribe.close()
    check(tmp_path, monkeypatch)


def test_a_torn_tail_is_left_out(tmp_path: Path) -> None:
    two_segments(tmp_path)
    *_, path = sorted(tmp_path.iterdir())
    whole = read(tmp_path)
    path.write_bytes(path.read_bytes()[:-5000])  # into the last record
    torn = read(tmp_path)
    assert names(*torn[0]) == names(*whole[0])
    assert len(torn[1][0].updates) == len(whole[1][0].updates) - 1
    assert torn[1][0].damage is None
    assert path.name != FIRST
