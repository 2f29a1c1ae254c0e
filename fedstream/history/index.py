"""The index of a journal: its columns, kept in a file beside the journal's folder.

Reading 100,000 records takes seconds, reading their index a moment. ``journal.index`` holds the
rows of each segment with the segment's name, size and time of change, so that only segments that
are new or were written since are read again. The index is a cache: an unusable one is made anew,
and where none can be written, the journal is read each time.

The time of change is the file system's (ctime), which no program can set: an index that was copied
together with its journal does not match the copied files, and is not used.

The file has a first line that names the format, the length of a JSON header (8 bytes,
little-endian), the header, and the rows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np

from fedstream.history.table import (
    MADE,
    UPDATE,
    Columns,
    Reasons,
    RowArray,
    SegmentRows,
    joined,
    rows_of,
)
from fedstream.journal import SUFFIX, Cut, Segment, cuts, opened, stored_bytes
from fedstream.journal.writer import FILE_MODE
from fedstream.runtime import process
from fedstream.runtime.process import read_regular
from fedstream.terminal import adding, progress

_BEGIN = b"fedstream journal index 3\n"
_LENGTH = 8  # bytes
_FEW = 500  # updates that are not worth writing the whole index again

LEAST = 32 << 20  # bytes of a journal that are worth a process

File: TypeAlias = tuple[str, int, int]  # name, bytes, time of change in ns
Mark: TypeAlias = tuple[str, int, int, int]  # the same, and its cut


@dataclass(frozen=True)
class _Kept:
    """The content of an index file."""

    files: tuple[File, ...]  # the folder's segments
    parts: Mapping[Mark, SegmentRows]  # of those that count, oldest first
    reasons: Reasons


def columns_of(
    journal: Path, read: Callable[[int], object] = lambda _bytes: None, *, keep: bool = True
) -> Columns:
    """The columns of a journal's folder, or of one segment. Raises JournalError.

    ``read`` is called with each number of bytes read from the journal. ``keep``: write the index.
    """
    return _columns(*_parts(journal, read, keep=keep))


def index(journal: Path, read: Callable[[int], object] = lambda _bytes: None) -> None:
    """Add a journal's new records to its index, for later readers.

    ``read`` is called with each number of bytes read from the journal. Raises JournalError.
    """
    _parts(journal, read)


def _parts(
    journal: Path, read: Callable[[int], object], *, keep: bool = True
) -> tuple[Mapping[Mark, SegmentRows], Reasons]:
    """The rows of all segments that count, oldest first. ``keep``: write the index."""
    kept = _load(journal)
    files = marks(journal)
    if kept is not None and kept.files == files:
        return kept.parts, kept.reasons
    known, reasons = _fitting(kept, files)
    with opened(journal) as chain:
        parts: dict[Mark, SegmentRows] = {}
        for segment, cut in cuts(chain):
            mark = _mark(segment, cut, files)
            first = segment is chain[0]
            # A segment that has become the first begins with a version of its own.
            if mark not in known or (first and not known[mark].made["begins"][:1].any()):
                known[mark] = rows_of(segment, cut, reasons, first=first, read=read)
                segment.close()
            parts[mark] = known[mark]
    if keep and not journal.is_file() and not _is_good_enough(kept, parts):
        _save(journal, _Kept(files, parts, reasons))
    return parts, reasons


def _fitting(kept: _Kept | None, files: Sequence[File]) -> tuple[dict[Mark, SegmentRows], Reasons]:
    """The parts of an index that match the files, and the index's reasons."""
    there = set(files)
    fits = {mark: part for mark, part in kept.parts.items() if mark[:3] in there} if kept else {}
    return fits, kept.reasons if kept is not None and fits else Reasons()


def _is_good_enough(kept: _Kept | None, parts: Mapping[Mark, SegmentRows]) -> bool:
    """Whether an index lacks only some records of a run that goes on.

    Reading those is quick, and a reader that follows the run asks often.
    """
    new = [mark for mark in parts if kept is None or mark not in kept.parts]
    if kept is None or new != list(parts)[-1:]:
        return False
    was = [len(part.updates) for mark, part in kept.parts.items() if mark[0] == new[0][0]]
    return any(0 <= len(parts[new[0]].updates) - length < _FEW for length in was)


def index_of(journal: Path) -> Path:
    """The path of a journal's index: beside the folder, which may contain only segments."""
    folder = journal.absolute()
    return folder.with_name(f"{folder.name}.index")


def _columns(parts: Mapping[Mark, SegmentRows], reasons: Reasons) -> Columns:
    return joined([mark[0] for mark in parts], list(parts.values()), reasons.names)


