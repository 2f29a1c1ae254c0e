"""What trainers do in Redis: they read the run and the newest version, and write to their inbox.

All that a trainer says goes to its site's inbox, to which it can only append. An inbox's name tells
its reader which site sent the messages. A coordinator decides what comes of them: trainers write
nothing that others rely on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.ledger.reading import MemoryUse
from fedstream.broker.messages import Dead, Event, GiveUp, Presence, Trigger, Upload
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry

FINISH = Script("finish_task")
_UNHEARD = 10_000  # inbox entries above which trainers skip their announcements
TASKS = "{tasks}"  # the streams of a site's tasks

# `{site}` is the trainer's. Trainers may not load scripts; what those send is listed here.
RIGHTS = Rights(
    reads=("run", "head", "model:*", "control:{site}/*"),
    commands=("hgetall", "info", "multi", "exec", "discard", *blobs.READS),
    apart=(
        Rights(both=(TASKS, "update:{site}/*"), commands=("evalsha",)),
        Rights(
            both=(TASKS,),
            commands=(
                "xgroup|create", "xreadgroup", "xpending", "xclaim", "xrange", "xack", "xdel",
            ),
        ),
        Rights(writes=("update:{site}/*",), commands=("hset", "hexists", "pexpire")),
        Rights(both=("workspace:{site}/*",), commands=("getrange", "set", "unlink")),
        Rights(writes=("inbox:{site}",), commands=("xadd", "xlen", "exists")),
    ),
)  # fmt: skip


class TrainerLedger(MemoryUse):
    """The run as trainers see it."""


class Outbox:
    """The sender for the trainers of one site."""

    def __init__(self, client: Client, keys: Keys, site: str) -> None:
        client.bind(keys.prefix)
        self._client = client
        self._keys = keys
        self._inbox = keys.inbox(site)
        self.site = site

    async def say(self, message: Trigger | Event | Presence) -> None:
        """Append a message; sending it twice does no harm."""
        await self._client.call("XADD", self._inbox, "*", "m", message.encode())

    async def announce(
        self,
        trainer: str,
        owns: Sequence[int] = (),
        *,
        device: int | None = None,
        answers: int = 0,
    ) -> bool:
        """Announce that a trainer is alive and owns exactly these devices.

        Returns False and sends nothing while the inbox isn't being read, so that announcements
        don't pile up.
        """
        if await self._client.call("XLEN", self._inbox) > _UNHEARD:
            return False
        await self.say(
            Presence(
                trainer=trainer, owns=tuple(owns), host=socket.gethostname(), pid=os.getpid(),
                device=device, answers=answers,
            )
        )  # fmt: skip
        return True

    async def goodbye(self, trainer: str) -> None:
        """Say that a trainer leaves; a coordinator deregisters it at its next sweep."""
        await self.say(Presence(trainer=trainer, leaves=True))

    async def answer(
        self,
        stream: str,
        entry: Entry,
        answer: Upload | GiveUp | Dead,
        *,
        expire_s: float = 600.0,
        ahead: Sequence[Command] = (),
    ) -> str:
        """Send the answer to a task and end its lease, both or neither.

        A trainer that can't read a task answers with a Dead, as it may not write to ``dead``
        itself. Returns 'said', 'over' (the lease had already ended) or 'unwritten' (the update's
        blob is missing). ``ahead``: commands from :func:`fedstream.broker.blobs.prepare` that write
        the blob.
        """
        update = answer.blob if isinstance(answer, Upload) else f"{self.site}/none"
        reply = await FINISH(
            self._client, {"tasks": stream, "update": self._keys.update(update)},
            TRAINERS, entry.id, answer.encode(),
            answer.size if isinstance(answer, Upload) else 0, round(expire_s * 1000), self._inbox,
            ahead=ahead,
        )  # fmt: skip
        return str(reply.decode())
