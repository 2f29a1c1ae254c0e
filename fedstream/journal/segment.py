"""Reading a segment, without writing to it and with every byte checked.

A record must be whole, be at its stated offset, and follow the previous record; the last counted
record must be the one that the successor states. An incomplete record is the torn tail of a crash,
unless a later record states that it was on disk: then the file is damaged. Any invalid content
raises a JournalError with the place, and memory is allocated only once the file has enough bytes.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from fedstream.core.digest import Digester, algorithm_of
from fedstream.core.errors import BadMessage, LayoutMismatch
from fedstream.core.formats import most_bytes
from fedstream.core.layout import PAGE, Layout, Payload
from fedstream.core.messages import Message, decode
from fedstream.journal import unshared
from fedstream.journal.errors import JournalDamaged, JournalError
from fedstream.journal.frames import (
    BEGINNING,
    FILE_BYTES,
    FORMAT,
    FRAME_BYTES,
    Place,
    file_parts,
    filled,
    frame_of,
    frame_parts,
    is_whole,
    salt_bytes,
)
from fedstream.journal.record_batches import RecordBatch, batch_at
from fedstream.journal.records import (
    KINDS,
    KNOWN,
    WIRE_FORMATS,
    DeviceVector,
    EntryRecord,
    SegmentHead,
    Standing,
)
from fedstream.runtime.process import open_regular

_CHUNK = 2 << 20  # bytes that are read at once, extended to the end of a record
_AHEAD = 16 << 20  # bytes after a payload that the disk is asked to prefetch


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a segment that its successor counts."""

    at: int  # bytes
    chain: bytes  # the chain's value there
    successor: str  # file name


@dataclass(frozen=True, slots=True)
class SegmentEnd:
    """The end of a segment, for its successor."""

    path: Path
    at: int  # bytes of it that count
    chain: bytes  # the chain's value there


@dataclass(frozen=True, slots=True)
class Record:
    """A record in a file: its message, and the place of its payload."""

    message: Message
    place: Place
    payload: int  # offset in the file
    payload_bytes: int
    synced: int
    end: int  # offset after it
    follows: bytes  # the chain's value before it
    chain: bytes  # and after it

    @property
    def entry(self) -> EntryRecord:
        """The message, which must be of a queue entry. Raises JournalError."""
        if not isinstance(self.message, EntryRecord):
            raise JournalError(f"{self.place.where}: this kind of record does not belong here")
        return self.message


