"""The table ``[simulation]``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field, field_validator

from fedstream.runtime.config import Section
from fedstream.trainer.data import Processor


class NoStaleness(Section):
    """Every device starts from the newest version: d = 0, as in synchronous rounds."""

    draws_late: ClassVar[bool] = False  # some updates come late because a draw says so
    kind: Literal["none"] = "none"


class UniformStaleness(Section):
    """d uniform on [0, min(``most``, t)] at version t (FedAsync)."""

    draws_late: ClassVar[bool] = True
    kind: Literal["uniform"] = "uniform"
    most: Annotated[int, Field(ge=0)] = 4


class RecentStaleness(Section):
    """Each device starts from one of the last ``of`` existing versions, uniformly (AFL)."""

    draws_late: ClassVar[bool] = True
    kind: Literal["recent"] = "recent"
    of: Annotated[int, Field(ge=1)] = 5


class LatencyStaleness(Section):
    """Staleness emerges on a virtual clock: ``scheduler.policy`` decides when devices begin, and
    ``[devices]`` how long they take."""

    draws_late: ClassVar[bool] = False
    kind: Literal["latency"] = "latency"


SimulatedStaleness: TypeAlias = NoStaleness | UniformStaleness | RecentStaleness | LatencyStaleness


class SimulationSettings(Section):
    """The table ``[simulation]``: settings of ``fedstream simulate`` alone."""

    staleness: Annotated[SimulatedStaleness, Field(discriminator="kind")] | None = None
    """None: the policy's default, ``none`` for rounds and otherwise ``uniform``"""
    evaluate_every: Annotated[int, Field(ge=0)] = 10
    """in versions; the last one is always measured; 0: only the last"""
    device: Processor = "cpu"
    batched: bool = True
    """train in faster ways that are equal up to rounding: devices together, channels last"""
    threads: Annotated[int, Field(ge=1)] | None = None
    """of torch; None: 1, but logistic regression uses as many as torch has by default"""

    @field_validator("staleness", mode="before")
    @classmethod
    def _told_by_its_key(cls, table: object) -> object:
        """Take a table with only ``most`` as uniform staleness."""
        if isinstance(table, dict) and table.keys() == {"most"}:
            return {"kind": "uniform"} | table
        return table
