"""The state of torch's optimizers and schedulers as bytes, without pickle.

Tensors are in the format of safetensors, numbers as JSON in its metadata. JSON keeps every float64.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedstream.core.errors import BadMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

_HEADER = 8  # bytes: the length of safetensors' header, which begins with it


def encoded(optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> bytes | None:
    """The state as bytes; None if a value is neither a dense tensor nor valid in JSON."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    groups = []
    for n, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        for parameter, values in state["state"].items():
            for name, value in values.items():
                where = f"{n}.{parameter}.{name}"
                if not isinstance(value, torch.Tensor):
                    numbers[where] = value
                elif value.layout is torch.strided:
                    tensors[where] = value.contiguous()
                else:
                    return None
        groups.append([{**group, "params": None} for group in state["param_groups"]])
    rates = [scheduler.state_dict() for scheduler in schedulers]
    try:
        about = json.dumps({"numbers": numbers, "groups": groups, "schedulers": rates})
    except (TypeError, ValueError):
        return None
    return save(tensors, {"state": about})


def restore(
    data: bytes, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]
) -> None:
    """Put fresh optimizers and schedulers into an encoded state.

    Raises BadMessage if the bytes are invalid, or belong to other optimizers.
    """
    try:
        end = _HEADER + int.from_bytes(data[:_HEADER], "little")
        about = json.loads(json.loads(data[_HEADER:end])["__metadata__"]["state"])
        values = {**load(data), **about["numbers"]}
        for n, (optimizer, groups) in enumerate(zip(optimizers, about["groups"], strict=True)):
            state = optimizer.state_dict()
            for ours, theirs in zip(state["param_groups"], groups, strict=True):
                ours.update(theirs | {"params": ours["params"]})
            for where, value in values.items():
                number, parameter, name = where.split(".", 2)
                if int(number) == n:
                    state["state"].setdefault(int(parameter), {})[name] = value
            optimizer.load_state_dict(state)
        for scheduler, rates in zip(schedulers, about["schedulers"], strict=True):
            scheduler.load_state_dict(rates)
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadMessage(f"the workspace's optimizer state cannot be read: {error}") from error
