"""What the live page reads, with a coordinator's rights and no others.

Everything is asked for since the last look: what was opened and has ended by the log of changes,
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
_PENDING = 1000  # entries of a stream, in trainers' hands, that are named
_REGISTER = 1 << 20  # bytes of descriptions; sites choose how long theirs are


class OpenTask(Trigger):
    """A task as the register of open tasks has it."""

    site: str | None = None  # None: not handed out yet
    owner: str | Literal[False] | None = None
    entry: str | None = None  # in the stream of its owner, or of the pool
    handed: int | None = None  # the newest version when it was handed out


@dataclass(frozen=True)
class OpenedTasks:
    """The open tasks that changed since a place, as they are now."""

    tasks: Mapping[str, OpenTask | None]  # by id; None: it has ended
    all_tasks: bool  # they are all, because the place was not known
    place: Bookmark | None


@dataclass(frozen=True)
class HeldEntries:
    """A stream's entries that were taken and not answered yet."""

    by: Mapping[str, str]  # entry -> the trainer or gateway that has it
    delivered: str  # the newest entry that was ever taken


@dataclass(frozen=True)
class Described:
    """What a trainer, or a replica of a gateway, says of itself."""

    is_gateway: bool
    about: Mapping[str, Any]  # empty if it can't be read


@dataclass(frozen=True)
class News:
    """What was told since the ids that were asked for."""

    events: list[Entry]
    versions: list[Entry]
    is_gap: bool  # Redis no longer has the entries of these ids: something may be missing
    is_all: bool  # there is no more for now


class LivePageLedger(Overview, MemoryUse):
    """The run as somebody sees it who looks on."""

    async def opened(self, place: Bookmark | None) -> tuple[Tally, OpenedTasks]:
        """Read everything countable, and which tasks were opened or ended since a place.

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
        """Read these open tasks anew: the log of changes says nothing of who gets them."""
        if not names:
            return {}
        found = await self._client.call("HMGET", self.keys.open, *names)
        pairs = zip(names, found, strict=True)
        return {name: None if data is None else _opened(data) for name, data in pairs}

    async def admitted(self) -> set[str]:
        """Name the open tasks whose update was admitted."""
        return {name.decode() for name in await self._client.call("HKEYS", self.keys.admitted)}

    async def news(self, event: str, version: str, *, most: int) -> News:
        """Read at most so many events, and versions, after the ones with these ids.

        An entry that is still there vouches for what follows it, so it is read again.
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
        """Find who has the entries of an owner's stream of tasks; '': of the pool's."""
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
        """Which roles somebody holds now, of those that one process at a time does."""
        asked: list[Command] = [("EXISTS", self.keys.leader(role)) for role in LED]
        found = await self._client.pipeline(asked)
        return frozenset(role for role, is_held in zip(LED, found, strict=True) if is_held)

    async def heard(self, most: int) -> dict[str, float]:
        """When trainers and gateways were heard, at most so many: in seconds since 1970.

        0: it has signed off.
        """
        flat = await self._client.call("ZRANGE", self.keys.alive, 0, most - 1, "WITHSCORES")
        return {name.decode(errors="replace"): float(at) for name, at in paired(flat)}

    async def described(self, names: Sequence[str]) -> dict[str, Described]:
        """How trainers and gateways describe themselves: empty if all are too long together."""
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
    """Whether nobody has read the stream yet, or it isn't there yet."""
    return "NOGROUP" in str(error) or "no such key" in str(error)
