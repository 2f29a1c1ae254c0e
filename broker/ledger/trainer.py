"""The trainers' operations on Redis: read the run and the newest version, write to an inbox.

All messages of a trainer go to its site's inbox, to which it can only append. The inbox's name
gives the reader the sender's site. A coordinator decides on each message: trainers write nothing
that other services rely on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import TRAINERS, Keys, member
from fedstream.broker.ledger.base import Rights, word
from fedstream.broker.ledger.queries import MemoryUse
from fedstream.broker.link import Started
from fedstream.broker.scripts import Script, run
from fedstream.broker.streams import BLOCK_MS, Entry, Group, given, lost, reading
from fedstream.core.digest import digest_of
from fedstream.core.errors import BrokerError
from fedstream.core.messages import (
    Dead,
    Event,
    GiveUp,
    Heartbeat,
    Measured,
    Presence,
    Trigger,
    Upload,
)
from fedstream.core.records import Head, mapping

FINISH = Script("finish_task")
_UNHEARD = 10_000  # inbox entries above which trainers skip their announcements
_SHORT = 100  # devices: a list this short is sent with every announcement
TASKS = "{tasks}"  # stands for the task streams of a site

# `{site}`: the trainer's site. Trainers may not load scripts, but need the commands inside them.
RIGHTS = Rights(
    reads=("run", "head", "sealing", "model:*", "control:{site}/*", "owned:{site}/*"),
    commands=("get", "hgetall", "info", "multi", "exec", "discard", *blobs.READS),
    apart=(
        Rights(both=(TASKS, "update:{site}/*", "workspace:{site}/*"), commands=("evalsha",)),
        Rights(
            both=(TASKS,),
            commands=(
                "xgroup|create",
                "xreadgroup",
                "xpending",
                "xclaim",
                "xrange",
                "xack",
                "xdel",
            ),
        ),
        Rights(writes=("update:{site}/*",), commands=("hset", "hexists", "pexpire")),
        Rights(
            both=("workspace:{site}/*",),
            commands=("getrange", "set", "unlink", "exists", "rename"),
        ),
        Rights(writes=("inbox:{site}",), commands=("xadd", "xlen", "exists")),
    ),
)


@dataclass(frozen=True, slots=True)
class TakenTask:
    """A task that a trainer has taken from a stream."""

    entry: Entry
    newest: Head | None = None  # the newest version at that moment; None: unknown
    again: bool = False  # another attempt came before, and may have left a workspace


class TakesTasks(MemoryUse):
    """Taking tasks, for trainers and gateways."""

    async def take(self, group: Group, *, block_ms: int = BLOCK_MS) -> TakenTask | None:
        """Take an undelivered task; None if there is none within ``block_ms``."""
        entries, head = await self.take_some(group, count=1, block_ms=block_ms)
        return TakenTask(entries[0], head) if entries else None

    async def take_some(
        self, group: Group, *, count: int, block_ms: int = BLOCK_MS
    ) -> tuple[list[Entry], Head | None]:
        """Take at most ``count`` undelivered tasks, and the newest version at that moment.

        Returns no tasks if there are none within ``block_ms``; no version before the first.
        """
        taking = self._taking(group, count, block_ms)
        return await _taken(group, self._client.pipeline(taking, wait_s=block_ms / 1000))

    async def epoch_key(self) -> bytes | None:
        """In a private run, the helper's EpochKey; None until an updater has asked the helper.

        A writer of Redis may have replaced it: check its signature.
        """
        key: bytes | None = await self._client.call("GET", self.keys.sealing)
        return key

    def _taking(self, group: Group, count: int, block_ms: int) -> tuple[Command, Command]:
        # Redis executes the read of the head after the blocking read of the stream.
        return reading([group], count=count, block_ms=block_ms), ("HGETALL", self.keys.head)


async def _taken(group: Group, taking: Awaitable[list[Any]]) -> tuple[list[Entry], Head | None]:
    """Parse the replies: the tasks and the newest version."""
    try:
        reply, head = await taking
    except BrokerError as error:
        if not lost(error):
            raise
        await group.ensure()
        return [], None
    entries = [entry for _, entry in given([group], reply)]
    return entries, Head.parsed(mapping(head)) if head else None


class ComingTask:
    """A read of a task stream, which is under way."""

    def __init__(self, group: Group, started: Started) -> None:
        self._group = group
        self._started = started

    async def taken(self) -> TakenTask | None:
        """Wait for the task; None if there is none in time. Call it once."""
        entries, head = await _taken(self._group, self._started.rest())
        return TakenTask(entries[0], head) if entries else None

    def abandon(self) -> None:
        """Stop waiting; Redis may have delivered a task all the same."""
        self._started.close()


class TrainerLedger(TakesTasks):
    """The trainers' view of the run."""

    async def take_after(
        self, commands: Sequence[Command], group: Group, *, block_ms: int = BLOCK_MS
    ) -> tuple[list[Any], ComingTask]:
        """Send commands, and take a task as :meth:`take` does, in one write.

        Returns the commands' replies as soon as they are there, and the task under way. If a
        command fails, this raises its error, but a task may have been taken all the same.
        """
        taking = self._taking(group, 1, block_ms)
        started = await self._client.start(
            [*commands, *taking], wait_s=block_ms / 1000, late=len(taking)
        )
        return started.replies, ComingTask(group, started)