@dataclass(frozen=True, slots=True)
class Tear:
    """The torn tail of a segment, from a record that a crash left incomplete."""

    place: Place
    behind: int = 0  # whole records after it, which are lost too
    version: int | None = None  # the newest of these records

    @property
    def lost(self) -> str:
        """The lost records, for people; '' if there are none."""
        if not self.behind:
            return ""
        records = "record" if self.behind == 1 else "records"
        until = "" if self.version is None else f", up to version {self.version}"
        return f"; {self.behind} whole {records} after it{until} cannot be used"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive unparsed records of a segment."""

    at: int  # offset in the file
    end: int  # offset after the last record, or the segment's end
    memory: mmap  # has the records from its beginning on,
    size: int  # in this number of bytes


def chunk_bytes(layout: Layout) -> int:
    """The memory of a chunk, in bytes, for models of this layout."""
    return _CHUNK + PAGE + filled(layout.nbytes)


class Segment:
    """A segment to read. Its file is opened on first use."""

    def __init__(self, path: Path) -> None:
        """Read the segment's beginning.

        Raises JournalError if it is not a segment, of another format, or damaged there.
        """
        self.path = path
        self.torn: Tear | None = None  # set once records() gets there
        self._open: int | None = None
        self._asked = 0  # the offset up to which the disk was asked to prefetch
        try:
            self.size = os.fstat(self._file).st_size
            self._check_file()
            found = self._record(PAGE)
            if found is None or not isinstance(found.message, SegmentHead):
                raise JournalDamaged(f"{path}: its first record is not a segment's head")
            self.head = found.message
            self._check_head(found)
            standing = self._record(found.end)
            if standing is None or not isinstance(standing.message, Standing):
                raise JournalDamaged(f"{path}: its second record is not a standing")
            self._check_follows(standing, found.chain)
            # The recent ends are long, and only recovery needs them.
            self.standing = standing.message.model_copy(update={"done": ()})
            self.standing_record = replace(standing, message=self.standing)
            self.layout = self._layout()
            encoded = WIRE_FORMATS in self.head.needs
            self._most = most_bytes(self.layout) if encoded else self.layout.nbytes
            models = 1 if self.standing.memory is None else 2
            self._check_payload(standing, models * self.layout.nbytes)
            self.elsewhere = dict(self.standing.elsewhere)  # device -> segment with its vector
            *_, last = standing, *(record for record, _ in self.vectors())
            self.beginning = SegmentEnd(path, last.end, last.chain)  # where the records begin
        except BaseException:
            self.close()
            raise

    def _check_file(self) -> None:
        parts = file_parts(self._read(FILE_BYTES, 0))
        if parts is None:
            raise JournalError(f"{self.path}: is not a journal segment")
        number, self._salt = parts
        if number != FORMAT:
            which = "0.1.0" if number == 1 else "the release that wrote it"
            raise JournalError(
                f"{self.path}: has journal format {number}, but this release reads format "
                f"{FORMAT}: use {which} to read it"
            )

    def _check_head(self, found: Record) -> None:
        unknown = [need for need in self.head.needs if need not in KNOWN]
        if unknown:
            raise JournalError(
                f"{self.path}: needs {reprlib.repr(unknown[0])}, which this release does not know: "
                "read it with a newer one"
            )
        self._check_follows(found, BEGINNING)
        named = (self.head.predecessor, self.head.cut, self.head.follows)
        if any(part is None for part in named) and named != (None, None, None):
            raise JournalDamaged(f"{found.place.where}: names its predecessor only in part")

    def _layout(self) -> Layout:
        try:
            layout = Layout.decode(self.head.layout)
        except LayoutMismatch as error:
            raise JournalDamaged(f"{self.path}: {error}") from error
        return unshared.stored(self.path.parent, layout)

    @property
    def follows(self) -> Cut | None:
        """The segment's cut of its predecessor; None without a predecessor."""
        head = self.head
        if head.cut is None or head.follows is None:
            return None
        return Cut(head.cut, bytes.fromhex(head.follows), self.path.name)

    @property
    def _file(self) -> int:
        if self._open is None:
            self._open = _opened_to_read(self.path)
        return self._open

    def close(self) -> None:
        """Close the file; it is opened again on next use."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def done(self) -> tuple[tuple[Any, ...], ...]:
        """Recent ends in the standing: the fields of :class:`fedstream.core.records.End`."""
        standing = self._record(self.standing_record.place.offset)
        if standing is None or not isinstance(standing.message, Standing):
            raise JournalDamaged(f"{self.path}: its second record is no longer a standing")
        return standing.message.done

    def vectors(self) -> Iterator[tuple[Record, DeviceVector]]:
        """The devices' vectors that belong to the standing. Raises JournalDamaged."""
        at, chain = self.standing_record.end, self.standing_record.chain
        for _ in self.standing.here:
            record = self._record(at)
            if record is None or not isinstance(record.message, DeviceVector):
                raise JournalDamaged(f"{Place(self.path, at).where}: is not a device's vector")
            self._check_follows(record, chain)
            yield record, record.message
            at, chain = record.end, record.chain

    def records(self, cut: Cut | None = None, after: Record | None = None) -> Iterator[Record]:
        """The records after the beginning, up to ``cut`` or to the torn tail.

        ``after``: begin after this record instead. Raises JournalDamaged at a damaged record.
        """
        at, chain = self.beginning.at, self.beginning.chain
        if after is not None:
            at, chain = after.end, after.chain
        end = self.size if cut is None else cut.at
        while at < end and (record := self._whole(at, cut, chain)) is not None:
            yield record
            at, chain = record.end, record.chain
        self._check_end(cut, chain)

    def appended(self, after: SegmentEnd) -> Iterator[Record]:
        """The whole records that a writer has added since. Raises JournalDamaged."""
        at, chain, self.size = after.at, after.chain, os.fstat(self._file).st_size
        while (record := self._record(at)) is not None:
            self._check_follows(record, chain)
            yield record
            at, chain = record.end, record.chain

    def messages(self, cut: Cut | None) -> Iterator[RecordBatch]:
        """The records of :meth:`records`, much faster and many together.

        Checks everything but the messages' content. Raises JournalError at a record that is not
        whole, also at a torn tail: :meth:`records` then has the details.
        """
        at, chain = self.beginning.at, self.beginning.chain
        end, salt = self.size if cut is None else cut.at, salt_bytes(self._salt)
        while at < end:
            with self._told(at):
                batch = batch_at(self._file, salt, at, end, chain)
            if not batch.offsets:
                raise JournalDamaged(f"damaged record: {Place(self.path, at).where}")
            yield batch
            at, chain = batch.end, batch.chain
        self._check_end(cut, chain)

    def at(self, offset: int) -> Record:
        """The record at an offset where :meth:`records` found one. Raises JournalDamaged."""
        record = self._record(offset)
        if record is None:
            raise JournalDamaged(f"damaged record: {Place(self.path, offset).where}")
        return record

    def _whole(
        self, at: int, cut: Cut | None, chain: bytes, begin: memoryview | None = None
    ) -> Record | None:
        """The record at ``at``; None where the torn tail begins. Raises JournalDamaged."""
        record = self._record(at, begin)
        if record is not None and (cut is None or record.end <= cut.at):
            self._check_follows(record, chain)
            return record
        place = Place(self.path, at)
        if cut is not None and self.size < cut.at:
            raise JournalDamaged(
                f"{place.where}: truncated: {cut.successor} expects {cut.at} bytes of it, "
                f"{self.size} are there"
            )
        if cut is not None:
            raise JournalDamaged(f"damaged record: {place.where}")
        self.tear(at, f"damaged record: {place.where}")
        return None

    def _check_follows(self, record: Record, chain: bytes) -> None:
        if record.follows != chain:
            raise JournalDamaged(
                f"{record.place.where}: does not follow the record before it: one of them was "
                "replaced"
            )

    def _check_end(self, cut: Cut | None, chain: bytes) -> None:
        if cut is not None and chain != cut.chain:
            raise JournalDamaged(
                f"{Place(self.path, cut.at).where}: {cut.successor} follows a different record "
                "from the one that ends here"
            )

    def tear(self, at: int, damage: str) -> None:
        """End the segment at ``at``, where a record is not whole.

        Raises JournalDamaged with the text ``damage`` if a later record states that it was on disk.
        """
        behind, version = 0, None
        for page in range(at + PAGE, self.size, PAGE):
            record = self._record(page)
            if record is None:
                continue
            if record.synced > at:
                raise JournalDamaged(damage)
            behind += 1
            if isinstance(record.message, EntryRecord):
                version = record.message.version
        self.torn = Tear(Place(self.path, at), behind, version)

    def chunks(self, cut: Cut | None, memory: Iterator[mmap]) -> Iterator[Chunk]:
        """The records of :meth:`records` in unparsed chunks, for :meth:`found`.

        Each chunk takes the next ``memory``, of :func:`chunk_bytes`, and more only for a long
        message. Opens the file anew, so another thread may use the segment. Raises JournalError.
        """
        at, end = self.beginning.at, self.size if cut is None else cut.at
        with _reading(self.path) as file:
            while at < end and (into := next(memory, None)) is not None:
                chunk = self._chunk(file, at, end, into)
                yield chunk
                at = chunk.end

    def _chunk(self, file: int, at: int, end: int, into: mmap) -> Chunk:
        """Read one chunk, and then the rest of its last record."""
        size = whole = 0  # bytes read, and those of them in whole records
        wanted = min(_CHUNK, end - at)
        while True:
            if wanted > len(into):
                into, size = mmap(-1, wanted), 0
            size += self._fill(file, at + size, memoryview(into)[size:wanted])
            if size < wanted:
                return Chunk(at, end, into, size)  # the file ends here
            wanted = whole + PAGE
            while wanted <= size:
                frame = frame_of(memoryview(into)[whole:])
                if frame is None or frame.payload > self._most:
                    return Chunk(at, end, into, size)  # found() raises the error
                wanted = frame.end(whole)
                if wanted <= size:
                    whole, wanted = wanted, wanted + PAGE
            if whole >= _CHUNK or at + whole == end:
                return Chunk(at, at + whole, into, size)
            if at + wanted > end:
                return Chunk(at, end, into, size)

    def _fill(self, file: int, at: int, view: memoryview) -> int:
        """Fill ``view`` from the file; return the bytes read, fewer only if the file ends."""
        size = 0
        while size < len(view):
            with self._told(at + size):
                read = os.preadv(file, [view[size:]], at + size)
            if not read:
                break
            size += read
        return size

    def found(
        self, chunks: Iterator[Chunk], cut: Cut | None
    ) -> Iterator[tuple[Chunk, Record, Payload | None]]:
        """The records of all chunks, each with its payload, which shares the chunk's memory.

        Raises JournalDamaged like :meth:`records` and :meth:`load`.
        """
        chain = self.beginning.chain
        for chunk in chunks:
            view, at = memoryview(chunk.memory)[: chunk.size], chunk.at
            while at < chunk.end:
                record = self._whole(at, cut, chain, view[at - chunk.at :])
                if record is None:
                    return  # nothing counts after a torn record
                payload = None
                if record.payload_bytes:
                    if record.end - chunk.at > chunk.size:
                        raise JournalDamaged(f"{self.path}: ends in the middle of a record")
                    start = record.payload - chunk.at
                    payload = Payload(np.frombuffer(view, np.uint8, record.payload_bytes, start))
                yield chunk, record, payload
                at, chain = record.end, record.chain
        self._check_end(cut, chain)

    def load(self, record: Record, *into: Payload) -> None:
        """Read a record's payload into blocks, one after the other. Raises JournalDamaged."""
        self._check_payload(record, sum(block.buffer.nbytes for block in into))
        if not self._asked - _AHEAD < record.end <= self._asked - _AHEAD // 2:
            # A reader of one payload usually wants the next: let the disk prefetch it.
            self._asked = record.end + _AHEAD
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, record.end, _AHEAD, os.POSIX_FADV_WILLNEED)
        at = record.payload
        for block in into:
            view = block.buffer.data
            if self._fill(self._file, at, view) < len(view):
                raise JournalDamaged(f"{self.path}: ends in the middle of a record")
            at += len(view)

    def digest(self, record: Record, begin: int, size: int, *, like: str) -> str:
        """Digest of a part of a record's payload, by the algorithm of ``like``, piece by piece.

        Raises JournalDamaged.
        """
        made, at = Digester(algorithm_of(like)), record.payload + begin
        end = at + size
        room = memoryview(bytearray(min(size, _CHUNK)))
        while at < end:
            piece = room[: end - at]
            if self._fill(self._file, at, piece) < len(piece):
                raise JournalDamaged(f"{self.path}: ends in the middle of a record")
            made.update(piece)
            at += len(piece)
        return made.digest()

    def _check_payload(self, record: Record, nbytes: int) -> None:
        if record.payload_bytes != nbytes:
            raise JournalDamaged(
                f"{record.place.where}: a payload of {record.payload_bytes} "
                "bytes, which does not fit the layout"
            )

    def _record(self, at: int, there: memoryview | None = None) -> Record | None:
        """The record at ``at``; None if there is no whole one. ``there``: its bytes, if read.

        Raises JournalDamaged for a record that was written at another offset.
        """
        # One page holds the frame and, usually, the whole message.
        begin = self._read(PAGE, at) if there is None else bytes(there[:PAGE])
        frame = frame_parts(begin)
        if frame is None:
            return None
        length, payload, synced, offset, follows, checksum = frame
        start = at + filled(FRAME_BYTES + length)
        end = start + filled(payload)
        if end > self.size:
            return None
        data = begin[: FRAME_BYTES + length]
        if len(data) < FRAME_BYTES + length:
            data += self._read(FRAME_BYTES + length - len(data), at + len(data))
        if not is_whole(self._salt, data, checksum):
            return None
        place = Place(self.path, at)
        if offset != at:
            raise JournalDamaged(f"{place.where}: holds the record of byte {offset}")
        try:
            found = decode(data[FRAME_BYTES:], *KINDS)
        except BadMessage as error:
            raise JournalDamaged(f"{place.where}: {error}") from error
        return Record(found, place, start, payload, synced, end, follows, checksum)

    def _read(self, size: int, at: int) -> bytes:
        with self._told(at):
            return os.pread(self._file, size, at)

    @contextmanager
    def _told(self, at: int) -> Iterator[None]:
        """Turn a read error into a JournalError with the place."""
        try:
            yield
        except OSError as error:
            where = Place(self.path, at).where
            raise JournalError(f"{where}: cannot be read: {error.strerror}") from error


def _opened_to_read(path: Path) -> int:
    try:
        return open_regular(path)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    file = _opened_to_read(path)
    try:
        yield file
    finally:
        os.close(file)
