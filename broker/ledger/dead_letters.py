"""Dead letters: unprocessable entries, kept for an operator."""

from __future__ import annotations

from fedstream.broker.ledger.base import Ledger, packed
from fedstream.broker.scripts import Script
from fedstream.broker.streams import Entry
from fedstream.core import reasons
from fedstream.core.messages import Assignment, Dead, GiveUp, Trigger, Upload

BURY = Script("bury")

# Bytes of an entry that a dead letter keeps. Most of our entries have fewer. 1,000 letters take
# 80 MiB of Redis's memory.
_LETTER = 64 << 10
_WHY = 1000  # characters kept of a reason, whose length a site chooses


class Letters(Ledger):
    """Moving unprocessable entries to the dead letters."""

    async def bury(
        self,
        stream: str,
        group: str,
        entry: Entry,
        reason: str,
        *,
        task: Assignment | Trigger | Upload | GiveUp | None = None,
        deliveries: int = 0,
        found: Dead | None = None,
        site: str = "",
    ) -> bool:
        """Move an entry to ``dead`` and end its task; return whether the entry was there.

        ``site``: the site of the entry's stream or inbox; the task ends only if it was sent to this
        site. Beyond the site's rate, an entry that ends no task is dropped. ``found``: a trainer's
        report of an unreadable entry, which is kept instead of ``entry``.
        """
        name, now = stream.removeprefix(self.keys.prefix), self.now()
        dead = found or Dead(
            stream=name,
            entry=entry.id,
            reason=reason,
            time=now,
            deliveries=deliveries,
            data=entry.data,
        )
        dead = dead.model_copy(
            update={"time": now, "reason": dead.reason[:_WHY], "data": dead.data[:_LETTER]}
        )
        kind = reasons.of_death(reason)
        event = self._event(
            device=task.device if task else None, text=reason[:_WHY] if reason != kind else None
        )
        return bool(
            await self._run(
                BURY,
                group,
                entry.id,
                dead.encode(),
                task.task if task else "",
                kind,
                packed(event),
                site,
                stream=stream,
            )
        )
