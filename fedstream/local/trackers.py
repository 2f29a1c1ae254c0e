"""Notices about trackers that don't keep up with a local run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fedstream.broker.ledger.sinks import Cursor, SinksLedger
from fedstream.core.records import Tally
from fedstream.sinks.settings import named
from fedstream.sinks.sink import SinkSettings

_LOOK_S = 1.0
_BEHIND_S = 15.0  # without a write; longer if the tracker is written to less often


class Trackers:
    """The progress of a run's trackers, by their cursors."""

    def __init__(
        self, ledger: SinksLedger, sinks: Sequence[SinkSettings], out: Path, log: Path
    ) -> None:
        """``out``: the run's folder. ``log``: of the service ``sinks``."""
        self._ledger, self._out, self._log = ledger, out, log
        self._patience_s = {
            one.name: max(_BEHIND_S, 3 * one.settings.every_s) for one in named(sinks)
        }
        self._cursors: dict[str, Cursor] = {}
        self._moved: dict[str, float] = {}  # time of a tracker's last progress
        self._looked: float | None = None

    async def look(self, view: Tally | None, now: float, *, again: bool = False) -> None:
        """Read the cursors, at most once a second unless ``again``. Raises FedstreamError."""
        if view is None or not self._patience_s:
            return
        if not again and self._looked is not None and now - self._looked < _LOOK_S:
            return
        self._looked = now
        for name in self._patience_s:
            cursor = await self._ledger.cursor(name, view.run.lineage)
            if cursor != self._cursors.get(name) or cursor.version >= view.head.version:
                self._moved[name] = now
            self._cursors[name] = cursor

    def notices(self, now: float) -> Iterator[tuple[str, str]]:
        """A key and a line for each tracker without a recent write."""
        for name, since in self._moved.items():
            if now - since > self._patience_s[name]:
                line = f"{name}: nothing written for {now - since:.0f} s, and tried again and again"
                yield f"tracker {name}", f"{line}: see {self._log}"

    def missing(self, view: Tally) -> Iterator[str]:
        """A line for each incomplete tracker at the end of the run."""
        done = view.run.state == "finished"
        for name, cursor in self._cursors.items():
            versions = view.head.version - cursor.version
            if versions > 0:
                lacks = f"{versions} of {view.head.version + 1} versions were"
            elif done and not cursor.ended:
                lacks = "the summary and the model were"
            else:
                continue
            yield (
                f"{name}: {lacks} not written: see {self._log}; `fedstream track {self._out}` "
                "writes what is missing"
            )
