"""The base of every role's ledger: rights, scripts, pending changes, events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgpack

from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import Keys
from fedstream.broker.scripts import Script
from fedstream.core.errors import NoRun
from fedstream.core.messages import SCHEMA, Event
from fedstream.core.records import Head, Run, mapping


@dataclass(frozen=True)
class Rights:
    """The rights of one role, with key names as in :class:`Keys` and ``*`` as a wildcard."""

    both: tuple[str, ...] = ()  # read and written
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # sent outside scripts
    scripts: tuple[Script, ...] = ()  # their commands are allowed too
    apart: tuple[Rights, ...] = ()  # ACL selectors: other commands for other keys


T = TypeVar("T")


def packed(value: object) -> bytes:
    """Pack an argument for a script, bytes as strings: Redis's cmsgpack has no binary type."""
    data = msgpack.packb(value, use_bin_type=False)
    assert isinstance(data, bytes)  # noqa: S101  (packb's type is Any)
    return data


def word(reply: bytes) -> str:
    """Decode a script's reply of one word."""
    return reply.decode()


def verdict(reply: Sequence[bytes]) -> tuple[str, str]:
    """Decode a script's reply: a verdict, and a reason or detail."""
    what, why = reply
    return what.decode(), why.decode()


@dataclass(slots=True, eq=False)
class Pending(Generic[T]):
    """A change that is not sent yet: await it, or send its command together with other commands."""

    command: Command
    parsed: Callable[[Any], T]  # parses the command's reply
    _alone: Callable[[], Awaitable[Any]]

    def __await__(self) -> Generator[Any, None, T]:
        return self.parsed((yield from self._alone().__await__()))


class Ledger:
    """The state of one run in Redis; each role has a subclass with the operations it may do."""

    def __init__(self, client: Client, keys: Keys, service: str) -> None:
        client.bind(keys.prefix)
        self._client = client
        self._service = service
        self.keys = keys

    def now(self) -> float:
        """Seconds since 1970, by Redis's clock."""
        return self._client.clock.now()

    async def run(self) -> Run:
        """Read the run's record. Raises NoRun."""
        record = await self._client.call("HGETALL", self.keys.run)
        if not record:
            raise self._no_run()
        return Run.parsed(tuple(record))

    async def head(self) -> Head | None:
        """Read the newest version; None before the first."""
        record = mapping(await self._client.call("HGETALL", self.keys.head))
        return Head.parsed(record) if record else None

    def _no_run(self) -> NoRun:
        return NoRun(f"there is no run {self.keys.name!r} in Redis at {self._client.address}")

    async def _run(
        self,
        script: Script,
        *arguments: Any,
        rest: Sequence[str] = (),
        ahead: Sequence[Command] = (),
        **keys: str,
    ) -> Any:
        named = {**self.keys.__dict__, **keys} if keys else self.keys.__dict__
        return await script(self._client, named, *arguments, rest=rest, ahead=ahead)

    def _pending(
        self,
        script: Script,
        parsed: Callable[[Any], T],
        *arguments: Any,
        rest: Sequence[str] = (),
        **more: str,
    ) -> Pending[T]:
        keys = {**self.keys.__dict__, **more} if more else self.keys.__dict__
        return Pending(
            script.command(keys, *arguments, rest=rest),
            parsed,
            partial(script, self._client, keys, *arguments, rest=rest),
        )

    def _event(self, **fields: Any) -> dict[str, Any]:
        event = {
            "v": SCHEMA,
            "k": Event.kind,
            "service": self._service,
            "time": self.now(),
            **fields,
        }
        return {name: value for name, value in event.items() if value is not None}


FINISH_RUN = Script("finish_run")


class Finishing(Ledger):
    """Ending a run early, for the evaluator at its target and for operators."""

    async def finish(self, why: str) -> bool:
        """End the run; return whether it was running."""
        event = self._event(what="run", text=f"finished: {why}")
        now = self.now()
        return bool(await self._run(FINISH_RUN, why, repr(now), packed(event)))
