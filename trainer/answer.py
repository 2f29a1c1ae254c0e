"""Turning a trained model into what a device sends, for trainers and the simulation alike."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from fedstream.broker.errors import ConfigError
from fedstream.trainer.compression import Compression, compress
from fedstream.trainer.solvers import Trained

if TYPE_CHECKING:
    from fedstream.broker.layout import Floats, Model
    from fedstream.broker.messages import Sends


def as_sent(
    trained: object,
    into: Model,
    base: Model,
    device_control: Floats | None,
    sends: Sends,
    compression: Compression,
) -> Trained:
    """Convert ``into``, which holds x_new, to what is sent; return the result as plain numbers.

    ``trained`` is what train() returned, ``base`` is x_tau, ``device_control`` is c_i (None: zero).
    Only the parameters of a delta are compressed.

    Raises TypeError or ValueError if train() returned anything invalid; ConfigError if compression
    is configured but models, not deltas, are sent.
    """
    from fedstream.trainer import vector

    if not isinstance(trained, Trained):
        raise TypeError(f"train() must return Trained(...), not {type(trained).__name__}")
    lr = None if trained.lr is None else float(trained.lr)
    loss = None if trained.loss is None else float(trained.loss)
    took = Trained(int(trained.steps), int(trained.samples), loss, lr=lr)
    if min(took.steps, took.samples) < 0:
        raise ValueError("train() must return Trained(...) with no negative numbers")
    if lr is not None and not 0.0 < lr < math.inf:
        raise ValueError(
            f"train() must return Trained(..., lr=...) with a finite lr above 0, not {lr}"
        )
    if sends == "delta":
        vector.to_delta(into, base)
        compress(into.parameters, compression)
    elif compression.kind != "none":
        raise ConfigError(
            f"compression.kind = {compression.kind!r}: devices send their models in this run, and "
            "only deltas can be compressed"
        )
    if into.layout.controls:
        if trained.control is None:
            raise TypeError("train() must return Trained(..., control=...): SCAFFOLD needs it")
        known = 0.0 if device_control is None else device_control
        np.subtract(trained.control, known, out=into.controls)
    return took
