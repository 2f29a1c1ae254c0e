"""A module as a vector: everything that state_dict carries, once, in order, and back unchanged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import ConfigError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.trainer.task import Task, initial, untrained
from fedstream.trainer.vector import layout_of, load, read, to_delta


class Mixed(nn.Module):
    """One of each: tied weights, bfloat16, BatchNorm, a mask, a buffer that is not persistent."""

    mask: torch.Tensor

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.narrow = nn.Linear(width, 2, dtype=torch.bfloat16)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


def scrambled(seed: int, width: int) -> Mixed:
    module = Mixed(width)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), module.norm.running_mean, module.norm.running_var]:
            assert tensor is not None
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    assert module.norm.num_batches_tracked is not None
    module.norm.num_batches_tracked.fill_(2**40 + seed)  # no float32 holds it
    module.mask[0] = False
    return module


def test_layout_lists_parameters_then_buffers_then_integers_once() -> None:
    rows = [(t.name, t.shape, t.dtype, t.kind) for t in layout_of(Mixed()).tensors]
    assert rows == [
        ("scale", (), "float32", "parameter"),
        ("embedding.weight", (3, 3), "float32", "parameter"),
        ("norm.weight", (3,), "float32", "parameter"),
        ("norm.bias", (3,), "float32", "parameter"),
        ("narrow.weight", (2, 3), "bfloat16", "parameter"),
        ("narrow.bias", (2,), "bfloat16", "parameter"),
        ("norm.running_mean", (3,), "float32", "buffer"),
        ("norm.running_var", (3,), "float32", "buffer"),
        ("mask", (2,), "bool", "integer"),
        ("norm.num_batches_tracked", (), "int64", "counter"),
    ]


@given(st.integers(0, 1000), st.integers(1, 6))
def test_vector_loads_into_another_module_bit_for_bit(seed: int, width: int) -> None:
    source, target = scrambled(seed, width), Mixed(width)
    model = Model(layout_of(source))
    read(source, model)
    load(model, target)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    assert target.head.weight is target.embedding.weight
    again = Model(model.layout)
    read(target, again)
    assert again.digest() == model.digest()


def test_batchnorm_statistics_are_transferred() -> None:
    module = nn.BatchNorm1d(2)
    before, after = Model(layout_of(module)), Model(layout_of(module))
    read(module, before)
    module(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    read(module, after)
    assert np.array_equal(before.parameters, after.parameters)
    assert after.tensors()["running_mean"] == pytest.approx([0.2, 0.4])
    assert (before.integers.tolist(), after.integers.tolist()) == ([0], [1])


def test_read_only_model_loads() -> None:
    module = scrambled(2, 3)
    model = Model(layout_of(module))
    read(module, model)
    load(Model(model.layout, np.frombuffer(model.buffer.tobytes(), np.uint8)), target := Mixed())
    assert torch.equal(target.scale, module.scale)


def test_different_layout_is_rejected_with_the_differing_tensor() -> None:
    model = Model(layout_of(nn.Linear(2, 2)))
    with pytest.raises(
        LayoutMismatch, match=r"the module has .*weight.*\(2, 3\).*the model .*2, 2"
    ):
        load(model, nn.Linear(3, 2))
    with pytest.raises(LayoutMismatch, match=r"the module has None, the model .*bias"):
        read(nn.Linear(2, 2, bias=False), model)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(2, 2, dtype=torch.complex64), "weight is of torch.complex64"),
        (nn.LazyLinear(2), "weight is not initialised yet"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_unmixable_tensors_are_rejected_by_name(module: nn.Module, words: str) -> None:
    with pytest.raises(LayoutMismatch, match=words):
        layout_of(module)


class Random(Task):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def device_data(self, device: int) -> TensorDataset:
        raise AssertionError("an initial model needs no data")


def test_initial_model_depends_only_on_the_seed() -> None:
    state = torch.get_rng_state()
    assert initial(Random(), 1).digest() == initial(Random(), 1).digest()
    assert initial(Random(), 1).digest() != initial(Random(), 2).digest()
    assert torch.equal(torch.get_rng_state(), state)


def test_delta_covers_only_parameters_relative_to_the_base() -> None:
    """Against the current model instead, others' progress would be taken back."""
    module = Mixed()
    layout = layout_of(module)
    x_tau, x_new = Model(layout), Model(layout)
    for model, value in ((x_tau, 2.0), (x_new, 5.0)):
        model.floats[:] = value
        model.integers[:] = int(value)
    to_delta(x_new, x_tau)
    assert set(x_new.parameters) == {3.0}
    assert set(x_new.buffers) == {5.0}
    assert set(x_new.integers) == {5}


class Adapted(Task):
    """A frozen base with tied weights, and a head; ``head``: whether that is trained."""

    def __init__(self, *, head: bool = True) -> None:
        self._head = head

    def model(self) -> nn.Module:
        base = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5))
        base[1].weight = base[0].weight
        head = nn.Linear(5, 2)
        whole = nn.ModuleDict({"base": base, "head": head})
        whole.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
        for part in (base, *([] if self._head else [head])):
            part.requires_grad_(requires_grad=False)
        return whole

    def device_data(self, device: int) -> TensorDataset:
        raise AssertionError("an initial model needs no data")


def test_frozen_parameters_are_unshared_and_buffers_are_not() -> None:
    layout = layout_of(Adapted().model())
    assert layout.unshared is not None
    assert [tensor.name for tensor in layout.tensors] == [
        "head.weight",
        "head.bias",
        "base.2.running_mean",
        "base.2.running_var",
        "base.2.num_batches_tracked",
    ]
    assert [(tensor.name, tensor.kind) for tensor in layout.unshared.layout.tensors] == [
        ("base.0.weight", "parameter"),
        ("base.2.weight", "parameter"),
        ("base.2.bias", "parameter"),
        ("table", "integer"),
    ]


def test_model_brings_its_runs_frozen_values_along() -> None:
    """Whatever base the loading process has drawn for itself."""
    x = initial(Adapted(), 1)
    module = initial_module(2)
    load(x, module)
    for name, tensor in initial_module(1).state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor), name
        if name in x.tensors():
            assert x.tensors()[name].tolist() == tensor.tolist()
    with pytest.raises(LayoutMismatch, match="unshared tensors are not at hand: read them first"):
        load(Model(type(x.layout).decode(x.layout.encode())), module)


def initial_module(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return untrained(Adapted())


def test_training_may_freeze_a_shared_parameter_for_a_while() -> None:
    x, module = initial(Adapted(), 1), initial_module(1)
    module.get_submodule("head").requires_grad_(requires_grad=False)
    again = Model(x.layout)
    read(module, again)
    assert again.digest() == x.digest()


def test_model_without_a_trained_parameter_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"model\(\): all 6 parameters are frozen or local, such as base.0.w"
    ):
        untrained(Adapted(head=False))
