"""Streams: readers, consumer groups, and recovery of a crashed consumer's entries.

Work streams have no length limit: an entry is deleted when it is acknowledged. Blocking reads are
short and time out by themselves, so that stopping never loses the reply of a cancelled read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.link import Started
from fedstream.broker.scripts import Script
from fedstream.core.errors import BrokerError

BLOCK_MS = 1000
RENEWED = 1000  # entries whose leases one script renews
PARTS = 16  # limit on the bytes of one claim, as a multiple of the largest entry

CLAIM = Script("claim")
_RENEW = Script("renew")
_RENEW_ALL = Script("renew_all")
REAP = Script("reap")
_RELEASE = Script("release")


def time_in(entry: str) -> float:
    """The time at which Redis stored an entry, from its id, in seconds since 1970."""
    return int(entry.partition("-")[0]) / 1000


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    id: str
    data: bytes
    size: int = 0  # bytes of all its fields; ``data`` is empty if they exceed the group's limit

    @property
    def time(self) -> float:
        """The time at which Redis stored the entry, in seconds since 1970."""
        return time_in(self.id)


def entries_of(rows: Any) -> list[Entry]:
    """Entries from a reply; a foreign entry has empty ``data``, which is no valid message."""
    return [_entry(*row) for row in rows]


def _entry(id_: bytes, fields: list[bytes], size: int | None = None) -> Entry:
    """An entry from a reply. ``size``: given for an entry whose fields a script left out."""
    if size is None and len(fields) == 2 and fields[0] == b"m":  # not foreign
        return Entry(id_.decode(), fields[1], 1 + len(fields[1]))
    data = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"m", b"")
    return Entry(id_.decode(), data, sum(map(len, fields)) if size is None else size)


@dataclass(frozen=True, slots=True)
class Look:
    """A read of streams that follows other commands in the same exchange."""

    command: Command
    wait_s: float  # the longest block, in seconds
    begun: Callable[[Started], object]  # called once the other commands were executed


class Reader:
    """A reader of streams from given ids on, without a group."""

    def __init__(self, client: Client, after: dict[str, str]) -> None:
        self._client = client
        self._after = dict(after)

    async def read(self, *, count: int = 100, block_ms: int = BLOCK_MS) -> dict[str, list[Entry]]:
        """Read new entries, at most ``count`` per stream.

        Returns {} if there are none within ``block_ms``; 0 polls.
        """
        command = self.command(count=count, block_ms=block_ms)
        return self.found(await self._client.call(*command, wait_s=block_ms / 1000))

    def command(self, *, count: int, block_ms: int) -> Command:
        """The command that reads new entries, for a pipeline; :meth:`found` takes its reply."""
        block = ("BLOCK", block_ms) if block_ms else ()
        return ("XREAD", "COUNT", count, *block, "STREAMS", *self._after, *self._after.values())

    def found(self, reply: Any) -> dict[str, list[Entry]]:
        """The new entries in a reply; the next read begins after them."""
        # A stream that was restored without entries (an older state of Redis) has an empty row.
        found = {name.decode(): entries_of(rows) for name, rows in reply or () if rows}
        for name, entries in found.items():
            self._after[name] = entries[-1].id
        return found

    def rewind(self, stream: str, after: str = "0") -> None:
        """Continue ``stream`` after the id ``after`` at the next read."""
        self._after[stream] = after


class Group:
    """One consumer of a group that shares the entries of a stream."""

    def __init__(
        self, client: Client, stream: str, group: str, consumer: str, *, largest: int | None = None
    ) -> None:
        """``largest``: bytes above which an entry's data is dropped, in streams that sites fill."""
        self._client = client
        self._largest = largest
        self.stream = stream
        self.group = group
        self.consumer = consumer

    async def ensure(self) -> None:
        """Create the stream and the group if missing."""
        try:
            await self._client.call("XGROUP", "CREATE", self.stream, self.group, "0", "MKSTREAM")
        except BrokerError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self, *, count: int = 1, block_ms: int = BLOCK_MS) -> list[Entry]:
        """Read entries not yet delivered to any consumer.

        Returns [] if there are none within ``block_ms``; 0 doesn't wait.
        """
        try:
            reply = await self._client.call(
                *reading((self,), count=count, block_ms=block_ms), wait_s=block_ms / 1000
            )
        except BrokerError as error:
            if not lost(error):
                raise
            await self.ensure()
            return []
        return [entry for _, rows in reply or () for entry in entries_of(rows)]

    async def claim(
        self, *, idle_ms: int, most: int, own: bool = False, quiet: bool = False, count: int = 10
    ) -> tuple[list[Entry], list[tuple[Entry, int]]]:
        """Claim entries idle for ``idle_ms``; return (entries, [(poison, deliveries)]).

        ``own``: claim, regardless of idle time, the entries that this consumer got before a crash,
        or in a reply that was lost. ``quiet``: count no delivery, because Redis was at fault and
        not the entry. An entry already delivered ``most`` times is poison: it is returned but not
        claimed. Without a consumer name, nothing is claimed.

        With ``largest``, a larger entry is claimed without its data at any number of deliveries,
        and one claim ends after ``PARTS`` times ``largest`` bytes.
        """
        taken, poison = await CLAIM(
            self._client,
            {"stream": self.stream},
            self.group,
            self.consumer,
            idle_ms,
            most,
            self.consumer if own else "",
            count,
            "quiet" if quiet else "",
            *((self._largest, PARTS) if self._largest else ()),
        )
        return entries_of(taken), [(_entry(*row), int(times)) for row, times in poison]

    async def renew(self, entry: Entry) -> bool:
        """Renew the lease on an entry; False if another consumer has it or it is acknowledged."""
        return bool(
            await _RENEW(self._client, {"stream": self.stream}, self.group, self.consumer, entry.id)
        )

    async def renew_all(self, entries: Sequence[str]) -> set[str]:
        """Renew the leases on entries, by id; return the ids that this consumer still has."""
        key = {"stream": self.stream}
        parts = [entries[at : at + RENEWED] for at in range(0, len(entries), RENEWED)]
        commands = [_RENEW_ALL.command(key, self.group, self.consumer, *part) for part in parts]
        replies = await self._client.pipeline(commands) if commands else ()
        return {id_.decode() for reply in replies for id_ in reply}

    async def is_empty(self) -> bool:
        """Whether the stream has no entry, neither undelivered nor pending."""
        return not await self._client.call("XRANGE", self.stream, "-", "+", "COUNT", 1)

    async def take_over(self, entries: Sequence[str]) -> list[Entry]:
        """Assign entries, by id, to this consumer, regardless of their present consumer.

        Counts no delivery. Returns the entries that still exist.
        """
        claim: Command = (
            "XCLAIM",
            self.stream,
            self.group,
            self.consumer,
            0,
            *entries,
            "JUSTID",
        )
        reads: list[Command] = [("XRANGE", self.stream, one, one) for one in entries]
        try:
            ours, *rows = await self._client.pipeline([claim, *reads])
        except BrokerError as error:
            if not lost(error):
                raise
            return []
        return [entry for some in rows for entry in entries_of(some) if entry.id.encode() in ours]

    async def release(self, entry: Entry) -> bool:
        """Hand an entry back, claimable at once; False if another consumer has it.

        Undoes the counted delivery: a consumer that stops on request says nothing about the entry.
        """
        return bool(
            await _RELEASE(
                self._client, {"stream": self.stream}, self.group, self.consumer, entry.id
            )
        )

    async def release_others(self, kept: Entry) -> bool:
        """Hand back all of this consumer's entries but one; False if there are no others."""
        try:
            rows = await self._client.call(
                "XPENDING", self.stream, self.group, "-", "+", 100, self.consumer
            )
        except BrokerError as error:
            if not lost(error):
                raise
            return False
        others = [Entry(id_.decode(), b"") for id_, *_ in rows if id_.decode() != kept.id]
        return any([await self.release(other) for other in others])

    async def reap(self, *, idle_ms: int) -> list[str]:
        """Remove consumers idle for ``idle_ms`` without pending entries; return their names.

        The next read of a removed consumer that is still alive adds it again.
        """
        reaped = await REAP(self._client, {"stream": self.stream}, self.group, idle_ms)
        return [name.decode() for name in reaped]


def reading(groups: Sequence[Group], *, count: int, block_ms: int) -> Command:
    """The command that reads several streams for one group and consumer, for a pipeline.

    Reads at most ``count`` entries per stream; pass the reply to :func:`given`.
    """
    block = ("BLOCK", block_ms) if block_ms else ()
    streams = (*(group.stream for group in groups), *(">" for _ in groups))
    first = groups[0]
    return (
        "XREADGROUP",
        "GROUP",
        first.group,
        first.consumer,
        "COUNT",
        count,
        *block,
        "STREAMS",
        *streams,
    )


def given(groups: Sequence[Group], reply: Any) -> list[tuple[Group, Entry]]:
    """The entries in a reply to :func:`reading`, each with its group."""
    of = {group.stream.encode(): group for group in groups}
    return [(of[stream], entry) for stream, rows in reply or () for entry in entries_of(rows)]


def lost(error: BrokerError) -> bool:
    """Whether a read failed because Redis was emptied, so that the group must be recreated."""
    return "NOGROUP" in str(error)
