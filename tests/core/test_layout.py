"""A layout says where every tensor lies in the one block of bytes that a model is."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from mmap import mmap

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.errors import LayoutMismatch
from fedstream.core.layout import PAGE, Layout, Model, Tensor, Unshared
from tests.support import layout_of

BATCH_NORM = Layout(
    (
        Tensor("conv.weight", (2, 3), "float32", "parameter"),
        Tensor("scale", (), "bfloat16", "parameter"),
        Tensor("norm.mean", (2,), "float64", "buffer"),
        Tensor("norm.count", (), "int64", "integer"),
        Tensor("flags", (3,), "uint8", "integer"),
    )
)

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
layouts = st.lists(
    st.tuples(
        st.text("abc.", min_size=1), shapes, st.sampled_from(["parameter", "buffer", "integer"])
    ),
    max_size=6,
    unique_by=lambda row: row[0],
).map(
    lambda rows: Layout(
        tuple(
            Tensor(name, shape, "int64" if kind == "integer" else "float32", kind)  # type: ignore[arg-type]
            for name, shape, kind in sorted(rows, key=lambda row: "pbi".index(row[2][0]))
        )
    )
)


@given(layouts)
def test_layout_round_trips_and_keeps_its_signature(layout: Layout) -> None:
    again = Layout.decode(layout.encode())
    assert again == layout
    assert again.signature == layout.signature


@given(layouts)
def test_tensors_cover_all_bytes_in_order(layout: Layout) -> None:
    model = Model(layout)
    model.floats[:] = np.arange(layout.floats)
    model.integers[:] = np.arange(layout.integers)
    tensors = model.tensors()
    assert list(tensors) == [tensor.name for tensor in layout.tensors]
    floats = [tensors[t.name].ravel() for t in layout.tensors if t.kind != "integer"]
    integers = [tensors[t.name].ravel() for t in layout.tensors if t.kind == "integer"]
    assert np.concatenate([np.empty(0), *floats]).tolist() == list(range(layout.floats))
    assert np.concatenate([np.empty(0), *integers]).tolist() == list(range(layout.integers))


def test_sizes_add_up() -> None:
    assert (BATCH_NORM.parameters, BATCH_NORM.floats, BATCH_NORM.integers) == (7, 9, 4)
    assert BATCH_NORM.nbytes == 4 * 9 + 8 * 4


def test_tensors_keep_their_dtypes_except_bfloat16() -> None:
    model = Model(BATCH_NORM)
    model.floats[:] = range(9)
    model.integers[:] = range(4)
    found = {name: (t.dtype.name, t.shape, t.tolist()) for name, t in model.tensors().items()}
    assert found == {
        "conv.weight": ("float32", (2, 3), [[0, 1, 2], [3, 4, 5]]),
        "scale": ("float32", (), 6),
        "norm.mean": ("float64", (2,), [7, 8]),
        "norm.count": ("int64", (), 0),
        "flags": ("uint8", (3,), [1, 2, 3]),
    }


def test_viewing_native_dtypes_copies_nothing() -> None:
    model = Model(BATCH_NORM)
    views = {name for name, t in model.tensors().items() if np.shares_memory(t, model.buffer)}
    assert views == {"conv.weight", "scale", "norm.count"}


@pytest.mark.parametrize(
    "other",
    [
        Tensor("other", (2, 3), "float32", "parameter"),
        Tensor("conv.weight", (3, 2), "float32", "parameter"),
        Tensor("conv.weight", (2, 3), "float16", "parameter"),
    ],
)
def test_any_difference_changes_the_signature(other: Tensor) -> None:
    changed = Layout((other, *BATCH_NORM.tensors[1:]))
    assert changed.signature != BATCH_NORM.signature


def test_floats_integers_and_parameters_are_views_into_one_buffer() -> None:
    model = Model(BATCH_NORM)
    model.buffer[:] = 0
    before = model.digest()
    model.parameters[-1] = 1.0
    model.integers[0] = 7
    assert model.buffer[: 8 * 4].view(np.int64)[0] == 7
    assert model.buffer[8 * 4 :].view(np.float32)[6] == 1.0
    assert model.digest() != before


def test_pages_cover_the_tensors_block() -> None:
    """What the journal writes at once, past the system's cache; all else it copies first."""
    model = Model(BATCH_NORM)
    model.buffer[:] = 1
    assert model.pages
    assert len(model.pages) == PAGE
    assert bytes(model.pages) == bytes(model.buffer) + bytes(PAGE - BATCH_NORM.nbytes)
    short = np.frombuffer(mmap(-1, PAGE), np.uint8, BATCH_NORM.nbytes)  # begins with a page
    assert Model(BATCH_NORM, short[:]).pages is None


