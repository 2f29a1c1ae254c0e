"""The layout of a model, and the model itself as one block of bytes.

A model is sent, stored and mixed as one flat float32 vector. The layout says where each tensor
lies: parameters first, then floating-point buffers (BatchNorm's statistics), then, for SCAFFOLD,
the control variate of each parameter. Integer buffers are kept beside the vector and never
averaged: first those that stay as in version 0 (position ids, masks), then counters, which may
grow (BatchNorm's ``num_batches_tracked``), then those that may take any value of their dtype.
The bytes of a model are

    int64[integers] ++ float32[floats]        little-endian, integers first so that both are aligned

The layout's signature tells layouts apart and is checked wherever a model changes hands.

A layout may also name **unshared** tensors: frozen parameters, which have the same values in every
version, and local tensors, of which each device has its own. They lie in no vector, update or
version. Their values in version 0 are stored once, by digest, in a block of their own with the same
order of bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgpack
import numpy as np
import numpy.typing as npt

from fedstream.core.digest import DIGEST_PATTERN, DigestAlgorithm, algorithm_of, digest_of
from fedstream.core.errors import LayoutMismatch

Kind = Literal["parameter", "buffer", "control", "integer", "counter", "variable"]
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

PAGE = 4096  # bytes

LARGEST = 1 << 40  # bytes of a model; more than any machine holds

_ORDER: tuple[Kind, ...] = ("parameter", "buffer", "control", "integer", "counter", "variable")
OF_INTEGERS = _ORDER[3:]
_FLOATS = {"float16", "bfloat16", "float32", "float64"}
_DIMENSIONS = 64
_INTEGERS = {"bool", "uint8", "int8", "int16", "int32", "int64"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One named tensor: its shape, the dtype it has in the user's module, and its role."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in order.

    Parameters, floating-point buffers, controls, constant integers, counters, variable integers.
    """

    tensors: tuple[Tensor, ...]
    unshared: Unshared | None = None  # the module's other tensors; None: there are none

    def __post_init__(self) -> None:
        kinds = [_ORDER.index(tensor.kind) for tensor in self.tensors]
        if kinds != sorted(kinds):
            raise LayoutMismatch(
                "a layout must list parameters, buffers, controls and integers (constant, "
                "counters, variable) in this order"
            )
        if len({tensor.name for tensor in self.whole}) != len(self.whole):
            raise LayoutMismatch("a layout must name every tensor exactly once")
        if self.nbytes > LARGEST:
            raise LayoutMismatch(f"a layout of {self.nbytes} bytes; the limit is {LARGEST}")

    @property
    def whole(self) -> tuple[Tensor, ...]:
        """All tensors, the unshared ones last."""
        return self.tensors + (self.unshared.layout.tensors if self.unshared else ())

    @property
    def unshared_bytes(self) -> int:
        """Bytes of the unshared tensors' values."""
        return self.unshared.layout.nbytes if self.unshared else 0

    @property
    def summary(self) -> str:
        """The numbers of parameters and tensors, for people."""
        said = f"{self.parameters} parameters in {len(self.tensors)} tensors"
        if self.unshared is None:
            return said
        kinds = {"frozen": self.unshared.frozen, "local": self.unshared.of_devices}
        for name, layout in kinds.items():
            if layout.tensors:
                said += f", {layout.parameters} {name} ones in {len(layout.tensors)}"
        return said

    def _count(self, kind: Kind) -> int:
        return sum(tensor.count for tensor in self.tensors if tensor.kind == kind)

    @cached_property
    def parameters(self) -> int:
        """Number of trained elements of the vector: ``floats[:parameters]``."""
        return self._count("parameter")

    @cached_property
    def floats(self) -> int:
        """Number of elements in the float32 vector: parameters, float buffers and controls."""
        return self.parameters + self._count("buffer") + self.controls

    @cached_property
    def controls(self) -> int:
        """Number of elements in the control variate at the vector's end: ``parameters`` or 0."""
        return self._count("control")

    @cached_property
    def integers(self) -> int:
        """Number of elements in the int64 vector."""
        return sum(self._count(kind) for kind in OF_INTEGERS)

    @cached_property
    def counters(self) -> slice:
        """The counters' slice of the int64 vector, after the constant integers."""
        stay = self._count("integer")
        return slice(stay, stay + self._count("counter"))

    @cached_property
    def variables(self) -> tuple[tuple[slice, int, int], ...]:
        """Slice, minimum and maximum of each integer tensor that may take any value."""
        found, at = [], self.counters.stop
        for tensor in self.tensors:
            if tensor.kind == "variable":
                of = np.iinfo(tensor.dtype) if tensor.dtype != "bool" else None
                place = slice(at, at + tensor.count)
                found.append((place, int(of.min) if of else 0, int(of.max) if of else 1))
                at += tensor.count
        return tuple(found)

    @cached_property
    def nbytes(self) -> int:
        """Size of one model in bytes."""
        return 4 * self.floats + 8 * self.integers

    @cached_property
    def signature(self) -> str:
        """Digest of the layout: equal if and only if the layouts are equal.

        The values of unshared tensors don't count: a device takes the run's.
        """
        return digest_of(self._encoded(""))

    def with_controls(self) -> Layout:
        """The layout with a control variate for each parameter (SCAFFOLD's c)."""
        parameters = [t for t in self.tensors if t.kind == "parameter"]
        controls = [replace(t, name=f"control.{t.name}", kind="control") for t in parameters]
        tensors = (*self.without_controls().tensors, *controls)
        ordered = sorted(tensors, key=lambda tensor: _ORDER.index(tensor.kind))
        return Layout(tuple(ordered), self.unshared)

    def without_controls(self) -> Layout:
        """The layout of the user's module alone."""
        if not self.controls:  # a shortcut: called for every model that is loaded
            return self
        return Layout(tuple(t for t in self.tensors if t.kind != "control"), self.unshared)

    def with_values(self, values: Callable[[], Model]) -> Layout:
        """The layout with the unshared tensors' values at hand; see :attr:`Unshared.values`."""
        if self.unshared is None:
            raise LayoutMismatch("this layout has no unshared tensors")
        return replace(self, unshared=replace(self.unshared, values=values))

    def encode(self) -> bytes:
        """The layout as msgpack; equal layouts with equal unshared values give equal bytes."""
        return self._encoded(self.unshared.digest if self.unshared else "")

    def _encoded(self, digest: str) -> bytes:
        rows: object = _rows(self.tensors)
        if self.unshared is not None:
            rows = {"tensors": rows, "unshared": _rows(self.unshared.layout.tensors)}
            rows |= {"digest": digest, "local": list(self.unshared.local)}
        packed = msgpack.packb(rows)
        assert isinstance(packed, bytes)  # noqa: S101  (packb's type is Any)
        return packed

    @classmethod
    @lru_cache(4)  # decoded often, with few different values
    def decode(cls, data: bytes) -> Layout:
        """Decode the bytes of :meth:`encode`. Raises LayoutMismatch if they are invalid."""
        try:
            found: Any = msgpack.unpackb(data)
            if isinstance(found, list):
                return cls(tuple(_tensor(*row) for row in found))
            rows, digest = found["unshared"], found["digest"]
            if not isinstance(digest, str) or not re.fullmatch(DIGEST_PATTERN, digest):
                raise ValueError("the unshared tensors have no digest")
            unshared = Unshared(
                cls(tuple(_tensor(*row) for row in rows)), tuple(found["local"]), digest
            )
            return cls(tuple(_tensor(*row) for row in found["tensors"]), unshared)
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise LayoutMismatch(f"not a layout: {error}") from error


