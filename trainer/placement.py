"""Where torch computes, in main memory or on a GPU, and with which random numbers.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from fedstream.broker.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

Processor: TypeAlias = Literal["cpu", "cuda"]
Threads: TypeAlias = Annotated[int, Field(ge=1, le=1024)]  # more than any machine has cores


def check(key: str, place: Processor) -> None:
    """Check that torch can compute there. Raises ConfigError, naming the key, if it can't."""
    import torch

    if place == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{key} = 'cuda': torch finds no CUDA device here; use 'cpu', or install torch with "
            "CUDA"
        )


def placed(data: Dataset[Any], place: Processor) -> Dataset[Any]:
    """Move a TensorDataset there; return other data as it is, for the loss to move."""
    from torch.utils.data import TensorDataset

    if place == "cpu" or type(data) is not TensorDataset:
        return data
    return TensorDataset(*(tensor.to(place) for tensor in data.tensors))


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
        # Not torch.manual_seed, which looks for every kind of device, in each call.
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
