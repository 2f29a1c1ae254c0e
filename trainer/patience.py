"""How long a trainer waits for an unavailable Redis."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError, OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator


class Patience:
    """Gives up ``most_s`` seconds after Redis last served a request; None: never.

    A Redis that answers but can't serve (loading, failing over, read-only) counts as unavailable.
    """

    def __init__(self, most_s: float | None) -> None:
        self._most_s = most_s
        self.heard = time.monotonic()  # when Redis last served

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Wrap a regular request to Redis. Raises FedstreamError if Redis is away for too long."""
        try:
            yield
        except FedstreamError as error:
            now, most_s = time.monotonic(), self._most_s
            if not error.retriable or isinstance(error, OutOfMemory):  # Redis serves
                self.heard = now
            elif most_s is not None and now - self.heard > most_s:
                raise FedstreamError(
                    f"Redis has not served this trainer for {most_s:g} s (trainer.redis_away_s), "
                    f"last: {error}: restart it when Redis is back, unless the run is over"
                ) from error
            raise
        self.heard = time.monotonic()
