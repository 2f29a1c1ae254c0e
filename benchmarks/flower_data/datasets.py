"""Stands in for Hugging Face's ``datasets``: CIFAR-10 from FEDSTREAM_DATA, without a download.

It has as much as Flower's quickstart-pytorch uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from fedstream.trainer.images import cifar10_fedasync
from fedstream.trainer.task import TaskSettings

Transform = Callable[[dict[str, list[Any]]], dict[str, list[Any]]]


class Split:
    """Rows of CIFAR-10: items ``{"img": ..., "label": ...}``, the image as PIL has it."""

    def __init__(self, images: Any, labels: Any, transform: Transform | None = None) -> None:
        self._images, self._labels, self._transform = images, labels, transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """A batch, transformed at once, as torch's loader asks for it."""
        batch: dict[str, list[Any]] = {
            "img": [Image.fromarray(self._images[row]) for row in rows],
            "label": [int(self._labels[row]) for row in rows],
        }
        if self._transform is not None:
            batch = self._transform(batch)
        return [dict(zip(batch, item, strict=True)) for item in zip(*batch.values(), strict=True)]

    def rows(self, chosen: Any) -> Split:
        """Some of the rows."""
        return Split(self._images[chosen], self._labels[chosen])

    def train_test_split(self, test_size: float, seed: int) -> dict[str, Split]:
        """Two parts, drawn at random."""
        order = np.random.default_rng(seed).permutation(len(self))
        cut = round(len(self) * (1 - test_size))
        return Parts(train=self.rows(order[:cut]), test=self.rows(order[cut:]))

    def with_transform(self, transform: Transform) -> Split:
        """The same, transformed as it is read."""
        return Split(self._images, self._labels, transform)

    def with_format(self, _: str) -> Split:
        """The same."""
        return self


class Parts(dict[str, Split]):
    """Named splits."""

    def with_transform(self, transform: Transform) -> Parts:
        """All of them, transformed as they are read."""
        return Parts({name: split.with_transform(transform) for name, split in self.items()})


@cache
def load_dataset(name: str, split: str) -> Split:
    """CIFAR-10's training or test images."""
    if name != "uoft-cs/cifar10":
        raise ValueError(f"only CIFAR-10 is here, not {name}")
    task = cifar10_fedasync(TaskSettings(name="cifar10-fedasync", devices=1))
    images, labels = (task.device_data(0) if split == "train" else task.test_data()).tensors
    return Split(images.permute(0, 2, 3, 1).numpy(), labels.numpy())
