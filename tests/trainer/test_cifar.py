"""CIFAR-10 from files like the published ones: what is read, what is refused, crops and flips."""

from __future__ import annotations

import io
import pickle
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.images import (
    Crop,
    _Unpickler,
    afl_network,
    cifar10_afl,
    cifar10_fedasync,
    fedasync_network,
)
from fedstream.trainer.partitions import Classes, Dirichlet, Iid
from fedstream.trainer.task import TaskSettings
from fedstream.trainer.vector import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fedstream.trainer.in_memory import Bytes, InMemory


def images(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def as_published(data: Bytes, labels: list[int]) -> bytes:
    """A pickle as Python 2 and its NumPy wrote it, in which arrays and names are short strings."""
    ones = b"".join(b"K" + bytes([label]) for label in labels)
    shape = b"".join(b"M" + struct.pack("<H", size) for size in data.shape)
    return (
        b"\x80\x02}q\x00(U\x06labelsq\x01]q\x02(" + ones + b"eU\x04dataq\x03"
        b"cnumpy.core.multiarray\n_reconstruct\nq\x04cnumpy\nndarray\nq\x05K\x00\x85U\x01b\x87R"
        b"(K\x01" + shape + b"\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<i", data.size)
        + data.tobytes()
        + b"tbu."
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five times forty training images, four of each class in each file, and thirty for testing.

    The test file is as Python 3 writes it for Python 2, the others are as they were published.
    """
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number in range(1, 6):
        path = folder / f"data_batch_{number}"
        path.write_bytes(as_published(images(40, number), list(range(10)) * 4))
    test = {"data": images(30, 0), "labels": list(range(10)) * 3, "filenames": ["a.png"]}
    (folder / "test_batch").write_bytes(pickle.dumps(test, protocol=2))
    return tmp_path


@pytest.mark.parametrize("make", [cifar10_fedasync, cifar10_afl])
def test_images_are_read_unchanged(root: Path, make: Callable[[TaskSettings], InMemory]) -> None:
    task = make(TaskSettings(data_root=str(root), devices=1, partition=Iid()))
    x, y = task.device_data(0).tensors
    assert (x.shape, x.dtype) == ((200, 3, 32, 32), torch.uint8)
    assert torch.bincount(y).tolist() == [20] * 10
    assert np.array_equal(x.flatten(1)[:40].numpy(), images(40, 1))
    assert np.array_equal(x.flatten(1)[160:].numpy(), images(40, 5))
    x, y = task.test_data().tensors
    assert np.array_equal(x.flatten(1).numpy(), images(30, 0))
    assert (y.dtype, y.tolist()) == (torch.int64, list(range(10)) * 3)


def test_devices_and_partitions_default_to_the_papers(root: Path) -> None:
    task = cifar10_fedasync(TaskSettings(data_root=str(root)))
    assert [len(task.device_data(device)) for device in range(100)] == [2] * 100
    task = cifar10_afl(TaskSettings(data_root=str(root)))
    assert task.devices == 10
    assert {len(set(task.device_data(i).tensors[1].tolist())) for i in range(10)} == {2}
    told = TaskSettings(data_root=str(root), devices=4, partition=Dirichlet(alpha=100.0))
    task = cifar10_afl(told)
    assert sum(len(task.device_data(i)) for i in range(4)) == 200
    with pytest.raises(DataError, match="5 devices with p = 1 classes each cover only 5 of 10"):
        cifar10_afl(TaskSettings(data_root=str(root), devices=5, partition=Classes(p=1)))


def test_networks_have_the_papers_sizes() -> None:
    convolutions = (27 + 1) * 64 + (576 + 1) * 64 + (576 + 1) * 128 + (1152 + 1) * 128
    dense = (128 * 36 + 1) * 512 + (512 + 1) * 10
    layout = layout_of(fedasync_network())
    statistics = 2 * (64 + 64 + 128 + 128)  # BatchNorm's two parameters, and its two statistics
    assert sum(p.numel() for p in fedasync_network().parameters()) == 2_625_866
    assert convolutions + dense + statistics == 2_625_866
    assert sum(tensor.count for tensor in layout.tensors) == 2_625_866 + statistics + 4
    count = (75 + 1) * 32 + (800 + 1) * 64 + 1025 * 512 + 513 * 128 + 129 * 10
    assert sum(p.numel() for p in afl_network().parameters()) == count == 645_450


def coordinates(crops: torch.Tensor, crop: Crop) -> torch.Tensor:
    """Undo the scaling, for images that hold in each channel: the row, the column, 10."""
    return (crops * crop.deviation + crop.mean) * 255


@pytest.fixture
def grid() -> torch.Tensor:
    """Six hundred images whose channels are the row, the column and 10."""
    row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    image = torch.stack([row, column, torch.full((32, 32), 10)]).to(torch.uint8)
    return image.expand(600, 3, 32, 32)


@pytest.mark.parametrize(("size", "first"), [(24, 4), (28, 2)])
def test_evaluation_crops_the_centre(grid: torch.Tensor, size: int, first: int) -> None:
    crop = Crop(size).eval()
    found = coordinates(crop(grid), crop)
    assert found.shape == (600, 3, size, size)
    expected = grid[..., first : first + size, first : first + size].float()
    assert torch.allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("size", [24, 28])
def test_training_uses_every_crop_and_mirrors_half(grid: torch.Tensor, size: int) -> None:
    crop = Crop(size).train()
    torch.manual_seed(0)
    found = coordinates(crop(grid), crop).round()
    rows, columns, constant = found[:, 0], found[:, 1], found[:, 2]
    assert constant.eq(10).all()
    assert (rows.diff(dim=1) == 1).all()  # rows and columns that follow each other,
    assert (rows.diff(dim=2) == 0).all()
    assert (columns.diff(dim=1) == 0).all()
    steps = columns.diff(dim=2)
    mirrored = steps[:, 0, 0] == -1
    assert torch.equal(steps, torch.where(mirrored, -1.0, 1.0)[:, None, None].expand_as(steps))
    assert 240 < int(mirrored.sum()) < 360  # 300 and five standard deviations
    places = {*zip(rows.amin((1, 2)).tolist(), columns.amin((1, 2)).tolist(), strict=True)}
    each = list(range(32 - size + 1))
    assert {row for row, _ in places} == {column for _, column in places} == set(each)
    assert len(places) > 0.9 * min(len(each) ** 2, 600)  # row and column are independent


def test_channel_normalisation_matches_cifar() -> None:
    crop = Crop(24).eval()
    white = crop(torch.full((1, 3, 32, 32), 255, dtype=torch.uint8))[0, :, 0, 0]
    assert white.tolist() == pytest.approx([2.0591, 2.1265, 2.1158], abs=1e-3)
    assert list(Crop(24).state_dict()) == []  # nothing of it travels


def test_metrics_use_centre_crops_and_are_deterministic(root: Path) -> None:
    task = cifar10_afl(TaskSettings(data_root=str(root)))
    model, data = task.model().train(), task.test_data()
    found = task.metrics(model, data)
    assert found == task.metrics(model.train(), data)
    x, y = data.tensors
    with torch.no_grad():
        scores = model.eval()(x)
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == y).float().mean()))
    with pytest.raises(DataError, match="nothing to evaluate"):
        task.metrics(model, TensorDataset(x[:0], y[:0]))


def test_missing_file_is_named(root: Path) -> None:
    (root / "cifar-10-batches-py/data_batch_4").unlink()
    with pytest.raises(DataError, match=r"data_batch_4 is not in .*cifar-10-batches-py: set"):
        cifar10_afl(TaskSettings(data_root=str(root)))


WRONG: list[tuple[object, str]] = [
    ({"data": images(2, 0), "labels": [1]}, "is not a batch of CIFAR-10"),
    ({"data": images(2, 0), "labels": [1, 10]}, "is not a batch of CIFAR-10"),
    ({"data": images(0, 0), "labels": []}, "damaged: it asks for __builtin__.bytes"),
    ([], "is not a batch of CIFAR-10"),
    ({"data": np.zeros((1, 3072)), "labels": [1]}, "damaged: it holds values of type 'f8'"),
    ({"data": print, "labels": [1]}, r"damaged: it asks for __builtin__.print, which no data set"),
]


@pytest.mark.parametrize(("values", "words"), WRONG)
def test_file_with_other_content_is_rejected(root: Path, values: object, words: str) -> None:
    path = root / "cifar-10-batches-py/data_batch_2"
    path.write_bytes(pickle.dumps(values, protocol=2))
    with pytest.raises(DataError, match=f"data_batch_2 .*{words}.*download it again$"):
        cifar10_afl(TaskSettings(data_root=str(root)))


@pytest.mark.parametrize(
    "damage",
    [
        b"no pickle",
        as_published(images(2, 0), [0, 1])[:-100],
        as_published(images(2, 0), [0, 1]).replace(b"u1", b"u2"),
        b"cnumpy\nndarray\n)R.",  # arrays are made by one function only
        b"cos\nsystem\n(Vexit 1\ntR.",
    ],
)
def test_damaged_or_hostile_pickle_is_rejected_unexecuted(root: Path, damage: bytes) -> None:
    path = root / "cifar-10-batches-py/test_batch"
    path.write_bytes(damage)
    with pytest.raises(DataError, match=r"test_batch is damaged: .+; download it again$") as caught:
        cifar10_afl(TaskSettings(data_root=str(root)))
    assert "\n" not in str(caught.value)


def test_unpickling_resolves_no_python_names() -> None:
    """Whatever a pickle may ask for is a function of this module, or nothing."""
    unpickler = _Unpickler(io.BytesIO())
    for module, name in (("numpy", "dtype"), ("_codecs", "encode"), ("numpy", "ndarray")):
        given = unpickler.find_class(module, name)
        assert given is None or getattr(given, "__module__", "") == "fedstream.trainer.images"
