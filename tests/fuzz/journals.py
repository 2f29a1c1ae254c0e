"""Hostile journals: whole records with right checksums, whose messages say anything.

A journal as a value is ``{"name of a segment": [[message, payload], ...]}``. What it says of its
own chain (``cut``, ``follows``) is corrected when it is written, unless that is what was changed.
"""

from __future__ import annotations

import gzip
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack

from fedstream.core.errors import BadMessage, FedstreamError
from fedstream.core.layout import PAGE
from fedstream.core.messages import decode
from fedstream.history.index import columns_of
from fedstream.journal import (
    EvaluationEnded,
    JournalError,
    QuarantineSet,
    RoundClosed,
    Taken,
    contributions,
    cuts,
    inspection,
    name_of,
    opened,
    uncounted,
)
from fedstream.journal.frames import FRAME_BYTES, file_page, filled, frame_of
from fedstream.journal.frames import packed as framed
from fedstream.journal.rebuild import recovered
from fedstream.journal.record_batches import Path as ValuePath
from fedstream.journal.record_batches import alike
from fedstream.journal.replay import Replayer
from tests.fuzz.mutation import packed

GOLDEN = Path(__file__).parents[1] / "data" / "journals"
_RIGHT = "as it is"
_SALT = 7
MANY = 10  # times that the messages are repeated, so that it is worth reading them together


def values() -> list[dict[str, Any]]:
    """The golden journals, of every strategy."""
    return [_unpacked(folder) for folder in _folders()]


def files() -> list[bytes]:
    """Their first segments, as files."""
    return [gzip.decompress(min(folder.glob("*.gz")).read_bytes()) for folder in _folders()]


def encoded(value: Any) -> bytes:
    """Such a value as one block of bytes."""
    return packed(value)


def read(data: bytes) -> None:
    """Everything that is done with a stranger's journal. Raises JournalError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            value = msgpack.unpackb(data, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException):
            value = None  # a segment's file as it is
        if isinstance(value, dict):
            _write(folder, value)
        else:
            (folder / name_of(1, 0)).write_bytes(data)
        _looked_at(folder)
        with Replayer(folder) as replayer:
            for moment in replayer:
                assert moment.model.layout


def _looked_at(folder: Path) -> None:
    with opened(folder) as chain:
        refusals = [verdict.damage for verdict in inspection.verify(chain) if verdict.damage]
        contributions.stats(chain, 2)
        uncounted(chain)
        inspection.divergence(chain, chain)
        recovered(chain[-1])
    _read_together(folder)
    if refusals:
        raise FedstreamError(refusals[0])


def _read_together(folder: Path) -> None:
    """What is read of many messages at once is what each of them says, or they are refused."""
    columns = columns_of(folder)
    assert len(columns.contained) == len(columns.updates)
    with opened(folder) as chain:
        for segment, cut in cuts(chain):
            try:
                batches = list(segment.messages(cut))
                many = [message for batch in batches for message in batch.messages] * MANY
                groups = list(alike(many))
            except JournalError:
                continue  # then they are read one by one
            for group in groups:
                for number, place in enumerate(group.places.tolist()):
                    with suppress(BadMessage):  # a name: no column has any
                        entry = decode(
                            many[place], Taken, RoundClosed, QuarantineSet, EvaluationEnded
                        )
                        said: dict[ValuePath, float] = {
                            ("version",): entry.version,
                            ("time",): entry.time,
                        }
                        if isinstance(entry, Taken):
                            said["upload", "tau"] = entry.upload.tau
                            said["weight",] = entry.weight
                        for path in said.keys() & group.numbers.keys():
                            assert group.numbers[path][number] == said[path], path


def _write(folder: Path, value: dict[Any, Any]) -> None:
    ends: dict[str, tuple[int, str]] = {}  # segment -> where it ends
    for name, records in value.items():
        path = folder / (str(name).replace("/", "_").replace("\0", "_")[:100].strip(".") or "none")
        data, chain = bytearray(_paged(file_page(_SALT))), bytes(32)
        for record in records if isinstance(records, list) else []:
            message, payload = _parts(record)
            if isinstance(message, dict) and message.get("cut") == _RIGHT:
                cut, follows = ends.get(str(message.get("predecessor")), (PAGE, "0" * 64))
                message = message | {"cut": cut, "follows": follows}
            begin, chain = framed(
                packed(message),
                payload=len(payload),
                synced=0,
                offset=len(data),
                follows=chain,
                salt=_SALT,
            )
            data += _paged(begin) + _paged(payload)
        path.write_bytes(data)
        ends[str(name)] = (len(data), chain.hex())


def _parts(record: Any) -> tuple[Any, bytes]:
    message, payload, *_ = [*record, b"", b""] if isinstance(record, list) else (record, b"")
    return message, payload if isinstance(payload, bytes) else b""


def _paged(data: bytes) -> bytes:
    """Bytes up to the end of their last page."""
    return data + bytes(filled(len(data)) - len(data))


def _folders() -> list[Path]:
    return sorted(path for path in GOLDEN.iterdir() if path.is_dir())


def _unpacked(folder: Path) -> dict[str, Any]:
    return {
        path.name.removesuffix(".gz"): _records(gzip.decompress(path.read_bytes()))
        for path in sorted(folder.glob("*.journal.gz"))
    }


def _records(data: bytes) -> list[Any]:
    found, at = [], PAGE
    while at < len(data) and (frame := frame_of(data[at:])) is not None:
        begin = at + FRAME_BYTES
        message = msgpack.unpackb(data[begin : begin + frame.length], strict_map_key=False)
        if message.get("cut") is not None:
            message["cut"] = message["follows"] = _RIGHT
        start = frame.payload_at(at)
        found.append([message, data[start : start + frame.payload]])
        at = frame.end(at)
    return found
