"""What all models say of each device's updates. It takes a replay, so it is measured when asked.

`fedstream ui` does so in a thread, as soon as somebody follows a link. In a service it is a
question like others, worked on in a process of its own; what was answered last is shown.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Protocol

from fedstream.broker.errors import FedstreamError
from fedstream.history.model_stats import AHEAD
from fedstream.history.models import Unwanted
from fedstream.history.table import RowArray
from fedstream.journal import counted_bytes, opened
from fedstream.journal.shares import Share, stats

if TYPE_CHECKING:
    from fedstream.history.ui.work import MeasuredShares

_WAIT_S = 0.5  # for a short run, whose answer can be on the page that asked
DISTANCES = "/distances"  # where a service is asked for them


@dataclass(frozen=True)
class LatePushes:
    """A device's newest updates as vectors, as far as the journal was read along."""

    rows: RowArray  # with version, norm, distance and cosine; NaN: not known yet
    until: int  # the version up to which the journal was read
    problem: str  # why it isn't read on


class Directions(Protocol):
    """What was measured, or is being measured."""

    @property
    def shares(self) -> Mapping[int, Share] | None:
        """By device, once all is measured."""

    @property
    def until(self) -> int | None:
        """The last version that counts; None: all of them."""

    @property
    def problem(self) -> str:
        """Why it could not be measured."""

    @property
    def part(self) -> float:
        """Of the journal that was read."""

    @property
    def is_going_on(self) -> bool:
        """Whether it has begun and not ended."""

    def lately(self, device: int) -> LatePushes | None:
        """What was read along of a device's newest updates; None where nobody reads along."""

    def begin(self) -> None:
        """Begin to measure, if following a link may do that."""

    def end(self) -> None:
        """Stop soon: nobody wants to know any more."""


class AskedDirections:
    """What was answered last to the question for them."""

    problem, part, is_going_on = "", 0.0, False  # told where it is asked

    def __init__(
        self,
        answered: Callable[[], MeasuredShares | None],
        lately: Callable[[int], LatePushes],
    ) -> None:
        self._answered = answered
        self._lately = lately

    def lately(self, device: int) -> LatePushes:
        """What was read along of a device's newest updates."""
        return self._lately(device)

    @property
    def shares(self) -> Mapping[int, Share] | None:
        """By device, once all is measured."""
        found = self._answered()
        return None if found is None else found.by_device

    @property
    def until(self) -> int | None:
        """The last version that counts; None: all of them."""
        found = self._answered()
        return None if found is None else found.until

    def begin(self) -> None:
        """A form begins it."""

    def end(self) -> None:
        """Whoever began it ends it."""


class ThreadedDirections:
    """A measurement in a thread of its own, at most one for each look at a run."""

    until = None

    def __init__(self, journal: Path) -> None:
        self.shares: dict[int, Share] | None = None  # by device, once all is measured
        self.problem = ""  # why it could not be measured
        self.part = 0.0  # of the journal that was read
        self._journal = journal
        self._thread: Thread | None = None
        self._ended = False

    def lately(self, device: int) -> LatePushes | None:
        """None: all is measured together."""
        return None

    @property
    def is_going_on(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread is not None and self.shares is None and not self.problem

    def begin(self) -> None:
        """Begin to measure, unless that was done; wait a moment for the end."""
        if self._thread is None:
            # The rules that may be loaded are those that may be where this is called.
            context = contextvars.copy_context()
            self._thread = Thread(target=context.run, args=(self._measure,), daemon=True)
            self._thread.start()
        self._thread.join(_WAIT_S)

    def end(self) -> None:
        """Stop soon: nobody wants to know any more."""
        self._ended = True

    def _measure(self) -> None:
        passed = 0
        try:
            with opened(self._journal) as chain:
                total = counted_bytes(chain)

                def read(length: int) -> None:
                    nonlocal passed
                    if self._ended:
                        raise Unwanted
                    passed += length
                    self.part = passed / total

                self.shares = stats(chain, AHEAD, read)
        except Unwanted:
            self.problem = "ended"
        except FedstreamError as error:  # damage, or a rule that may not be loaded
            self.problem = str(error)
