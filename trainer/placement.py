"""Where models and data are while torch computes: in main memory or on a GPU.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from fedstream.broker.errors import ConfigError

if TYPE_CHECKING:
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
