"""``torch.optim.SGD`` at the cost of its arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.sgd import sgd

if TYPE_CHECKING:
    from collections.abc import Callable


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
