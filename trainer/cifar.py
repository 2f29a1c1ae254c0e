"""CIFAR-10 with the convolutional networks of FedAsync and of Anarchic Federated Learning (AFL).

Images stay in memory as bytes of shape (3, 32, 32). Both models start with a layer that turns them
into its input: random crops and flips in training, the centre in evaluation. That way a whole batch
is augmented at once, with random numbers derived from the work's seed like all others.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.broker.errors import DataError
from fedstream.trainer.in_memory import InMemory, data_root, download, split_by_class
from fedstream.trainer.splitting import Classes, Iid

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from fedstream.trainer.in_memory import Bytes
    from fedstream.trainer.splitting import Partition
    from fedstream.trainer.task import TaskSettings

_FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST = "test_batch"
_SIDE = 32


def cifar10_fedasync(settings: TaskSettings) -> InMemory:
    """CIFAR-10 in crops of 24x24, as in FedAsync's experiments: 100 devices of 500 images.

    The paper doesn't say how images were split; the default is ``iid``. Raises DataError if the
    data is missing or damaged.
    """
    return _cifar10("cifar10-fedasync", fedasync_network, settings, devices=100, partition=Iid())


def cifar10_afl(settings: TaskSettings) -> InMemory:
    """CIFAR-10 in crops of 28x28, as in AFL's experiments: 10 devices of p classes each.

    Raises DataError if the data is missing or damaged.
    """
    return _cifar10("cifar10-afl", afl_network, settings, devices=10, partition=Classes())


def fedasync_network() -> nn.Module:
    """FedAsync's network (2019, section 9, table 2): 2,625,866 parameters.

    Bytes of shape (batch, 3, 32, 32) to scores of shape (batch, 10).
    """

    def convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
        return nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(outputs)

    return nn.Sequential(
        Crop(24),
        *(*convolution(3, 64), *convolution(64, 64), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(*convolution(64, 128), *convolution(128, 128), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(128 * 6 * 6, 512), nn.ReLU(), nn.Dropout(0.25)),
        nn.Linear(512, 10),
    )


def afl_network() -> nn.Module:
    """AFL's network (appendix E.1): 645,450 parameters.

    Its first dense layer has 1,024 inputs, which implies crops of 28x28 and no padding. Maps bytes
    of shape (batch, 3, 32, 32) to scores of shape (batch, 10).
    """
    return nn.Sequential(
        Crop(28),
        *(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU()),
        *(nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


class Crop(nn.Module):
    """Bytes of shape (batch, 3, 32, 32) to floats of shape (batch, 3, size, size).

    In training, crops are random, each mirrored with probability 1/2; in evaluation, the centre is
    taken. Channels are normalised by the mean and standard deviation of the training images. Random
    numbers are drawn on the CPU, so that they are the same wherever the model is.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        # not persistent: constants are neither trained, mixed nor sent
        for name, values in (
            ("mean", (0.4914, 0.4822, 0.4465)),
            ("deviation", (0.2470, 0.2435, 0.2616)),
        ):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            crops = self._at_random(images)
        else:
            start = (_SIDE - self._size) // 2
            crops = images[..., start : start + self._size, start : start + self._size]
        return (crops / 255 - self.mean) / self.deviation

    def _at_random(self, images: Tensor) -> Tensor:
        batch, size = len(images), self._size
        corners = torch.randint(_SIDE - size + 1, (2, batch, 1))
        rows, columns = corners + torch.arange(size)
        columns = torch.where(torch.rand(batch, 1) < 0.5, columns, columns.flip(1))
        return images[
            torch.arange(batch).view(batch, 1, 1, 1),
            torch.arange(3).view(1, 3, 1, 1),
            rows.view(batch, 1, size, 1),
            columns.view(batch, 1, 1, size),
        ]


def _cifar10(
    name: str,
    network: Callable[[], nn.Module],
    settings: TaskSettings,
    devices: int,
    partition: Partition,
) -> InMemory:
    root = data_root(name, settings)
    folder = root / _FOLDER
    if settings.download and not all((folder / file).is_file() for file in (*_TRAIN, _TEST)):
        download("CIFAR10", root)
    batches = [_batch(folder / file) for file in _TRAIN]
    train = TensorDataset(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    shares = split_by_class(
        train, settings.partition or partition, settings.devices or devices, settings.seed
    )
    return InMemory(network, shares, TensorDataset(*_batch(folder / _TEST)))


def _batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images, bytes of shape (images, 3, 32, 32), and labels from 0 to 9, of shape (images,).

    The file's digest isn't checked here: torchvision checks its downloads. Raises DataError if the
    file is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            values = _Unpickler(file, encoding="latin1").load()  # as Python 2 wrote them
    except FileNotFoundError:
        raise DataError(
            f"CIFAR-10's {path.name} is not in {path.parent}: set --data-root or FEDSTREAM_DATA to "
            f"a folder that contains {_FOLDER}, or set task.download = true"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        words = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is damaged: {words}; download it again") from error
    match values:
        case {"data": np.ndarray() as data, "labels": list() as labels} if (
            data.shape == (len(labels), 3 * _SIDE**2)
            and len(labels) > 0
            and all(type(label) is int and 0 <= label <= 9 for label in labels)
        ):
            images = torch.from_numpy(data.copy())  # a copy: torch wants writable arrays
            return images.view(-1, 3, _SIDE, _SIDE), torch.tensor(labels)
    raise DataError(
        f"{path} is not a batch of CIFAR-10: expected 'data' of shape (n, 3072) and n "
        "'labels' from 0 to 9; download it again"
    )


class _Unpickler(pickle.Unpickler):
    """Unpickles lists, dicts, numbers, strings and byte arrays, and nothing else.

    A pickle can name any function to be called. Those needed for byte arrays are replaced by
    harmless ones; every other name is refused.
    """

    def find_class(self, module: str, name: str) -> object:
        match module, name:
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct":
                return _empty_array
            case "numpy", "ndarray":
                return None  # only passed to _reconstruct, which ignores it
            case "numpy", "dtype":
                return _byte
            case "_codecs", "encode":
                return _encoded
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no data set needs")


def _empty_array(*_: object) -> Bytes:
    """An array for the pickle to fill."""
    return np.empty(0, np.uint8)


def _byte(kind: object, *_: object) -> np.dtype[np.uint8]:
    if kind != "u1":
        raise pickle.UnpicklingError(f"it holds values of type {kind!r}, not bytes")
    return np.dtype(np.uint8, copy=True)  # a copy: the pickle sets its byte order


def _encoded(text: str, encoding: object) -> bytes:
    """The bytes that Python 3 pickled as text for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it holds text in {encoding!r}")
    return text.encode("latin1")