def marks(journal: Path) -> tuple[File, ...]:
    """Name, size and ctime of a journal's files; empty without a journal."""
    paths = [journal] if journal.is_file() else sorted(journal.glob(f"*{SUFFIX}"))
    looked = [(path.name, path.stat()) for path in paths]
    return tuple((name, about.st_size, about.st_ctime_ns) for name, about in looked)


def _mark(segment: Segment, cut: Cut | None, files: Sequence[File]) -> Mark:
    """A segment's mark, with size and ctime from before reading, so that later writes change it."""
    name = segment.path.name
    size, changed = next(((size, at) for known, size, at in files if known == name), (-1, -1))
    return name, size, changed, -1 if cut is None else cut.at


# the file


def _save(journal: Path, kept: _Kept) -> None:
    """Write an index file, unless the folder is not writable."""
    about = {
        "files": kept.files,
        "reasons": kept.reasons.names,
        "parts": [
            {
                "mark": mark,
                "made": len(part.made),
                "updates": len(part.updates),
                "finished": part.finished,
                "damage": part.damage,
                "drops": part.drops,
            }
            for mark, part in kept.parts.items()
        ],
    }
    header = json.dumps(about).encode()
    path = index_of(journal)
    aside = path.with_name(f"{path.name}.new")
    try:
        aside.unlink(missing_ok=True)
        aside.touch(mode=FILE_MODE, exist_ok=False)
        with aside.open("wb") as file:
            file.write(_BEGIN + len(header).to_bytes(_LENGTH, "little") + header)
            for part in kept.parts.values():
                file.write(part.made.tobytes() + part.updates.tobytes())
        aside.replace(path)
    except OSError:
        return  # a recording on a read-only disk, or a full one: it is only slower next time


def _load(journal: Path) -> _Kept | None:
    """Read an index file; None if there is none that this release can read."""
    if journal.is_file():
        return None
    try:
        data = read_regular(index_of(journal))
        if not data.startswith(_BEGIN):
            return None
        at = len(_BEGIN) + _LENGTH
        length = int.from_bytes(data[len(_BEGIN) : at], "little")
        about = json.loads(data[at : at + length])
        at += length
        parts: dict[Mark, SegmentRows] = {}
        for one in about["parts"]:
            made, at = _rows(data, MADE, one["made"], at)
            updates, at = _rows(data, UPDATE, one["updates"], at)
            name, size, changed, cut = one["mark"]
            mark = name, size, changed, cut
            drops = tuple((int(drop), int(count)) for drop, count in one["drops"])
            parts[mark] = SegmentRows(made, updates, one["finished"], one["damage"], drops)
        return _Kept(_files(about["files"]), parts, Reasons(about["reasons"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _rows(data: bytes, of: Any, count: int, at: int) -> tuple[RowArray, int]:
    """The rows at an offset, and the offset after them. Raises ValueError, TypeError."""
    if count < 0:
        raise ValueError("fewer than no rows")
    # Of nothing, numpy makes no array.
    rows = np.frombuffer(data, of, count, at) if count else np.empty(0, of)
    return rows, at + count * of.itemsize


def _files(rows: Sequence[Sequence[Any]]) -> tuple[File, ...]:
    return tuple((name, size, changed) for name, size, changed in rows)


# Large journals are read in a process of its own, while this one loads what will show them. That
# process leaves an index. If it fails, the journal is read again here, which reports the error.


@contextmanager
def reading_ahead(journals: Sequence[Path]) -> Iterator[bool]:
    """Index journals during the block, if they are large and have no index; wait at its end.

    Yields whether there is indexing to wait for.
    """
    new = [journal for journal in journals if _is_worth_it(journal)]
    # A fork has this thread alone, and all resources of a calling program.
    if not new or not process.is_own() or threading.active_count() > 1 or sys.platform != "linux":
        yield False
        return
    above, child = os.getpid(), os.fork()
    if child == 0:
        _read(new, above)
    try:
        yield True
    except BaseException:
        os.kill(child, signal.SIGTERM)
        raise
    finally:
        os.waitpid(child, 0)


def _is_worth_it(journal: Path) -> bool:
    path = index_of(journal)
    if path.exists() or not os.access(path.parent, os.W_OK):
        return False
    return stored_bytes(journal) >= LEAST


def _read(journals: Sequence[Path], above: int) -> NoReturn:
    """Body of the indexing process, which ends with its parent process."""
    with suppress(BaseException):
        for journal in journals:
            total = stored_bytes(journal)
            with progress("reading the journal", total, quiet=False, parts=False) as step:
                index(journal, _while(above, adding(step, total)))
    os._exit(0)


def _while(above: int, add: Callable[[int], object]) -> Callable[[int], object]:
    """A function as ``add``, which ends this process once its parent isn't process ``above``."""

    def added(count: int) -> None:
        if os.getppid() != above:
            os._exit(1)
        add(count)

    return added
