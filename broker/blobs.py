"""Blobs: models and updates as Redis hashes of chunks of about 1 MiB.

Chunks move 2 to 5 times faster than a single value of 100 MB and stay far below Redis's limit of
512 MB per value. A blob is written once, before the entry that names it, and the blob's name is
never reused. A blob expires unless admission removes its expiry, so leftovers of a crashed writer
go away by themselves.

The field ``size`` of a blob has the blob's size in bytes. The blob of an encoded model has a field
with format, size and digest instead, so a release that knows no formats takes the blob for missing
and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.core.digest import Digester, algorithm_of
from fedstream.core.errors import BlobDamaged, BlobMissing, Foreign
from fedstream.core.layout import Payload
from fedstream.core.messages import Encoded

# Bytes: 1 MiB less Redis's header. One byte more would take 1.25 MiB of Redis's memory.
CHUNK = (1 << 20) - 64
# Bytes of a chunk that another release may choose. Admission holds sites to this: Redis measures
# every chunk, and a reader has WINDOW of them in memory.
SHORTEST, LONGEST = 1 << 16, 1 << 22
WINDOW = 8  # chunks in flight: bounds the extra memory that a transfer takes

READS = ("hget", "hmget")  # commands that read a blob
WRITES = ("multi", "exec", "hset", "pexpire")

SIZE = b"size"
_ENCODED = b"encoded"
_DIGEST = b"digest"
_CHUNKS = b"chunks"


def chunks_of(size: int) -> int:
    """The number of chunks in which this release writes ``size`` bytes.

    An entry that names a blob states this number, as another release may choose another chunk size.
    """
    return -(-size // CHUNK)


def _statement(size: int, encoded: Encoded | None) -> tuple[bytes, bytes]:
    """Name and value of the field with the blob's size, or with an encoded model's description."""
    return (_ENCODED, encoded.text.encode()) if encoded else (SIZE, b"%d" % size)


async def write(
    client: Client, key: str, payload: Payload, *, expire_s: float, encoded: Encoded | None = None
) -> None:
    """Write the payload's bytes under ``key``, expiring ``expire_s`` seconds after the last write.

    ``encoded``: format, size and digest of an encoded model; None: plain bytes.
    """
    data = payload.buffer.data
    states = _statement(data.nbytes, encoded)
    expire: Command = ("PEXPIRE", key, round(expire_s * 1000))
    # Size and expiry come first, in one transaction: a half-written blob can't stay for ever, and a
    # blob that expired while it was written has no size.
    await client.pipeline([("MULTI",), ("HSET", key, *states), expire, ("EXEC",)])
    for first in range(0, data.nbytes, WINDOW * CHUNK):
        starts = range(first, min(first + WINDOW * CHUNK, data.nbytes), CHUNK)
        chunks: list[Command] = [("HSET", key, at // CHUNK, data[at : at + CHUNK]) for at in starts]
        await client.pipeline([*chunks, expire])


async def prepare(
    client: Client, key: str, payload: Payload, *, expire_s: float, encoded: Encoded | None = None
) -> Sequence[Command]:
    """Write the payload now, or return the commands that write it if it fits into one chunk.

    The commands are one transaction. Sent ahead of the script that names the blob, they save a
    round trip. If the chunk were an argument of the script, Redis would copy it into Lua, which
    costs more than everything else. ``encoded``: as for :func:`write`.
    """
    data = payload.buffer.data
    if data.nbytes > CHUNK:
        await write(client, key, payload, expire_s=expire_s, encoded=encoded)
        return ()
    states = _statement(data.nbytes, encoded)
    put = ("HSET", key, *states, *((0, data) if data.nbytes else ()))
    return (("MULTI",), put, ("PEXPIRE", key, round(expire_s * 1000)), ("EXEC",))


async def read(
    client: Client,
    key: str,
    into: Payload,
    *,
    digest: str | None,
    chunks: int | None,
    encoded: Encoded | None = None,
) -> None:
    """Read the blob under ``key`` into a payload of its size and check its size and digest.

    ``digest``: the expected digest of the bytes; None: the caller checks the digest. ``chunks``:
    the number of chunks that the entry states; None: an earlier release wrote the entry, so this
    release's chunk size is assumed. ``encoded``: as for :func:`write`. Accepts chunks of any
    length, so use it only for blobs that no site can write: models, and updates whose lengths
    admission has checked. Raises BlobMissing if there is no blob, BlobDamaged if size or digest
    differ; the payload's bytes are then undefined.
    """
    data = into.buffer.data
    size = data.nbytes
    field, expected = _statement(size, encoded)
    chunks = chunks_of(size) if chunks is None else chunks
    at, digester = 0, Digester(algorithm_of(digest or ""))
    hashing: asyncio.Future[None] | None = None
    try:
        for first in range(0, max(chunks, 1), WINDOW):
            numbers = range(first, min(first + WINDOW, chunks))
            part = data[at:]
            asked = _asking(key, field, numbers)
            said = await _of(client, key, asked, [None, *(part for _ in numbers)])
            begin, at = at, at + _length(key, expected, said)
            if at > size:
                raise BlobDamaged(f"blob {key} is too long")
            if digest is None:
                continue
            if size <= CHUNK:
                digester.update(data[begin:at])
                continue
            # In a thread, as hashing would block the event loop, and while the next chunks arrive.
            if hashing is not None:
                await hashing
            hashing = asyncio.ensure_future(asyncio.to_thread(digester.update, data[begin:at]))
    finally:
        if hashing is not None:
            await hashing  # the thread still reads the payload
    _check(key, at, size, digest and digester.digest(), digest)


async def read_chunk(
    client: Client, key: str, number: int, size: int, *, encoded: Encoded | None = None
) -> bytes:
    """Read one chunk of a blob of ``size`` bytes in chunks of this release's size.

    Checks the chunk's length, but not its content. ``encoded``: as for :func:`write`. Raises
    BlobMissing, BlobDamaged.
    """
    field, expected = _statement(size, encoded)
    stated, data = await _of(client, key, _asking(key, field, range(number, number + 1)))
    if stated is None or data is None:
        raise BlobMissing(key)
    if stated != expected or len(data) != min(CHUNK, size - number * CHUNK):
        raise BlobDamaged(f"blob {key} has another size, or chunks of another length")
    return bytes(data)


@dataclass(frozen=True, slots=True)
class Wanted:
    """An update to read: its key, its expected size and digest, and the buffer for its bytes."""

    key: str
    into: Payload
    digest: str
    chunks: int | None  # as for :func:`read`

    @property
    def numbers(self) -> range:
        """The numbers of the update's chunks."""
        return range(chunks_of(self.into.buffer.nbytes) if self.chunks is None else self.chunks)


