"""Models as devices are given them: what they are known by, and what becomes of what they lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zstandard

from fedstream.broker.encoded import Encoded
from fedstream.broker.errors import BlobDamaged, Unavailable
from fedstream.broker.layout import Model, Payload
from fedstream.wire import Format, compressed, format_of
from fedstream.wire.given import decode, given, room_for
from tests.support import layout_of, model_of

LAYOUT = layout_of(300, buffers=2, integers=1)
LOSSY = ("bf16", "int8", "bf16+zstd", "int8+zstd")


def model() -> Model:
    floats = np.random.default_rng(7).normal(0, 0.1, LAYOUT.floats).astype(np.float32)
    return model_of(LAYOUT, *floats.tolist(), integers=(5,))


def received(one: Payload, encoded: Encoded) -> Model:
    """What a device has, after the bytes have gone through Redis."""
    block, into = room_for(encoded, LAYOUT), Model(LAYOUT)
    block.buffer[:] = one.buffer
    decode(block, encoded, into)
    return into


def test_known_digests() -> None:
    """They are in journals and in Redis: no release may give a version another one."""
    small = model_of(layout_of(2, buffers=1), 1.0, -0.3, 0.7)
    for name, digest in (
        ("bf16", "9bdb7576bdcc19ca8f7399f07b10d50f560c78ea1dbd611394ae76c19e1f0749"),
        ("int8", "95d649e1eb31cff4537aa3411f8f980fb1138d2b1aec234233e18cb8b7d0906d"),
    ):
        assert given(small, format_of(name)).digest == digest


def test_the_models_own_bytes_are_shared() -> None:
    x = model()
    one = given(x, format_of("f32"))
    assert (one.payload, one.encoded, one.digest) == (x, None, x.digest())


@pytest.mark.parametrize("name", LOSSY)
def test_devices_get_exactly_what_the_digest_says(name: str) -> None:
    x, how = model(), format_of(name)
    one = given(x, how)
    assert one.encoded is not None
    assert (one.encoded.format, one.encoded.size) == (name, one.payload.buffer.nbytes)
    assert one.digest != x.digest()
    into, expected = received(one.payload, one.encoded), Model(LAYOUT)
    how.decode(one.payload.buffer, expected)
    assert into.buffer.tolist() == expected.buffer.tolist()
    # Buffers and integers are never encoded.
    assert into.buffers.tolist() == x.buffers.tolist()
    assert into.integers.tolist() == [5]
    assert 0 < np.abs(into.parameters - x.parameters).max() < 0.003


@pytest.mark.parametrize("name", ["f32", "bf16", "int8"])
def test_another_compressor_changes_no_digest(name: str) -> None:
    x = model()
    plain, packed = given(x, format_of(name)), given(x, format_of(f"{name}+zstd"))
    assert packed.digest == plain.digest
    assert packed.encoded is not None
    # The same bytes, as another release of Zstandard might compress them.
    raw = compressed.decode(packed.payload.buffer, 1 << 20)
    frame = zstandard.ZstdCompressor(level=19).compress(raw.data)
    other = Encoded(f"{name}+zstd", len(frame), packed.digest)
    received(Payload(np.frombuffer(frame, np.uint8)), other)


def test_altered_models_are_damaged() -> None:
    one, other = given(model(), format_of("bf16+zstd")), model()
    other.parameters[40] *= -1
    altered = given(other, format_of("bf16+zstd")).payload
    assert one.encoded is not None
    encoded = replace(one.encoded, size=altered.buffer.nbytes)
    with pytest.raises(BlobDamaged, match="a model in a frame has digest"):
        received(altered, encoded)


def test_what_this_release_cannot_decode_is_waited_for() -> None:
    with pytest.raises(Unavailable, match=r"format fp4, which this release .* upgrade"):
        room_for(Encoded("fp4", 100, "d"), LAYOUT)
    with pytest.raises(BlobDamaged, match="a model in bf16 has 100 bytes, not 616 to 616"):
        room_for(Encoded("bf16", 100, "d"), LAYOUT)
    x = model()
    x.parameters[3] = np.inf
    one = given(x, format_of("int8"))
    assert one.encoded is not None
    with pytest.raises(Unavailable, match=r"can't be decoded: .*scale of block 0 is inf"):
        received(one.payload, one.encoded)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_a_copy_lost_is_in_a_later_one(name: str) -> None:
    """Deltas far below half a step move nothing at first. In the long run none of them is lost."""
    x, how = model(), format_of(name)
    x.parameters[[0, 256]] = 0.5  # the largest of each block: its scale stays
    small = np.abs(x.parameters) < 0.45
    before = _as_given(x, how)
    x.parameters[small] += np.float32(2e-6)
    assert np.mean(before != _as_given(x, how)) < 0.05
    for _ in range(4999):
        x.parameters[small] += np.float32(2e-6)
    moved = _as_given(x, how) - before
    assert np.mean(moved[small]) == pytest.approx(0.01, rel=0.05)


def _as_given(x: Model, how: Format) -> np.ndarray:
    into = Model(LAYOUT)
    how.decode(given(x, how).payload.buffer, into)
    return into.parameters.copy()
