"""Segmentation: a class for each pixel, except for those labelled -100.

fedstream simulate --task examples/segmentation.py:task --versions 100
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream import Task


def discs(seed):
    """Noisy images of a disc each, and each pixel's class; the disc's edge has no label."""
    draw = torch.Generator().manual_seed(seed)
    row, column = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    y, x = torch.randint(3, 13, (2, 100, 1, 1), generator=draw)
    radius = torch.randint(2, 5, (100, 1, 1), generator=draw)
    distance = torch.hypot(row - y, column - x)
    labels = (distance < radius).long()
    images = labels + 0.7 * torch.randn(labels.shape, generator=draw)
    labels[(distance - radius).abs() < 0.5] = -100
    return TensorDataset(images[:, None], labels)


class Discs(Task):
    devices = 10

    def model(self):  # its scores have the shape (images, classes, 16, 16)
        convolutions = nn.Conv2d(1, 8, 5, padding=2), nn.ReLU(), nn.Conv2d(8, 2, 5, padding=2)
        return nn.Sequential(*convolutions)

    def device_data(self, device):
        return discs(seed=device)

    def test_data(self):
        return discs(seed=10)

    def metrics(self, model, data):
        images, labels = self.gather(data, torch.arange(len(data)))
        found = model(images).argmax(1)
        found[labels == -100] = -100
        both = [((found == c) & (labels == c)).sum() for c in (0, 1)]
        either = [((found == c) | (labels == c)).sum() for c in (0, 1)]
        mean_iou = (both[0] / either[0] + both[1] / either[1]) / 2
        return super().metrics(model, data) | {"mean_iou": mean_iou}  # and the pixels' accuracy


task = Discs()