@dataclass(frozen=True)
class Unshared:
    """Tensors of a module that no update and no version contains, and their values' digest."""

    layout: Layout  # of these tensors alone
    local: tuple[str, ...] = ()  # names of those that stay on the devices; the others are frozen
    digest: str = field(default="", compare=False)  # of their values in version 0; '': of no run
    values: Callable[[], Model] | None = field(default=None, compare=False, repr=False)
    """Reads the values, where a process needs whole models; raises FedstreamError."""

    def __post_init__(self) -> None:
        if not {tensor.name for tensor in self.layout.tensors}.issuperset(self.local):
            raise LayoutMismatch("a layout must name its local tensors among the unshared ones")

    @cached_property
    def of_devices(self) -> Layout:
        """The layout of the local tensors alone."""
        return Layout(tuple(t for t in self.layout.tensors if t.name in self.local))

    @cached_property
    def frozen(self) -> Layout:
        """The layout of the frozen tensors alone."""
        return Layout(tuple(t for t in self.layout.tensors if t.name not in self.local))

    def model(self) -> Model:
        """The values. Raises LayoutMismatch if this process has not fetched them, and their
        reader's errors."""
        if self.values is None:
            raise LayoutMismatch("the model's unshared tensors are not at hand: read them first")
        return self.values()


def _rows(tensors: tuple[Tensor, ...]) -> list[list[object]]:
    return [[t.name, list(t.shape), t.dtype, t.kind] for t in tensors]


def _tensor(name: str, shape: list[int], dtype: str, kind: Kind) -> Tensor:
    """A tensor from a row of an encoded layout. Raises TypeError or ValueError if malformed."""
    if not (isinstance(name, str) and isinstance(dtype, str) and isinstance(shape, list)):
        raise TypeError("a tensor is a name, a shape, a dtype and a kind")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name} has no shape")
    if len(shape) > _DIMENSIONS:
        raise ValueError(f"{name} has {len(shape)} dimensions; numpy supports {_DIMENSIONS}")
    if kind not in _ORDER or dtype not in (_INTEGERS if kind in OF_INTEGERS else _FLOATS):
        raise ValueError(f"{name} is {kind!r} of dtype {dtype!r}, which models cannot have")
    return Tensor(name, tuple(shape), dtype, kind)


