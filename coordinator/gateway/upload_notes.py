"""Notes about uploads in Redis, with which any replica can continue an upload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstream.broker.blobs import CHUNK
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.protocol.messages import UpdateReport

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys

EXPIRE_S: Final = 600.0  # expiry of an incomplete upload after its last chunk


def upload_blob(client: Client, keys: Keys, site: str, task: str, attempt: str) -> PartialBlob:
    """The blob and the note of an attempt's upload."""
    name = f"{task}.{attempt}"
    key, note_key = keys.update(f"{site}/{name}"), keys.upload_note(site, name)
    return PartialBlob(client, key, note_key, expire_s=EXPIRE_S)


class Source(BaseModel):
    """The task of an update, as handed to this site."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: int
    seed: int
    stream: str
    entry: str  # its id in the stream


class UploadNote(BaseModel):
    """An upload's task, length and report."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Source
    length: int  # bytes
    report: UpdateReport
    complete: bool = False  # the device has sent the last byte

    def encode(self) -> bytes:
        """Encode the note for Redis."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes | None) -> Self | None:
        """Decode a note; None if there is none or another release wrote it."""
        if data is None:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def at(self, chunks: int) -> int:
        """The number of bytes in the first ``chunks`` chunks."""
        return min(chunks * CHUNK, self.length)
