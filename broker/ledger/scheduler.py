"""The scheduler's operations on Redis: hand out tasks, and ask coordinators to give up others.

The scheduler looks at every version, so reading every open task and owned device each time would
cost too much. Scripts that change a task or device append its name to the log ``changes``, and a
look reads only the names after the scheduler's place in the log. The first look reads everything,
as does a look whose place the log no longer has (it was cut, or Redis fell back).
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
    """The scheduler's view of the run, and its changes to it."""

    async def changes(self, place: Bookmark | None = None) -> tuple[Tally, Changes]:
        """Read the run's counts and the changes since a place in the log, in one step.

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
        """Open tasks, wait for news after ``seen``, and read changes, all in one exchange.

        ``own``: the tasks that ``opening`` opens, by id, which need no decoding. Returns, after at
        most ``block_ms``, the number of opened tasks, the counts and the changes. Raises NoRun, and
        Fenced as :meth:`trigger` does.
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
        """Load every script for all users, as trainers may load none."""
        await load_all(self._client)

    def trigger(
        self, token: str, limit: int, draw: int, triggers: Iterable[Trigger]
    ) -> Pending[int]:
        """Open tasks and hand them out while fewer than ``limit`` are open; return their number.

        ``draw``: the number of tasks issued before these were drawn. If others were issued since,
        none is opened. Raises Fenced.
        """

        def opened(reply: Any) -> int:
            if reply == b"fenced":
                raise Fenced(f"another scheduler leads now (mine is token {token})")
            return reply if isinstance(reply, int) else 0

        parts = [p for t in triggers for p in (t.task, t.device, t.encode(), t.assignment())]
        return self._pending(TRIGGER, opened, token, limit, draw, *parts)

    async def ask(self, wish: CloseRound | Withdraw) -> None:
        """Ask the coordinators to end a round or to give up tasks."""
        await self._client.call("XADD", self.keys.triggers, "*", "m", wish.encode())
