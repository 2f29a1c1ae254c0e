"""Interrupted training goes on elsewhere as if nothing had been, and damaged bytes are seen."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import BadMessage, ConfigError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.trainer.solvers import (
    Cancelled,
    DriftCorrected,
    Proximal,
    Sgd,
    Solver,
    Trained,
    Work,
)
from fedstream.trainer.task import Task, initial
from fedstream.trainer.vector import layout_of, load, read
from fedstream.trainer.workspace import Workspace
from tests.trainer.stepping import work_of

STEPS = 7


class Noisy(Task):
    """Everything that has a state: dropout, BatchNorm, and a parameter that is not trained."""

    def model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        model.get_parameter("0.bias").requires_grad = False
        return model

    def device_data(self, device: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(device)
        return TensorDataset(
            torch.randn(20, 4, generator=generator),
            torch.randint(3, (20,), generator=generator),
        )


TASK = Noisy()
X_TAU = initial(TASK, seed=0)
C = np.linspace(-1, 1, X_TAU.layout.parameters, dtype=np.float32)


def work(solver: Solver, **more: Any) -> Work:
    about = {"version": 9, "steps": STEPS, "control": C, "device_control": -C / 2}
    return work_of(solver, **about | more)


def trained(piece: Work, start: Model = X_TAU) -> tuple[str, int, float | None, bytes]:
    """The bits that training gives, in a process that begins with a module of its own."""
    module = TASK.model()
    load(start, module)
    result: Trained = TASK.train(module, TASK.device_data(piece.device), piece)
    model = Model(layout_of(module))
    read(module, model)
    control = b"" if result.control is None else result.control.tobytes()
    return model.digest(), result.steps, result.loss, control


def interrupted(piece: Work, after: int, start: Model = X_TAU) -> Workspace:
    """The workspace after so many steps, once it has been bytes."""
    asked = count()
    with pytest.raises(Cancelled) as stopped:
        trained(replace(piece, cancelled=lambda: next(asked) == after), start)
    assert stopped.value.workspace is not None
    return Workspace.decode(stopped.value.workspace.encode())


@pytest.mark.parametrize("sampling", ["passes", "fresh"])
@pytest.mark.parametrize(
    "kind",
    [
        Sgd,
        Proximal,
        DriftCorrected,
        partial(Sgd, momentum=0.9, weight_decay=0.01, clip_norm=1.0),
        partial(Proximal, momentum=0.9),
    ],
    ids=["sgd", "proximal", "scaffold", "sgd with options", "proximal with momentum"],
)
def test_resumed_training_equals_uninterrupted_training(kind: Any, sampling: str) -> None:
    piece = work(kind(batch_size=6, sampling=sampling, lr=0.1))
    expected = trained(piece)
    # What the resuming module holds of the version doesn't matter; frozen values are the run's.
    other = Model(X_TAU.layout, initial(TASK, seed=1).buffer)
    for after in range(STEPS):
        saved = interrupted(piece, after)
        torch.manual_seed(after)
        resumed = replace(piece, resume=saved, control=None, device_control=None)
        assert trained(resumed, other) == expected
        again = interrupted(resumed, 0, other)  # at once, and then to the end
        assert again.step == saved.step == after
        assert trained(replace(resumed, resume=again), other) == expected


def test_workspace_names_its_work_and_carries_x_tau() -> None:
    piece = work(Proximal(momentum=0.5))
    saved = interrupted(piece, 2)
    assert (saved.task, saved.device, saved.version, saved.seed) == ("t", 3, 9, 5)
    assert (saved.samples, saved.steps, saved.step) == (20, STEPS, 2)
    assert saved.solver == piece.solver.model_dump_json()
    assert saved.base == X_TAU.digest()
    x, x_tau = saved.models(X_TAU.layout)
    assert x_tau.digest() == X_TAU.digest() != x.digest()
    assert interrupted(replace(piece, base="as published"), 2).base == "as published"


def test_cancelled_training_restores_x_tau() -> None:
    module, asked = TASK.model(), count()
    load(X_TAU, module)
    piece = work(Sgd(), cancelled=lambda: next(asked) == 3)
    with pytest.raises(Cancelled):
        TASK.train(module, TASK.device_data(3), piece)
    model = Model(X_TAU.layout)
    read(module, model)
    assert model.digest() == X_TAU.digest()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"task": "u"}, "task is t, not u"),
        ({"version": 8}, "version is 9, not 8"),
        ({"seed": 6}, "seed is 5, not 6"),
        ({"steps": None, "epochs": 2}, "steps is 7, not 2"),
        ({"solver": Sgd(lr=0.2)}, "solver is .*, not "),
    ],
)
def test_only_the_same_work_is_resumed(more: dict[str, Any], says: str) -> None:
    piece = work(Sgd(lr=0.1))
    other = replace(piece, resume=interrupted(piece, 2), **more)
    with pytest.raises(ConfigError, match=f"workspace belongs to other work: its {says}"):
        trained(other)


def test_workspace_of_another_layout_or_torch_is_rejected() -> None:
    piece = work(Sgd())
    saved = interrupted(piece, 2)
    with pytest.raises(LayoutMismatch, match="different layout"):
        trained(replace(piece, resume=saved.model_copy(update={"layout": "other"})))
    for damaged in (
        {"minibatches": b"x"},
        {"minibatches": b""},
        {"generators": (*saved.generators[:2], b"x" * 5056)},
    ):
        with pytest.raises(BadMessage, match=r"not fit this version of torch|has taken 1 batch"):
            trained(replace(piece, resume=saved.model_copy(update=damaged)))


def states(**changed: Any) -> bytes:
    """The encoded state of an optimizer, with other content of its JSON."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.3, 0.5, foreach=True)
    about: dict[str, Any] = {"numbers": {}, "groups": [[{**optimizer.param_groups[0]}]]}
    about["groups"][0][0]["params"] = None
    return save({}, {"state": json.dumps(about | {"schedulers": []} | changed)})


