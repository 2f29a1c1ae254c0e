"""How to split the training data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IidPartitioner:
    """Into equal parts, drawn at random."""

    num_partitions: int
