"""Streams: appending, reading, consumer groups, and taking over what a crashed consumer left.

Work streams have no length limit: an entry is deleted when it is acknowledged. A block is short and
ends by itself, so that stopping never cancels a read that Redis has already answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedstream.broker.client import Client, Command
from fedstream.broker.errors import BrokerError
from fedstream.broker.scripts import Script

BLOCK_MS = 1000
PARTS = 16  # entries of the largest size that are looked at together

_CLAIM = Script("claim")
_RENEW = Script("renew")
_REAP = Script("reap")
_RELEASE = Script("release")


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream."""

    id: str
    data: bytes
    size: int = 0  # bytes of all its fields; ``data`` is empty where that is more than was wanted

    @property
    def time(self) -> float:
        """When Redis took it, in seconds since 1970."""
        return int(self.id.partition("-")[0]) / 1000


def _entries(rows: Any) -> list[Entry]:
    """Entries from a reply. An entry without our field gets empty data, which no message is."""
    return [_entry(*row) for row in rows]


def _entry(id_: bytes, fields: list[bytes], size: int | None = None) -> Entry:
    """``size``: of one whose fields Redis kept for itself."""
    data = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"m", b"")
    return Entry(id_.decode(), data, sum(map(len, fields)) if size is None else size)


class Reader:
    """Reads streams from given ids on, without a group."""

    def __init__(self, client: Client, after: dict[str, str]) -> None:
        self._client = client
        self._after = dict(after)

    async def read(self, *, count: int = 100, block_ms: int = BLOCK_MS) -> dict[str, list[Entry]]:
        """What is new in each stream, at most ``count`` each; {} after ``block_ms``; 0 polls."""
        block = ("BLOCK", block_ms) if block_ms else ()
        reply = await self._client.call(
            "XREAD", "COUNT", count, *block, "STREAMS", *self._after, *self._after.values(),
            wait_s=block_ms / 1000,
        )  # fmt: skip
        found = {name.decode(): _entries(rows) for name, rows in reply or ()}
        for name, entries in found.items():
            self._after[name] = entries[-1].id
        return found

    def rewind(self, stream: str, after: str = "0") -> None:
        """Reads ``stream`` from behind ``after`` next time."""
        self._after[stream] = after


class Group:
    """One consumer's part in a group that shares the entries of a stream."""

    def __init__(
        self, client: Client, stream: str, group: str, consumer: str, *, largest: int | None = None
    ) -> None:
        """``largest``: bytes of an entry that are of use, where others decide how many it has."""
        self._client = client
        self._largest = largest
        self.stream = stream
        self.group = group
        self.consumer = consumer

    async def ensure(self) -> None:
        """Creates stream and group where they are missing."""
        try:
            await self._client.call("XGROUP", "CREATE", self.stream, self.group, "0", "MKSTREAM")
        except BrokerError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self, *, count: int = 1, block_ms: int = BLOCK_MS) -> list[Entry]:
        """Entries nobody was given yet; [] after ``block_ms`` without one; 0 doesn't wait."""
        try:
            reply = await self._client.call(
                *reading([self], count=count, block_ms=block_ms), wait_s=block_ms / 1000
            )
        except BrokerError as error:
            if not lost(error):
                raise
            await self.ensure()
            return []
        return [entry for _, entry in given([self], reply)]

    async def claim(
        self, *, idle_ms: int, most: int, own: bool = False, quiet: bool = False, count: int = 10
    ) -> tuple[list[Entry], list[tuple[Entry, int]]]:
        """Takes over what was idle for ``idle_ms``: (entries, [(poison, deliveries)]).

        ``own``: only what this very consumer was given before it crashed or lost the reply.
        ``quiet``: counts no delivery, because Redis was at fault and not the entry. An entry that
        was delivered ``most`` times already is poison: it is shown, not taken. Without a consumer
        name nothing is taken.

        Of a stream that others fill, what is larger than ``largest`` is taken without its data,
        however often it was delivered, and no more comes at once than ``PARTS`` of that size.
        """
        taken, poison = await _CLAIM(
            self._client,
            {"stream": self.stream},
            self.group, self.consumer, idle_ms, most, self.consumer if own else "", count,
            "quiet" if quiet else "", *((self._largest, PARTS) if self._largest else ()),
        )  # fmt: skip
        return _entries(taken), [(_entry(*row), int(times)) for row, times in poison]

    async def renew(self, entry: Entry) -> bool:
        """Renews the lease of an entry; False if it is another's, or done."""
        return bool(
            await _RENEW(self._client, {"stream": self.stream}, self.group, self.consumer, entry.id)
        )

    async def release(self, entry: Entry) -> bool:
        """Hands an entry back, so that anybody may claim it at once; False if it is another's.

        It counts as no delivery: whoever is told to stop is no proof of poison.
        """
        return bool(
            await _RELEASE(
                self._client, {"stream": self.stream}, self.group, self.consumer, entry.id
            )
        )

    async def reap(self, *, idle_ms: int) -> list[str]:
        """Removes consumers that asked for nothing for ``idle_ms`` and have nothing pending.

        Their names. One that is still there is harmed by nothing: reading adds it again.
        """
        reaped = await _REAP(self._client, {"stream": self.stream}, self.group, idle_ms)
        return [name.decode() for name in reaped]


def reading(groups: Sequence[Group], *, count: int, block_ms: int) -> Command:
    """The command that reads streams of one group and consumer together, for a pipeline.

    At most ``count`` entries of each stream; its reply goes to :func:`given`.
    """
    block = ("BLOCK", block_ms) if block_ms else ()
    streams = (*(group.stream for group in groups), *(">" for _ in groups))
    first = groups[0]
    return (
        "XREADGROUP", "GROUP", first.group, first.consumer, "COUNT", count, *block,
        "STREAMS", *streams,
    )  # fmt: skip


def given(groups: Sequence[Group], reply: Any) -> list[tuple[Group, Entry]]:
    """The entries that a reply to :func:`reading` brought, with the group of each."""
    of = {group.stream.encode(): group for group in groups}
    return [(of[stream], entry) for stream, rows in reply or () for entry in _entries(rows)]


def lost(error: BrokerError) -> bool:
    """Whether a read failed because Redis was emptied under us: the group is to be made again."""
    return "NOGROUP" in str(error)
