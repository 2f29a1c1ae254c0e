"""The built-in tasks: real data sets that classify handwritten digits, split over devices."""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from broker.errors import DataError
from trainer import partitions, torchvision_ops
from trainer.task import Classes, Task, TaskSettings

if TYPE_CHECKING:
    from collections.abc import Callable

_DEVICES = 10
Bytes = npt.NDArray[np.uint8]


class Split(Task):
    """A classification data set in memory, split over devices as the settings say."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        train: TensorDataset,
        test: TensorDataset,
        settings: TaskSettings,
    ) -> None:
        x, y = train.tensors
        self.devices = settings.devices or _DEVICES
        labels = y.numpy()
        if isinstance(settings.partition, Classes):
            rows = partitions.by_classes(labels, self.devices, settings.partition.p, settings.seed)
        else:
            rows = partitions.iid(labels, self.devices, settings.seed)
        # sorted by device once, so that each one's data is a view, not a copy at every task
        order, sizes = torch.from_numpy(np.concatenate(rows)), [len(part) for part in rows]
        shares = zip(torch.split(x[order], sizes), torch.split(y[order], sizes), strict=True)
        self._data = [TensorDataset(*share) for share in shares]
        self._test = test
        self._model = model

    def model(self) -> nn.Module:
        return self._model()

    def device_data(self, device: int) -> TensorDataset:
        """The device's share. Raises DataError for a device that does not exist."""
        if not 0 <= device < len(self._data):
            raise DataError(
                f"there is no device {device}: task.devices = {self.devices} are numbered from 0"
            )
        return self._data[device]

    def test_data(self) -> TensorDataset:
        return self._test


def digits(settings: TaskSettings) -> Split:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels; it is installed with the package.

    Within each class every fifth is for testing. The model is a perceptron with one hidden layer.
    Pixels are centred: FedAsync over devices of two classes then takes larger steps and reaches .95
    in 400 updates; with pixels from 0 to 1 the best that was tried reached .93.
    """
    table = _digits_table()
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int64)
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[::5]] = True
    mean, deviation = 0.3, 0.38  # of pixels / 16
    x = torch.from_numpy((pixels / 16 - mean) / deviation).float()
    y = torch.from_numpy(labels).long()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    return Split(
        model, TensorDataset(x[~test], y[~test]), TensorDataset(x[test], y[test]), settings
    )


def _digits_table() -> npt.NDArray[np.float64]:
    """scikit-learn's own file, a row for each image: 64 pixels from 0 to 16, then the label.

    Its load_digits reads it likewise, but importing that takes as long as torch, in every service.
    """
    package = importlib.util.find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else Path("sklearn")
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"the digits are not in {path}: install scikit-learn anew")
    return np.loadtxt(path, delimiter=",")


def mnist(settings: TaskSettings) -> Split:
    """MNIST with multinomial logistic regression from zero, as in AFL's experiments.

    Pixels are (x/255 - .1307)/.3081: its numbers come out with these. Raises DataError if the data
    is missing or damaged.
    """
    root = settings.data_root or os.environ.get("FEDSTREAM_DATA")
    if root is None:
        raise DataError(
            "mnist needs a folder for its data: give --data-root or set FEDSTREAM_DATA "
            "(and task.download = true to have it fetched)"
        )
    folder = Path(root) / "MNIST" / "raw"
    if settings.download and not all(_find(folder, name) for name in _MNIST_FILES):
        _download_mnist(root)
    images, labels, test_images, test_labels = (_idx(folder, name) for name in _MNIST_FILES)

    def examples(pixels: Bytes, classes: Bytes) -> TensorDataset:
        x = torch.from_numpy(pixels).flatten(1).float().div_(255).sub_(0.1307).div_(0.3081)
        return TensorDataset(x, torch.from_numpy(classes).long())

    def model() -> nn.Module:
        regression = nn.Linear(784, 10)
        nn.init.zeros_(regression.weight)
        nn.init.zeros_(regression.bias)
        return regression

    return Split(model, examples(images, labels), examples(test_images, test_labels), settings)


BUILT_IN: dict[str, Callable[[TaskSettings], Task]] = {"digits": digits, "mnist": mnist}

_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _download_mnist(root: str) -> None:
    torchvision_ops.declare_missing()
    from torchvision.datasets import MNIST

    try:
        MNIST(root, download=True)
    except (RuntimeError, OSError) as error:
        raise DataError(f"MNIST could not be downloaded to {root}: {error}") from error


def _find(folder: Path, name: str) -> Path | None:
    """The file, unpacked as torchvision leaves it or packed as it is published."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _idx(folder: Path, name: str) -> Bytes:
    """Read an IDX file of bytes (http://yann.lecun.com/exdb/mnist): its own shape.

    torchvision would read it too, but only unpacked, and its import takes 2 s in every trainer.
    """
    path = _find(folder, name)
    if path is None:
        raise DataError(
            f"MNIST's {name} (or {name}.gz) is not in {folder}: point --data-root or "
            f"FEDSTREAM_DATA to a folder with MNIST/raw in it, or set task.download = true"
        )
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        zeros, kind, dimensions = int.from_bytes(data[:2]), data[2], data[3]
        if zeros != 0 or kind != 8:
            raise ValueError("it does not begin as an IDX file of bytes")
        shape = np.frombuffer(data, dtype=">u4", count=dimensions, offset=4)
        values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions)
        return values.reshape(shape).copy()  # a copy: torch wants arrays that it may write
    except (ValueError, IndexError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}; fetch it anew") from error
