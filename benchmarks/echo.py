"""A task without training: trainers return nearly the same model, so only the pipeline works.

FEDSTREAM_ECHO_PARAMETERS is the number of the model's float32 parameters.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream import Task
from fedstream.trainer.solvers import Trained, Work

PARAMETERS = int(os.environ.get("FEDSTREAM_ECHO_PARAMETERS", "61706"))


class Vector(nn.Module):
    """A model that consists of its parameters only."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(size) * 0.01)


class Echo(Task):
    """Devices with one sample each, and nothing to learn.

    There are more of them than tasks in flight, since a device has one at a time.
    """

    devices = 100

    def model(self) -> nn.Module:
        return Vector(PARAMETERS)

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.tensor([device]))

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        with torch.no_grad():  # changes the digest, or trainers would skip downloads
            next(model.parameters())[0] += 1e-3
        return Trained(steps=1, samples=1, loss=0.0)


task = Echo()
