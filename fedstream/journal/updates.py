"""The payloads in a journal: updates as received, sums of masks, and what these encode."""

from __future__ import annotations

from fedstream.core.errors import Undecodable
from fedstream.core.formats import Format, format_of
from fedstream.core.layout import Layout, Model, Payload
from fedstream.journal.errors import JournalDamaged, JournalError, UpdateAltered
from fedstream.journal.records import SumOpened, Taken
from fedstream.journal.segment import Record, Segment


def received(segment: Segment, record: Record, room: Model) -> Payload:
    """An update's received bytes, in ``room`` if they are a model's.

    Raises JournalError, UpdateAltered.
    """
    how = _format_of(record, segment.layout)
    block = room if how.is_plain else Payload.empty(record.payload_bytes)
    segment.load(record, block)
    check_digest(record, block, segment.layout)
    return block


def check_digest(record: Record, sent: Payload, layout: Layout) -> None:
    """Raise UpdateAltered unless the bytes have the update's recorded digest.

    Needed because rounding may hide a flipped bit in all versions. Raises JournalError if the size
    does not fit.
    """
    _format_of(record, layout)
    message = record.entry
    if isinstance(message, Taken) and not sent.is_of(message.upload.digest):
        raise UpdateAltered(
            f"{record.place.where}: the update does not match its digest "
            f"(device {message.upload.device}, version {message.version})"
        )
    if isinstance(message, SumOpened) and not sent.is_of(message.masks or ""):
        raise UpdateAltered(
            f"{record.place.where}: the sum of masks does not match its digest "
            f"(version {message.version})"
        )


def decoded(record: Record, sent: Payload, into: Model) -> Model:
    """Decode an update into ``into``, or return ``sent`` if it is a model already.

    Raises JournalError.
    """
    if sent is into:
        return into
    how = _format_of(record, into.layout)
    if how.is_plain:
        return Model(into.layout, sent.buffer)
    try:
        how.decode(sent.buffer, into)
    except Undecodable as error:
        raise JournalDamaged(
            f"{record.place.where}: the update cannot be decoded: {error}"
        ) from error
    return into


def update_of(segment: Segment, record: Record, into: Model) -> Model:
    """Read an update into a model, and decode it if it is encoded.

    Raises JournalError, UpdateAltered.
    """
    return decoded(record, received(segment, record, into), into)


def _format_of(record: Record, layout: Layout) -> Format:
    """The format of a record's update. Raises JournalError if its size does not fit."""
    message, size = record.entry, record.payload_bytes
    if not isinstance(message, Taken | SumOpened):
        raise JournalDamaged(f"{record.place.where}: a payload of {size} bytes, which none has")
    try:
        how = format_of(message.upload.format if isinstance(message, Taken) else message.format)
    except Undecodable as error:
        raise JournalError(
            f"{record.place.where}: {error}: read it with the release that wrote it"
        ) from error
    least, most = how.sizes(layout)
    fits = least <= size <= most
    if not fits or (isinstance(message, Taken) and least != most and size != message.upload.size):
        raise JournalDamaged(
            f"{record.place.where}: a payload of {size} bytes, which does not fit the layout"
        )
    return how
