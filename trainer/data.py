"""Data sets, the processor that torch computes on, and its random numbers.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgpack
import numpy as np
from pydantic import Field

from fedstream.core.errors import BadMessage, ConfigError, DataError

if TYPE_CHECKING:
    import torch
    from torch.utils.data import Dataset

Processor: TypeAlias = Literal["cpu", "cuda"]


Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]  # more than the cores of any machine


def check(key: str, place: Processor) -> None:
    """Check that torch can compute on ``place``. Raises ConfigError, naming the key."""
    import torch

    if place == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{key} = 'cuda': torch finds no CUDA device here; use 'cpu', or install torch with "
            "CUDA"
        )


def placed(data: Dataset[Any], place: Processor) -> Dataset[Any]:
    """Move a TensorDataset to ``place``; return other data unchanged, for the loss to move."""
    from torch.utils.data import TensorDataset

    if place == "cpu" or type(data) is not TensorDataset:
        return data
    return TensorDataset(*(tensor.to(place) for tensor in data.tensors))


def thinned(data: Dataset[Any], rows: int) -> Dataset[Any]:
    """At most ``rows`` items of map-style data, evenly spaced."""
    import torch
    from torch.utils.data import Subset, TensorDataset

    if (size := samples_of(data)) <= rows:
        return data
    at = torch.arange(rows) * size // rows
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor[at] for tensor in data.tensors))
    return Subset(data, at.tolist())


@cache
def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed Python's, numpy's and torch's global random generators, and restore them afterwards."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpus = range(torch.cuda.device_count()) if begun else ()
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed, which checks for every kind of device in each call.
        torch.default_generator.manual_seed(seed)
        if _has_cuda():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def state_of(generator: torch.Generator) -> bytes:
    """A torch generator's state as bytes."""
    data: bytes = generator.get_state().numpy().tobytes()
    return data


def restore(generator: torch.Generator, state: bytes) -> None:
    """Put a torch generator into a state. Raises BadMessage if this torch cannot read the state."""
    import torch

    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:
        raise BadMessage(
            f"the random generator's state does not fit this version of torch: {error}"
        ) from error


def _torchs(where: torch.device) -> list[torch.Generator]:
    """torch's global generators: the CPU's, and that of a GPU."""
    import torch

    gpu = [torch.cuda.default_generators[where.index]] if where.type == "cuda" else []
    return [torch.default_generator, *gpu]


def random_states(where: torch.device) -> tuple[bytes, ...]:
    """The states of the global generators: Python's, numpy's, torch's, and the GPU's if used."""
    version, words, gauss = random.getstate()
    _, numbers, at, has_gauss, other = np.random.get_state(legacy=True)
    return (
        msgpack.packb((version, np.array(words, "<u4").tobytes(), gauss)),
        msgpack.packb((np.array(numbers, "<u4").tobytes(), at, has_gauss, other)),
        *map(state_of, _torchs(where)),
    )


def restore_random_states(states: Sequence[bytes], where: torch.device) -> None:
    """Restore :func:`random_states`. Raises BadMessage if another release made them."""
    try:
        python, numpy, *torchs = states
        version, words, gauss = msgpack.unpackb(python)
        random.setstate((version, tuple(np.frombuffer(words, "<u4").tolist()), gauss))
        numbers, at, has_gauss, other = msgpack.unpackb(numpy)
        if not 0 <= at <= len(words) // 4 - 1:  # numpy would read beyond its numbers
            raise ValueError(f"place {at}")
        keys = np.frombuffer(numbers, "<u4")
        np.random.set_state(("MT19937", keys, at, has_gauss, other))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise BadMessage(f"the random generators' states do not fit: {error}") from error
    # A workspace from a machine without a GPU lacks that generator's state: keep it as seeded.
    for generator, state in zip(_torchs(where), torchs, strict=False):
        restore(generator, state)


def size_of(data: Dataset[Any], device: int) -> int:
    """The number of samples; 0 for a stream (``IterableDataset``), which has no length.

    Raises DataError if other data has no samples or no length.
    """
    from torch.utils.data import IterableDataset

    if isinstance(data, IterableDataset):
        return 0
    size = length_of(
        data, f"device {device}: device_data()", "a map-style data set or an IterableDataset"
    )
    if size == 0:
        raise DataError(f"device {device} has no data: its data set is empty")
    return size


def samples_of(test_data: Dataset[Any]) -> int:
    """The number of test samples. Raises DataError if the data is empty or has no length."""
    samples = length_of(test_data, "test_data()", "a map-style data set, or None")
    if samples == 0:
        raise DataError("there is nothing to evaluate: the data set is empty")
    return samples


def length_of(data: Dataset[Any], source: str, wanted: str) -> int:
    """The length of the data. Raises DataError if it has none.

    The error names ``source``, which returned the data, and the kind that is ``wanted``.
    """
    try:
        return len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    except TypeError:
        raise DataError(
            f"{source} returned {type(data).__name__}, which has no length: it must return {wanted}"
        ) from None
