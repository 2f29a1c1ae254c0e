"""Models as Flower's objects: the bytes that Flower reads, and what they take of memory."""

from __future__ import annotations

import io
import tracemalloc
from typing import Any

import numpy as np

from fedstream.coordinator.gateway.fleet import models, objects
from fedstream.coordinator.gateway.fleet.objects import Received
from fedstream.core.layout import Layout, Model, Tensor
from tests.support import layout_of

LARGE = 3 * objects.CHUNK // 4 + 1000  # parameters of an array of four chunks
DTYPES = {"float32": "<f4", "float64": "<f8", "float16": "<f2", "bfloat16": "<f4"}


def test_arrays_are_files_of_numpys_whatever_their_dtype_and_length() -> None:
    layout = Layout(
        (
            *(Tensor(dtype, (3, 2), dtype, "parameter") for dtype in DTYPES),
            Tensor("large", (LARGE,), "float32", "parameter"),
            Tensor("one", (), "float32", "buffer"),
            Tensor("none", (0, 4), "float32", "buffer"),
            Tensor("seen", (2,), "int64", "integer"),
        )
    )
    model = Model(layout)
    model.floats[:] = np.random.default_rng(0).standard_normal(model.floats.size, np.float32)
    model.integers[:] = (7, 8)
    whole = models.arrays_of(model)
    received = Received({one.id: one.content for one in whole.every()})
    given = received.named(whole.id, "ArrayRecord")
    for name, values in model.tensors().items():
        wanted = np.asarray(values, DTYPES.get(name, values.dtype))
        file = io.BytesIO()
        np.save(file, wanted.reshape(next(t.shape for t in layout.tensors if t.name == name)))
        assert received.array(given[name], 1 << 30) == file.getvalue(), name
    assert len(received.body(given["large"], "Array")[1]) == 4
    copied = 6 * (8 + 2)  # float64 and float16, which the model has as float32
    assert models.memory_of(layout) == layout.nbytes + copied


def test_objects_share_the_models_memory() -> None:
    model = Model(layout_of(LARGE))
    model.floats[:] = np.arange(LARGE)
    tracemalloc.start()
    try:
        kept: Any = models.arrays_of(model)
        assert tracemalloc.get_traced_memory()[1] < model.buffer.nbytes / 50
    finally:
        tracemalloc.stop()
    assert sum(len(one.content) for one in kept.every()) > model.buffer.nbytes
