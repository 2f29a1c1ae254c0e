"""Commands sent in one write, of which the last may wait: its reply is a separate wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Self

from fedstream.broker.link import Link


class Started:
    """Commands that were executed, and one or more after them that may wait.

    To be used in a ``with`` block, which closes the connection if it is left before the last reply
    was asked for; or to be closed.
    """

    def __init__(
        self,
        replies: list[Any],
        link: Link | None,
        rest: Callable[[], Awaitable[list[Any]]],
    ) -> None:
        self.replies = replies  # to all commands but the last ones
        self._link = link
        self._rest = rest

    async def last(self) -> Any:
        """Wait for the last command's reply; to be called once. Raises as ``pipeline`` does."""
        return (await self.rest())[-1]

    async def rest(self) -> list[Any]:
        """Wait for the replies to the last commands, as :meth:`last` does for that to one."""
        self._link = None  # it is up to the rest to close it
        return (await self._rest())[len(self.replies) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, unless the last reply was asked for."""
        if self._link is not None:
            self._link.abort()
            self._link = None
