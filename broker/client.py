"""The only contact with redis-py: connections, commands, pipelines, scripts, and their errors.

redis-py's ``Redis`` object repeats commands whose reply was lost, which would repeat an ``XADD``
and strand what an ``XREADGROUP`` handed out. So this client drives redis-py's *connections* itself:
a command is sent once; a reply that doesn't come is an :class:`Unavailable`, and whoever called
decides what a repetition means. Replies come in RESP2's shapes, always as bytes.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from typing import Any

import hiredis
from pydantic import BaseModel, ConfigDict, Field
from redis import exceptions
from redis.asyncio.connection import Connection, parse_url

from broker.errors import BrokerError, ConfigError, NoScript, OutOfMemory, Unavailable

Buffer = bytes | memoryview
Argument = bytes | memoryview | str | int | float
Command = Sequence[Argument]

_READ = 1 << 20  # bytes taken from a connection at once
# UNBLOCKED: the stream that was waited for is gone, or the node is no master any more. MISCONF: a
# snapshot failed. BUSY: a script that runs too long. In a script's error the code is not the first.
_PASSING = re.compile(r"\b(UNBLOCKED|NOREPLICAS|MISCONF|BUSY) ")


class RedisSettings(BaseModel):
    """Where Redis is, and how long its answers may take."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    url: str = "redis://127.0.0.1:6379/0"
    # For one round trip, or one window of chunks; liveness expects a sign of life within 30 s.
    timeout_s: float = Field(default=10.0, gt=0, le=20)


class Client:
    """Commands to one Redis, each sent at most once. Safe for concurrent tasks of one loop."""

    def __init__(self, settings: RedisSettings, name: str = "") -> None:
        try:
            options: dict[str, Any] = dict(parse_url(settings.url))
        except ValueError as error:
            raise ConfigError(f"redis.url: {settings.url!r} is not allowed: {error}") from error
        self._make = options.pop("connection_class", Connection)
        self._options = options | {
            "protocol": 2,
            "socket_timeout": None,  # one time-out around the whole exchange instead
            "socket_connect_timeout": settings.timeout_s,
            "socket_read_size": _READ,
            "driver_info": None,
            "client_name": name or None,
        }
        self._timeout_s = settings.timeout_s
        self._idle: list[Connection] = []
        self._closed = False
        where = (
            options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        )
        self.address = str(where)  # without credentials: for messages

    async def call(self, *command: Argument, wait_s: float = 0.0) -> Any:
        """The reply to one command; ``wait_s`` is how long the command itself may block."""
        return (await self._exchange((command,), wait_s))[0]

    async def pipeline(self, commands: Sequence[Command], *, wait_s: float = 0.0) -> list[Any]:
        """The replies to several commands sent in one write; raises the first error among them.

        ``wait_s`` is how long they may block.
        """
        return await self._exchange(commands, wait_s)

    async def _exchange(self, commands: Sequence[Command], wait_s: float) -> list[Any]:
        connection: Connection | None = None
        transport: asyncio.WriteTransport | None = None
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                connection = self._idle.pop() if self._idle else self._make(**self._options)
                if not connection.is_connected:
                    await _as_awaitable(connection.connect())
                    # asyncio's 64 KiB pause and resume the socket four times for every chunk.
                    connection._reader._limit = _READ  # type: ignore[union-attr]  # noqa: SLF001
                transport = connection._writer.transport  # type: ignore[union-attr]  # noqa: SLF001
                await connection.send_packed_command(_pack(commands), check_health=False)  # type: ignore[arg-type]
                replies: list[Any] = []
                failure: exceptions.ResponseError | None = None
                for _ in commands:
                    try:
                        # One at a time and to the end: an error reply leaves the rest in order.
                        replies.append(await connection.read_response(disconnect_on_error=False))
                    except exceptions.ResponseError as error:
                        failure = failure or error
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            await self._drop(connection, transport)
            raise self._translated(error) from error
        except BaseException:  # cancelled: the reply may still come, and must meet nobody
            await self._drop(connection, transport)
            raise
        if self._closed:
            await self._drop(connection)
        else:
            self._idle.append(connection)
        if failure is not None:
            raise self._translated(failure) from failure
        return replies

    async def _drop(
        self, connection: Connection | None, transport: asyncio.WriteTransport | None = None
    ) -> None:
        """Closes a connection. What waits in ``transport`` is not sent any more: whoever gave it
        up may have another use for its memory, and another idea of what should happen."""
        if transport is not None:
            transport.abort()
        if connection is not None:
            await connection.disconnect(nowait=True)

    def _translated(self, error: Exception) -> BrokerError:
        text = str(error) or type(error).__name__
        denied = (exceptions.AuthenticationError, exceptions.NoPermissionError)
        if isinstance(error, denied) or "NOPERM" in text or "WRONGPASS" in text:
            return BrokerError(f"Redis at {self.address} refuses: {text}")
        if isinstance(error, exceptions.NoScriptError):
            return NoScript(f"Redis at {self.address}: {text}")
        if isinstance(error, exceptions.OutOfMemoryError) or "OOM " in text:
            return OutOfMemory(f"Redis at {self.address} is full: {text}")
        passing = (
            exceptions.ConnectionError,  # BusyLoadingError among them
            exceptions.TimeoutError,
            exceptions.ReadOnlyError,
            exceptions.TryAgainError,
            exceptions.ClusterDownError,
            exceptions.MasterDownError,
            OSError,
            TimeoutError,
        )
        if isinstance(error, passing) or _PASSING.search(text):
            return Unavailable(f"Redis at {self.address} does not answer: {text}")
        return BrokerError(f"Redis at {self.address}: {text}")

    def hurry(self, seconds: float) -> None:
        """From now on an answer must come in ``seconds``: for good-byes, which must not hold up."""
        self._timeout_s = min(self._timeout_s, seconds)

    async def close(self) -> None:
        """Closes the connections that are idle, and those in use when their reply is in."""
        self._closed = True
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)


async def _as_awaitable(connected: Awaitable[object]) -> None:
    await connected


def _pack(commands: Sequence[Command]) -> list[Buffer]:
    """The commands in Redis's protocol. Memory views are not copied: 44 MB would be, twice."""
    packed: list[Buffer] = []
    small: list[bytes] = []
    for command in commands:
        if not any(isinstance(argument, memoryview) for argument in command):
            small.append(hiredis.pack_command(tuple(command)))  # type: ignore[arg-type]  # a stub of one element
            continue
        small.append(b"*%d\r\n" % len(command))
        for argument in command:
            if isinstance(argument, memoryview):
                small.append(b"$%d\r\n" % argument.nbytes)
                packed += (b"".join(small), argument)
                small = [b"\r\n"]
            else:
                # A command is an array of arguments: one alone is an array of one, less its head.
                small.append(hiredis.pack_command((argument,)).removeprefix(b"*1\r\n"))
    packed.append(b"".join(small))
    return packed
