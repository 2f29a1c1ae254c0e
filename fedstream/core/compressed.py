"""Zstandard frames, with protection against decompression bombs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zstandard

from fedstream.core import reasons
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

LEVEL = 1  # higher levels cost several times as much for one or two percent (benchmarks/wire.py)


def most(size: int) -> int:
    """An upper bound on the frame of ``size`` bytes, a little above ZSTD_compressBound."""
    return size + (size >> 7) + 512


def encode(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Compress bytes into one frame that states their number."""
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(data.data)
    return np.frombuffer(frame, np.uint8)


def decode(frame: npt.NDArray[np.uint8], limit: int) -> npt.NDArray[np.uint8]:
    """Decompress a frame of at most ``limit`` bytes.

    Raises Undecodable if the frame is damaged or followed by more bytes, and, before allocating
    memory, if it states more than ``limit`` bytes or no number.
    """
    try:
        about = zstandard.get_frame_parameters(frame.data)
        if about.content_size > limit:  # an unstated size is the largest number
            raise Undecodable(
                reasons.WIRE_TOO_LONG, f"{_said(about.content_size)}, at most {limit} were expected"
            )
        inside = zstandard.ZstdDecompressor(max_window_size=0).decompress(
            frame.data, max_output_size=limit, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Undecodable(reasons.WIRE_LENGTH, f"not a Zstandard frame: {error}") from error
    return np.frombuffer(inside, np.uint8)


def _said(size: int) -> str:
    if size >= zstandard.CONTENTSIZE_ERROR:
        return "a frame that doesn't say how many bytes it holds"
    return f"a frame of {size} bytes"
