"""A task that costs nothing, and writes down what it was given and what it made of it.

Those notes are the trainers' own account of a run: what the checks compare a journal with.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream import Task
from fedstream.trainer.solvers import Trained, Work

NOTES = "FEDSTREAM_CHAOS_NOTES"  # in the environment: the folder for what trainers note down
PARAMETERS, BUFFERS = 4000, 8


class Vector(nn.Module):
    """A model that is nothing but its parameters, and a few buffers that no step trains."""

    x: nn.Parameter
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(PARAMETERS))
        self.register_buffer("seen", torch.zeros(BUFFERS))


class Noise(Task):
    """Ten devices that move every parameter, so that two updates in the wrong order are seen."""

    devices = 10

    def model(self) -> nn.Module:
        return Vector()

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.tensor([device]))

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        assert isinstance(model, Vector)
        drawn = torch.Generator().manual_seed(work.seed)
        began = bytes_of(model)
        with torch.no_grad():
            model.x.add_(torch.randn(PARAMETERS, generator=drawn), alpha=0.1)
            model.seen.copy_(torch.rand(BUFFERS, generator=drawn))
            control = (0.1 * torch.randn(PARAMETERS, generator=drawn)).numpy()
        steps, samples = 1 + work.seed % 3, 1 + work.device
        note(work, began, bytes_of(model), control, steps, samples)
        return Trained(steps=steps, samples=samples, loss=0.0, control=control)


def bytes_of(model: Vector) -> bytes:
    """Parameters and buffers as float32."""
    return bytes(torch.cat([model.x.detach(), model.seen]).numpy().tobytes())


def note(
    work: Work, began: bytes, ended: bytes, control: np.ndarray[Any, Any], steps: int, samples: int
) -> None:
    """One line of this trainer's account, in one write: whoever is killed leaves no half of it."""
    folder = os.environ.get(NOTES)
    if folder is None:
        return
    known = None if work.device_control is None else work.device_control.tobytes()
    said = msgpack.packb(
        {
            "task": work.task,
            "device": work.device,
            "tau": work.version,
            "base": work.base,
            "seed": work.seed,
            "lr": work.solver.lr,
            "steps": steps,
            "samples": samples,
            "began": began,
            "ended": ended,
            "control": control.tobytes(),
            "known": known,
        }
    )
    file = os.open(f"{folder}/{os.getpid()}.notes", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(file, said)
    finally:
        os.close(file)


task = Noise()
