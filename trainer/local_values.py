"""Values of local tensors (:attr:`fedstream.Task.local`): each device has its own.

A device begins with version 0's values, which come with every whole model. After a task whose
answer was accepted, it keeps those that it has trained; a task that was given up changes nothing.
``Learner.load`` puts a whole model into the module, then the device's values.

Trainers keep them by :class:`fedstream.trainer.saved_work.LocalValues`, devices over HTTPS in their
folder, and simulations in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model

if TYPE_CHECKING:
    from torch import nn


def layout_of(layout: Layout) -> Layout | None:
    """The layout of a model's local tensors alone; None if there are none."""
    if layout.unshared is None or not layout.unshared.local:
        return None
    return layout.unshared.of_devices


def check_room(layout: Layout, devices: int, most: int) -> None:
    """Raise ConfigError if the values of so many devices may exceed ``trainer.local_bytes``."""
    local = layout_of(layout)
    if local is not None and devices * local.nbytes > most:
        raise ConfigError(
            f"trainer.local_bytes = {most}: the local tensors of {devices} devices have "
            f"{devices * local.nbytes} bytes (Task.local): allow as many, or name fewer tensors"
        )


def read(module: nn.Module, layout: Layout) -> Model | None:
    """The local values that ``module`` has after training; None if there is nothing to keep.

    Values that are not finite are not kept, as their device could never train again.
    """
    from fedstream.trainer import vector

    if (local := layout_of(layout)) is None:
        return None
    values = vector.read_part(module, local)
    return values if np.isfinite(values.floats).all() else None


def of_bytes(data: bytes, layout: Layout) -> Model | None:
    """Kept values from their bytes; None if missing, damaged or of another layout."""
    local = layout_of(layout)
    if local is None or len(data) != local.nbytes:
        return None
    values = Model(local, np.frombuffer(data, np.uint8))
    return values if np.isfinite(values.floats).all() else None
