"""Snapshots of interrupted local training, from which any replica can resume.

A snapshot is encoded as a checksum and a msgpack map, in which vectors are raw little-endian bytes:

    xxh3_64(map) ++ {"v": schema, field: value, ...}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from fedstream.core.errors import BadMessage, LayoutMismatch
from fedstream.core.layout import Floats, Layout, Model
from fedstream.core.messages import Count, first_wrong

SCHEMA = 2

_CHECKSUM = 8  # bytes
_MOST = 16  # lists, and elements per list; an honest workspace has one list, of generator states


class _Few:
    """Limits the number of lists and maps: 64 MiB of one-byte lists would decode to gigabytes."""

    def __init__(self) -> None:
        self._left = _MOST

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST} lists or maps")
        return value


def _vector(dtype: str) -> PlainValidator:
    """A validator that accepts a vector of this dtype, or its bytes."""

    def read(value: object) -> npt.NDArray[Any]:
        if isinstance(value, bytes):
            return np.frombuffer(value, dtype)  # raises ValueError if the last element is cut off
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise ValueError(f"expected a vector of {np.dtype(dtype)}")
        return value

    return PlainValidator(read)


Block = Annotated[npt.NDArray[np.uint8], _vector("u1")]
"""The buffer of a :class:`fedstream.core.layout.Model`."""
Vector = Annotated[Floats, _vector("<f4")]
"""One float32 per parameter, in the layout's order."""


class Workspace(BaseModel):
    """The state of local training between two steps, with the identity of the work.

    On the same machine, resumed training gives the same bits as uninterrupted training. The
    exceptions are values that a layout lacks: non-persistent buffers and float64's extra digits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: str
    device: Count
    version: Count
    """tau"""
    base: str
    """digest of x_tau"""
    layout: str
    """signature of the models' layout"""
    seed: int
    solver: str
    """the solver's settings, as JSON"""
    samples: Count
    """samples in the device's data"""
    steps: Count | None
    """H; None: until the time budget ends"""

    step: Count
    """steps done"""
    seconds: float
    """time spent on the steps"""
    loss: float
    """sum of the steps' losses"""
    minibatches: bytes
    """state of the minibatches' generator before it drew the current pass; b"" of loaded batches"""
    position: Count
    """minibatches taken from that pass; in all, of loaded batches"""
    generators: tuple[bytes, ...]
    """states of the global generators: Python's, numpy's, torch's, then the model's GPU's"""

    x: Block
    """the current model"""
    x_tau: Block
    local: Block | None = None
    """the current values of the device's local tensors; None: there are none"""
    rates: bytes
    """a float64 for each parameter group: the sum of its learning rates over the steps"""
    optimizers: bytes
    """states of the optimizers and schedulers (:mod:`fedstream.trainer.optimizers`)"""
    control: Vector | None = None
    """c of SCAFFOLD, as published with x_tau; None: zero"""
    device_control: Vector | None = None
    """c_i of SCAFFOLD at the start of the task; None: zero"""
    memory: dict[str, Vector] = Field(default_factory=dict)
    """vectors that a user's own solver keeps between steps"""

    def encode(self) -> bytes:
        """The workspace as bytes; deterministic."""
        fields = msgpack.packb({"v": SCHEMA, **self.__dict__}, default=_raw)
        assert isinstance(fields, bytes)  # noqa: S101  (packb's type is Any)
        return xxhash.xxh3_64_digest(fields) + fields

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Decode the bytes of :meth:`encode`. Raises BadMessage if they are invalid."""
        packed = memoryview(data)[_CHECKSUM:]
        if xxhash.xxh3_64_digest(packed) != data[:_CHECKSUM]:
            raise BadMessage("the workspace's bytes do not match their checksum")
        try:
            fields = msgpack.unpackb(
                packed,
                use_list=False,
                list_hook=_Few(),
                object_hook=_Few(),
                max_array_len=_MOST,
                max_map_len=2 * _MOST,
            )
        except (ValueError, msgpack.UnpackException) as error:
            raise BadMessage(f"the workspace is not msgpack: {error}") from error
        if not isinstance(fields, dict) or fields.pop("v", None) != SCHEMA:
            raise BadMessage(f"not a workspace of schema {SCHEMA}, the one this release reads")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise BadMessage(f"workspace: {first_wrong(error)}") from error

    def models(self, layout: Layout) -> tuple[Model, Model]:
        """The current model, and x_tau. Raises LayoutMismatch for another layout."""
        if self.layout != layout.signature:
            raise LayoutMismatch("the workspace was saved with a model of a different layout")
        return Model(layout, self.x), Model(layout, self.x_tau)


def _raw(vector: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(vector).data


@dataclass(frozen=True)
class Start:
    """The start of training: a version, or a workspace."""

    version: int  # tau
    digest: str  # of x_tau as received
    model: Model  # x_tau
    device_control: Floats | None = None  # c_i
    saved: Workspace | None = None
    local: Model | None = None  # values of the device's local tensors; None: those of version 0

    @classmethod
    def resumed(cls, saved: Workspace, layout: Layout) -> Start:
        """The start from a workspace; ``layout``: the layout of its models."""
        _, x_tau = saved.models(layout)
        return cls(saved.version, saved.base, x_tau, saved.device_control, saved)
