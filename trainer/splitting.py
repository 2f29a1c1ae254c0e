"""The table ``task.partition``: how built-in tasks split their data over devices.

A partition of one's own needs no class: its parameters after the seed become keys.

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

from fedstream.broker.errors import DataError, FedstreamError
from fedstream.runtime.alternatives import OneOf
from fedstream.runtime.chosen import Chosen
from fedstream.runtime.parameters import table_of
from fedstream.runtime.plugins import Door, words
from fedstream.trainer import partitions
from fedstream.trainer.partitions import Rows


class Partition(Chosen):
    """Base class of partitions. Its fields are the keys of ``task.partition``."""

    kind: str = ""
    """the name by which the configuration chose it"""
    covers: ClassVar[bool] = True
    """Whether every row must be on a device. A function of one's own says it leaves rows out by
    an attribute: ``blocks.covers = False``."""

    @abstractmethod
    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Row numbers of each device: disjoint, none empty.

        ``labels`` has one entry per row: the class, or, for texts, the window's next words. The
        result must depend on the arguments alone, because every trainer computes it.
        """


class Iid(Partition):
    """Every device's data looks alike."""

    kind: Literal["iid"] = "iid"

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Shuffled rows, dealt out evenly."""
        return partitions.iid(labels, devices, seed)


class Classes(Partition):
    """Every device holds ``p`` of the classes (Anarchic Federated Learning, appendix E.1)."""

    kind: Literal["classes"] = "classes"
    p: Annotated[int, Field(ge=1)] = 2

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Samples of exactly p classes each."""
        return partitions.by_classes(labels, devices, self.p, seed)


class Dirichlet(Partition):
    """Every device has its own mix of classes, drawn from a Dirichlet distribution."""

    kind: Literal["dirichlet"] = "dirichlet"
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Small: each device has few classes; large: devices look alike."""

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        """Shares of each class by the devices' mixes."""
        return partitions.by_dirichlet(labels, devices, self.alpha, seed)


class Natural(Partition):
    """Devices follow the data's own structure: speaking roles, or stretches of a text."""

    kind: Literal["natural"] = "natural"

    def split(self, labels: npt.NDArray[Any], devices: int, _seed: int) -> Sequence[Rows]:
        """Stretches of a text. A task with another structure doesn't ask."""
        return partitions.contiguous(len(labels), devices)


class _Plain(Partition):
    """A function that a program defines. Subclasses have its parameters as fields."""

    function: ClassVar[Callable[..., Sequence[Rows]]]

    def split(self, labels: npt.NDArray[Any], devices: int, seed: int) -> Sequence[Rows]:
        parameters = {key: getattr(self, key) for key in type(self).model_fields if key != "kind"}
        return self.function(labels, devices, seed, **parameters)


def _accept(value: object) -> type[Partition] | None:
    if isinstance(value, type):
        return value if issubclass(value, Partition) else None
    if not callable(value):
        return None
    made = table_of(value, _Plain, ["labels", "devices", "seed"])
    made.function = staticmethod(value)
    made.covers = getattr(value, "covers", True)
    return made


PARTITIONS: Door[type[Partition]] = Door(
    "fedstream.partitions", "partition",
    {"iid": Iid, "classes": Classes, "dirichlet": Dirichlet, "natural": Natural},
    accept=_accept,
    expected="a function of labels, devices and seed, or a class derived from fedstream.Partition",
)  # fmt: skip
PartitionSettings: TypeAlias = Annotated[Partition, OneOf(PARTITIONS)]


def split(partition: Partition, labels: npt.NDArray[Any], devices: int, seed: int) -> list[Rows]:
    """The rows of each device, in the order in which the partition gave them.

    Raises DataError if the data can't be split that way, or a user's partition is none.
    """
    where = f"task.partition.kind = {partition.kind!r}"
    given = labels.view()
    given.flags.writeable = False  # the task goes on using them
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
    """Why this is no partition; "" if it is one."""
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
