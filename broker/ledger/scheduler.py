"""What the scheduler does in Redis: it hands out tasks, and asks for others to be given up.

It looks at every version, so it doesn't read every open task and every owned device: scripts that
change them name them in the log ``changes``, and a look tells how those stand that were named since
its place there. Without such a place a look tells of all: at first, if Redis fell back behind it,
or if the log was cut since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedstream.broker import lease
from fedstream.broker.ledger.base import Pending, Rights
from fedstream.broker.ledger.queries import (
    LOOK,
    LOOKED_AT,
    MemoryUse,
    Overview,
    asked_since,
    device_of,
    failing_devices,
    news_since,
    paired,
)
from fedstream.broker.scripts import Script, load_all
from fedstream.core.errors import Fenced, NoScript
from fedstream.core.messages import CloseRound, Trigger, Withdraw
from fedstream.core.records import Bookmark, Changes, Tally

TRIGGER = Script("trigger")

RIGHTS = Rights(
    both=("leader:scheduler", "tokens", "open", "counts", "changes", "control:*"),
    reads=(*LOOKED_AT, "device:*"),
    writes=("triggers", "tasks", "tasks:*"),
    commands=("xread", "xadd", "info"),
    scripts=(*lease.SCRIPTS, LOOK, TRIGGER),
)


class SchedulerLedger(Overview, MemoryUse):
    """The run as the scheduler sees and changes it."""

    async def changes(self, place: Bookmark | None = None) -> tuple[Tally, Changes]:
        """Read everything countable, and what changed since a place, in one step.

        Raises NoRun until the run is created.
        """
        return self._changes(await self._run(LOOK, 0, *asked_since(place)), {})

    async def changes_after(
        self,
        seen: Tally,
        place: Bookmark | None,
        *,
        block_ms: int,
        opening: Pending[int] | None = None,
        own: Mapping[str, Trigger] | None = None,
    ) -> tuple[int, Tally, Changes]:
        """Open tasks, wait for news since ``seen``, and look for changes, all in one exchange.

        ``own``: the tasks that ``opening`` opens, by id, which then need not be decoded.
        Returns how many tasks were opened, and the new look, after at most ``block_ms``. Raises
        NoRun, and Fenced as :meth:`trigger` does.
        """
        look = LOOK.command(self.keys.__dict__, 0, *asked_since(place))
        first = (opening.command,) if opening else ()
        try:
            *opened, _, reply = await self._client.pipeline(
                [*first, news_since(seen, block_ms), look], wait_s=block_ms / 1000
            )
        except NoScript:
            return await opening if opening else 0, *await self.changes(place)
        return opening.parsed(opened[0]) if opening else 0, *self._changes(reply, own or {})

    def _changes(self, reply: Any, own: Mapping[str, Trigger]) -> tuple[Tally, Changes]:
        (how_tasks, tasks), (how_devices, devices), failing, last = reply[-4:]
        tally = self._tally(reply)
        if how_tasks == b"all":
            opened = (Trigger.decode(data) for data in tasks)
            found: dict[str, Trigger | None] = {trigger.task: trigger for trigger in opened}
        else:
            found = {}
            for name, data in paired(tasks):
                task = name.decode()
                found[task] = None if data is None else own.get(task) or Trigger.decode(data)
        named = [(name, b"") for name in devices] if how_devices == b"all" else paired(devices)
        owned = {
            device: owner is not None
            for name, owner in named
            if (device := device_of(name)) is not None and device < tally.run.devices
        }
        return tally, Changes(
            tasks=found,
            devices=owned,
            failing=failing_devices(failing),
            all_tasks=how_tasks == b"all",
            all_devices=how_devices == b"all",
            place=Bookmark(last[0], *last[1][:2]) if last else None,
        )

    async def prepare(self) -> None:
        """Load every script, including those that trainers may not load."""
        await load_all(self._client)

    def trigger(
        self, token: str, limit: int, draw: int, triggers: Iterable[Trigger]
    ) -> Pending[int]:
        """Open tasks and hand them out while fewer than ``limit`` are open: how many were opened.

        ``draw`` is the number of tasks issued when these were drawn; if others were issued since,
        none is opened. Raises Fenced.
        """

        def opened(reply: Any) -> int:
            if reply == b"fenced":
                raise Fenced(f"another scheduler leads now (mine is token {token})")
            return reply if isinstance(reply, int) else 0

        parts = [p for t in triggers for p in (t.task, t.device, t.encode(), t.assignment())]
        return self._pending(TRIGGER, opened, token, limit, draw, *parts)

    async def ask(self, wish: CloseRound | Withdraw) -> None:
        """Ask the coordinator to end a round or to give up tasks."""
        await self._client.call("XADD", self.keys.triggers, "*", "m", wish.encode())
