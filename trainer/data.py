"""Reading a user's data set: its length, and batches of its rows.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedstream.broker.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset


def gather(data: Dataset[Any], rows: torch.Tensor) -> Any:
    """Collate these rows into a batch, as torch does by default; index tensors where possible.

    Raises DataError if the items cannot be collated.
    """
    from torch.utils.data import TensorDataset, default_collate

    if type(data) is TensorDataset:  # a subclass may override __getitem__
        # several times as fast as tensor[rows]
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in data.tensors]
    items = [data[row] for row in rows.tolist()]
    try:
        return default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"cannot form a batch from items of the data set: {error}") from error


def size_of(data: Dataset[Any], device: int) -> int:
    """The number of samples. Raises DataError if there are none, or the data has no length."""
    size = length_of(data, f"device {device}: device_data()", "a map-style data set")
    if size == 0:
        raise DataError(f"device {device} has no data: its data set is empty")
    return size


def samples_of(test_data: Dataset[Any]) -> int:
    """The number of test samples. Raises DataError if there are none, or no length."""
    samples = length_of(test_data, "test_data()", "a map-style data set, or None")
    if samples == 0:
        raise DataError("there is nothing to evaluate: the data set is empty")
    return samples


def length_of(data: Dataset[Any], source: str, wanted: str) -> int:
    """The length of what ``source`` returned. Raises DataError, naming both, if it has none."""
    try:
        return len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    except TypeError:
        raise DataError(
            f"{source} returned {type(data).__name__}, which has no length: it must return {wanted}"
        ) from None
