"""The formats by themselves: what they lose, what they cost, and what they refuse."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedstream.core import reasons
from fedstream.core.blocks import BLOCK
from fedstream.core.errors import Undecodable
from fedstream.core.formats import F32, Format, fed_back, format_of
from fedstream.core.layout import Floats, Layout, Model, Tensor

NAMES = ("f32", "bf16", "int8", "int4", "topk:0.1", "topk:1")
ALL = (*NAMES, *(f"{name}+zstd" for name in NAMES))
LOSS = {"f32": 0.0, "bf16": 2**-8, "int8": 1 / 254, "int4": 1 / 14}  # of the block's largest value

FINITE = st.floats(-(2.0**99), 2.0**99, width=32)
VECTORS = arrays.arrays(np.float32, st.integers(0, 700), elements=FINITE)


def layout_of(parameters: int) -> Layout:
    return Layout(
        (
            Tensor("weight", (parameters,), "float32", "parameter"),
            Tensor("mean", (3,), "float32", "buffer"),
            Tensor("batches", (2,), "int64", "counter"),
        )
    )


def model_of(values: Floats) -> Model:
    model = Model(layout_of(values.size))
    model.parameters[:] = values
    model.buffers[:] = (1.1, -2.2, 3.3)
    model.integers[:] = (7, -(1 << 60))
    return model


def through(how: Format, model: Model) -> Model:
    """What a receiver gets."""
    found = Model(model.layout)
    found.buffer[:] = 0xAB
    how.decode(how.encoded(model), found)
    return found


def drawn(count: int, seed: int = 3) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("name", ALL)
@given(values=VECTORS)
@settings(max_examples=20)
def test_what_is_not_a_parameter_arrives_as_it_was(name: str, values: Floats) -> None:
    model, how = model_of(values), format_of(name)
    found = through(how, model)
    assert found.buffers.tobytes() == model.buffers.tobytes()
    assert found.integers.tobytes() == model.integers.tobytes()
    least, most = how.sizes(model.layout)
    assert least <= how.encoded(model).size <= most
    assert how.name == name


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
@given(values=VECTORS)
@settings(max_examples=40)
def test_no_value_is_off_by_more_than_half_a_step(name: str, values: Floats) -> None:
    found = through(format_of(name), model_of(values)).parameters.astype(np.float64)
    for at in range(0, values.size, BLOCK):
        block = values[at : at + BLOCK].astype(np.float64)
        allowed = np.abs(block).max() * LOSS[name] * (1 + 1e-5) + 1e-40
        assert np.abs(found[at : at + BLOCK] - block).max() <= allowed


def test_bf16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    values = bits.view(np.float32)
    found = through(format_of("bf16"), model_of(values)).parameters
    expected = torch.from_numpy(values.copy()).to(torch.bfloat16).to(torch.float32).numpy()
    known = ~np.isnan(values)
    assert (found[known] == expected[known]).all()
    assert np.isnan(found[~known]).all()


def test_int8_by_hand() -> None:
    values = np.zeros(BLOCK + 2, np.float32)
    values[:3] = (254.0, -3.0, 1.0)  # a scale of 2: -1.5 goes to -2, 0.5 to 0
    values[BLOCK:] = (-1.27, 0.01)  # a scale of 0.01, in a block of its own
    data = format_of("int8").encoded(model_of(values))
    scales, numbers = data[-(BLOCK + 2) - 8 :][:8].view("<f4"), data[-(BLOCK + 2) :].view(np.int8)
    assert scales.tolist() == [2.0, np.float32(1.27) / np.float32(127)]
    assert numbers[[0, 1, 2, 3, BLOCK, BLOCK + 1]].tolist() == [127, -2, 0, 0, -127, 1]
    assert through(format_of("int8"), model_of(values)).parameters[1] == -4.0


def test_int4_puts_the_first_value_into_the_lower_half() -> None:
    data = format_of("int4").encoded(model_of(np.array([7.0, -7.0, 3.0], np.float32)))
    assert data[-6:-2].view("<f4").tolist() == [1.0]
    assert data[-2:].tolist() == [(7 + 8) | (-7 + 8) << 4, (3 + 8) | 8 << 4]


def test_topk_keeps_the_largest_and_the_first_of_equals() -> None:
    values = np.array([1.0, -4.0, 2.0, 2.0, 0.5, -2.0, 0.0, 0.0, 0.0, 0.0], np.float32)
    found = through(format_of("topk:0.3"), model_of(values)).parameters
    assert found.tolist() == [0.0, -4.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


@given(share=st.sampled_from(["0.001", "0.01", "0.25", "1"]), count=st.integers(1, 40_000))
def test_topk_finds_its_places_again(share: str, count: int) -> None:
    values = drawn(count, seed=count)
    found = through(format_of(f"topk:{share}"), model_of(values)).parameters
    there = np.flatnonzero(found)
    k = max(1, round(float(share) * count))
    assert there.tolist() == sorted(np.argsort(-np.abs(values), kind="stable")[:k])
    assert np.abs(found[there] - values[there]).max() <= np.abs(values).max() * 2**-8


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "topk:0.1"])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_made_finite(name: str, wrong: float) -> None:
    values = drawn(1000)
    values[400] = wrong
    how = format_of(name)
    data, found = how.encoded(model_of(values)), Model(layout_of(1000))
    try:
        how.decode(data, found)
    except Undecodable as error:
        assert error.reason == reasons.WIRE_SCALE  # noqa: PT017  (or it is decoded)
    else:
        assert not np.isfinite(found.parameters[400])


# error feedback


@pytest.mark.parametrize("name", ["int4", "topk:0.1"])
def test_error_feedback_loses_nothing_in_the_long_run(name: str) -> None:
    how, sent, wanted = format_of(name), np.zeros(500), np.zeros(500)
    memory = np.zeros(500, np.float32)
    for seed in range(60):
        update = model_of(drawn(500, seed))
        wanted += update.parameters
        data, memory, dropped = fed_back(update, memory, how)
        assert not dropped
        received = Model(update.layout)
        how.decode(data, received)
        assert received.parameters.tobytes() == update.parameters.tobytes()
        sent += received.parameters
    # Whatever was not sent yet is in the memory: the sums differ by that and by rounding.
    assert np.abs(sent + memory - wanted).max() < 1e-4
    assert np.abs(wanted - sent).max() > 1e-3


def test_an_update_that_is_not_finite_leaves_the_memory_alone() -> None:
    update, memory = model_of(drawn(10)), drawn(10, seed=9)
    update.parameters[3] = np.inf
    before = memory.copy()
    _, after, _ = fed_back(update, memory, format_of("int4"))
    assert after.tobytes() == before.tobytes()


def test_infinity_made_by_rounding_is_not_remembered() -> None:
    update = model_of(np.array([3.4e38, 1.0, 2.0], np.float32))  # no bfloat16 is as large
    _, lost, _ = fed_back(update, None, format_of("topk:1"))
    assert np.isfinite(lost).all()


@pytest.mark.parametrize("name", ["int4", "topk:0.1"])
def test_what_an_outlier_left_is_dropped(name: str) -> None:
    """Its receiver refused it, and must not get it piece by piece with later updates."""
    outlier, usual = model_of(drawn(500) * np.float32(1e6)), drawn(500, seed=1)
    _, memory, _ = fed_back(outlier, None, format_of(name))
    update = model_of(usual)
    assert fed_back(update, memory, format_of(name)).dropped
    assert np.abs(update.parameters).max() <= np.abs(usual).max() * 1.01


# hostile bytes


def refused(name: str, data: bytes, count: int = 1000) -> str:
    with pytest.raises(Undecodable) as caught:
        format_of(name).decode(np.frombuffer(data, np.uint8), Model(layout_of(count)))
    return caught.value.reason


@pytest.mark.parametrize(
    "name",
    [
        "",
        "f16",
        "int8 ",
        "topk",
        "topk:0",
        "topk:0.0",
        "topk:1.5",
        "topk:nan",
        "topk:0.\u0663",
        "topk:0.1234567891",
        "int8+gzip",
        "F32",
    ],
)
def test_unknown_formats_are_refused(name: str) -> None:
    with pytest.raises(Undecodable, match="none of ours: f32, bf16, int8, int4, topk") as caught:
        format_of(name)
    assert caught.value.reason == reasons.WIRE_FORMAT


@pytest.mark.parametrize("name", NAMES)
@given(cut=st.integers(1, 60), more=st.booleans())
def test_bytes_of_another_length_are_refused(name: str, cut: int, more: bool) -> None:
    data = format_of(name).encoded(model_of(drawn(1000))).tobytes()
    wrong = data + b"\0" * cut if more else data[:-cut]
    assert refused(name, wrong) in (reasons.WIRE_LENGTH, reasons.WIRE_INDEX)


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1e-9])
def test_a_scale_that_is_none_is_refused(name: str, scale: float) -> None:
    data = format_of(name).encoded(model_of(drawn(1000))).copy()
    data[28 + 4 : 28 + 8] = np.frombuffer(struct.pack("<f", scale), np.uint8)  # of the second block
    assert refused(name, data.tobytes()) == reasons.WIRE_SCALE


def sparse(count: int, gaps: bytes) -> bytes:
    begin = format_of("topk:0.1").encoded(model_of(drawn(1000))).tobytes()[:28]
    return begin + struct.pack("<I", count) + b"\x80\x3f" * count + gaps


def test_places_beyond_the_end_are_refused() -> None:
    last = sparse(2, b"\x00" + bytes([0xE6, 0x07]))  # the first and, after 998 others, the last
    found = Model(layout_of(1000))
    format_of("topk:0.1").decode(np.frombuffer(last, np.uint8), found)
    assert np.flatnonzero(found.parameters).tolist() == [0, 999]
    assert refused("topk:0.1", sparse(2, b"\x00" + bytes([0xE7, 0x07]))) == reasons.WIRE_INDEX
    assert refused("topk:0.1", sparse(1, b"\xff" * 4 + b"\x7f")) == reasons.WIRE_INDEX
    assert refused("topk:0.1", sparse(1, b"\x80" * 9 + b"\x00")) == reasons.WIRE_INDEX
    padded = b"\x80\x00"  # zero in two bytes
    assert refused("topk:0.1", sparse(1, padded)) == reasons.WIRE_INDEX


def test_places_across_parts_are_found_and_take_little_memory() -> None:
    count = 400_000  # more gaps than are decoded at once
    how, values = format_of("topk:1"), np.ones(count, np.float32)
    data, found = how.encoded(model_of(values)), Model(layout_of(count))
    tracemalloc.start()
    try:
        how.decode(data, found)
        assert tracemalloc.get_traced_memory()[1] < 3 * found.buffer.nbytes
    finally:
        tracemalloc.stop()
    assert (found.parameters == 1).all()


def test_more_values_than_the_share_are_refused() -> None:
    assert refused("topk:0.1", sparse(101, b"\x00" * 101)) == reasons.WIRE_LENGTH
    huge = sparse(0, b"")[:-4] + b"\xff" * 4
    assert refused("topk:0.1", huge) == reasons.WIRE_LENGTH
    assert refused("topk:0.1", sparse(3, b"\x00\x00")) == reasons.WIRE_LENGTH
    assert refused("topk:0.1", sparse(2, b"\x00\x80")) == reasons.WIRE_LENGTH


def test_a_bomb_is_refused_before_it_takes_memory() -> None:
    model = model_of(drawn(1000))
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (1 << 28))
    assert len(bomb) < 20_000
    assert refused("int8+zstd", bomb) == reasons.WIRE_TOO_LONG
    silent = zstandard.ZstdCompressor(write_content_size=False)
    assert refused("int8+zstd", silent.compress(F32.encoded(model).data)) == reasons.WIRE_TOO_LONG


def test_frames_with_something_behind_are_refused() -> None:
    data = format_of("bf16+zstd").encoded(model_of(drawn(1000))).tobytes()
    assert refused("bf16+zstd", data + b"x") == reasons.WIRE_LENGTH
    assert refused("bf16+zstd", data[:-1]) == reasons.WIRE_LENGTH
    assert refused("bf16+zstd", b"") == reasons.WIRE_LENGTH


@given(data=st.binary(max_size=400), name=st.sampled_from(ALL))
def test_any_bytes_are_refused_or_decoded(data: bytes, name: str) -> None:
    found = Model(layout_of(40))
    try:
        format_of(name).decode(np.frombuffer(data, np.uint8), found)
    except Undecodable as error:
        assert error.reason in reasons.REFUSED  # noqa: PT017  (or it is decoded)