def with_place(saved: Workspace, place: int) -> tuple[bytes, ...]:
    """The generators' states with another place in numpy's numbers, which numpy does not check."""
    python, numpy, *rest = saved.generators
    numbers, _, *more = msgpack.unpackb(numpy)
    return python, msgpack.packb((numbers, place, *more)), *rest


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: {"optimizers": b""},
        lambda _: {"optimizers": states(groups=[])},
        lambda _: {"optimizers": states(groups=[[{"lr": 0.3, "params": None}]])},
        lambda _: {"optimizers": states(numbers={"9.0.step": 1})},
        lambda _: {"optimizers": states(numbers={"0.99.step": 1})},
        lambda _: {"optimizers": states(numbers={"0.0.momentum_buffer": 5})},
        lambda _: {"optimizers": states(schedulers=[{"step": 5}])},
        lambda saved: {"generators": with_place(saved, 10**9)},
        lambda saved: {"generators": with_place(saved, 2**40)},
        lambda _: {"rates": b""},
        lambda _: {"rates": bytes(16)},
        lambda _: {"step": STEPS + 1},
        lambda _: {"seconds": math.nan},
    ],
)
def test_a_hostile_workspace_is_a_bad_message(damage: Callable[[Workspace], Any]) -> None:
    piece = work(Sgd(momentum=0.5))
    saved = interrupted(piece, 2)
    with pytest.raises(BadMessage):
        trained(replace(piece, resume=saved.model_copy(update=damage(saved))))


SAVED = interrupted(work(DriftCorrected()), 2)
BYTES = SAVED.encode()


def sealed(fields: object) -> bytes:
    packed = msgpack.packb(fields)
    return bytes(xxhash.xxh3_64_digest(packed) + packed)


@given(data=st.data())
def test_damaged_bytes_are_a_bad_message(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(BYTES) - 1))
    flipped = bytearray(BYTES)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), BYTES[:at], BYTES + BYTES[:1]):
        with pytest.raises(BadMessage):
            Workspace.decode(damaged)


@given(data=st.binary())
def test_any_other_bytes_are_a_bad_message(data: bytes) -> None:
    for foreign in (data, xxhash.xxh3_64_digest(data) + data):
        with pytest.raises(BadMessage):
            Workspace.decode(foreign)


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.binary(), inner),
    max_leaves=5,
)


@given(name=st.sampled_from([*Workspace.model_fields, "v", "more"]), value=anything)
def test_field_of_another_type_is_rejected_or_kept(name: str, value: object) -> None:
    fields = msgpack.unpackb(BYTES[8:])
    try:
        found = Workspace.decode(sealed(fields | {name: value}))
    except BadMessage:
        return
    assert isinstance(found, Workspace)
    assert name in ({"v"} | Workspace.model_fields.keys())


@pytest.mark.parametrize("fields", [None, 3, [], {}, {"v": 1}, {"v": 2}, {b"v": 1}, {1: 2}])
def test_checksummed_bytes_that_are_not_a_workspace(fields: object) -> None:
    with pytest.raises(BadMessage):
        Workspace.decode(sealed(fields))


@pytest.mark.parametrize(
    "forged",
    [
        b"\xdd" + (4 << 20).to_bytes(4, "big") + bytes(4 << 20),  # a list of zeros
        b"\xdc\xff\xff" * 60 + b"\x90" * (4 << 20),  # lists of lists
        b"\x9f" * 5 + b"\x80" * (4 << 20),  # short lists of maps
    ],
)
def test_forged_workspace_uses_bounded_memory(forged: bytes) -> None:
    """As a map's value: each of its bytes would become an object."""
    packed = b"\x81\xa1x" + forged
    sealed = xxhash.xxh3_64_digest(packed) + packed
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage):
            Workspace.decode(sealed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(forged)
