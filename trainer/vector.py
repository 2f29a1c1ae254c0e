"""Convert a torch module to the flat vector of :mod:`fedstream.core.layout`, and back.

Names are those of ``state_dict``; non-persistent buffers, which it leaves out, are not sent. A
tensor with several names (tied weights) is sent once, under the first. SCAFFOLD's control variate,
which a layout may have in addition to the module's tensors, is left alone.

Frozen parameters (``requires_grad = False``) and the tensors that :attr:`fedstream.Task.local`
names (``module.local_tensors``) are unshared: the layout names them apart, and their values are
read and stored once.

Integer tensors keep their values from version 0, except batch norms' counters and those whose names
match the module's patterns: ``module.changing_integers = ("*.zero_point",)``.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedstream.core.errors import LayoutMismatch
from fedstream.core.layout import Kind, Layout, Model, Tensor, Unshared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Models are mixed in float32: float16 and bfloat16 are widened exactly, float64 is rounded.
_FLOATS = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
_COUNTER = "num_batches_tracked"  # of torch's batch norms and others that copy them


def layout_of(module: nn.Module) -> Layout:
    """The layout of a module: parameters, float buffers (BatchNorm's statistics), integers.

    Raises LayoutMismatch, naming the tensor, for any other kind (complex, quantised, lazy, meta).
    """
    found = _tensors(module)
    shared = Layout(tuple(entry for entry, _, is_shared in found if is_shared))
    unshared = tuple(entry for entry, _, is_shared in found if not is_shared)
    if not unshared:
        return shared
    patterns = _patterns(module, "local_tensors")
    local = tuple(entry.name for entry in unshared if _matches(entry.name, patterns))
    return replace(shared, unshared=Unshared(Layout(unshared), local))


def read(module: nn.Module, out: Model) -> None:
    """Copy the module's values into ``out``. Raises LayoutMismatch if their layouts differ."""
    for vector, tensor in _pairs(out, _found(module, out.layout)):
        vector.copy_(tensor)


def load(model: Model, module: nn.Module) -> None:
    """Copy the model's values into ``module``, with those of a run's unshared tensors.

    Raises LayoutMismatch if their layouts differ, and as :meth:`Unshared.model`.
    """
    found = _found(module, model.layout)
    unshared = model.layout.unshared
    models = [model]
    if unshared is not None and unshared.digest:  # else the module's own values are meant
        models.append(unshared.model())
    for one in models:
        _copy(one, found)


def load_part(values: Model, module: nn.Module) -> None:
    """Copy the values of some of the module's tensors, such as local ones, into ``module``."""
    _copy(values, {entry: tensor for entry, tensor, _ in _tensors(module)})


def read_part(module: nn.Module, layout: Layout) -> Model:
    """The values of some of the module's tensors, such as local ones."""
    values = Model(layout)
    for vector, tensor in _pairs(values, {entry: x for entry, x, _ in _tensors(module)}):
        vector.copy_(tensor)
    return values


def _copy(model: Model, found: dict[Tensor, torch.Tensor]) -> None:
    if not model.buffer.flags.writeable:  # torch rejects such arrays
        model = model.copy()
    for vector, tensor in _pairs(model, found):
        tensor.copy_(vector)


def with_own_values(layout: Layout, module: nn.Module) -> Layout:
    """A layout with the digest and the values of the module's unshared tensors."""
    if layout.unshared is None:
        return layout
    values = read_part(module, layout.unshared.layout)
    unshared = replace(layout.unshared, digest=values.digest(), values=values.itself)
    return replace(layout, unshared=unshared)


def to_delta(model: Model, base: Model) -> None:
    """Replace the parameters of ``model``, x_new, by x_new - x_tau; ``base`` is x_tau.

    Buffers and integers are left alone: they are never extrapolated.
    """
    np.subtract(model.parameters, base.parameters, out=model.parameters)


def _tensors(module: nn.Module) -> list[tuple[Tensor, torch.Tensor, bool]]:
    """Every tensor with its entry, and whether it is shared, in the layout's order."""
    buffers = [*module.named_buffers()]
    if buffers:  # many modules have none, and all of this is done twice for each task
        carried = module.state_dict(keep_vars=True)
        buffers = [(name, buffer) for name, buffer in buffers if name in carried]
    groups: dict[Kind, list[tuple[Tensor, torch.Tensor, bool]]] = {
        "parameter": [],
        "buffer": [],
        "integer": [],
        "counter": [],
        "variable": [],
    }
    changing = _patterns(module, "changing_integers")
    local = _patterns(module, "local_tensors")
    of_float: Kind
    for of_float, named in (("parameter", module.named_parameters()), ("buffer", buffers)):
        for name, tensor in named:
            kind = of_float if tensor.dtype in _FLOATS else _of_integers(name, changing)
            if is_lazy(tensor) or tensor.is_meta or tensor.dtype not in _FLOATS | _INTEGERS:
                raise LayoutMismatch(f"model(): {name} {_unfit(tensor)}")
            is_frozen = of_float == "parameter" and not tensor.requires_grad
            is_shared = not is_frozen or kind in ("counter", "variable")  # those may change
            is_shared = is_shared and not _matches(name, local)
            entry = _entry(name, tensor.shape, tensor.dtype, kind)
            groups[kind].append((entry, tensor.detach(), is_shared))
    return [one for group in groups.values() for one in group]


def _patterns(module: nn.Module, attribute: str) -> tuple[str, ...]:
    found: tuple[str, ...] | str = getattr(module, attribute, ())
    if isinstance(found, str):
        raise LayoutMismatch(f"{attribute} must be a tuple of patterns: ({found!r},)")
    return found


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unfit(tensor: torch.Tensor) -> str:
    """The error text for a tensor that can't be sent."""
    if is_lazy(tensor):
        return "is not initialised yet: pass a batch through the model before you return it"
    if tensor.is_meta:
        return "is on the device 'meta' and has no values: make the model on the device 'cpu'"
    return f"is of {tensor.dtype}: a model's tensors are float, integer or bool"


@lru_cache(4096)  # of one module: models with more tensors are large, and this doesn't matter there
def _entry(name: str, shape: torch.Size, dtype: torch.dtype, kind: Kind) -> Tensor:
    return Tensor(name, tuple(shape), str(dtype).removeprefix("torch."), kind)


def _of_integers(name: str, changing: Iterable[str]) -> Kind:
    """The kind of an integer tensor, variable if the module names it."""
    if _matches(name, changing):
        return "variable"
    return "counter" if name.rpartition(".")[2] == _COUNTER else "integer"


def _found(module: nn.Module, layout: Layout) -> dict[Tensor, torch.Tensor]:
    """A module's tensors. Raises LayoutMismatch unless they are those of ``layout``.

    Not by ``requires_grad``: training may freeze a shared tensor for a while.
    """
    found = {entry: tensor for entry, tensor, _ in _tensors(module)}
    wanted = layout.without_controls()
    if found.keys() != set(wanted.whole):
        raise LayoutMismatch(_difference(wanted.whole, tuple(found)))
    return found


def _pairs(
    model: Model, found: dict[Tensor, torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of the model's and the module's tensors; the model's are views of its vectors."""
    for entry, vector in model.flat():
        yield torch.from_numpy(vector).view(entry.shape), found[entry]


def _difference(model: tuple[Tensor, ...], module: tuple[Tensor, ...]) -> str:
    """Describe the first tensor in which two layouts differ."""
    ours, theirs = set(module), set(model)
    here = next((t for t in module if t not in theirs), None)
    there = next((t for t in model if t not in ours), None)
    return f"the module's layout differs from the model's: the module has {here}, the model {there}"
