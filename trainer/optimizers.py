"""torch's SGD at the cost of its arithmetic, and the state of any optimizer as bytes.

No pickle is involved: tensors are in the format of safetensors, numbers as JSON in the metadata.
JSON keeps every float64.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch.optim.sgd import sgd

from fedstream.core.errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

_HEADER = 8  # bytes: the length of safetensors' header, which begins with it
_PAIRS = "pairs of a dict"  # whose keys are not text, as MultiStepLR's milestones


class LeanSGD(torch.optim.SGD):
    """``torch.optim.SGD`` for models that are not compiled together with their optimizer.

    SGD's own methods ask torch.compile first. To import it takes each process 1.5 s, and to ask it
    a third of a small model's step. The step is torch's function of the same name, so its bits are
    SGD's.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with the defaults of the arguments that it lacks."""
        group = {**self.defaults, **param_group, "params": [*param_group["params"]]}
        self.param_groups.append(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a step of each parameter that has a gradient. ``closure`` is ignored."""
        for group in self.param_groups:
            moved = [x for x in group["params"] if x.grad is not None]
            gradients = [x.grad for x in moved]
            momentum = group["momentum"]
            buffers = [self.state[x].get("momentum_buffer") if momentum else None for x in moved]
            sgd(
                moved,
                gradients,
                buffers,
                has_sparse_grad=any(one.is_sparse for one in gradients),
                foreach=group["foreach"],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                momentum=momentum,
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            if momentum:
                for x, buffer in zip(moved, buffers, strict=True):
                    self.state[x]["momentum_buffer"] = buffer


def encoded(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> bytes | None:
    """The state as bytes; None if it has values other than dense tensors and JSON's."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    groups = []
    for n, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for parameter, values in state["state"].items():
            if not isinstance(parameter, int):
                return None
            for name, value in values.items():
                where = f"{n}.{parameter}.{name}"
                if not isinstance(value, torch.Tensor):
                    numbers[where] = value
                elif value.layout is torch.strided:
                    tensors[where] = value.clone(memory_format=torch.contiguous_format)
                else:
                    return None
        groups.append([{**group, "params": None} for group in state["param_groups"]])
    rates = [scheduler.state_dict() for scheduler in schedulers]
    about = _plain({"numbers": numbers, "groups": groups, "schedulers": rates})
    try:
        text = json.dumps(about)
    except (TypeError, ValueError):
        return None
    return save(tensors, {"state": text}) if json.loads(text) == about else None


def restore(
    data: bytes, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]
) -> None:
    """Put fresh optimizers and schedulers into an encoded state.

    Raises BadMessage if the bytes are invalid, or of other optimizers.
    """
    try:
        end = _HEADER + int.from_bytes(data[:_HEADER], "little")
        about = _own(json.loads(json.loads(data[_HEADER:end])["__metadata__"]["state"]))
        every = []
        for optimizer, groups in zip(optimizers, about["groups"], strict=True):
            for ours, theirs in zip(optimizer.param_groups, groups, strict=True):
                if ours.keys() != theirs.keys():
                    raise ValueError("a parameter group has other keys than this optimizer's")
                ours.update(theirs | {"params": ours["params"]})
            every.append([x for group in optimizer.param_groups for x in group["params"]])
        # Not by load_state_dict, which would cast a float32 moment to its parameter's dtype.
        for where, value in {**load(data), **about["numbers"]}.items():
            number, place, name = where.split(".", 2)
            parameter = every[int(number)][int(place)]
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                value = value.to(parameter.device)
            optimizers[int(number)].state[parameter][name] = value
        for scheduler, rates in zip(schedulers, about["schedulers"], strict=True):
            if rates.keys() - vars(scheduler).keys():
                raise ValueError("the saved scheduler has attributes that this one lacks")
            scheduler.load_state_dict(rates)
    except (SafetensorError, LookupError, *_WRONG) as error:
        raise BadMessage(f"the workspace's optimizer state cannot be read: {error}") from error


_WRONG = (ValueError, TypeError, AttributeError, RuntimeError, RecursionError, OverflowError)


def _plain(value: Any) -> Any:
    """A value in the types of JSON, as far as these can express it."""
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(inner) for key, inner in value.items()}
        return {_PAIRS: [[key, _plain(inner)] for key, inner in value.items()]}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def _own(value: Any) -> Any:
    """The inverse of :func:`_plain`, but for tuples, which stay lists."""
    if isinstance(value, dict):
        if value.keys() == {_PAIRS}:
            return Counter(dict(value[_PAIRS]))
        return {key: _own(inner) for key, inner in value.items()}
    return [_own(inner) for inner in value] if isinstance(value, list) else value
