"""What the built-in tasks share: finding their data and splitting it over devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from fedstream.broker.errors import DataError
from fedstream.trainer import partitions, torchvision_ops
from fedstream.trainer.task import Classes, Dirichlet, Iid, Natural, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fedstream.trainer.task import PartitionSettings, TaskSettings

Bytes = npt.NDArray[np.uint8]


class InMemory(Task):
    """A task with its data in memory: one share per device, and common test data."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        shares: Sequence[TensorDataset],
        test: TensorDataset,
    ) -> None:
        self.devices = len(shares)
        self._model = model
        self._shares = shares
        self._test = test

    def model(self) -> nn.Module:
        return self._model()

    def device_data(self, device: int) -> TensorDataset:
        """The device's share. Raises DataError for a device that does not exist."""
        if not 0 <= device < len(self._shares):
            raise DataError(
                f"there is no device {device}: the {self.devices} devices (task.devices) are "
                "numbered from 0"
            )
        return self._shares[device]

    def test_data(self) -> TensorDataset:
        return self._test


def split_by_class(
    train: TensorDataset, partition: PartitionSettings, devices: int, seed: int
) -> list[TensorDataset]:
    """Split (x, y), where y holds class numbers, over devices.

    Raises DataError if the data can't be split that way.
    """
    labels = train.tensors[1].numpy()
    match partition:
        case Iid():
            rows = partitions.iid(labels, devices, seed)
        case Classes():
            rows = partitions.by_classes(labels, devices, partition.p, seed)
        case Dirichlet():
            rows = partitions.by_dirichlet(labels, devices, partition.alpha, seed)
        case Natural():
            raise DataError(
                "task.partition.kind = 'natural': these images have no natural partition; choose "
                "iid, classes or dirichlet"
            )
    return deal(train, rows)


def deal(train: TensorDataset, rows: Sequence[partitions.Rows]) -> list[TensorDataset]:
    """One data set per device's rows. All are views of one copy, so that tasks copy nothing."""
    order, sizes = torch.from_numpy(np.concatenate(rows)), [len(part) for part in rows]
    shares = zip(*(torch.split(values[order], sizes) for values in train.tensors), strict=True)
    return [TensorDataset(*share) for share in shares]


def data_root(name: str, settings: TaskSettings) -> Path:
    """The folder of data sets, which need not exist. Raises DataError if none is configured."""
    root = settings.data_root or os.environ.get("FEDSTREAM_DATA")
    if root is None:
        raise DataError(
            f"{name} needs a folder for its data: give --data-root or set FEDSTREAM_DATA"
        )
    return Path(root)


def read_text(path: Path) -> str:
    """The text of a UTF-8 file. Raises DataError if it can't be read or decoded."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as text: {error}; download it again") from error


def download(dataset: str, root: Path) -> None:
    """Have torchvision fetch one of its data sets into ``root``. Raises DataError if that fails."""
    torchvision_ops.declare_missing()
    from torchvision import datasets

    try:
        getattr(datasets, dataset)(str(root), download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{dataset} could not be downloaded to {root}: {error}") from error
