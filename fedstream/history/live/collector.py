"""Collects snapshots of a run from Redis: everything at first, then only changes."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from fedstream.broker.ledger.live_page import (
    BEGINNING,
    Described,
    HeldEntries,
    LivePageLedger,
    OpenTask,
)
from fedstream.core.errors import FedstreamError
from fedstream.core.messages import time_of
from fedstream.core.records import Bookmark
from fedstream.history.live.recent import Recent
from fedstream.history.live.snapshot import (
    PHASES,
    Phase,
    RedisMemory,
    SeenWorker,
    Snapshot,
)
from fedstream.history.measurements import Measurement
from fedstream.settings.config import Settings

_LOOKED_UP = 1000  # open tasks, one by one
_WORKERS = 200
_STREAMS = 64  # of owners' tasks, looked through at once
_ON_THEIR_WAY = ("triggered", "waiting")
_READ = 1000  # events, and versions, in one exchange


class Collector:
    """Collects snapshots of one run."""

    def __init__(self, ledger: LivePageLedger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._recent = Recent()
        self._event = self._version = BEGINNING
        self._open: dict[str, OpenTask] = {}
        self._place: Bookmark | None = None
        self._phases: dict[str, Phase] = {}  # by task

    async def look(self) -> Snapshot:
        """Collect a snapshot. Raises NoRun until the run exists, and the client's errors."""
        try:
            return await self._looked()
        except FedstreamError:
            raise
        except Exception:  # some of the changes may have been taken in
            self._begin_anew()
            raise

    async def _looked(self) -> Snapshot:
        tally, opened = await self._ledger.opened(self._place)
        on_their_way = [] if opened.all_tasks else self._on_their_way()
        moved = await self._ledger.tasks(on_their_way)
        if opened.all_tasks:
            self._open.clear()
        for name, task in (*opened.tasks.items(), *moved.items()):
            if task is None:
                self._open.pop(name, None)
            else:
                self._open[name] = task
        # A release that doesn't keep the log may have changed something.
        self._place = opened.place if len(self._open) == tally.tasks else None
        if not await self._caught_up():
            self._begin_anew()
            return await self._looked()
        memory = RedisMemory(*await self._ledger.memory())
        admitted = await self._ledger.admitted() if tally.admitted else set()
        held = {owner: await self._ledger.held(owner) for owner in self._owners()}
        heard = await self._ledger.heard(_WORKERS)
        described = await self._ledger.described(list(heard))
        leading = await self._ledger.leading()
        self._phases = {
            name: _phase(task, name in admitted, held.get(task.owner or ""))
            for name, task in self._open.items()
        }
        opened_at = [at for name in self._open if (at := time_of(name)) is not None]
        deadlines = [at for one in self._open.values() if (at := one.deadline) is not None]
        workers = tuple(_worker(name, at, described[name]) for name, at in sorted(heard.items()))
        phases = Counter(self._phases.values())
        recent = self._recent
        recent.gauge(tally, memory.used, phases["training"], phases["uploading"], leading)
        return Snapshot(
            settings=self._settings,
            tally=tally,
            now=tally.now,
            memory=memory,
            phases={phase: phases[phase] for phase in PHASES},
            oldest=min(opened_at, default=None),
            deadline=min(deadlines, default=None),
            workers=workers,
            leading=leading,
            measured=tuple(
                Measurement(at, max(0.0, one.time - tally.run.created), at, one.metrics or {})
                for at, one in sorted(recent.measured.items())
            ),
            ended=recent.ended.newest(),
            reasons=tuple(recent.reasons),
            made=recent.made.newest(),
            gauged=recent.gauged.newest(),
            told=tuple(recent.told),
            suspects=dict(recent.suspects),
        )

    async def _caught_up(self) -> bool:
        """Read until there is nothing new; False if something may be missing."""
        while True:
            some = await self._ledger.news(self._event, self._version, most=_READ)
            if some.is_gap:
                return False
            self._recent.publish(some.versions)
            self._recent.tell(some.events)
            self._event = some.events[-1].id if some.events else self._event
            self._version = some.versions[-1].id if some.versions else self._version
            if some.is_all:
                return True

    def _on_their_way(self) -> list[str]:
        """Tasks that no trainer had in the last snapshot."""
        found = (name for name, phase in self._phases.items() if phase in _ON_THEIR_WAY)
        return list(islice(found, _LOOKED_UP))

    def _owners(self) -> list[str]:
        """Owners with open tasks in their streams; '' stands for the pool."""
        found = {task.owner or "" for task in self._open.values() if task.entry is not None}
        return sorted(found)[:_STREAMS]


def _phase(task: OpenTask, is_admitted: bool, held: HeldEntries | None) -> Phase:
    if is_admitted:
        return "queue"
    if task.entry is None:
        return "triggered"
    if held is None:
        return "waiting"
    if task.entry in held.by:
        return "training"
    # An answer deletes the entry: an entry that was delivered and isn't held was answered.
    return "uploading" if _place(task.entry) <= _place(held.delivered) else "waiting"


def _place(id_: str) -> tuple[int, int]:
    ms, _, number = id_.partition("-")
    return int(ms), int(number or 0)


def _worker(name: str, heard: float, described: Described) -> SeenWorker:
    owns = described.about.get("owns")
    owned = len(owns) if isinstance(owns, list) else 0
    return SeenWorker(name, described.is_gateway, owned, heard or None)
