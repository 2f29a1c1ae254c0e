"""What the scheduler does in Redis: it opens tasks, and asks for others to be given up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fedstream.broker import lease
from fedstream.broker.errors import Fenced
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.ledger.plumbing import Pending
from fedstream.broker.ledger.reading import LOOK, LOOKED_AT, MemoryUse, Watch
from fedstream.broker.messages import CloseRound, Trigger, Withdraw
from fedstream.broker.scripts import Script, load_all

TRIGGER = Script("trigger")

RIGHTS = Rights(
    both=("leader:scheduler", "tokens", "open", "counts"),
    reads=LOOKED_AT,
    writes=("triggers",),
    commands=("xread", "xadd", "info"),
    scripts=(*lease.SCRIPTS, LOOK, TRIGGER),
)


class SchedulerLedger(Watch, MemoryUse):
    """The run as the scheduler sees and changes it."""

    async def prepare(self) -> None:
        """Load every script, including those that trainers may not load."""
        await load_all(self._client)

    def trigger(
        self, token: str, limit: int, draw: int, triggers: Iterable[Trigger]
    ) -> Pending[int]:
        """Open tasks while fewer than ``limit`` are open: how many were opened.

        ``draw`` is the number of tasks issued when these were drawn; if others were issued since,
        none is opened. Raises Fenced.
        """

        def opened(reply: Any) -> int:
            if reply == b"fenced":
                raise Fenced(f"another scheduler leads now (mine is token {token})")
            return reply if isinstance(reply, int) else 0

        pairs = [part for t in triggers for part in (t.task, t.encode())]
        return self._pending(TRIGGER, opened, token, limit, draw, *pairs)

    async def ask(self, wish: CloseRound | Withdraw) -> None:
        """Ask the coordinator to end a round or to give up tasks."""
        await self._client.call("XADD", self.keys.triggers, "*", "m", wish.encode())
