"""What all strategies' settings have in common: the facts that the rest of fedstream goes by."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from fedstream.broker.messages import Sends
from fedstream.runtime.config import Section

if TYPE_CHECKING:
    from fedstream.strategies.strategy import Strategy

InRounds: TypeAlias = Literal["never", "possible", "always"]


class RuleSettings(Section):
    """Base class of a strategy's table. A subclass adds the fields ``name`` and ``max_staleness``.

    The class variables describe the strategy to the scheduler, the solvers and the journal, so
    nothing outside this package needs to know one strategy from another.
    """

    sends: ClassVar[Sends] = "delta"
    """what its devices send"""
    has_memory: ClassVar[bool] = True
    """it keeps something between versions, such as a batch that is not full yet"""
    controls: ClassVar[bool] = False
    """it corrects client drift, and needs solvers that do so too (SCAFFOLD)"""
    rounds: ClassVar[InRounds] = "possible"
    """whether the scheduler may ask devices in rounds"""
    batch_key: ClassVar[str] = "buffer_size"
    """the key that sets ``batch``, for error messages"""

    @property
    @abstractmethod
    def batch(self) -> int:
        """The number of updates in a version."""

    @property
    def remembered(self) -> int | None:
        """The number of devices of which it keeps a vector, if configured; else None."""
        return None

    @abstractmethod
    def build(self, devices: int = 0) -> Strategy:
        """The strategy, for a run with ``devices`` devices."""
