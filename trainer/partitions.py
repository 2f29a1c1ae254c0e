"""The table ``task.partition``: how data sets are split over devices.

Every partition is one array of row numbers per device. The arrays are disjoint, not empty, and
cover all rows. They depend only on the arguments, so every trainer computes the same partition.

A user's partition can be a plain function, whose parameters after the seed become keys.

    def blocks(labels, devices, seed, size: int = 10) -> list[Rows]:
        rows = np.arange(len(labels)) // size % devices
        return [np.flatnonzero(rows == device) for device in range(devices)]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedstream.core.errors import DataError, FedstreamError
from fedstream.runtime.config import NamedSettings, call_function, own_class
from fedstream.runtime.plugins import OneOf, PluginRegistry, words

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


class Partition(NamedSettings):
    """Base class of partitions. Its fields are the keys of ``task.partition``."""

    kind: str = ""
    """the partition's name in the configuration"""
    covers: ClassVar[bool] = True
    """Whether every row must be on a device. A user's function that leaves rows out has the
    attribute ``blocks.covers = False``."""

    @abstractmethod
    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Row numbers of each device: disjoint, none empty.

        ``labels`` has one entry per row: the class, or, for texts, the window's next words. The
        result must depend on the arguments alone, because every trainer computes it.
        """


class Iid(Partition):
    """All devices' data has the same distribution."""

    kind: Literal["iid"] = "iid"

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Shuffled rows, dealt out evenly."""
        return iid(labels, devices, seed)


class Classes(Partition):
    """Every device holds ``p`` of the classes (Anarchic Federated Learning, appendix E.1)."""

    kind: Literal["classes"] = "classes"
    p: Annotated[int, Field(ge=1)] = 2

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Samples of exactly p classes each."""
        return by_classes(labels, devices, self.p, seed)


class Dirichlet(Partition):
    """Every device has its own mix of classes, drawn from a Dirichlet distribution."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """small: each device has few classes; large: devices have similar data"""

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Split each class by the devices' mixes."""
        return by_dirichlet(labels, devices, self.alpha, seed)


class Natural(Partition):
    """Devices follow the data's own structure: speaking roles, or stretches of a text."""

    kind: Literal["natural"] = "natural"

    def split(self, labels: npt.NDArray[Any], devices: int, _seed: int) -> Sequence[Rows]:
        """Contiguous parts of a text. Tasks with roles split by themselves."""
        return contiguous(len(labels), devices)


class _Plain(Partition):
    """Base for a user's function; a subclass has the function's parameters as fields."""

    function: ClassVar[Callable[..., Sequence[Rows]]]

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        split: Sequence[Rows] = call_function(self, labels, devices, seed)
        return split


def _accept(value: object) -> type[Partition] | None:
    made = own_class(value, Partition, _Plain, ["labels", "devices", "seed"])
    if made is not None and not isinstance(value, type):
        made.covers = getattr(value, "covers", True)
    return made


PARTITIONS: PluginRegistry[type[Partition]] = PluginRegistry(
    "fedstream.partitions",
    "partition",
    {"iid": Iid, "classes": Classes, "dirichlet": Dirichlet, "natural": Natural},
    accept=_accept,
    expected="a function of labels, devices and seed, or a class derived from fedstream.Partition",
)
PartitionSettings: TypeAlias = Annotated[Partition, OneOf(PARTITIONS)]


def split(partition: Partition, labels: npt.NDArray[Any], devices: int, seed: int) -> list[Rows]:
    """The rows of each device, in the partition's order.

    Raises DataError if the data can't be split, or a user's partition is invalid.
    """
    where = f"task.partition.kind = {partition.kind!r}"
    given = labels.view()
    given.flags.writeable = False  # the task uses the array later
    try:
        found = partition.split(given, devices, seed)
    except FedstreamError:
        raise
    except Exception as error:
        raise DataError(f"{where} raised {words(error)}") from error
    if wrong := _wrong(found, len(labels), devices, covers=partition.covers):
        raise DataError(f"{where}, with seed {seed}: {wrong}")
    return [np.asarray(rows, dtype=np.int64) for rows in found]


def _wrong(found: object, samples: int, devices: int, *, covers: bool) -> str:
    """Why the object is no partition; "" if it is one."""
    if not isinstance(found, list | tuple) or len(found) != devices:
        got = f"{len(found)} of them" if isinstance(found, list | tuple) else type(found).__name__
        return f"it must return a list of {devices} arrays of row numbers, not {got}"
    owner = np.full(samples, -1)
    for device, one in enumerate(found):
        try:
            rows = np.asarray(one)
        except ValueError:  # lists of different lengths inside
            return f"device {device} has no row numbers, but a {type(one).__name__} of lists"
        if rows.size == 0:
            return f"device {device} has no rows"
        if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
            return f"device {device} has no row numbers, but {rows.dtype} of shape {rows.shape}"
        if len(outside := rows[(rows < 0) | (rows >= samples)]):
            return f"device {device} has row {outside[0]}; rows are numbered 0 to {samples - 1}"
        if len(taken := rows[owner[rows] >= 0]):
            return f"row {taken[0]} is on devices {owner[taken[0]]} and {device}"
        owner[rows] = device
        if len(np.unique(rows)) < len(rows):
            return f"device {device} has a row twice"
    missing = np.flatnonzero(owner < 0)
    if covers and len(missing):
        return (
            f"{len(missing)} of {samples} rows are on no device, such as {missing[0]}; if that is "
            "meant, the partition says so by an attribute covers = False"
        )
    return ""
