"""Images: handwritten digits, MNIST, and CIFAR-10 with the networks of FedAsync and of AFL.

CIFAR-10's images stay in memory as bytes of shape (3, 32, 32). Both models start with a layer that
turns them into its input: random crops and flips in training, the centre in evaluation. That way a
whole batch is augmented at once, with random numbers derived from the work's seed like all others.
"""

from __future__ import annotations

import gzip
import importlib.util
import pickle
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.in_memory import InMemory, data_root, download, split_by_class
from fedstream.trainer.partitions import Classes, Iid

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedstream.trainer.in_memory import Bytes
    from fedstream.trainer.partitions import Partition
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

    Maps bytes of shape (batch, 3, 32, 32) to scores of shape (batch, 10).
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
    """Turns bytes of shape (batch, 3, 32, 32) into floats of shape (batch, 3, size, size).

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
    task = InMemory(network, shares, TensorDataset(*_batch(folder / _TEST)))
    task.evaluation_batch = 100  # more images don't fit the cache: 512 take twice as long each
    return task


def _batch(path: Path) -> tuple[Tensor, Tensor]:
    """The images, as bytes of shape (images, 3, 32, 32), and their labels from 0 to 9.

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
