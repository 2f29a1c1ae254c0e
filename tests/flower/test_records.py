"""A model's tensors as Flower's arrays, and back, without numpy's slow way with headers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedstream.core.errors import DataError
from fedstream.flower import records

pytest.importorskip("flwr", reason="Flower has an environment of its own: make flower")

from flwr.app import Array, ArrayRecord, RecordDict


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).T,
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.zeros(0, 2),
        torch.tensor([1.5, float("nan")], dtype=torch.float64),
        torch.tensor([1.5], dtype=torch.float16),
    ],
)
def test_flower_reads_what_is_sent_and_it_is_read_again(x: torch.Tensor) -> None:
    module = nn.Module()
    module.register_buffer("x", x)
    made, theirs = records.arrays_of(module)["x"], Array(x)
    assert (made.dtype, made.shape, made.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert np.array_equal(made.numpy(), theirs.numpy(), equal_nan=x.is_floating_point())
    again = nn.Module()
    again.register_buffer("x", torch.zeros_like(x))
    records.load(RecordDict({"arrays": ArrayRecord({"x": made})}), again, "client")
    assert torch.equal(again.get_buffer("x").isnan(), x.isnan())
    assert torch.equal(again.get_buffer("x").nan_to_num(), x.nan_to_num())


def test_reply_in_another_order_of_memory_is_read_and_a_torn_one_refused() -> None:
    module = nn.Linear(3, 2, bias=False)
    values = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    reply = RecordDict({"arrays": ArrayRecord({"weight": Array(values)})})
    records.load(reply, module, "client")
    assert module.weight.tolist() == values.tolist()
    torn = Array("float32", (2, 3), "numpy.ndarray", Array(values).data[:-1])
    with pytest.raises(DataError, match=r"client: array 'weight' cannot be read"):
        records.load(RecordDict({"arrays": ArrayRecord({"weight": torn})}), module, "client")
