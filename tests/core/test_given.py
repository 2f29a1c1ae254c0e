"""Models as devices are given them: what they are known by, and what becomes of what they lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import zstandard

from fedstream.core import compressed
from fedstream.core.errors import BlobDamaged, Unavailable
from fedstream.core.formats import Format, format_of
from fedstream.core.given import GivenModel, decode, room_for
from fedstream.core.given import given as given_by
from fedstream.core.layout import Floats, Model, Payload
from fedstream.core.messages import Encoded, Sends
from tests.support import layout_of, model_of

LAYOUT = layout_of(300, buffers=2, integers=1)
SENDS: tuple[Sends, ...] = ("model", "delta")
KNOWN = {
    ("bf16", "model"): "df7196f1564d3b75b3f1020ec693c41dc31796affa32ad7104162072e3ff1fbe",
    ("bf16", "delta"): "764fbf6e8ac3e5aaa56e94c166df8f80720f0f1d27eca270136cd396874baf09",
    ("int8", "model"): "a7a04a532a3233f9bd6a1c6a253339323fe56681c99de3a792fb7a62cd382837",
    ("int8", "delta"): "a212be7e0bd6126f76892784bacd3c6d1d39a2c9dfe4f936285340073f3ef27d",
}
LOSSY = ("bf16", "int8", "bf16+zstd", "int8+zstd")


def model() -> Model:
    floats = np.random.default_rng(7).normal(0, 0.1, LAYOUT.floats).astype(np.float32)
    return model_of(LAYOUT, *floats.tolist(), integers=(5,))


def given(model: Model, how: Format, version: int = 3) -> GivenModel:
    """By a run whose strategy takes models."""
    return given_by(model, how, version=version, sends="model", digests="sha256")


def received(one: Payload, encoded: Encoded) -> Model:
    """What a device has, after the bytes have gone through Redis."""
    block, into = room_for(encoded, LAYOUT), Model(LAYOUT)
    block.buffer[:] = one.buffer
    decode(block, encoded, into)
    return into


def test_known_digests() -> None:
    """They are in journals and in Redis: no release may give a version another one."""
    x = model_of(layout_of(300, buffers=1), *(n / 700 - 0.2 for n in range(300)), 0.7)
    found = {
        (name, sends): given_by(x, format_of(name), version=3, sends=sends, digests="sha256").digest
        for name in ("bf16", "int8")
        for sends in SENDS
    }
    assert found == KNOWN


def test_the_models_own_bytes_are_shared() -> None:
    x = model()
    one = given(x, format_of("f32"))
    assert (one.payload, one.encoded, one.digest) == (x, None, x.digest())


@pytest.mark.parametrize("name", LOSSY)
def test_a_copy_goes_where_there_is_room(name: str) -> None:
    x, how, rooms = model(), format_of(name), list[Payload]()

    def room(size: int) -> Payload:
        rooms.append(Payload(np.full(size, 0xAA, np.uint8)))
        return rooms[-1]

    one = given_by(x, how, room, version=3, sends="model", digests="sha256")
    assert one.payload.buffer.tobytes() == given(x, how).payload.buffer.tobytes()
    assert one.digest == given(x, how).digest
    assert rooms == ([] if how.zstd else [one.payload])  # frames differ in size


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
    x, how = still(), format_of(name)
    small = np.abs(x.parameters) < 0.45
    before = as_given(x, how, 0, "delta")
    x.parameters[small] += np.float32(2e-6)
    assert np.mean(before != as_given(x, how, 1, "delta")) < 0.05
    for _ in range(4999):
        x.parameters[small] += np.float32(2e-6)
    moved = as_given(x, how, 5000, "delta") - before
    assert np.mean(moved[small]) == pytest.approx(0.01, rel=0.05)


@pytest.mark.parametrize(("name", "step"), [("bf16", 3e-6), ("int8", 1e-4)])
def test_models_are_not_held_back_by_what_they_began_with(name: str, step: float) -> None:
    """FedAsync takes half of what a device makes of its copy: there, it moved each value a bit.

    Rounded to nearest, the copies never change, and the versions stay within one such step.
    """
    how = format_of(name)
    moved = {}
    for sends in ("model", "delta"):  # the latter: as if to nearest were good enough
        x = still()
        small = np.abs(x.parameters) < 0.45
        first = x.parameters.copy()
        for version in range(400):
            new = as_given(x, how, version, sends)
            new[small] += np.float32(step)
            x.parameters[:] = (x.parameters + new) / 2
        moved[sends] = np.mean((x.parameters - first)[small])
    assert moved["model"] == pytest.approx(200 * step, rel=0.1)
    assert moved["delta"] < 60 * step


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_random_rounding_is_exact_in_the_mean(name: str) -> None:
    x, how = still(), format_of(name)
    seen = []
    for seed in range(400):
        into = Model(LAYOUT)
        how.decode(how.encoded(x, seed=seed), into)
        seen.append(into.parameters.copy())
    error = np.mean(seen, axis=0) - x.parameters
    spread = np.std(seen, axis=0)
    assert np.all(np.abs(error) <= 5 * spread / 20 + 1e-7)
    assert spread.max() > 0
    # One of the two neighbours: never further than a step away.
    assert all(len(set(column)) <= 2 for column in np.transpose(seen).tolist())
    again = how.encoded(x, seed=7)
    assert again.tolist() == how.encoded(x, seed=7).tolist() != how.encoded(x, seed=8).tolist()


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
def test_random_rounding_leaves_what_needs_none(name: str) -> None:
    how = format_of(name)
    x = Model(LAYOUT)
    how.decode(how.encoded(model()), x)  # as it comes out of the format
    if name == "bf16":
        x.parameters[:4] = (np.inf, -np.inf, np.nan, 0.0)
    into = Model(LAYOUT)
    how.decode(how.encoded(x, seed=3), into)
    np.testing.assert_allclose(into.parameters, x.parameters, rtol=1e-6)


def still() -> Model:
    """A model in which the largest of each block, and so its scale, is to stay."""
    x = model()
    x.parameters[[0, 256]] = 0.5
    return x


def as_given(x: Model, how: Format, version: int, sends: Sends) -> Floats:
    into = Model(LAYOUT)
    how.decode(
        given_by(x, how, version=version, sends=sends, digests="sha256").payload.buffer, into
    )
    return into.parameters.copy()
