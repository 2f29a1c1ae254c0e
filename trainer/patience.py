"""How long a trainer waits for a Redis that is away."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator


class Patience:
    """``most_s`` seconds, or without end (None), since Redis served last.

    Away is also a Redis that answers but cannot serve now: it loads, fails over, or may not write.
    """

    def __init__(self, most_s: float | None) -> None:
        self._most_s = most_s
        self.heard = time.monotonic()  # Redis, the last time

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Where Redis is asked at regular times. Raises FedstreamError if it is away too long."""
        try:
            yield
        except FedstreamError as error:
            now, most_s = time.monotonic(), self._most_s
            if not error.retriable or isinstance(error, OutOfMemory):  # it answers
                self.heard = now
            elif most_s is not None and now - self.heard > most_s:
                raise FedstreamError(
                    f"for {most_s:g} s (trainer.redis_away_s) Redis has not served this trainer, "
                    f"at last: {error}: the run that it was for is over, or start this trainer "
                    "again when Redis serves"
                ) from error
            raise
        self.heard = time.monotonic()
