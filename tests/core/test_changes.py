"""What changed between two models: exact for any bytes, small for small changes, never a bomb."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core import changes, compressed
from fedstream.core.errors import Undecodable
from fedstream.core.formats import format_of
from tests.support import layout_of, model_of

WIDTHS = (1, 2, 4)


def array(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(data, np.uint8)


@given(st.sampled_from(WIDTHS), st.binary(min_size=1, max_size=99), st.binary(max_size=99))
def test_any_bytes_come_out_as_they_were(width: int, a: bytes, b: bytes) -> None:
    size = len(a) * width
    old, new = array((a * width)[:size]), array((b + a * width)[:size])
    frame = changes.encode(old, new, width)
    assert bytes(changes.decode(old, frame, width)) == bytes(new)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_change_of_a_byte_is_exact(width: int) -> None:
    """Also those that wrap around."""
    old = np.repeat(np.arange(256, dtype=np.uint8), 256 * width)
    new = np.tile(np.arange(256, dtype=np.uint8), 256 * width)
    frame = changes.encode(old, new, width)
    np.testing.assert_array_equal(changes.decode(old, frame, width), new)


def test_bytes_are_as_documented() -> None:
    """Other devices read them too."""
    old = np.array([5, 5, 5, 5, 0], "<u2").view(np.uint8)
    new = np.array([5, 4, 6, 3, 0x8000], "<u2").view(np.uint8)
    frame = changes.encode(old, new, 2)
    low, high = [0, 1, 2, 3, 0xFF], [0, 0, 0, 0, 0xFF]
    assert list(compressed.decode(frame, 10)) == low + high


@pytest.mark.parametrize(("name", "most"), [("f32", 0.75), ("bf16", 0.35), ("int8", 0.45)])
def test_small_changes_take_few_bytes(name: str, most: float) -> None:
    """A step of a thousandth of the weights' size: what is left is what Zstandard can't remove."""
    how, layout, rng = format_of(name), layout_of(20_000, buffers=3), np.random.default_rng(0)
    x = rng.normal(0, 0.1, layout.floats).astype(np.float32)
    y = x + rng.normal(0, 1e-4, x.size).astype(np.float32)
    old, new = (how.encoded(model_of(layout, *one.tolist())) for one in (x, y))
    frame = changes.encode(old, new, changes.width_of(how.kind))
    assert frame.size < most * new.size
    assert frame.size < 0.85 * compressed.encode(new).size


@pytest.mark.parametrize(
    "frame",
    [
        b"not a frame",
        zstandard.ZstdCompressor().compress(bytes(8)),
        zstandard.ZstdCompressor().compress(bytes(1 << 20)),  # a bomb
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(400)),
        zstandard.ZstdCompressor().compress(bytes(400)) + b"x",
    ],
    ids=["noise", "too few", "too many", "unknown size", "something behind"],
)
def test_other_frames_are_refused(frame: bytes) -> None:
    with pytest.raises(Undecodable):
        changes.decode(array(bytes(400)), array(frame), 4)
