"""Split a data set over devices: evenly, by classes, by random mixes of classes, or in order.

All functions return one array of row numbers per device. The arrays are disjoint, cover all rows,
and none is empty. They depend only on the arguments, so every trainer computes the same partition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedstream.broker.errors import DataError

Rows = npt.NDArray[np.int64]


def iid(labels: npt.NDArray[Any], devices: int, seed: int) -> list[Rows]:
    """Shuffle the rows and deal them out evenly: sizes differ by at most one.

    Raises DataError if there are fewer rows than devices.
    """
    _check_devices(len(labels), devices)
    rows = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(rows, devices)]


def contiguous(samples: int, devices: int) -> list[Rows]:
    """Give each device a contiguous stretch of rows: sizes differ by at most one.

    Raises DataError if there are fewer rows than devices.
    """
    _check_devices(samples, devices)
    return list(np.array_split(np.arange(samples), devices))


def by_classes(labels: npt.NDArray[Any], devices: int, p: int, seed: int) -> list[Rows]:
    """Give every device samples of exactly ``p`` classes (AFL, appendix E.1).

    In the paper each device draws its classes independently, which leaves some classes without a
    device at small p. Its numbers are reproduced if every class is held by M p / classes of the M
    devices instead, rounded up for some classes and down for others if that is not an integer.
    A class's samples are split evenly over its holders.

    Raises DataError if p is not in 1..classes, if M p < classes (a class would be left out), or if
    a class has fewer samples than holders.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if devices < 1 or not 1 <= p <= len(classes):
        raise DataError(
            f"{devices} devices of p = {p} classes each: need at least 1 device, and p from 1 to "
            f"{len(classes)}, the number of classes"
        )
    if devices * p < len(classes):
        raise DataError(
            f"{devices} devices with p = {p} classes each cover only {devices * p} of "
            f"{len(classes)} classes: "
            f"use at least {-(-len(classes) // p)} devices or p = {-(-len(classes) // devices)}"
        )
    draw = np.random.default_rng(seed)
    held = _holders(len(classes), devices, p, draw)
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for name, count, holders in zip(classes, counts, held, strict=True):
        if count < len(holders):
            raise DataError(
                f"class {name} has {count} samples, too few for the {len(holders)} devices that "
                "hold it: use fewer devices or a smaller p"
            )
        rows = draw.permutation(np.flatnonzero(labels == name))
        for device, share in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[device].append(share)
    return [np.sort(np.concatenate(shares)) for shares in parts]


def by_dirichlet(labels: npt.NDArray[Any], devices: int, alpha: float, seed: int) -> list[Rows]:
    """Give every device a mix of classes drawn from a symmetric Dirichlet distribution.

    The mixes q_i ~ Dir(alpha) are those of Hsu, Qi, Brown (2019, "Measuring the Effects of
    Non-Identical Data Distribution", section 3). The paper fills devices of equal size until a
    class runs out. Here device i gets the share q_ic / sum_j q_jc of each class c instead: no
    sample is left over, the order of devices doesn't matter, and sizes differ.

    Raises DataError if alpha is not above 0, if there are fewer rows than devices, or if a device
    is left without samples.
    """
    _check_devices(len(labels), devices)
    if not alpha > 0:
        raise DataError(f"a Dirichlet distribution with alpha = {alpha}: alpha must be above 0")
    draw = np.random.default_rng(seed)
    classes = np.unique(labels)
    mixes = draw.dirichlet(np.full(len(classes), alpha), size=devices)
    mixes += np.finfo(float).tiny  # with a tiny alpha, all shares of a class may be 0: share evenly
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for name, weights in zip(classes, mixes.T, strict=True):
        rows = draw.permutation(np.flatnonzero(labels == name))
        ends = np.rint(np.cumsum(weights) / weights.sum() * len(rows)).astype(np.int64)
        for own, share in zip(parts, np.split(rows, ends[:-1]), strict=True):
            own.append(share)
    split = [np.sort(np.concatenate(shares)) for shares in parts]
    empty = [device for device, rows in enumerate(split) if not len(rows)]
    if empty:
        raise DataError(
            f"a Dirichlet partition with alpha = {alpha} and seed {seed} leaves device {empty[0]} "
            f"({len(empty)} of {devices} devices) without a sample: use fewer devices, a larger "
            "alpha or another seed"
        )
    return split


def _check_devices(samples: int, devices: int) -> None:
    if not 1 <= devices <= samples:
        raise DataError(
            f"{samples} samples cannot be split over {devices} devices: use 1 to {samples} devices"
        )


def _holders(classes: int, devices: int, p: int, draw: np.random.Generator) -> list[Rows]:
    """The devices that hold each class: p classes per device, and every class equally often.

    A class goes to the devices with the most free places, ties broken at random. Free places then
    never differ by more than one between devices, so that the last class still finds enough.
    """
    each, more = divmod(devices * p, classes)
    wanted = draw.permutation(np.repeat([each + 1, each], [more, classes - more]))
    places = np.full(devices, p)
    held = []
    for number in wanted:
        shuffled = draw.permutation(devices)
        holders = shuffled[np.argsort(-places[shuffled], kind="stable")][:number]
        places[holders] -= 1
        held.append(holders)
    return held
