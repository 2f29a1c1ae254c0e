"""The live page's reads from Redis, with a coordinator's rights.

Each look reads only what is new since the last one: opened and ended tasks by the log of changes,
events and versions by the ids of their streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedstream.broker.commands import Command
from fedstream.broker.keys import TRAINERS
from fedstream.broker.ledger.queries import (
    LOOK,
    MemoryUse,
    Overview,
    about_trainer,
    asked_since,
    paired,
)
from fedstream.broker.streams import Entry, entries_of
from fedstream.core.errors import BadMessage, BrokerError, ReplyTooLarge
from fedstream.core.messages import Trigger
from fedstream.core.records import Bookmark, Tally

BEGINNING = "0-0"
LED = ("scheduler", "updater")
_PENDING = 1000  # pending entries read per stream
_REGISTER = 1 << 20  # bytes of all descriptions, whose length sites choose


class OpenTask(Trigger):
    """An open task's fields in the register of open tasks."""

    site: str | None = None  # None: not handed out yet
    owner: str | Literal[False] | None = None
    entry: str | None = None  # id in the task stream of the owner or of the pool
    handed: int | None = None  # the newest version when it was handed out


@dataclass(frozen=True)
class OpenedTasks:
    """The tasks that changed since a place in the log of changes."""

    tasks: Mapping[str, OpenTask | None]  # by id; None: it has ended
    all_tasks: bool  # all open tasks, because the place was not in the log
    place: Bookmark | None


@dataclass(frozen=True)
class HeldEntries:
    """The entries of a task stream that trainers have taken and not answered yet."""

    by: Mapping[str, str]  # entry -> the trainer or gateway that has it
    delivered: str  # id of the newest entry ever taken


@dataclass(frozen=True)
class Described:
    """The latest announcement and heartbeat of a trainer or a gateway's replica."""

    is_gateway: bool
    about: Mapping[str, Any]  # empty if unreadable


@dataclass(frozen=True)
class News:
    """The events and versions after given ids."""

    events: list[Entry]
    versions: list[Entry]
    is_gap: bool  # entries may be missing: Redis has trimmed the given ids
    is_all: bool  # nothing newer exists now


class LivePageLedger(Overview, MemoryUse):
    """The read-only view of a run for the live page."""

    async def opened(self, place: Bookmark | None) -> tuple[Tally, OpenedTasks]:
        """Read the counts, and the tasks that were opened or ended since a place in the log.

        Raises NoRun until the run is created.
        """
        reply = await self._run(LOOK, 1, *asked_since(place))
        (how, tasks), *_, last = reply[-4:]
        found: dict[str, OpenTask | None] = {}
        if how == b"all":
            for data in tasks:
                if (task := _opened(data)) is not None:
                    found[task.task] = task
        else:
            for name, data in paired(tasks):
                found[name.decode(errors="replace")] = None if data is None else _opened(data)
        newest = Bookmark(last[0], *last[1][:2]) if last else None
        tally = replace(self._tally(reply), failing=await self.failing())
        return tally, OpenedTasks(found, how == b"all", newest)

    async def tasks(self, names: Sequence[str]) -> dict[str, OpenTask | None]:
        """Read open tasks by id: the log of changes doesn't record hand-outs."""
        if not names:
            return {}
        found = await self._client.call("HMGET", self.keys.open, *names)
        pairs = zip(names, found, strict=True)
        return {name: None if data is None else _opened(data) for name, data in pairs}

    async def admitted(self) -> set[str]:
        """Read the ids of open tasks whose update was admitted."""
        return {name.decode() for name in await self._client.call("HKEYS", self.keys.admitted)}

    async def news(self, event: str, version: str, *, most: int) -> News:
        """Read at most ``most`` events and ``most`` versions after the given ids.

        The given entries are read too: if they still exist, nothing after them is missing.
        """
        asked: list[Command] = [
            ("XRANGE", stream, after, "+", "COUNT", most + 1)
            for stream, after in ((self.keys.events, event), (self.keys.models, version))
        ]
        events, versions = map(entries_of, await self._client.pipeline(asked))
        is_gap = not (_vouched(events, event) and _vouched(versions, version))
        is_all = max(len(events), len(versions)) <= most
        return News(_after(events, event), _after(versions, version), is_gap, is_all)

    async def held(self, owner: str) -> HeldEntries:
        """Read the pending entries of an owner's task stream ('': the pool's) and their holders."""
        stream = self.keys.tasks_of(owner) if owner else self.keys.tasks
        try:
            rows, groups = await self._client.pipeline(
                [
                    ("XPENDING", stream, TRAINERS, "-", "+", _PENDING),
                    ("XINFO", "GROUPS", stream),
                ]
            )
        except BrokerError as error:
            if error.retriable or not _is_absent(error):
                raise
            return HeldEntries({}, BEGINNING)
        of_group = [dict(paired(group)) for group in groups]
        delivered = [one[b"last-delivered-id"] for one in of_group if one[b"name"] == _GROUP]
        return HeldEntries(
            {id_.decode(): by.decode(errors="replace") for id_, by, *_ in rows},
            delivered[0].decode() if delivered else BEGINNING,
        )

    async def leading(self) -> frozenset[str]:
        """The roles with a lease that some process holds now."""
        asked: list[Command] = [("EXISTS", self.keys.leader(role)) for role in LED]
        found = await self._client.pipeline(asked)
        return frozenset(role for role, is_held in zip(LED, found, strict=True) if is_held)

    async def heard(self, most: int) -> dict[str, float]:
        """The times of the last messages of at most ``most`` trainers, in seconds since 1970.

        0: the trainer or gateway has signed off.
        """
        flat = await self._client.call("ZRANGE", self.keys.alive, 0, most - 1, "WITHSCORES")
        return {name.decode(errors="replace"): float(at) for name, at in paired(flat)}

    async def described(self, names: Sequence[str]) -> dict[str, Described]:
        """Read the announcements and heartbeats; {} if they are too long in total."""
        if not names:
            return {}
        hashes = (self.keys.concurrent, self.keys.working, self.keys.trainers)
        asked: list[Command] = [("HMGET", key, *names) for key in hashes]
        nothing = [None] * len(names)
        concurrent, working, described = nothing, nothing, nothing
        with suppress(ReplyTooLarge):
            concurrent, working, described = await self._client.pipeline(asked, most=_REGISTER)
        return {
            name: Described(at_once is not None, about_trainer(data, since))
            for name, at_once, since, data in zip(
                names, concurrent, working, described, strict=True
            )
        }


_GROUP = TRAINERS.encode()


def _opened(data: bytes) -> OpenTask | None:
    with suppress(BadMessage):
        return OpenTask.decode(data)
    return None


def _vouched(entries: Sequence[Entry], after: str) -> bool:
    return after == BEGINNING or bool(entries and entries[0].id == after)


def _after(entries: list[Entry], after: str) -> list[Entry]:
    return entries[1:] if entries and entries[0].id == after else entries


def _is_absent(error: BrokerError) -> bool:
    """Whether the stream or its consumer group doesn't exist yet."""
    return "NOGROUP" in str(error) or "no such key" in str(error)
