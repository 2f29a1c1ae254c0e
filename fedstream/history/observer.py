"""Observer of a run from outside: its versions, its events, and current counts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import TypeVar

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.broker.streams import Entry, Reader
from fedstream.core.errors import BadMessage
from fedstream.core.layout import PAGE
from fedstream.core.messages import Event, Message, Version
from fedstream.core.records import Tally
from fedstream.history.timeline import History

M = TypeVar("M", bound=Message)

_MEASUREMENTS = ("evaluation", "devices_evaluated")  # kinds of events
_RECORD = 2 * PAGE  # bytes in the journal, besides the model's


def out_of_space(folder: Path, view: Tally | None) -> bool:
    """Whether updates wait for space on the journal's disk; False if that isn't reachable."""
    if view is None or not view.backlog or not folder.is_dir():
        return False
    return disk_usage(folder).free < view.run.layout.nbytes + _RECORD


class Observer:
    """Reader of a run: its streams from the beginning into ``history``, its state into ``view``."""

    def __init__(
        self, client: Client, keys: Keys, *, most: int | None = None, look_s: float = 0.25
    ) -> None:
        """``look_s``: time between two readings of the counts."""
        self.ledger = OperatorLedger(client, keys, "observer")
        self.history = History(most)
        self.view: Tally | None = None  # None until the run exists
        self.keys = keys
        self._reader = Reader(client, {keys.models: "0", keys.events: "0"})
        self._look_s = look_s
        self._looked = 0.0

    async def step(self, *, block_ms: int = 250) -> bool:
        """Read news, and refresh the view from time to time; returns whether there was news.

        Events are read before the view. Raises NoRun until the run exists.
        """
        found = await self._reader.read(count=1000, block_ms=block_ms)
        for version in _messages(found.get(self.keys.models, ()), Version):
            self.history.publish(version)
        events = list(_messages(found.get(self.keys.events, ()), Event))
        # The view must not be older than the evaluations shown with it.
        seen = self.view.head.version if self.view else -1
        if any(event.what in _MEASUREMENTS and (event.version or 0) > seen for event in events):
            await self.look()
        for event in events:
            if event.what not in _MEASUREMENTS or self._is_known(event):
                self.history.tell(event)
        if time.monotonic() - self._looked >= self._look_s:
            await self.look()
        return bool(found)

    def _is_known(self, evaluation: Event) -> bool:
        """Whether an evaluation can be genuine: of an existing version, and of no device.

        With ACL users, only evaluator and updater can write them: a trainer lacks the rights
        (`broker/rights.py`), and a coordinator passes on only a trainer's errors. This check is for
        a Redis without users.
        """
        newest = max(self.history.newest, self.view.head.version if self.view else -1)
        version = evaluation.version
        return evaluation.device is None and version is not None and version <= newest

    async def look(self) -> Tally:
        """Refresh the view. Raises NoRun until the run exists."""
        self.view = await self.ledger.tally(inboxes=True)
        self.history.goal.update(self.view.run.goal)
        self._looked = time.monotonic()
        return self.view

    async def catch_up(self) -> None:
        """Read until there is nothing new."""
        while await self.step(block_ms=0):
            pass


def _messages(entries: Iterable[Entry], kind: type[M]) -> Iterator[M]:
    """Messages of the entries, skipping undecodable ones."""
    for entry in entries:
        with suppress(BadMessage):
            yield kind.decode(entry.data)