class Outbox:
    """Sends messages to the inbox of one site."""

    def __init__(self, client: Client, keys: Keys, site: str) -> None:
        client.bind(keys.prefix)
        self._client = client
        self._keys = keys
        self._inbox = keys.inbox(site)
        self._list: tuple[Sequence[int], str] = ((), "")  # last announced devices, their digest
        self.unread = 0  # messages in the inbox at the last announcement
        self.site = site

    async def say(self, message: Trigger | Event | Presence | Heartbeat) -> None:
        """Append a message, which may safely be sent twice."""
        await self._client.call("XADD", self._inbox, "*", "m", message.encode())

    async def announce(
        self,
        trainer: str,
        owns: Sequence[int] = (),
        *,
        device: int | None = None,
        answers: int = 0,
        failing: int = 0,
        concurrent: bool = False,
    ) -> bool:
        """Announce that a trainer is alive and owns exactly these devices.

        A long list is sent only while no coordinator has a note of its digest. Returns False and
        sends nothing while the inbox isn't being read, so that announcements don't pile up.
        ``failing``: see :class:`~fedstream.core.messages.Presence`. ``concurrent``: whether the
        devices work at the same time.
        """
        digest = self._digest_of(owns) if len(owns) > _SHORT else None
        note = self._keys.owned(member(self.site, trainer))
        asked: list[Command] = [("XLEN", self._inbox)]
        waiting, *noted = await self._client.pipeline(
            [*asked, ("GET", note)] if digest is not None else asked
        )
        self.unread = waiting
        if waiting > _UNHEARD:
            return False
        if digest is not None and (noted[0] or b"").partition(b" ")[2] == digest.encode():
            await self.say(
                Heartbeat(
                    trainer=trainer, owns=digest, device=device, answers=answers, failing=failing
                )
            )
            return True
        await self.say(
            Presence(
                trainer=trainer,
                owns=tuple(owns),
                host=socket.gethostname(),
                pid=os.getpid(),
                device=device,
                answers=answers,
                failing=failing,
                digest=digest,
                concurrent=concurrent,
            )
        )
        return True

    def _digest_of(self, owns: Sequence[int]) -> str:
        """The digest of a list of devices, cached for the last list."""
        if self._list[0] is not owns:
            self._list = (owns, digest_of(" ".join(map(str, owns)).encode()))
        return self._list[1]

    async def goodbye(self, trainer: str) -> None:
        """Sign a trainer off; a coordinator deregisters it at its next sweep."""
        await self.say(Presence(trainer=trainer, leaves=True))

    async def answer(
        self,
        stream: str,
        entry: Entry,
        answer: Upload | GiveUp | Measured | Dead,
        *,
        expire_s: float = 600.0,
        ahead: Sequence[Command] = (),
        renamed: Sequence[str] = (),
    ) -> str:
        """Send the answer to a task and end its lease, both or neither.

        A trainer that can't read a task answers with a Dead, as it may not write to ``dead``
        itself. Returns 'said', 'over' (the lease had ended before) or 'unwritten' (the update's
        blob is missing). ``ahead``: commands from :func:`fedstream.broker.blobs.prepare` that write
        the blob. ``renamed``: pairs of a staged key, of error feedback or local values, and the key
        to which the script renames it; if there is no answer, the script deletes the staged ones.
        """
        command = self.answering(stream, entry, answer, expire_s=expire_s, renamed=renamed)
        return word(await run(self._client, command, ahead=ahead))

    def answering(
        self,
        stream: str,
        entry: Entry,
        answer: Upload | GiveUp | Measured | Dead,
        *,
        expire_s: float = 600.0,
        renamed: Sequence[str] = (),
    ) -> Command:
        """The command that :meth:`answer` sends, for a pipeline; the reply is the returned word."""
        update = answer.blob if isinstance(answer, Upload) else f"{self.site}/none"
        return FINISH.command(
            {"tasks": stream, "update": self._keys.update(update)},
            TRAINERS,
            entry.id,
            answer.encode(),
            answer.size if isinstance(answer, Upload) else 0,
            round(expire_s * 1000),
            self._inbox,
            rest=renamed,
        )
