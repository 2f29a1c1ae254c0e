"""What the built-in tasks share; real digits at once, MNIST from wherever the user has it."""

from __future__ import annotations

import gzip
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fedstream.core.errors import ConfigError, DataError
from fedstream.runtime.config import Section, load
from fedstream.trainer.images import digits, mnist
from fedstream.trainer.in_memory import Bytes, InMemory
from fedstream.trainer.loading import BUILT_IN, load_task
from fedstream.trainer.partitions import Classes, Dirichlet, Iid, Natural
from fedstream.trainer.task import TaskSettings, initial

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def idx(values: Bytes) -> bytes:
    """Values as an IDX file, as http://yann.lecun.com/exdb/mnist describes it."""
    head = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
    return head + bytes(values.tobytes())


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty training and ten test images, in which every pixel is six times the class."""
    monkeypatch.delenv("FEDSTREAM_DATA", raising=False)
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    labels = np.tile(np.arange(10, dtype=np.uint8), 4)
    images = np.broadcast_to(6 * labels[:, None, None], (40, 28, 28)).astype(np.uint8)
    for name, values in zip(FILES, (images, labels, images[:10], labels[:10]), strict=True):
        (folder / f"{name}-ubyte").write_bytes(idx(values))
    return tmp_path


def classes(task: InMemory, device: int) -> set[int]:
    return set(task.device_data(device).tensors[1].tolist())


def test_digits_splits_all_training_data_as_configured() -> None:
    task = digits(TaskSettings(devices=5, partition=Classes(p=2)))
    assert [len(classes(task, device)) for device in range(5)] == [2] * 5
    sizes = [len(task.device_data(device)) for device in range(5)]
    assert sum(sizes) + len(task.test_data()) == 1797
    counts = torch.bincount(task.test_data().tensors[1])
    assert ((counts >= 35) & (counts <= 37)).all()  # a fifth of 174 to 183
    x = task.device_data(0).tensors[0]
    assert x.dtype == torch.float32
    again = digits(TaskSettings(devices=5, partition=Classes(p=2)))
    assert torch.equal(again.device_data(0).tensors[0], x)


def test_digits_has_ten_devices_by_default() -> None:
    task = load_task("digits", TaskSettings())
    assert task.devices == 10
    for device in (-1, 10):
        with pytest.raises(DataError, match=f"no device {device}: the 10 devices"):
            task.device_data(device)


@pytest.mark.parametrize("partition", [Iid(), Classes(p=1)])
@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_with_or_without_gzip(
    root: Path, *, packed: bool, partition: Iid | Classes
) -> None:
    for file in [*root.rglob("*-ubyte")] if packed else []:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    task = mnist(TaskSettings(data_root=str(root), partition=partition))
    x, y = task.device_data(3).tensors
    assert (x.shape, y.dtype) == ((4, 784), torch.int64)
    expected = (6 * y / 255 - 0.1307) / 0.3081
    assert torch.allclose(x, expected.float().unsqueeze(1).expand_as(x), atol=1e-6)
    assert task.test_data().tensors[1].tolist() == list(range(10))
    assert not initial(task, seed=0).floats.any()  # starts at zero


def test_mnist_is_found_through_the_environment(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSTREAM_DATA", str(root))
    assert len(mnist(TaskSettings(devices=4, partition=Iid())).device_data(0)) == 10


def test_missing_mnist_says_what_where_and_how_to_get_it(root: Path) -> None:
    with pytest.raises(DataError, match=r"needs a folder .*--data-root or set FEDSTREAM_DATA"):
        mnist(TaskSettings())
    (root / "MNIST/raw/t10k-images-idx3-ubyte").unlink()
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte.*is not in") as caught:
        mnist(TaskSettings(data_root=str(root)))
    for words in (str(root / "MNIST" / "raw"), "--data-root", "FEDSTREAM_DATA", "task.download"):
        assert words in str(caught.value)


@pytest.mark.parametrize("damage", ["", "short", "not gzip"])
def test_damaged_mnist_names_the_file(root: Path, damage: str) -> None:
    file = root / "MNIST/raw/train-images-idx3-ubyte"
    whole = file.read_bytes()
    file.unlink()
    packed = {"": b"", "short": gzip.compress(whole[:-1]), "not gzip": whole}[damage]
    file.with_name(f"{file.name}.gz").write_bytes(packed)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz is damaged: .*download it again"
    ):
        mnist(TaskSettings(data_root=str(root)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("train-images-idx3", np.zeros((40, 28, 27), np.uint8)),
        ("train-images-idx3", np.zeros((39, 28, 28), np.uint8)),
        ("t10k-labels-idx1", np.full(10, 10, np.uint8)),
        ("t10k-labels-idx1", np.zeros((10, 1), np.uint8)),
    ],
)
def test_mnist_of_the_wrong_shape_is_rejected(root: Path, name: str, values: Bytes) -> None:
    (root / "MNIST/raw" / f"{name}-ubyte").write_bytes(idx(values))
    with pytest.raises(DataError, match=f"{name}-ubyte.* 28, 28\\).* from 0 to 9: download"):
        mnist(TaskSettings(data_root=str(root)))


def test_torchvision_downloads_only_what_is_missing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Path]] = []

    def download(dataset: str, root: Path) -> None:
        asked.append((dataset, root))

    monkeypatch.setattr("fedstream.trainer.images.download", download)
    settings = TaskSettings(data_root=str(root), download=True)
    mnist(settings)
    assert asked == []
    (root / "MNIST/raw/t10k-images-idx3-ubyte").unlink()
    for name in ("mnist", "cifar10-afl"):
        with pytest.raises(DataError, match="is not in"):
            load_task(name, settings)
    assert asked == [("MNIST", root), ("CIFAR10", root)]


def test_images_have_no_natural_partition() -> None:
    with pytest.raises(DataError, match=r"'natural'.*choose iid, classes or dirichlet"):
        digits(TaskSettings(partition=Natural()))


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - {"digits"}))
def test_every_task_with_files_says_what_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDSTREAM_DATA", raising=False)
    with pytest.raises(DataError, match=rf"{name} needs a folder .*--data-root .*FEDSTREAM_DATA"):
        load_task(name, TaskSettings())
    with pytest.raises(DataError, match=rf"in {tmp_path}/.*: set --data-root") as caught:
        load_task(name, TaskSettings(data_root=str(tmp_path)))
    assert "\n" not in str(caught.value)


class Settings(Section):
    task: TaskSettings = TaskSettings()


@pytest.mark.parametrize(
    ("sets", "partition"),
    [
        ([], None),
        (["task.partition.p=5"], Classes(p=5)),
        (["task.partition.alpha=0.1"], Dirichlet(alpha=0.1)),
        (["task.partition.kind=iid"], Iid()),
        (["task.partition.kind=natural"], Natural()),
        (["task.partition.kind=classes"], Classes(p=2)),
    ],
)
def test_partition_kind_may_be_inferred_from_its_keys(sets: list[str], partition: object) -> None:
    settings = load(Settings, path=None, environ={}, sets=sets)
    assert settings.task.partition == partition


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (
            ["task.partition.kind=diagonal"],
            "must be one of iid, classes, dirichlet, natural, or",
        ),
        (["task.partition.alpha=0"], "task.partition.alpha = 0 .*greater than 0"),
        (["task.partition.kind=iid", "task.partition.p=2"], "task.partition.p .*unknown key"),
    ],
)
def test_invalid_partitions_are_named_by_key(sets: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(Settings, path=None, environ={}, sets=sets)
