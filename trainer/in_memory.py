"""Data sets that built-in tasks hold in memory: finding them, and splitting them over devices."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.partitions import Natural, Partition, split
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from fedstream.trainer.partitions import Rows
    from fedstream.trainer.task import TaskSettings

_OPERATORS = ("torchvision::nms", "torchvision::qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_DECLARING = Lock()  # declaring twice is an error, and services may load tasks in threads


def declare_missing() -> None:
    """Make ``import torchvision`` work where its compiled operators can't be loaded; idempotent.

    A torchvision wheel built for CUDA is often installed beside a CPU build of torch. Its library
    then fails to load, and the import fails because it registers shapes for two operators that are
    not declared. Data sets and transforms need neither. This tries to load the library first, as
    torchvision itself does, so nothing changes where that works.
    """
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return  # not installed: the import will say so
    folder = Path(spec.origin).parent
    for library in (folder / f"_C{suffix}" for suffix in EXTENSION_SUFFIXES):
        if library.exists():
            try:
                torch.ops.load_library(library)  # type: ignore[no-untyped-call]
            except OSError:
                break
    with _DECLARING:
        for operator in _OPERATORS:
            if not hasattr(torch.ops.torchvision, operator.partition("::")[2]):
                torch.library.define(operator, _SCHEMA)


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

    def device_test_data(self, device: int) -> TensorDataset | None:
        """The test examples of the classes that the device has; None if items have no class."""
        own = self.device_data(device).tensors[-1]
        labels = self._test.tensors[-1]
        if own.dim() != 1 or labels.dim() != 1:
            return None
        rows = torch.isin(labels, own)
        return TensorDataset(*(values[rows] for values in self._test.tensors))


def split_by_class(
    train: TensorDataset, partition: Partition, devices: int, seed: int
) -> list[TensorDataset]:
    """Split (x, y), where y holds class numbers, over devices.

    Raises DataError if the data can't be split that way.
    """
    if isinstance(partition, Natural):
        raise DataError(
            "task.partition.kind = 'natural': these images have no natural partition; choose "
            "iid, classes or dirichlet"
        )
    return deal(train, split(partition, train.tensors[1].numpy(), devices, seed))


def deal(train: TensorDataset, rows: Sequence[Rows]) -> list[TensorDataset]:
    """One data set per device, all views of one copy, so that tasks copy nothing."""
    order, sizes = torch.from_numpy(np.concatenate(rows)), [len(part) for part in rows]
    shares = zip(*(torch.split(values[order], sizes) for values in train.tensors), strict=True)
    return [TensorDataset(*share) for share in shares]


def data_root(name: str, settings: TaskSettings) -> Path:
    """The configured folder of data sets, which may be missing. Raises DataError without one."""
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
    declare_missing()
    from torchvision import datasets

    try:
        getattr(datasets, dataset)(str(root), download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"{dataset} could not be downloaded to {root}: {error}") from error
