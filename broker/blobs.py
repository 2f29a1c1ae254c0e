"""Blobs: models and updates as Redis hashes of chunks of about 1 MiB.

Chunks move 2 to 5 times faster than one value of 100 MB and stay far from Redis's limit of 512 MB
for one value. A blob is written before the entry that names it, once, under a name that is never
used again, with an expiry that admission removes: what a crashed writer leaves behind goes away by
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedstream.broker.client import Client, Command
from fedstream.broker.errors import BlobDamaged, BlobMissing, Foreign
from fedstream.broker.layout import Model

# Bytes: a MiB less what Redis puts in front of it. One byte more would take 1.25 MiB of its memory.
CHUNK = (1 << 20) - 64
WINDOW = 8  # chunks on their way at once: bounds the memory that a transfer takes on top

_SIZE = b"size"
_DIGEST = b"digest"


async def write(client: Client, key: str, model: Model, *, expire_s: float) -> None:
    """Writes the model's bytes under ``key``, to expire ``expire_s`` after the last of them."""
    data = model.buffer.data
    expire: Command = ("PEXPIRE", key, round(expire_s * 1000))
    # Size and expiry come first, together and alone: no half-written blob is there for ever, and
    # one that expired while it was written has no size.
    await client.pipeline([("MULTI",), ("HSET", key, _SIZE, data.nbytes), expire, ("EXEC",)])
    for first in range(0, data.nbytes, WINDOW * CHUNK):
        starts = range(first, min(first + WINDOW * CHUNK, data.nbytes), CHUNK)
        chunks: list[Command] = [("HSET", key, at // CHUNK, data[at : at + CHUNK]) for at in starts]
        await client.pipeline([*chunks, expire])


async def prepare(client: Client, key: str, model: Model, *, expire_s: float) -> Sequence[Command]:
    """Writes the model; one of a single chunk rides ahead of the script that names it instead.

    The commands for that, all or nothing. They save a round trip; as an argument of the script the
    chunk would be copied into Lua, which costs Redis more than all the rest.
    """
    data = model.buffer.data
    if data.nbytes > CHUNK:
        await write(client, key, model, expire_s=expire_s)
        return ()
    put = ("HSET", key, _SIZE, data.nbytes, *((0, data) if data.nbytes else ()))
    return (("MULTI",), put, ("PEXPIRE", key, round(expire_s * 1000)), ("EXEC",))


async def read(client: Client, key: str, into: Model, *, digest: str) -> None:
    """Reads the blob under ``key`` into a model and checks size and digest.

    Takes whatever length a chunk has, so it is for what no site can write: models, and updates
    whose lengths admission has checked. Raises BlobMissing if it is not there, BlobDamaged if its
    bytes are not those announced; the model's bytes are undefined then.
    """
    data = into.buffer
    chunks = -(-data.nbytes // CHUNK)
    at = 0
    for first in range(0, max(chunks, 1), WINDOW):
        numbers = range(first, min(first + WINDOW, chunks))
        size, *found = await _asked(client, key, numbers)
        if size is None:
            raise BlobMissing(key)
        if size != b"%d" % data.nbytes:
            said = size.decode(errors="replace")
            raise BlobDamaged(f"blob {key} has {said} bytes, expected {data.nbytes}")
        for chunk in found:
            if chunk is None or at + len(chunk) > data.nbytes:
                raise BlobMissing(key) if chunk is None else BlobDamaged(f"blob {key} is too long")
            data[at : at + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            at += len(chunk)
    if at != data.nbytes:
        raise BlobDamaged(f"blob {key} ends after {at} of {data.nbytes} bytes")
    # A large one takes longer than the event loop can spare.
    own = into.digest() if chunks < 2 else await asyncio.to_thread(into.digest)
    if own != digest:
        raise BlobDamaged(f"blob {key} has digest {own}, announced was {digest}")


async def _asked(client: Client, key: str, numbers: range) -> list[Any]:
    """The size that a blob says, and those of its chunks."""
    rest: list[Command] = [("HGET", key, n) for n in numbers[1:]]
    begin, *more = await _of(client, key, [("HMGET", key, _SIZE, *numbers[:1]), *rest])
    return [*begin, *more]


async def _of(client: Client, key: str, commands: Sequence[Command]) -> list[Any]:
    """The replies to what is asked of a blob. Raises BlobDamaged if something else is there."""
    try:
        return await client.pipeline(commands)
    except Foreign as error:  # whoever may write updates may put anything in the place of one
        raise BlobDamaged(f"{key} is no blob") from error


async def keep(client: Client, key: str, size: int) -> bool:
    """Takes the blob's expiry away: whether all of its ``size`` bytes are there. Reads none."""
    lengths = [len(b"%d" % size), *(min(CHUNK, size - at) for at in range(0, size, CHUNK))]
    parts = (_SIZE, *range(len(lengths) - 1))
    asked: list[Command] = [("HSTRLEN", key, part) for part in parts]
    try:
        _, *found = await _of(client, key, [("PERSIST", key), *asked])
    except BlobDamaged:
        return False
    return found == lengths


async def recall(client: Client, key: str, into: Model) -> bool:
    """Reads what was handed out under ``key``, which has its digest: whether there was any.

    Raises BlobDamaged or BlobMissing if another takes its place meanwhile: read it again.
    """
    digest = await client.call("HGET", key, _DIGEST)
    if digest is None:
        return False
    await read(client, key, into, digest=digest.decode())
    return True
