"""The journal: what the updater did, in the order in which it did it, on disk.

A journal is a folder of segments. Only the epoch that made a segment ever writes to it, and a
segment begins complete (it is written aside and renamed) with

    its head      epoch, the segment before it and how much of that one counts, run, strategy
    a standing    where the run stood: version, model, the strategy's memory, what was done lately

and goes on with a record for every entry of the queue. So a standing is a checkpoint, recovery
reads the newest segment alone, and the oldest segments can go whenever there are too many.

A writer that was stopped past its lease and goes on writes into its own segment, behind the cut
that its successor has named: nobody reads that. A record is

    mark (4 bytes) | length of the message (4) | length of the payload (8)
    | bytes known to be on disk when it was written (8) | xxh3 of all that and the message (8)
    | the message, msgpack | the payload: a model's bytes

little-endian, filled up to a page behind the message and behind the payload: so they are written
past the system's cache, which for models costs more than the disk. The payload is covered by the
digest that the message states. A record that is not whole is the torn tail of a crash if nothing
behind it says that it was on disk, else the file is damaged.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import xxhash
from pydantic import Field

from broker.errors import BadMessage, FedstreamError, Fenced
from broker.layout import PAGE, Layout, Model, vector_of
from broker.messages import Contribution, Count, Message, Name, Outcome, Upload, decode
from runtime.config import Section
from updater.strategies.vectors import DeviceVectors

FORMAT = 2
SUFFIX = ".journal"

_FILE = struct.Struct("<8sI4xQ")  # magic, format, salt; alone on its page
_MAGIC = b"fedstrm\n"
_RECORD = struct.Struct("<IIQQQ")
_MARK = 0x6C6E726A  # "jrnl"
_MESSAGE = 16 << 20  # bytes; a longer one is no message of ours
_CHUNK = 2 << 20  # bytes that are read at once, and then to the end of a record
_AHEAD = 16 << 20  # bytes behind a payload that the disk is asked for in advance
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class JournalError(FedstreamError):
    """A journal that cannot be read or written; the message says which file and where."""


class JournalDamaged(JournalError):
    """A record that was on disk is not what it was."""


class JournalFull(JournalError):
    """There is no room for another record."""

    retriable = True


class JournalSettings(Section):
    """Where the journal is, how soon it is on disk, and how much of it is kept."""

    dir: str = "journal"
    sync: Literal["always", "interval", "never"] = "interval"
    sync_s: Annotated[float, Field(gt=0)] = 1.0  # interval: at most so long after it was written
    sync_bytes: Annotated[int, Field(gt=0)] = 64 << 20  # interval: or so much
    weights: bool = True  # false: everything but the updates' bytes is recorded
    segment_versions: Annotated[int, Field(ge=1)] = 4000  # a checkpoint after so many,
    segment_s: Annotated[float, Field(gt=0)] = 600.0  # so long
    segment_bytes: Annotated[int, Field(gt=0)] = 1 << 30  # or so much
    keep_bytes: Annotated[int, Field(gt=0)] = 10 << 30  # the newest segment is kept at any size
    keep_segments: Annotated[int, Field(ge=1)] | None = None
    keep_s: Annotated[float, Field(gt=0)] | None = None
    adopt: bool = False  # no journal, or not its end: begin with what Redis has


Counts: TypeAlias = dict[str, int]


class SegmentHead(Message):
    """The first record of a segment: what it belongs to."""

    kind: ClassVar[str] = "segment"
    needs: tuple[str, ...] = ()  # what a reader must know of besides the format
    epoch: Count
    number: Count  # of the epoch's segments
    predecessor: str | None = None  # file name
    cut: Count | None = None  # bytes of the predecessor that count
    lineage: Name  # the same from version 0 on, or since Redis's model was adopted
    run: Name
    task: Name
    devices: Count
    versions: Count  # the run ends with this one
    seed: Count
    created: float  # of the run, seconds since 1970
    strategy: dict[str, Any]  # name and parameters
    layout: bytes
    release: str  # of fedstream, numpy and the machine, for whoever wonders about a bit
    time: float  # of the segment, seconds since 1970


class Standing(Message):
    """Where the run stands: the second record of a segment. Payload: the model, then the memory."""

    kind: ClassVar[str] = "standing"
    why: Literal["begun", "continued", "adopted"]
    version: Count
    digest: Name
    time: float  # of the version
    arrivals: Count = 0  # in the strategy's memory
    weight: float = 0.0  # summed there
    memory: str | None = None  # digest of its model
    held: tuple[Contribution, ...] = ()
    mean_staleness: float = 0.0
    counts: Counts = Field(default_factory=dict)  # of the run, as Redis had them last
    done: tuple[tuple[Any, ...], ...] = ()  # the fields of `End`s, lately, oldest first
    forgotten: Count = 0  # the version at which a task may have ended that `done` has no more
    rounds: tuple[str, ...] = ()  # entries that ended rounds lately, oldest first
    made: tuple[Contribution, ...] = ()  # the updates in the version
    finished: str | None = None  # why the run is over
    here: tuple[Count, ...] = ()  # devices whose vectors are the records that follow
    again: tuple[Count, ...] = ()  # those of them that are as they were: their segment went
    elsewhere: tuple[tuple[Count, Name], ...] = ()  # and the segments where the others' are


class DeviceVector(Message):
    """What a strategy remembers of a device. Payload: a vector as long as the parameters."""

    kind: ClassVar[str] = "device_vector"
    device: Count
    digest: Name


class Taken(Message):
    """One update and what became of it. Payload: its bytes as received, where they are recorded."""

    kind: ClassVar[str] = "taken"
    entry: Name  # of the queue
    upload: Upload
    outcome: Outcome
    reason: str = ""
    staleness: Count
    weight: float = 0.0  # as it was used, exactly
    version: Count  # after it
    digest: str | None = None  # of the version, if this made one
    time: float  # when
    received: float  # when it was admitted: the queue's clock
    finished: str | None = None  # why the run is over with this
    counts: Counts = Field(default_factory=dict)  # of the run, before this


class RoundClosed(Message):
    """The end of a round, as the queue brought it."""

    kind: ClassVar[str] = "round_closed"
    entry: Name
    round: Count  # the version that it was for
    late: bool = False  # the run was over: it ends nothing
    why: str = ""
    version: Count  # after it
    digest: str | None = None  # of the version, if this made one
    time: float
    received: float
    finished: str | None = None
    counts: Counts = Field(default_factory=dict)


Entry: TypeAlias = Taken | RoundClosed
_KINDS: tuple[type[Message], ...] = (SegmentHead, Standing, DeviceVector, Taken, RoundClosed)
VECTORS = "device vectors"  # what a segment with some of them needs
_KNOWN = {VECTORS}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is."""

    path: Path  # of the segment
    offset: int  # bytes from its beginning

    def __str__(self) -> str:
        return f"{self.path.name} at byte {self.offset}"

    @property
    def where(self) -> str:
        """The place with its folder, for messages."""
        return f"{self.path} at byte {self.offset}"


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was found: its message, and where its payload is."""

    message: Message
    place: Place
    payload: int  # offset in the file
    payload_bytes: int
    synced: int
    end: int  # offset behind it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some records of a segment on end, as they are in the file."""

    at: int  # offset in the file
    end: int  # offset behind the last of them, or to which the rest of the segment is no record
    memory: mmap  # from its beginning on, and ...
    size: int  # ... so many bytes of it


