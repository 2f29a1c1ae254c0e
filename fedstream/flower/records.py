"""Models as Flower's records, and a client's replies as models and numbers.

A model travels as one ``ArrayRecord`` with the names and the order of ``state_dict()``. A
``NumPyClient`` gets the arrays in this order, without names.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib import format as npy

from fedstream.core.errors import DataError

if TYPE_CHECKING:
    from flwr.app import Array, ArrayRecord, RecordDict
    from torch import nn

# numpy has no bfloat16
_WIDENED = {torch.bfloat16: torch.float32}
_LAYOUTS = 4096  # dtypes and shapes of tensors whose headers are kept


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of ``state_dict()``, which share the module's memory."""
    state = module.state_dict()
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def arrays_of(module: nn.Module) -> ArrayRecord:
    """A module's tensors as Flower's arrays."""
    from flwr.app import ArrayRecord

    record = ArrayRecord()
    for name, x in tensors_of(module).items():  # one by one, as ArrayRecord would copy each Array
        record[name] = _packed(x)
    return record


def _packed(x: torch.Tensor) -> Array:
    """Like Flower's ``Array(x)``, but with a cached header."""
    from flwr.app import Array

    values = x.detach().cpu().to(_WIDENED.get(x.dtype, x.dtype)).numpy()
    data = _header(x.dtype, x.shape) + values.tobytes()
    return Array(str(values.dtype), values.shape, "numpy.ndarray", data)


@lru_cache(_LAYOUTS)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The header of numpy's format .npy for such a tensor in C order."""
    header = BytesIO()
    about = {
        "descr": npy.dtype_to_descr(_plain(dtype)),
        "fortran_order": False,
        "shape": tuple(shape),
    }
    npy.write_array_header_1_0(header, about)
    return header.getvalue()


@lru_cache
def _plain(dtype: torch.dtype) -> np.dtype[Any]:
    """The dtype in which such a tensor is sent."""
    return torch.empty(0, dtype=_WIDENED.get(dtype, dtype)).numpy().dtype


def request(
    arrays: ArrayRecord, config: Mapping[str, Any], *, ins: str, legacy: bool
) -> RecordDict:
    """The request to a client. ``ins``: "fitins" or "evaluateins", as for a NumPyClient."""
    from flwr.app import ConfigRecord, RecordDict

    names = (f"{ins}.parameters", f"{ins}.config") if legacy else ("arrays", "config")
    return RecordDict(dict(zip(names, (arrays, ConfigRecord(dict(config))), strict=True)))


def content_of(reply: object, who: str) -> RecordDict:
    """The content of a client's reply. Raises DataError, naming ``who``, for an error."""
    from flwr.app import Message

    if not isinstance(reply, Message):
        raise DataError(f"{who} returned {type(reply).__name__}: expected a flwr.app.Message")
    if reply.has_error():
        raise DataError(f"{who} answered with error {reply.error.code}: {reply.error.reason}")
    content = reply.content
    for name, status in content.config_records.items():
        if name.endswith("res.status") and status.get("code"):  # a NumPyClient's; 0 is OK
            raise DataError(f"{who} answered with status {status['code']}: {status['message']}")
    return content


def numbers_of(content: RecordDict) -> dict[str, float]:
    """All single numbers of a reply by name; the last one if several have the same name."""
    found: dict[str, float] = {}
    records = (*content.config_records.items(), *content.metric_records.items())
    for name, record in records:
        if not name.endswith("res.status"):
            found |= {k: v for k, v in record.items() if isinstance(v, int | float)}
    return found


def load(content: RecordDict, module: nn.Module, who: str) -> None:
    """Copy the arrays of a reply into ``module``.

    Arrays are matched by name, or by position if they are only numbered, as in a NumPyClient. Also
    copies values that are not finite, which the updater refuses and counts.

    Raises DataError, naming ``who`` and the array, if arrays are missing, unknown, or of another
    shape or kind.
    """
    record = _only_arrays(content, who)
    tensors = tensors_of(module)
    numbered = [str(n) for n in range(len(record))]
    names = list(record)
    if names == numbered and names != list(tensors):
        if len(names) != len(tensors):
            raise DataError(f"{who} returned {len(names)} arrays, the model has {len(tensors)}")
        places = dict(zip(tensors, names, strict=True))
    else:
        if missing := [name for name in tensors if name not in record]:
            raise DataError(f"{who} returned no array {missing[0]!r}, which the model has")
        if unknown := [name for name in names if name not in tensors]:
            raise DataError(f"{who} returned an array {unknown[0]!r}, which the model lacks")
        places = {name: name for name in tensors}
    arrays = {
        name: _array(record[key], tensors[name], f"{who}: array {name!r}")
        for name, key in places.items()
    }
    for name, x in tensors.items():  # check all before changing any
        _check(arrays[name], x, f"{who}: array {name!r}")
    with torch.no_grad():
        for name, x in tensors.items():
            x.copy_(torch.from_numpy(arrays[name]))


def _only_arrays(content: RecordDict, who: str) -> ArrayRecord:
    records = content.array_records
    if "arrays" in records:
        return records["arrays"]
    if len(records) != 1:
        raise DataError(
            f"{who} returned {len(records)} array records: expected one, named 'arrays'"
        )
    return next(iter(records.values()))


def _array(array: Any, x: torch.Tensor, what: str) -> np.ndarray[Any, Any]:
    """The values of an array, comparing the header with that of ``x`` first, for speed."""
    header, dtype = _header(x.dtype, x.shape), _plain(x.dtype)
    size = x.numel() * dtype.itemsize
    if size and array.data.startswith(header) and len(array.data) == len(header) + size:
        return np.frombuffer(array.data, dtype, offset=len(header)).reshape(x.shape).copy()
    try:
        values: np.ndarray[Any, Any] = array.numpy()
    except (TypeError, ValueError, EOFError) as error:
        raise DataError(f"{what} cannot be read: {error}") from error
    return values


def _check(values: np.ndarray[Any, Any], x: torch.Tensor, what: str) -> None:
    if values.shape != tuple(x.shape):
        raise DataError(f"{what} has shape {values.shape}, in the model it has {tuple(x.shape)}")
    numeric = values.dtype.kind in "fiub"
    if not numeric or (values.dtype.kind == "f") != x.is_floating_point():
        raise DataError(f"{what} is of dtype {values.dtype}, in the model it is of {x.dtype}")