def test_copies_share_no_memory() -> None:
    model = Model(BATCH_NORM)
    model.buffer[:] = 1
    copy = model.copy()
    assert copy.digest() == model.digest()
    copy.floats[0] = 5.0
    assert copy.digest() != model.digest()


def test_buffer_of_the_wrong_size_or_type_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="takes 68 bytes, the buffer has 4"):
        Model(BATCH_NORM, np.zeros(4, np.uint8))
    with pytest.raises(LayoutMismatch):
        Model(BATCH_NORM, np.zeros(68, np.int8))


def test_a_layout_names_every_tensor_once_and_keeps_the_order_of_roles() -> None:
    weight = Tensor("w", (1,), "float32", "parameter")
    with pytest.raises(LayoutMismatch, match="name every tensor exactly once"):
        Layout((weight, weight))
    with pytest.raises(LayoutMismatch, match="parameters, buffers, controls and integers"):
        Layout((Tensor("m", (1,), "float32", "buffer"), weight))


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([["w", [1], "float32", "colour"]]),
        msgpack.packb([["w", 1, "float32", "parameter"]]),
        msgpack.packb([["w"]]),
        msgpack.packb([["w", [-1], "float32", "parameter"]]),
        msgpack.packb([["w", [1.0], "float32", "parameter"]]),
        msgpack.packb([["w", [True], "float32", "parameter"]]),
        msgpack.packb([["w", "12", "float32", "parameter"]]),
        msgpack.packb([["w", [1], 5, "parameter"]]),
        msgpack.packb([[b"w", [1], "float32", "parameter"]]),
        msgpack.packb([["w", [1], "float32", ["parameter"]]]),
        b"\x91" * 10**5 + b"\x01",
    ],
)
def test_invalid_layout_is_a_mismatch(junk: bytes) -> None:
    with pytest.raises(LayoutMismatch):
        Layout.decode(junk)


@given(st.binary(max_size=100))
def test_junk_is_a_mismatch_or_a_layout_that_round_trips(junk: bytes) -> None:
    with suppress(LayoutMismatch):
        layout = Layout.decode(junk)
        assert layout.nbytes >= 0
        assert Layout.decode(layout.encode()) == layout


def test_values_of_unshared_tensors_are_named_but_do_not_count() -> None:
    """Two runs whose frozen values differ have the same layout, which a device compares."""
    shared, frozen = layout_of(3), Layout((Tensor("base", (2, 2), "float32", "parameter"),))
    one, other = (replace(shared, unshared=Unshared(frozen, (), digit * 64)) for digit in "ab")
    again = Layout.decode(one.encode())
    assert again == one == other
    assert again.unshared is not None
    assert (again.unshared.digest, again.nbytes) == ("a" * 64, shared.nbytes)
    assert one.signature == other.signature != shared.signature
    assert one.encode() != other.encode()
    assert one.with_controls().unshared == one.unshared
    assert one.with_controls().without_controls() == one
    local = replace(shared, unshared=Unshared(frozen, ("base",), "a" * 64))
    assert Layout.decode(local.encode()) == local != one
    assert msgpack.unpackb(local.encode()) == {
        "tensors": [["weight", [3], "float32", "parameter"]],
        "unshared": [["base", [2, 2], "float32", "parameter"]],
        "local": ["base"],
        "digest": "a" * 64,
    }
    assert local.unshared is not None
    assert (local.unshared.of_devices, local.unshared.frozen) == (frozen, Layout(()))
    assert local.summary == "3 parameters in 1 tensors, 4 local ones in 1"


@pytest.mark.parametrize("change", [{"digest": "short"}, {"digest": 3}, {"unshared": [["x"]]}])
def test_invalid_unshared_tensors_are_refused(change: dict[str, object]) -> None:
    rows = [["base", [2], "float32", "parameter"]]
    found = {"tensors": [], "unshared": rows, "digest": "a" * 64, "local": []}
    assert Layout.decode(msgpack.packb(found)).unshared is not None
    with pytest.raises(LayoutMismatch, match="not a layout"):
        Layout.decode(msgpack.packb(found | change))
    with pytest.raises(LayoutMismatch, match="exactly once"):
        Layout.decode(msgpack.packb(found | {"tensors": rows}))
    wrong: list[list[object]] = [["other"], [["base"]], [{}]]
    for local in wrong:
        with pytest.raises(LayoutMismatch):
            Layout.decode(msgpack.packb(found | {"local": local}))