class Payload:
    """Bytes to send or store, of a model or of an encoded model.

    A buffer allocated here fills whole pages, so it can be written to disk directly.
    """

    __slots__ = ("buffer",)

    def __init__(self, buffer: npt.NDArray[np.uint8]) -> None:
        self.buffer = buffer

    @classmethod
    def empty(cls, size: int) -> Payload:
        """Allocate a payload of ``size`` bytes."""
        return Payload(_paged(size))

    @property
    def pages(self) -> memoryview | None:
        """The buffer with the padding of its last page; None if it was allocated elsewhere."""
        block, start, size = self.buffer.base, self.buffer.ctypes.data, self.buffer.nbytes
        if not isinstance(block, np.ndarray) or block.dtype != np.uint8 or start % PAGE:
            return None  # allocated elsewhere
        first = start - block.ctypes.data
        filled = size + -size % PAGE
        return block[first : first + filled].data if first + filled <= block.nbytes else None

    def digest(self, algorithm: DigestAlgorithm = "sha256") -> str:
        """Digest of the bytes; see :mod:`fedstream.core.digest`."""
        return digest_of(self.buffer.data, algorithm)

    def digest_like(self, digest: str) -> str:
        """Digest of the bytes by the algorithm of ``digest``."""
        return self.digest(algorithm_of(digest))

    def is_of(self, digest: str) -> bool:
        """Whether ``digest`` is the digest of the bytes."""
        return self.digest_like(digest) == digest


def _paged(size: int) -> npt.NDArray[np.uint8]:
    """A page-aligned buffer, followed by the rest of its last page."""
    block = np.empty(size + 2 * PAGE, dtype=np.uint8)
    start = -block.ctypes.data % PAGE
    block[start + size :] = 0  # written to disk, so it must not leak old memory
    return block[start : start + size]


class Model(Payload):
    """A model of a given layout: one buffer, with ``floats`` and ``integers`` as views into it.

    The buffer belongs to this model alone: never share one between models.
    """

    __slots__ = ("floats", "integers", "layout")

    def __init__(self, layout: Layout, buffer: npt.NDArray[np.uint8] | None = None) -> None:
        if buffer is None:
            buffer = _paged(layout.nbytes)
        if buffer.dtype != np.uint8 or buffer.shape != (layout.nbytes,):
            raise LayoutMismatch(
                f"the layout takes {layout.nbytes} bytes, the buffer has {buffer.nbytes}"
            )
        super().__init__(buffer)
        split = 8 * layout.integers
        self.layout = layout
        self.integers: Integers = buffer[:split].view(np.int64)
        self.floats: Floats = buffer[split:].view(np.float32)

    @property
    def parameters(self) -> Floats:
        """The trained part of the vector (a view)."""
        return self.floats[: self.layout.parameters]

    @property
    def buffers(self) -> Floats:
        """The floating-point buffers (a view)."""
        return self.floats[self.layout.parameters : self.layout.floats - self.layout.controls]

    @property
    def controls(self) -> Floats:
        """The control variate (a view), as long as the parameters; empty but for SCAFFOLD."""
        return self.floats[self.layout.floats - self.layout.controls :]

    def __reduce__(self) -> tuple[type[Model], tuple[Layout, npt.NDArray[np.uint8]]]:
        """Pickle the buffer alone, so that the views are views again."""
        return Model, (self.layout, self.buffer)

    def itself(self) -> Model:
        """The model, as the values of a layout's unshared tensors."""
        return self

    def copy(self) -> Model:
        """A copy of the model with its own buffer."""
        return Model(self.layout, self.buffer.copy())

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The module's tensors by name, in their shapes: views for float32 and int64, else copies.

        dtypes that numpy lacks (bfloat16) are returned as float32, the precision used for mixing.
        Raises as :meth:`Unshared.model`.
        """
        unshared = self.layout.unshared
        found: dict[str, npt.NDArray[Any]] = unshared.model().tensors() if unshared else {}
        for tensor, values in self.flat():
            dtype = tensor.dtype if tensor.dtype != "bfloat16" else "float32"
            found[tensor.name] = values.reshape(tensor.shape).astype(dtype, copy=False)
        return found

    def flat(self) -> Iterator[tuple[Tensor, Floats | Integers]]:
        """The module's shared tensors, each with its part of the vectors (a view)."""
        floats, integers = self.floats, self.integers
        for tensor in self.layout.without_controls().tensors:
            if tensor.kind in OF_INTEGERS:
                yield tensor, integers[: tensor.count]
                integers = integers[tensor.count :]
            else:
                yield tensor, floats[: tensor.count]
                floats = floats[tensor.count :]


def vector_of(values: Floats) -> Model:
    """A model that wraps a vector and shares its memory."""
    layout = Layout((Tensor("vector", values.shape, "float32", "parameter"),))
    return Model(layout, values.view(np.uint8))
