"""Augmentation: each use of an image shifts it and adds noise; the model has BatchNorm.

fedstream simulate --task examples/augmentation.py:task --versions 100
"""

import random

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream import Task, iid


class Augmented(Dataset):
    def __init__(self, images, classes):
        self.images, self.classes = images, classes

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):  # the generators of random and torch are seeded per task
        shifted = self.images[row].roll(random.choice([-1, 0, 1]), 2)
        return shifted + 0.1 * torch.randn(1, 8, 8), self.classes[row]


class Digits(Task):
    x, y = load_digits(return_X_y=True)
    test, *parts = iid(y, 11, seed=0)  # rows: one part to test, one for each of 10 devices
    x, y = torch.tensor(x / 16).float().view(-1, 1, 8, 8), torch.tensor(y)

    def model(self):
        convolution = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        return nn.Sequential(*convolution, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))

    def device_data(self, device):
        return Augmented(self.x[self.parts[device]], self.y[self.parts[device]])

    def test_data(self):
        x, y = self.x[self.test], self.y[self.test]
        return TensorDataset(torch.cat([x.roll(-1, 3), x, x.roll(1, 3)]), y.repeat(3))


task = Digits()
