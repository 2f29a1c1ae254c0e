"""BASGD: the middle of a few buckets' means, which minorities of buckets can't move far."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Layout, Model
from fedstream.strategies.batches import Middle, Stepping, middle, weighted
from fedstream.strategies.mixing import toward
from fedstream.strategies.staleness import Constant, Staleness
from fedstream.strategies.strategy import InRounds, Memory, State, Update


class BasgdSettings(Stepping):
    """BASGD: x_{t+1} = x_t + server_lr Aggr(h_0, ..., h_{B-1}), once no bucket is empty.

    Buffered Asynchronous SGD for Byzantine Learning (Yang, Li; JMLR 2023), algorithm 2, with deltas
    in place of -eta times gradients. Bucket h_b is the mean of all s(d) (x_new - x_tau) that came
    from devices b, b + B, b + 2 B, ... since the last version; then all are emptied. The paper's
    buffers are assigned anew when devices fall silent; here, a silent bucket holds the version up.
    """

    rounds: ClassVar[InRounds] = "never"
    name: Literal["basgd"] = "basgd"
    buckets: Annotated[int, Field(ge=2)] = 5
    """B; resists attackers in fewer than half of the buckets"""
    aggregate: Middle = "geometric median"
    """Aggr"""
    staleness: Staleness = Constant()
    """s; not in the paper"""

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices. Raises ConfigError."""
        if 0 < devices < self.buckets:
            raise ConfigError(
                f"strategy.buckets = {self.buckets}: the run's {devices} devices (task.devices) "
                f"can't fill them: set at most {devices}"
            )
        return self

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The buckets' means, so that bucket b has number b; then the optimizer's vectors."""
        return (*(f"bucket {b}" for b in range(self.buckets)), *super().vector_names)

    def span(self, layout: Layout) -> int:
        """The parameters and the buffers."""
        return layout.floats

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """s(d)."""
        return self.staleness(version - tau)

    def completes(self, arrived: dict[int, int], device: int) -> bool:
        """Count an update in its bucket; whether no bucket is empty now."""
        b = device % self.buckets
        arrived[b] = arrived.get(b, 0) + 1
        if len(arrived) < self.buckets:
            return False
        arrived.clear()
        return True

    def is_complete(self, memory: Memory, device: int) -> bool:
        """Whether no bucket is empty."""
        return memory.devices is not None and len(memory.devices.numbers) == self.buckets

    def _grown(self, memory: Memory, update: Update, factor: float, spare: Model) -> Memory:
        """The memory with the update in its bucket's mean."""
        grown = super()._grown(memory, update, factor, spare)
        vectors = grown.devices or self.vectors(self.span(update.model.layout))
        counts = vectors.numbers  # of updates, by bucket
        if grown.arrivals == 1:
            counts.clear()
        b = update.device % self.buckets
        counts[b] = counts.get(b, 0) + 1
        bucket = vectors.write(f"bucket {b}")
        if counts[b] == 1:
            weighted(update.model, factor, into=bucket)
        else:
            new = np.empty_like(bucket)
            weighted(update.model, factor, into=new)
            toward(bucket, new, 1 / counts[b], into=bucket)
        return replace(grown, devices=vectors)

    def combine(self, state: State) -> tuple[int, ...]:
        """Put n times the middle of the buckets' means in place of the sum.

        No update stands out, as a bucket hides its updates.
        """
        memory = state.memory
        if memory.devices is not None:
            kept = [memory.devices[f"bucket {b}"] for b in sorted(memory.devices.numbers)]
            middle(self.aggregate, kept, memory.arrivals, into=self.total(state))
            memory.devices.numbers.clear()
        return ()