async def read_together(
    client: Client, wanted: Sequence[Wanted]
) -> list[BlobMissing | BlobDamaged | None]:
    """Read small blobs in one exchange; return for each the error of :func:`read`, or None.

    Small means a few MiB in total, because this hashes on the event loop.
    """
    asked: list[Command] = []
    places: list[memoryview | None] = []
    for one in wanted:
        data, numbers = one.into.buffer.data, one.numbers
        asked += _asking(one.key, SIZE, numbers)
        places += (None, *(data for _ in numbers))
    try:
        replies = iter(await client.pipeline(asked, into=places))
    except Foreign:  # a site wrote another type under one of the keys: read one blob at a time
        return [await _failure(client, one) for one in wanted]
    return [_failure_in(one, list(islice(replies, 1 + len(one.numbers)))) for one in wanted]


def _failure_in(one: Wanted, said: list[Any]) -> BlobMissing | BlobDamaged | None:
    """The error in the replies about a blob; None if size and digest are as wanted."""
    size = one.into.buffer.nbytes
    try:
        length = _length(one.key, _statement(size, None)[1], said)
        _check(one.key, length, size, one.into.digest_like(one.digest), one.digest)
    except (BlobMissing, BlobDamaged) as error:
        return error
    return None


async def _failure(client: Client, one: Wanted) -> BlobMissing | BlobDamaged | None:
    try:
        await read(client, one.key, one.into, digest=one.digest, chunks=one.chunks)
    except (BlobMissing, BlobDamaged) as error:
        return error
    return None


def _asking(key: str, field: bytes, numbers: range) -> list[Command]:
    """The commands that read ``field`` of a blob, and the chunks with these numbers."""
    return [("HGET", key, field), *(("HGET", key, n) for n in numbers)]


def _length(key: str, expected: bytes, said: Sequence[Any]) -> int:
    """Total length of the chunks in the replies to :func:`_asking`.

    Raises BlobMissing, or BlobDamaged if the field's value isn't ``expected``.
    """
    stated, *lengths = said
    if stated is None:
        raise BlobMissing(key)
    if stated != expected:
        other = stated.decode(errors="replace")
        raise BlobDamaged(f"blob {key} has {other} bytes, expected {expected.decode()}")
    if None in lengths:
        raise BlobMissing(key)
    return sum(lengths)


def _check(key: str, length: int, size: int, own: str | None, digest: str | None) -> None:
    """Raise BlobDamaged if a blob's length or digest is not the expected one."""
    if length > size:
        raise BlobDamaged(f"blob {key} is too long")
    if length < size:
        raise BlobDamaged(f"blob {key} ends after {length} of {size} bytes")
    if own != digest:
        raise BlobDamaged(f"blob {key} has digest {own}, expected {digest}")


async def _of(
    client: Client,
    key: str,
    commands: Sequence[Command],
    into: Sequence[memoryview | None] | None = None,
) -> list[Any]:
    """Send commands that read a blob; return the replies.

    Raises BlobDamaged if the key holds a value of another type.
    """
    try:
        return await client.pipeline(commands, into=into)
    except Foreign as error:  # a site may write a value of any type under an update's key
        raise BlobDamaged(f"{key} is not a blob") from error


async def keep(
    client: Client, key: str, size: int, *, chunks: int | None, encoded: Encoded | None = None
) -> bool:
    """Remove the blob's expiry and return whether all ``size`` bytes are there.

    Checks the chunks' lengths without reading them. ``chunks``, ``encoded``: as for :func:`read`.
    """
    field, expected = _statement(size, encoded)
    parts = (field, *range(chunks_of(size) if chunks is None else chunks))
    asked: list[Command] = [("HSTRLEN", key, part) for part in parts]
    try:
        _, digits, *lengths = await _of(client, key, [("PERSIST", key), *asked])
    except BlobDamaged:
        return False
    return digits == len(expected) and all(lengths) and sum(lengths) == size


async def stated(client: Client, key: str) -> tuple[int | None, Encoded | None]:
    """Read a published blob's number of chunks, and the description of an encoded model."""
    chunks, encoded = await client.call("HMGET", key, _CHUNKS, _ENCODED)
    return (
        None if chunks is None else int(chunks),
        None if encoded is None else Encoded.parsed(encoded),
    )


async def recall(client: Client, key: str, into: Payload) -> bool:
    """Read a blob that states its own digest, as handed-out vectors do; False if it is missing.

    Raises BlobDamaged or BlobMissing if the blob is replaced meanwhile: read it again.
    """
    digest, stated = await client.call("HMGET", key, _DIGEST, _CHUNKS)
    if digest is None:
        return False
    chunks = None if stated is None else int(stated)
    await read(client, key, into, digest=digest.decode(), chunks=chunks)
    return True
