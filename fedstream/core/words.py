"""Unsigned integers of 16, 24 or 32 bits, packed without gaps, least significant byte first.

Masked updates and sums of masks consist of such words (:mod:`fedstream.private.masks`). In memory
they are 32-bit words; arithmetic on them is modulo 2**32, of which packing keeps the lower bits.
"""

from __future__ import annotations

from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

MaskWords = NDArray[np.uint32]
WordBits = Literal[16, 24, 32]
WORD_BITS: Final[tuple[WordBits, ...]] = (16, 24, 32)


def packed(words: MaskWords, bits: WordBits) -> NDArray[np.uint8]:
    """The lower ``bits`` of each word: bits / 8 bytes for each."""
    data = words.astype("<u4", copy=False).view(np.uint8)
    if bits == 32:
        return data
    return data.reshape(-1, 4)[:, : bits // 8].reshape(-1)


def unpack(data: NDArray[np.uint8], bits: WordBits, into: MaskWords) -> None:
    """Write packed words into ``into``, whose length must be that of ``data``."""
    if bits == 32:
        into[:] = data.view("<u4")
        return
    wide = into.view(np.uint8).reshape(-1, 4)
    wide[:] = 0
    wide[:, : bits // 8] = data.reshape(-1, bits // 8)
