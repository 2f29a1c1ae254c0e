"""Local layers: each device keeps BatchNorms of its own (FedBN), as its images look different.

fedstream simulate --task examples/local_batchnorm.py:Rotated --versions 30 \
    --set strategy.name=fedavg --set evaluator.per_device=last
"""

from collections import OrderedDict

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import TensorDataset

from fedstream import Task, iid


class Rotated(Task):
    x, y = load_digits(return_X_y=True)  # 1,797 images of 8x8 pixels
    parts = iid(y, 20, seed=0)  # rows: two parts for each of 10 devices, to train and to test
    x, y = torch.tensor(x / 16).float().view(-1, 1, 8, 8), torch.tensor(y)
    devices = 10

    def __init__(self, shared: bool = False):
        self.local = () if shared else ("bn*",)

    def model(self):
        layers = {"conv": nn.Conv2d(1, 16, 3), "bn": nn.BatchNorm2d(16), "relu": nn.ReLU()}
        return nn.Sequential(
            OrderedDict(layers | {"flat": nn.Flatten(), "out": nn.Linear(576, 10)})
        )

    def rotated(self, device, rows):
        """These images, turned by the device's angle: 0, 36, 72, ... degrees."""
        a = torch.tensor(2 * torch.pi * device / 10)
        turn = torch.stack([a.cos(), -a.sin(), 0 * a, a.sin(), a.cos(), 0 * a]).view(1, 2, 3)
        grid = affine_grid(turn.expand(len(rows), 2, 3), (len(rows), 1, 8, 8), align_corners=False)
        return TensorDataset(grid_sample(self.x[rows], grid, align_corners=False), self.y[rows])

    def device_data(self, device):
        return self.rotated(device, self.parts[2 * device])

    def device_test_data(self, device):
        return self.rotated(device, self.parts[2 * device + 1])
