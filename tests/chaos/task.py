"""A task that costs nothing: what a trainer uploads follows from device and seed alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream import Task
from trainer.solvers import Trained, Work


class Vector(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(4000))


class Noise(Task):
    """Ten devices that move every parameter, so that two updates in the wrong order are seen."""

    devices = 10

    def model(self) -> nn.Module:
        return Vector()

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.tensor([device]))

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        drawn = torch.Generator().manual_seed(work.seed)
        with torch.no_grad():
            for x in model.parameters():
                x.add_(torch.randn(x.shape, generator=drawn), alpha=0.1)
                control = 0.1 * torch.randn(x.numel(), generator=drawn)
        return Trained(steps=1, samples=1 + work.device, loss=0.0, control=control.numpy())


task = Noise()
