"""Partitions: nothing lost, nothing twice, and the classes that the AFL paper's numbers need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.errors import DataError
from fedstream.trainer.partitions import Rows, by_classes, by_dirichlet, contiguous, iid


def labels_of(classes: int, each: int = 40) -> Rows:
    return np.random.default_rng(0).permutation(np.repeat(np.arange(classes), each))


def assert_covers_once(parts: list[Rows], total: int) -> None:
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(total))


@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**32))
def test_iid_deals_every_row_once_and_evenly(devices: int, more: int, seed: int) -> None:
    labels = np.zeros(devices + more, dtype=np.int64)
    parts = iid(labels, devices, seed)
    assert len(parts) == devices
    assert_covers_once(parts, len(labels))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_iid_rejects_more_devices_than_rows() -> None:
    with pytest.raises(DataError, match="3 samples cannot be split over 4 devices"):
        iid(np.zeros(3), 4, seed=0)
    with pytest.raises(DataError, match=r"3 samples .* 4 devices: use 1 to 3 devices"):
        contiguous(3, 4)


@given(st.integers(1, 60), st.integers(0, 40))
def test_contiguous_keeps_the_order(devices: int, more: int) -> None:
    parts = contiguous(devices + more, devices)
    assert np.array_equal(np.concatenate(parts), np.arange(devices + more))
    sizes = [len(part) for part in parts]
    assert len(sizes) == devices
    assert 0 < min(sizes) <= max(sizes) <= min(sizes) + 1


@given(st.integers(2, 12), st.integers(1, 30), st.data(), st.integers(0, 2**32))
def test_by_classes_gives_p_classes_each_evenly(
    classes: int, devices: int, data: st.DataObject, seed: int
) -> None:
    smallest = -(-classes // devices)
    if smallest > classes:
        return
    p = data.draw(st.integers(smallest, classes))
    labels = labels_of(classes)
    parts = by_classes(labels, devices, p, seed)
    assert_covers_once(parts, len(labels))
    held = [set(labels[part]) for part in parts]
    assert {len(own) for own in held} == {p}
    holders = [sum(name in own for own in held) for name in range(classes)]
    assert max(holders) - min(holders) <= (1 if devices * p % classes else 0)


def test_by_classes_depends_on_the_seed() -> None:
    labels = labels_of(10)
    first, again, other = (by_classes(labels, 10, 2, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    pairs = [{frozenset(labels[part]) for part in parts} for parts in (first, other)]
    assert pairs[0] != pairs[1]


@pytest.mark.parametrize(
    ("devices", "p", "words"),
    [
        (
            4,
            2,
            "each cover only 8 of 10 classes: use at least 5 devices or p = 3",
        ),
        (10, 11, "p = 11 classes each: need at least 1 device, and p from 1 to 10"),
        (10, 0, "p = 0 classes each"),
        (100, 10, "class 0 has 40 samples, too few for the 100 devices that hold it"),
    ],
)
def test_by_classes_rejects_impossible_numbers(devices: int, p: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        by_classes(labels_of(10), devices, p, seed=0)


@given(
    classes=st.integers(1, 12),
    devices=st.integers(1, 30),
    alpha=st.floats(1e-6, 1e6),
    seed=st.integers(0, 2**32),
)
def test_by_dirichlet_deals_every_row_once_with_no_empty_device(
    classes: int, devices: int, alpha: float, seed: int
) -> None:
    labels = labels_of(classes, each=2 * devices * classes)  # the smallest share then has one
    parts = by_dirichlet(labels, devices, alpha, seed)
    assert len(parts) == devices
    assert min(len(part) for part in parts) > 0
    assert_covers_once(parts, len(labels))
    again = by_dirichlet(labels, devices, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def shares(labels: Rows, parts: list[Rows]) -> npt.NDArray[np.float64]:
    """How much of each device's samples is of each class: (devices, classes), rows sum to 1."""
    counts = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    found: npt.NDArray[np.float64] = counts / counts.sum(axis=1, keepdims=True)
    return found


def test_by_dirichlet_follows_the_distribution() -> None:
    """The variance of a class's share is (1/c)(1 - 1/c) / (c alpha + 1), c classes."""
    labels = labels_of(10, each=100_000)
    for alpha, tolerance in ((100.0, 0.1), (1.0, 0.1), (0.1, 0.1)):
        found = shares(labels, by_dirichlet(labels, 1000, alpha, seed=5)).var()
        assert found == pytest.approx(0.09 / (10 * alpha + 1), rel=tolerance)


def test_by_dirichlet_names_empty_devices() -> None:
    labels = labels_of(2, each=10)
    with pytest.raises(DataError, match=r"alpha = 0.01 and seed 0 leaves device \d+ .*of 20 dev"):
        by_dirichlet(labels, 20, 0.01, seed=0)
    with pytest.raises(DataError, match="20 samples cannot be split over 21 devices"):
        by_dirichlet(labels, 21, 1.0, seed=0)
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(DataError, match="alpha must be above 0"):
            by_dirichlet(labels, 2, alpha, seed=0)
