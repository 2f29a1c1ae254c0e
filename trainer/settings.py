"""A trainer's settings, and the processor that torch computes on.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import POOL, check_name
from fedstream.broker.messages import OWNED
from fedstream.runtime.config import Section
from fedstream.runtime.steps import Epochs, Steps

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


class InitiativeSettings(Section):
    """How an anarchic trainer decides by itself when to take part and how many steps to do."""

    rate: Annotated[float, Field(gt=0)] = 1.0  # triggers per second while idle
    steps: Steps = Epochs()


class TrainerSettings(Section):
    """What one trainer serves, and the resources it may use."""

    site: str = POOL  # trainers of one site trust each other: they share a Redis user
    # Device numbers; (): a replica of the pool.
    owns: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=OWNED)] = ()
    anarchic: InitiativeSettings | None = None
    threads: Threads = 1  # of torch
    device: Processor = "cpu"  # of torch; updates are float32 either way
    blob_expiry_s: Annotated[float, Field(gt=0)] = 600.0  # of an update that is never admitted
    workspace_bytes: Annotated[int, Field(ge=0)] = 64 << 20  # larger workspaces are not saved
    workspace_expiry_s: Annotated[float, Field(gt=0)] = 3600.0
    # Of what a format lost of owned devices' updates: beyond that, the oldest is dropped.
    feedback_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    # The trainer exits after a longer outage of Redis; None: it waits forever.
    redis_away_s: Annotated[float, Field(gt=0)] | None = None
    ends_with_run: bool | None = None  # True: exit when the run is finished; else idle
    drain_s: Annotated[float, Field(gt=0)] = 20.0

    @model_validator(mode="after")
    def _site_owns(self) -> TrainerSettings:
        try:
            check_name("trainer.site", self.site)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.site != POOL and not self.owns:
            raise ValueError(
                f"trainer.site = {self.site!r} needs trainer.owns: only the site {POOL!r} serves "
                "devices that nobody owns"
            )
        return self
