"""A thread of its own for work that would block the event loop, one call at a time."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """One thread, for as long as a ``with`` block lasts, or until :meth:`close`.

    An executor of one thread passes each result on through a second future with a lock of its own.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name).start()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have the thread make a call after those before it; returns its result to come.

        Cancelling the future doesn't stop the call.
        """
        asked = _Call(partial(call, *args, **kwargs), asyncio.get_running_loop())
        self._calls.put(asked)
        return asked.result

    def close(self) -> None:
        """Let the thread end after the calls that were asked for; doesn't wait for it."""
        self._calls.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.make()
            del asked  # or what it was given would stay alive until the next one


class _Call(Generic[T]):
    """A call that a thread makes, and what it comes to."""

    __slots__ = ("_call", "_loop", "result")

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self.result: asyncio.Future[T] = loop.create_future()

    def make(self) -> None:
        """Make the call, and have the loop hear of it."""
        try:
            tell = partial(self._returned, self._call())
        except BaseException as error:  # raised where the result is awaited
            tell = partial(self._raised, error)
        with suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(tell)

    def _returned(self, value: T) -> None:
        if not self.result.cancelled():
            self.result.set_result(value)

    def _raised(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # no future takes one
            error = RuntimeError(f"{type(error).__name__}: {error}")
        if not self.result.cancelled():
            self.result.set_exception(error)
