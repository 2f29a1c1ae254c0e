"""What is kept in Redis beside an upload, for any replica to go on with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstream.broker.blobs import CHUNK
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.protocol.messages import UpdateReport

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys

EXPIRE_S: Final = 600.0  # after the last chunk came, an upload that was not completed is gone


def upload_blob(client: Client, keys: Keys, site: str, task: str, attempt: str) -> PartialBlob:
    """The blob that an attempt's update arrives in, and its note."""
    name = f"{task}.{attempt}"
    key, note_key = keys.update(f"{site}/{name}"), keys.upload_note(site, name)
    return PartialBlob(client, key, note_key, expire_s=EXPIRE_S)


class Source(BaseModel):
    """The task that an update answers, as it was handed to this site."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: int
    seed: int
    stream: str
    entry: str  # its id in the stream


class UploadNote(BaseModel):
    """An upload: the task that it answers, how long it is, and what the device says of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Source
    length: int  # bytes
    report: UpdateReport
    complete: bool = False  # the device has sent the end

    def encode(self) -> bytes:
        """As Redis has it."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes | None) -> Self | None:
        """The note as it was written; None if there is none, or one of another release."""
        if data is None:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def at(self, chunks: int) -> int:
        """How many bytes so many chunks of the upload have."""
        return min(chunks * CHUNK, self.length)
