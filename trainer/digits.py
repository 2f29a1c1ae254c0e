"""Handwritten digits: scikit-learn's small data set, and MNIST."""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.broker.errors import DataError
from fedstream.trainer.in_memory import InMemory, data_root, download, split_by_class
from fedstream.trainer.splitting import Classes

if TYPE_CHECKING:
    from fedstream.trainer.in_memory import Bytes
    from fedstream.trainer.task import TaskSettings

_DEVICES = 10


def digits(settings: TaskSettings) -> InMemory:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, which are installed with fedstream.

    Every fifth image of each class is held out for testing. The model is a perceptron with one
    hidden layer. Pixels are centred: with two classes per device, FedAsync can then take larger
    steps and reaches .95 in 400 updates; with pixels from 0 to 1 the best setting tried reached
    .93.
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

    shares = _split(TensorDataset(x[~test], y[~test]), settings)
    return InMemory(model, shares, TensorDataset(x[test], y[test]))


def mnist(settings: TaskSettings) -> InMemory:
    """MNIST with multinomial logistic regression from zero, as in AFL's experiments.

    Pixels are scaled to (x/255 - .1307)/.3081, which reproduces the paper's numbers. Raises
    DataError if the data is missing or damaged.
    """
    root = data_root("mnist", settings)
    folder = root / "MNIST" / "raw"
    if settings.download and not all(_find(folder, name) for name in _MNIST_FILES):
        download("MNIST", root)
    train_images, train_labels, test_images, test_labels = _MNIST_FILES

    def model() -> nn.Module:
        regression = nn.Linear(784, 10)
        nn.init.zeros_(regression.weight)
        nn.init.zeros_(regression.bias)
        return regression

    shares = _split(_examples(folder, train_images, train_labels), settings)
    return InMemory(model, shares, _examples(folder, test_images, test_labels))


def _split(train: TensorDataset, settings: TaskSettings) -> list[TensorDataset]:
    partition = settings.partition or Classes()
    return split_by_class(train, partition, settings.devices or _DEVICES, settings.seed)


def _digits_table() -> npt.NDArray[np.float64]:
    """scikit-learn's own file, one row per image: 64 pixels from 0 to 16, then the label.

    load_digits reads the same file, but importing it takes as long as torch, in every service.
    """
    package = importlib.util.find_spec("sklearn")
    folder = Path(package.origin).parent if package and package.origin else Path("sklearn")
    path = folder / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"the digits are not in {path}: reinstall scikit-learn")
    return np.loadtxt(path, delimiter=",")


_MNIST_FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def _examples(folder: Path, images: str, labels: str) -> TensorDataset:
    """x of shape (images, 784), centred; y of shape (images,), from 0 to 9."""
    pixels, classes = _idx(folder, images), _idx(folder, labels)
    if pixels.shape[1:] != (28, 28) or classes.shape != pixels.shape[:1] or classes.max() > 9:
        raise DataError(
            f"{folder}: {images} holds values of shape {pixels.shape}, {labels} of "
            f"{classes.shape}; expected (images, 28, 28) and as many labels from 0 to 9: download "
            "them again"
        )
    x = torch.from_numpy(pixels).flatten(1).float().div_(255).sub_(0.1307).div_(0.3081)
    return TensorDataset(x, torch.from_numpy(classes).long())


def _find(folder: Path, name: str) -> Path | None:
    """The file, either unpacked, as torchvision leaves it, or compressed, as published."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _idx(folder: Path, name: str) -> Bytes:
    """The array in an IDX file of bytes (http://yann.lecun.com/exdb/mnist), in the file's shape.

    Raises DataError if it is missing, damaged or empty. torchvision reads only unpacked files, and
    importing it takes 2 s in every trainer.
    """
    path = _find(folder, name)
    if path is None:
        raise DataError(
            f"MNIST's {name} (or {name}.gz) is not in {folder}: set --data-root or FEDSTREAM_DATA "
            "to a folder that contains MNIST/raw, or set task.download = true"
        )
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        zeros, kind, dimensions = int.from_bytes(data[:2]), data[2], data[3]
        if zeros != 0 or kind != 8:
            raise ValueError("it is not an IDX file of bytes")
        shape = np.frombuffer(data, dtype=">u4", count=dimensions, offset=4)
        values = np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * dimensions)
        if not len(values):
            raise ValueError("it is empty")
        return values.reshape(shape).copy()  # a copy: torch wants writable arrays
    except (ValueError, IndexError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}; download it again") from error
