"""The table ``[simulation]``."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from fedstream.runtime.config import Section
from fedstream.trainer.placement import Place


class NoStaleness(Section):
    """Every device starts from the newest version: d = 0, as in synchronous rounds."""

    kind: Literal["none"] = "none"


class UniformStaleness(Section):
    """d uniform on [0, ``most``], and on [0, t] as long as t is below that (FedAsync)."""

    kind: Literal["uniform"] = "uniform"
    most: Annotated[int, Field(ge=0)] = 4


class RecentStaleness(Section):
    """Each device starts from one of the last ``of`` versions that there are, uniformly (AFL)."""

    kind: Literal["recent"] = "recent"
    of: Annotated[int, Field(ge=1)] = 5


class LatencyStaleness(Section):
    """Staleness emerges: devices take the time that ``[devices]`` says, ``scheduler.policy`` says
    when they begin, and the clock is virtual."""

    kind: Literal["latency"] = "latency"


Staleness: TypeAlias = NoStaleness | UniformStaleness | RecentStaleness | LatencyStaleness


class SimulationSettings(Section):
    """How ``fedstream simulate`` differs from a run of services."""

    staleness: Annotated[Staleness, Field(discriminator="kind")] | None = None
    """None: what suits the strategy, ``none`` for FedAvg and else ``uniform``"""
    evaluate_every: Annotated[int, Field(ge=0)] = 10
    """versions; the last one is measured too; 0: that one alone"""
    device: Place = "cpu"
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: of layers while they train (autocast, channels last); the weights stay float32."""
    batched: bool = True
    """Train as is faster and the same to rounding: together, convolutions with channels last."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """of torch; None: as many as it takes by itself"""

    @field_validator("staleness", mode="before")
    @classmethod
    def _told_by_its_key(cls, table: object) -> object:
        """``most`` alone is about uniform staleness."""
        if isinstance(table, dict) and table.keys() == {"most"}:
            return {"kind": "uniform"} | table
        return table
