"""Commands sent in one write, of which the last may wait: its reply is a separate wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self

from fedstream.broker.link import Link


class Started:
    """Commands that were executed, and one after them that may wait.

    To be used in a ``with`` block: leaving it before :meth:`last` was called closes the connection.
    """

    def __init__(
        self,
        replies: list[Any],
        link: Link | None,
        rest: Callable[[], Awaitable[list[Any]]],
    ) -> None:
        self.replies = replies  # to all commands but the last
        self._link = link
        self._rest = rest

    async def last(self) -> Any:
        """Wait for the last command's reply; to be called once. Raises as ``pipeline`` does."""
        self._link = None  # it is up to the rest to close it
        return (await self._rest())[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._link is not None:
            self._link.abort()
            self._link = None
