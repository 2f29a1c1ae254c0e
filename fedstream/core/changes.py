"""Exact differences between two models of one format, usually far smaller than the model.

Each model is read as little-endian words: four bytes in ``f32``, two in ``bf16``, one in ``int8``.
A word becomes its difference from the older model's word, modulo 2^bits, with the sign in the
lowest bit (0, -1, 1, -2 become 0, 1, 2, 3), so that a small change is a small number, also across a
power of two. Then the words' bytes are transposed: all lowest bytes first, and last the highest
ones, which are nearly all zero. A Zstandard frame compresses them. Decoding restores the newer
model's exact bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedstream.core import compressed, reasons
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.core.formats import Encoding

_WORDS: Final[dict[int, np.dtype[np.unsignedinteger[Any]]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}


def width_of(kind: Encoding) -> int:
    """Bytes of a word in models of this kind."""
    return {"f32": 4, "bf16": 2}.get(kind, 1)


def encode(
    old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8], width: int
) -> npt.NDArray[np.uint8]:
    """The frame that turns ``old`` into ``new``; both have the same multiple of ``width`` bytes."""
    words = _WORDS[width]
    change = new.view(words) - old.view(words)
    is_negative = change >> (8 * width - 1)
    folded = (change << 1) ^ (0 - is_negative)
    return compressed.encode(np.ascontiguousarray(folded.view(np.uint8).reshape(-1, width).T))


def decode(
    old: npt.NDArray[np.uint8], frame: npt.NDArray[np.uint8], width: int
) -> npt.NDArray[np.uint8]:
    """The newer model's bytes, which the caller must check by their digest.

    Raises Undecodable for a damaged frame or another number of bytes; for more bytes, before
    allocating memory for them.
    """
    planes = compressed.decode(frame, old.size)
    if planes.size != old.size:
        raise Undecodable(
            reasons.WIRE_LENGTH, f"changes of {planes.size} bytes; the model has {old.size}"
        )
    folded = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(_WORDS[width])
    new = (folded >> 1) ^ (0 - (folded & 1))
    new += old.view(_WORDS[width])
    return new.view(np.uint8)