def chunk_bytes(layout: Layout) -> int:
    """The memory that a chunk of such models' updates takes."""
    return _CHUNK + PAGE + _filled(layout.nbytes)


def name_of(epoch: int, number: int) -> str:
    """A segment's file name; they sort by age."""
    return f"{epoch:08d}-{number:06d}{SUFFIX}"


# reading


class Segment:
    """A segment that is read. Nothing is ever written. It is open from the first look on."""

    def __init__(self, path: Path) -> None:
        """Raises JournalError if it is none, or of a newer format."""
        self.path = path
        self.torn: Place | None = None  # where the torn tail begins, once records() got there
        self._open: int | None = None
        self._asked = 0  # the offset up to which the disk was asked for payloads
        try:
            self.size = os.fstat(self._file).st_size
            self._check_file()
            found = self._record(PAGE)
            if found is None or not isinstance(found.message, SegmentHead):
                raise JournalDamaged(f"{path}: its first record is not a segment's head")
            self.head = found.message
            unknown = [need for need in self.head.needs if need not in _KNOWN]
            if unknown:
                raise JournalError(
                    f"{path}: needs {', '.join(unknown)}, which this release does not "
                    "know: read it with a newer one"
                )
            standing = self._record(found.end)
            if standing is None or not isinstance(standing.message, Standing):
                raise JournalDamaged(f"{path}: its second record is not a standing")
            # What was done lately is long, and recovery's alone.
            self.standing = standing.message.model_copy(update={"done": ()})
            self.standing_record = replace(standing, message=self.standing)
            self.layout = Layout.decode(self.head.layout)
            self.elsewhere = dict(self.standing.elsewhere)  # device -> segment with its vector
            self.begun = self.standing_record.end  # offset behind the beginning
            for record, _ in self.vectors():
                self.begun = record.end
        except BaseException:
            self.close()
            raise

    def _check_file(self) -> None:
        begin = os.pread(self._file, _FILE.size, 0)
        if len(begin) < _FILE.size or begin[: len(_MAGIC)] != _MAGIC:
            raise JournalError(f"{self.path}: is not a segment of a journal")
        _, number, self._salt = _FILE.unpack(begin)
        if number != FORMAT:
            which = "0.1.0" if number == 1 else "the release that wrote it"
            raise JournalError(
                f"{self.path}: is of journal format {number}, and this release reads {FORMAT}: use "
                f"{which} to read it"
            )

    @property
    def _file(self) -> int:
        if self._open is None:
            self._open = _opened_to_read(self.path)
        return self._open

    def close(self) -> None:
        """Closes the file until it is looked at again."""
        if self._open is not None:
            os.close(self._open)
            self._open = None

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def done(self) -> tuple[tuple[Any, ...], ...]:
        """What the standing says was done lately: the fields of :class:`broker.records.End`."""
        standing = self._record(self.standing_record.place.offset)
        if standing is None or not isinstance(standing.message, Standing):
            raise JournalDamaged(f"{self.path}: its second record is not a standing any more")
        return standing.message.done

    def vectors(self) -> Iterator[tuple[Record, DeviceVector]]:
        """The devices' vectors that belong to the standing. Raises JournalDamaged."""
        at = self.standing_record.end
        for _ in self.standing.here:
            record = self._record(at)
            if record is None or not isinstance(record.message, DeviceVector):
                raise JournalDamaged(f"{Place(self.path, at).where}: is not a device's vector")
            yield record, record.message
            at = record.end

    def records(self, cut: int | None = None) -> Iterator[Record]:
        """The records behind the beginning, up to ``cut`` or to the torn tail.

        Raises JournalDamaged where one is not whole that was.
        """
        at = self.begun
        end = self.size if cut is None else cut
        while at < end and (record := self._whole(at, cut)) is not None:
            yield record
            at = record.end

    def _whole(self, at: int, cut: int | None, begin: memoryview | None = None) -> Record | None:
        """The record ``at``; None where the torn tail begins. Raises JournalDamaged."""
        record = self._record(at, begin)
        if record is not None and (cut is None or record.end <= cut):
            return record
        place = Place(self.path, at)
        if cut is not None or self.was_on_disk(at):
            raise JournalDamaged(f"damaged record: {place.where}")
        self.torn = place
        return None

    def chunks(self, cut: int | None, memory: Iterator[mmap]) -> Iterator[Chunk]:
        """The records of :meth:`records` as they are in the file, for :meth:`found`.

        Each takes the next ``memory``, :func:`chunk_bytes` of it, and more only for a long message.
        Reads with a file of its own: another thread may use the segment. Raises JournalError.
        """
        at, end = self.begun, self.size if cut is None else cut
        with _reading(self.path) as file:
            while at < end and (into := next(memory, None)) is not None:
                chunk = self._chunk(file, at, end, into)
                yield chunk
                at = chunk.end

    def _chunk(self, file: int, at: int, end: int, into: mmap) -> Chunk:
        """The first bytes, as many as are read at once, and then what the last record lacks."""
        size = whole = 0  # bytes that are there, and those of them in whole records
        wanted = min(_CHUNK, end - at)
        while True:
            if wanted > len(into):
                into, size = mmap(-1, wanted), 0
            size += self._fill(file, at + size, memoryview(into)[size:wanted])
            if size < wanted:
                return Chunk(at, end, into, size)  # no more than that is there
            wanted = whole + PAGE
            while wanted <= size:
                mark, length, payload, _, _ = _RECORD.unpack_from(into, whole)
                wanted = whole + _filled(_RECORD.size + length) + _filled(payload)
                if mark != _MARK or length > _MESSAGE or payload not in (0, self.layout.nbytes):
                    return Chunk(at, end, into, size)  # whoever takes it in finds out what it is
                if wanted <= size:
                    whole, wanted = wanted, wanted + PAGE
            if whole >= _CHUNK or at + whole == end:
                return Chunk(at, at + whole, into, size)
            if at + wanted > end:
                return Chunk(at, end, into, size)

    def _fill(self, file: int, at: int, view: memoryview) -> int:
        """Bytes read; fewer than there is room for only where the file ends."""
        size = 0
        while size < len(view):
            try:
                read = os.preadv(file, [view[size:]], at + size)
            except OSError as error:
                where = Place(self.path, at + size).where
                raise JournalError(f"{where}: cannot be read: {error.strerror}") from error
            if not read:
                break
            size += read
        return size

    def found(self, chunk: Chunk, cut: int | None) -> Iterator[tuple[Record, Model | None]]:
        """The records of a chunk, each with its payload, which shares the chunk's memory.

        Raises JournalDamaged like :meth:`records` and :meth:`load`.
        """
        view, layout, at = memoryview(chunk.memory)[: chunk.size], self.layout, chunk.at
        while at < chunk.end:
            record = self._whole(at, cut, view[at - chunk.at :])
            if record is None:
                return
            payload = None
            if record.payload_bytes:
                self._check_payload(record, layout.nbytes)
                if record.end - chunk.at > chunk.size:
                    raise JournalDamaged(f"{self.path}: ends in the middle of a record")
                start = record.payload - chunk.at
                payload = Model(layout, np.frombuffer(view, np.uint8, layout.nbytes, start))
            yield record, payload
            at = record.end

    def load(self, record: Record, *into: Model) -> None:
        """Reads a record's payload into models, one behind the other. Raises JournalDamaged."""
        self._check_payload(record, sum(model.layout.nbytes for model in into))
        if not self._asked - _AHEAD < record.end <= self._asked - _AHEAD // 2:
            # Whoever reads one payload mostly wants the next: the disk works meanwhile.
            self._asked = record.end + _AHEAD
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file, record.end, _AHEAD, os.POSIX_FADV_WILLNEED)
        at = record.payload
        for model in into:
            view = model.buffer.data
            while view:
                read = os.preadv(self._file, [view], at)
                if not read:
                    raise JournalDamaged(f"{self.path}: ends in the middle of a record")
                at, view = at + read, view[read:]

    def _check_payload(self, record: Record, nbytes: int) -> None:
        if record.payload_bytes != nbytes:
            raise JournalDamaged(
                f"{record.place.where}: a payload of {record.payload_bytes} "
                "bytes, which is not the layout's"
            )

    def _record(self, at: int, there: memoryview | None = None) -> Record | None:
        """The record that begins ``at``; None if there is no whole one. ``there``: its bytes."""
        # Most messages come with their frame.
        begin = os.pread(self._file, PAGE, at) if there is None else bytes(there[:PAGE])
        if len(begin) < _RECORD.size:
            return None
        mark, length, payload, synced, checksum = _RECORD.unpack_from(begin)
        if mark != _MARK or length > _MESSAGE:
            return None
        if len(begin) < _RECORD.size + length:
            begin += os.pread(self._file, _RECORD.size + length - len(begin), at + len(begin))
        message = begin[_RECORD.size : _RECORD.size + length]
        if len(message) < length or checksum != _checksum(
            self._salt, begin[: _RECORD.size - 8], message
        ):
            return None
        place = Place(self.path, at)
        start = at + _filled(_RECORD.size + length)
        end = start + _filled(payload)
        if end > self.size:
            return None
        try:
            found = decode(message, *_KINDS)
        except BadMessage as error:
            raise JournalError(f"{place.where}: {error}") from error
        return Record(found, place, start, payload, synced, end)

    def was_on_disk(self, at: int) -> bool:
        """Whether a whole record behind ``at`` says that what is there was on disk."""
        later = (self._record(page) for page in range(at + PAGE, self.size, PAGE))
        return any(record is not None and record.synced > at for record in later)


