"""Split a data set over devices: alike, or by classes (Anarchic Federated Learning, appendix E.1).

Both return one array of row numbers per device, disjoint and together every row, as a function of
their arguments only: every trainer computes the same partition for itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from broker.errors import DataError

Rows = npt.NDArray[np.int64]


def iid(labels: npt.NDArray[Any], devices: int, seed: int) -> list[Rows]:
    """Shuffle the rows and deal them out evenly: sizes differ by at most one.

    Raises DataError if there are fewer rows than devices.
    """
    if not 1 <= devices <= len(labels):
        raise DataError(f"{len(labels)} samples cannot be split over {devices} devices")
    rows = np.random.default_rng(seed).permutation(len(labels))
    return [np.sort(part) for part in np.array_split(rows, devices)]


def by_classes(labels: npt.NDArray[Any], devices: int, p: int, seed: int) -> list[Rows]:
    """Give every device samples of exactly ``p`` classes (AFL, appendix E.1).

    The paper lets each device draw its classes by itself, which leaves classes without a device at
    small p. Its numbers come out if every class is held by M p / classes devices instead (M
    devices); where that is no whole number, by as near to it as possible, rounded up or down.
    A class's samples are split evenly over its holders.

    Raises DataError if p is not in 1..classes, if M p < classes (a class would be left out), or if
    a class has fewer samples than holders.
    """
    classes, counts = np.unique(labels, return_counts=True)
    if devices < 1 or not 1 <= p <= len(classes):
        raise DataError(
            f"{devices} devices of p = {p} classes each: the data has {len(classes)} classes"
        )
    if devices * p < len(classes):
        raise DataError(
            f"{devices} devices of p = {p} classes hold {devices * p} of {len(classes)} classes: "
            f"take at least {-(-len(classes) // p)} devices or p = {-(-len(classes) // devices)}"
        )
    draw = np.random.default_rng(seed)
    held = _holders(len(classes), devices, p, draw)
    parts: list[list[Rows]] = [[] for _ in range(devices)]
    for name, count, holders in zip(classes, counts, held, strict=True):
        if count < len(holders):
            raise DataError(
                f"class {name} has {count} samples, too few for the {len(holders)} devices that "
                f"hold it: take fewer devices or a smaller p"
            )
        rows = draw.permutation(np.flatnonzero(labels == name))
        for device, share in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[device].append(share)
    return [np.sort(np.concatenate(shares)) for shares in parts]


def _holders(classes: int, devices: int, p: int, draw: np.random.Generator) -> list[Rows]:
    """The devices that hold each class: p classes to every device, each class as often as another.

    A class goes to the devices with the most places left, equals in random order. Places then
    never differ by more than one between devices, so that the last class still finds its number.
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
