"""What an interrupted piece of local training leaves, so that any replica can go on from there.

As bytes it is a checksum and a msgpack map, in which vectors lie as they are, little-endian:

    xxh3_64(map) ++ {"v": schema, field: value, ...}
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from fedstream.broker.errors import BadMessage, LayoutMismatch
from fedstream.broker.layout import Floats, Layout, Model
from fedstream.broker.messages import first_wrong

SCHEMA = 1

_CHECKSUM = 8  # bytes
_MOST = 16  # lists, and elements of one: there is one, of a state for each generator


class _Few:
    """Lets only few lists or maps through: of a byte each, 64 MiB of them would take gigabytes."""

    def __init__(self) -> None:
        self._left = _MOST

    def __call__(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST} lists or maps")
        return value


def _vector(dtype: str) -> PlainValidator:
    """Takes a vector of this dtype, or its bytes."""

    def read(value: object) -> npt.NDArray[Any]:
        if isinstance(value, bytes):
            return np.frombuffer(value, dtype)  # raises ValueError if the last element is cut off
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise ValueError(f"expected a vector of {np.dtype(dtype)}")
        return value

    return PlainValidator(read)


Count = Annotated[int, Field(ge=0)]
Block = Annotated[npt.NDArray[np.uint8], _vector("u1")]
"""The buffer of a :class:`broker.layout.Model`."""
Vector = Annotated[Floats, _vector("<f4")]
"""One number for each parameter, in the layout's order."""


class Workspace(BaseModel):
    """Local training between two of its steps: whose it is, how far it came, what it goes on with.

    Training that is resumed from it gives the bits that it would have given uninterrupted, on the
    same machine. What a model's layout does not carry is not in it: buffers that are not persistent
    and the digits that float64 has over float32.
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
    """its settings, as JSON"""
    samples: Count
    """in the device's data"""
    steps: Count | None
    """H; None: until the time budget ends"""

    step: Count
    """steps done"""
    seconds: float
    """that they took"""
    loss: float
    """their sum"""
    minibatches: bytes
    """state of the minibatches' generator before it drew the current pass"""
    position: Count
    """minibatches taken of that pass"""
    generators: tuple[bytes, ...]
    """states of torch's global ones, which dropout draws from: the CPU's, the model's GPU's"""

    x: Block
    """the model so far"""
    x_tau: Block
    momentum: Vector | None = None
    control: Vector | None = None
    """c of SCAFFOLD, as it came with x_tau; None: zero"""
    device_control: Vector | None = None
    """c_i of SCAFFOLD, as it was at the start; None: zero"""

    def encode(self) -> bytes:
        """The workspace as bytes, the same ones for the same workspace."""
        fields = msgpack.packb({"v": SCHEMA, **self.__dict__}, default=_raw)
        assert isinstance(fields, bytes)  # noqa: S101  (packb's type is Any)
        return xxhash.xxh3_64_digest(fields) + fields

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The workspace that :meth:`encode` wrote. Raises BadMessage for anything else."""
        packed = memoryview(data)[_CHECKSUM:]
        if xxhash.xxh3_64_digest(packed) != data[:_CHECKSUM]:
            raise BadMessage("a workspace whose bytes do not match their checksum")
        try:
            fields = msgpack.unpackb(
                packed, use_list=False, list_hook=_Few(), object_hook=_Few(),
                max_array_len=_MOST, max_map_len=2 * _MOST,
            )  # fmt: skip
        except (ValueError, msgpack.UnpackException) as error:
            raise BadMessage(f"a workspace that is not msgpack: {error}") from error
        if not isinstance(fields, dict) or fields.pop("v", None) != SCHEMA:
            raise BadMessage(f"not a workspace of schema {SCHEMA}, which this release speaks")
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise BadMessage(f"workspace: {first_wrong(error)}") from error

    def models(self, layout: Layout) -> tuple[Model, Model]:
        """The model so far, and x_tau. Raises LayoutMismatch if they are of another layout."""
        if self.layout != layout.signature:
            raise LayoutMismatch("the workspace was saved with a model of another layout")
        return Model(layout, self.x), Model(layout, self.x_tau)


def _raw(vector: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(vector).data