def _opened_to_read(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _reading(path: Path) -> Iterator[int]:
    file = _opened_to_read(path)
    try:
        yield file
    finally:
        os.close(file)


def segments(folder: Path) -> list[Segment]:
    """The segments that count, oldest first, each but the last up to its successor's cut.

    None: there is no journal. Segments of writers that were fenced are left out, and the oldest
    ones that cannot be rebuilt, since devices' vectors went with what was before them. Raises
    JournalError for a foreign file, and if one is missing in the middle.
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
            chain[-1].close()  # there may be more of them than files that may be open
            name = chain[-1].head.predecessor
        if name is not None and names[0] < name:
            raise JournalError(
                f"{folder / name}: is missing, but older segments are there: put it back, or move "
                "the older ones away to begin behind it"
            )
    except BaseException:
        for segment in chain:
            segment.close()
        raise
    return _with_vectors(chain, set(names))[::-1]


def _with_vectors(chain: list[Segment], names: set[str]) -> list[Segment]:
    """The segments, newest first, as far as their devices' vectors are there.

    One whose segment is gone may be in a later segment again: it is looked for there.
    """
    again: dict[int, str] = {}  # device -> where its vector is, if it is the same in the next one
    for number, segment in enumerate(chain):
        gone = {device for device, name in segment.elsewhere.items() if name not in names}
        if number and not gone <= again.keys():
            return chain[:number]
        segment.elsewhere |= {device: again[device] for device in gone & again.keys()}
        again = segment.elsewhere | dict.fromkeys(segment.standing.again, segment.path.name)
    return chain


def cuts(chain: Sequence[Segment]) -> Iterator[tuple[Segment, int | None]]:
    """Each segment with the bytes of it that count; None: all that is whole."""
    for segment, successor in zip(chain, [*chain[1:], None], strict=True):
        yield segment, successor.head.cut if successor is not None else None


# writing


class Writer:
    """A segment that is written, by one thread at a time."""

    def __init__(
        self,
        folder: Path,
        head: SegmentHead,
        standing: Standing,
        *models: Model,
        vectors: DeviceVectors | None = None,
    ) -> None:
        """Makes the segment, whole and on disk. Raises JournalError; Fenced if it is there.

        ``vectors``: where those are that the standing says are here.
        """
        self.path = folder / name_of(head.epoch, head.number)
        self.head = head
        self._salt = secrets.randbits(64)  # so that no update can contain a record
        self._lock = Lock()  # between appending and syncing
        self._page = mmap(-1, PAGE)  # what a message is written from
        # Not another's: after Redis was emptied twice, two may try to begin the same epoch.
        aside = self.path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _opened(aside)
        except OSError as error:
            raise _translated(aside, error) from error
        self.size = 0
        self._synced = 0
        self._cuts = 0
        try:
            self._write([self._paged(_FILE.pack(_MAGIC, FORMAT, self._salt))])
            self.append(head)
            self.append(standing, *models)
            for device in standing.here:
                if vectors is None:
                    raise RuntimeError("a standing with vectors, without them")
                # Copied: rows of one array are not pages of their own.
                vector = vector_of(vectors[device]).copy()
                self.append(DeviceVector(device=device, digest=vector.digest()), vector)
            self.sync()
            _named(aside, self.path)
            _sync_folder(folder)
        except BaseException as error:
            os.close(self._file)
            with suppress(OSError):
                aside.unlink()
            if isinstance(error, FileExistsError):
                raise Fenced(f"another updater has begun {self.path}") from error
            if isinstance(error, FileNotFoundError) and folder.is_dir():
                raise Fenced(f"another updater took over, and cleared {aside} away") from error
            if isinstance(error, OSError):
                raise _translated(aside, error) from error
            raise

    @property
    def unsynced(self) -> int:
        """Bytes that may not be on disk yet."""
        return self.size - self._synced

    def append(self, message: Message, *models: Model) -> int:
        """Adds a record: the size of the file then.

        Raises JournalFull and leaves the file as it was, or JournalError.
        """
        packed = message.encode()
        payload = sum(model.layout.nbytes for model in models)
        frame = struct.pack("<IIQQ", _MARK, len(packed), payload, self._synced)
        if len(packed) > _MESSAGE:
            raise JournalError(f"{self.path}: a message of {len(packed)} bytes, at most {_MESSAGE}")
        checksum = _checksum(self._salt, frame, packed).to_bytes(8, "little")
        # Only whole models can lie behind one another, which they do in a standing alone.
        alone = models[0].pages if len(models) == 1 else None
        block = _joined(models) if alone is None and models else alone
        self._write([self._paged(frame + checksum + packed), *([block] if block else [])])
        return self.size

    def _paged(self, message: bytes) -> memoryview:
        """Bytes on pages of their own."""
        if len(message) > len(self._page):
            self._page = mmap(-1, _filled(len(message)))
        filled = _filled(len(message))
        self._page[: len(message)] = message
        self._page[len(message) : filled] = bytes(filled - len(message))
        return memoryview(self._page)[:filled]

    def _write(self, parts: list[memoryview]) -> None:
        at = self.size
        try:
            while parts:
                written = os.pwritev(self._file, parts, at)
                at += written
                while parts and written >= len(parts[0]):
                    written -= len(parts.pop(0))
                if written:
                    parts[0] = parts[0][written:]
        except OSError as error:
            self.cut(self.size)
            raise _translated(self.path, error) from error
        self.size = at

    def cut(self, size: int) -> None:
        """Takes back what was appended behind ``size``, and was not said to have happened."""
        with self._lock:
            self.size = size
            self._synced = min(self._synced, size)
            self._cuts += 1
        with suppress(OSError):  # what is left there, the next record overwrites
            os.ftruncate(self._file, size)

    def sync(self) -> int:
        """Everything that was appended before the call is on disk: how many bytes that is.

        May run beside :meth:`append`, in another thread. After it failed nobody knows what is on
        disk: it raises JournalError, and the updater has to begin again with what is there.
        """
        with self._lock:
            size, cuts = self.size, self._cuts
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise JournalError(f"{self.path}: not written to disk: {error.strerror}") from error
        with self._lock:
            if cuts == self._cuts:  # else something was taken back: other bytes may be there now
                self._synced = max(self._synced, size)
            return self._synced

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _translated(path: Path, error: OSError) -> JournalError:
    if error.errno in _FULL:
        return JournalFull(f"{path}: no room: {error.strerror}; make some")
    return JournalError(f"{path}: cannot be written: {error.strerror}")


def _named(aside: Path, path: Path) -> None:
    """Unlike a renaming, a link never replaces another's. FileExistsError if there is one."""
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        aside.rename(path)  # a file system without links
    else:
        aside.unlink()


def sync_file(path: Path) -> None:
    """What is in a file is on disk. Raises JournalError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise JournalError(f"{path}: not written to disk: {error.strerror}") from error


def _sync_folder(folder: Path) -> None:
    """A file's name is on disk only once its folder is."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _checksum(salt: int, frame: bytes, message: bytes) -> int:
    checksum = xxhash.xxh3_64(frame, seed=salt)
    checksum.update(message)
    return checksum.intdigest()


def _filled(length: int) -> int:
    return length + -length % PAGE


def _joined(models: Sequence[Model]) -> memoryview:
    """Models behind one another, on pages."""
    block = mmap(-1, max(PAGE, _filled(sum(model.layout.nbytes for model in models))))
    at = 0
    for model in models:
        block[at : at + model.layout.nbytes] = model.buffer.data
        at += model.layout.nbytes
    return memoryview(block)


def _opened(path: Path) -> int:
    """A new file, past the system's cache where it can be."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o644)  # a file system that has only its cache
