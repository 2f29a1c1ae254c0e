"""What a model's blob says of itself if its bytes are not the model's own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Encoded:
    """A model in one of the formats of :mod:`fedstream.wire`.

    ``digest``: of the encoded model before compression, so that another release of the compressor
    changes nothing. Devices report it as the digest of x_tau.
    """

    format: str
    size: int  # bytes of the blob
    digest: str

    @property
    def text(self) -> str:
        """As blobs and the head in Redis have it."""
        return f"{self.format} {self.size} {self.digest}"

    @classmethod
    def parsed(cls, text: bytes) -> Encoded:
        """What :attr:`text` says."""
        format_, size, digest = text.decode().split(" ")
        return cls(format_, int(size), digest)
