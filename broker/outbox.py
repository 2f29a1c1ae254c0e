"""What a trainer says: everything goes into its site's inbox, to which it can append and no more.

Who reads an inbox knows by its name whose words they are. What comes of them is a coordinator's
business: nothing that others rely on is written by a trainer.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from fedstream.broker.client import Client, Command
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.messages import Dead, Event, GiveUp, Presence, Trigger, Upload
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry

_FINISH = Script("finish_task")
_UNHEARD = 10_000  # entries in the inbox with which nobody need say once more that it is there


class Outbox:
    """The words of the trainers of one site."""

    def __init__(self, client: Client, keys: Keys, site: str) -> None:
        client.bind(keys.prefix)
        self._client = client
        self._keys = keys
        self._inbox = keys.inbox(site)
        self.site = site

    async def say(self, message: Trigger | Event | Presence) -> None:
        """Appends a message. Said twice, it does no harm."""
        await self._client.call("XADD", self._inbox, "*", "m", message.encode())

    async def announce(
        self,
        trainer: str,
        owns: Sequence[int] = (),
        *,
        device: int | None = None,
        answers: int = 0,
    ) -> bool:
        """Says that a trainer is alive and owns these devices, and no others.

        False, and nothing is said, while nobody reads: it would pile up.
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
        """Says that a trainer leaves: a coordinator strikes it off at its next sweep."""
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
        """Says the answer to a task and ends its lease, both or neither: what happened.

        A trainer that can't read a task says so by a Dead: it has no right to ``dead`` itself.
        'said'; 'over': the lease had ended before; 'unwritten': the update's blob is not there.
        ``ahead``: what :func:`broker.blobs.prepare` left to write it by.
        """
        update = answer.blob if isinstance(answer, Upload) else f"{self.site}/none"
        reply = await _FINISH(
            self._client, {"tasks": stream, "update": self._keys.update(update)},
            TRAINERS, entry.id, answer.encode(),
            answer.size if isinstance(answer, Upload) else 0, round(expire_s * 1000), self._inbox,
            ahead=ahead,
        )  # fmt: skip
        return str(reply.decode())
