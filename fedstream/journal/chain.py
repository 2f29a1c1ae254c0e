"""A journal's segments, read as one chain.

Each segment names its predecessor and the predecessor's counted length, so the chain is found from
the newest segment backwards. Other segments in the folder belong to a fenced writer or an earlier
journal, and are not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedstream.journal import unshared
from fedstream.journal.errors import Diverged, JournalDamaged, JournalError
from fedstream.journal.records import SUFFIX, EntryRecord
from fedstream.journal.segment import Cut, Record, Segment

FOLDER = "journal"  # in a run's output folder


@contextmanager
def opened(path: Path) -> Iterator[list[Segment]]:
    """The counted segments, oldest first, of a run, a journal's folder or a segment's file.

    Of a single segment, all whole records count. Raises JournalError.
    """
    chain = [Segment(path)] if path.is_file() else segments(journal_of(path))
    try:
        if not chain:
            raise JournalError(
                f"{path}: no journal there: name a run's folder, its journal folder or a segment"
            )
        yield chain
    finally:
        for segment in chain:
            segment.close()


def journal_of(path: Path) -> Path:
    """The journal's folder in a run's folder; a journal's own folder is returned unchanged."""
    inside = path / FOLDER
    return inside if inside.is_dir() else path


def segments(folder: Path) -> list[Segment]:
    """The counted segments, oldest first, each but the last up to its successor's cut.

    Empty if there is no journal. Leaves out the segments of fenced writers, and the oldest ones if
    they can't be rebuilt because devices' vectors were deleted with the segments before them.
    Raises JournalError for a foreign file, and if a segment is missing in the middle.
    """
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(SUFFIX))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JournalError(f"{folder}: cannot be read: {error.strerror}") from error
    chain: list[Segment] = []
    try:
        name = names[-1] if names else None
        while name is not None and name in names:
            try:
                chain.append(Segment(folder / name))
            except JournalError:
                if chain and not (folder / name).exists():
                    return chain[::-1]  # the oldest, deleted since it was listed
                raise
            chain[-1].close()  # there may be more segments than the limit on open files
            before = chain[-1].head.predecessor
            if before is not None and before >= name:
                raise JournalDamaged(f"{folder / name}: names {before} as its predecessor")
            name = before
        if name is not None and names[0] < name:
            raise JournalError(
                f"{folder / name}: is missing, but older segments are there: restore it, or move "
                "the older ones away to start after it"
            )
    except BaseException:
        for segment in chain:
            segment.close()
        raise
    return _with_vectors(chain, set(names))[::-1]


def _with_vectors(chain: list[Segment], names: set[str]) -> list[Segment]:
    """The segments, newest first, back to the oldest with all devices' vectors.

    A vector whose segment was deleted may be repeated in a later segment, and is then read there.
    """
    again: dict[int, str] = {}  # device -> the segment that has the vector unchanged
    for number, segment in enumerate(chain):
        gone = {device for device, name in segment.elsewhere.items() if name not in names}
        if number and not gone <= again.keys():
            return chain[:number]
        segment.elsewhere |= {device: again[device] for device in gone & again.keys()}
        again = segment.elsewhere | dict.fromkeys(segment.standing.again, segment.path.name)
    return chain


def cuts(chain: Sequence[Segment]) -> Iterator[tuple[Segment, Cut | None]]:
    """Each segment with its successor's cut; None: all whole records count."""
    for segment, successor in zip(chain, [*chain[1:], None], strict=True):
        yield segment, successor.follows if successor is not None else None


def stored_bytes(folder: Path) -> int:
    """The bytes of all segments in a folder, counted or not, and of the unshared values."""
    total = 0
    for file in (*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{unshared.SUFFIX}")):
        with suppress(FileNotFoundError):  # retention may delete it meanwhile
            total += file.stat().st_size
    return total


def counted_bytes(chain: Sequence[Segment]) -> int:
    """The bytes that count: of each segment, those up to its successor's cut."""
    return sum(segment.size if cut is None else cut.at for segment, cut in cuts(chain))


def uncounted(chain: Sequence[Segment]) -> list[str]:
    """The folder's other segments: those of fenced writers or of an earlier journal."""
    ours = {segment.path.name for segment in chain}
    names = {path.name for path in chain[0].path.parent.iterdir() if path.name.endswith(SUFFIX)}
    return sorted(names - ours)


def since(chain: Sequence[Segment], version: int) -> Sequence[Segment]:
    """The segments since the newest that begins at or before ``version``.

    Raises JournalError, naming the oldest kept version, if there is none.
    """
    for number in range(len(chain) - 1, -1, -1):
        if chain[number].standing.version <= version:
            return chain[number:]
    raise JournalError(
        f"{chain[0].path.parent}: version {version} is no longer kept: the oldest is "
        f"{chain[0].standing.version}"
    )


def entries(
    segment: Segment, cut: Cut | None, after: Record | None = None
) -> Iterator[tuple[Record, EntryRecord]]:
    """A segment's records after its beginning, or ``after`` one of them, with their messages.

    No payload is read.
    """
    for record in segment.records(cut, after):
        yield record, record.entry


def newest_version(chain: Sequence[Segment]) -> int:
    """The newest version."""
    version = chain[-1].standing.version
    for _, entry in entries(chain[-1], None):
        version = entry.version
    return version


def check_joint(segment: Segment, ended: tuple[int, str] | None) -> None:
    """Raise Diverged unless a segment begins with the version and digest ``ended`` of its
    predecessor, if these are known."""
    said = segment.standing
    if ended is None or said.why != "continued" or (said.version, said.digest) == ended:
        return
    raise Diverged(
        f"{segment.standing_record.place.where}: the segment begins with version "
        f"{said.version} ({said.digest}), the one before ends with version {ended[0]} ({ended[1]})"
    )
