"""States of a run, and changes to them, made without Redis or a journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstream.core.layout import Layout
from fedstream.core.messages import Contribution, Upload, Version
from fedstream.core.records import End, Run
from fedstream.journal import RoundClosed, SegmentHead, Taken
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.journal.progress import Progress
from fedstream.strategies import State, Strategy
from fedstream.updater.state import Change, Ends, RunState
from tests.support import layout_of, model_of
from tests.updater.journalled import HALF

LAYOUT = layout_of()


def run_of(**changes: Any) -> Run:
    """A run's record."""
    about: dict[str, Any] = {
        "layout": LAYOUT,
        "strategy": "fedasync",
        "task": "digits",
        "devices": 10,
        "versions": 100,
        "seed": 0,
        "created": 1.5,
        "lineage": "mine",
    }
    return Run(**about | changes)


def state_of(version: int = 5, **changes: Any) -> RunState:
    """A state with nothing in its index."""
    about: dict[str, Any] = {
        "run": run_of(),
        "strategy": HALF.build(),
        "digest": f"digest {version}",
        "time": 2.5,
        "progress": Progress(State(version, model_of(LAYOUT))),
        "ends": Ends(EndedTasks(Path("none"))),
    }
    return RunState(**about | changes)


def upload_of(task: str, **changes: Any) -> Upload:
    """An update of a task, as its trainer reported it."""
    about: dict[str, Any] = {
        "task": task,
        "attempt": "a1",
        "device": 1,
        "trainer": "t",
        "tau": 5,
        "base": "d",
        "layout": LAYOUT.signature,
        "digest": "d",
        "size": LAYOUT.nbytes,
        "samples": 10,
        "steps": 5,
        "lr": 0.1,
    }
    return Upload(**about | changes)


def head_of(layout: Layout, rule: Strategy, **changes: Any) -> SegmentHead:
    """The head of a run's first segment."""
    about: dict[str, Any] = {
        "epoch": 1,
        "number": 0,
        "lineage": "line",
        "run": "demo",
        "task": "digits",
        "devices": 10,
        "versions": 100,
        "seed": 0,
        "created": 1.0,
        "strategy": rule.model_dump(mode="json"),
        "layout": layout.encode(),
        "release": "tests",
        "time": 1.0,
    }
    return SegmentHead(**about | changes)


def applied(task: str, version: int, *, finish: str | None = None) -> Change:
    """An update that made a version."""
    contribution = Contribution(
        task=task, device=1, tau=5, staleness=0, weight=0.5, samples=10, steps=5, loss=None
    )
    made = Version(
        version=version,
        time=10.0 + version,
        epoch=1,
        digest=f"digest {version}",
        blob=f"{version}.1.x",
        size=LAYOUT.nbytes,
        updates=(contribution,),
    )
    record = Taken(
        entry=f"{version}-0",
        upload=upload_of(task),
        outcome="applied",
        weight=0.5,
        staleness=0,
        version=version,
        digest=made.digest,
        time=made.time,
        received=1.0,
        finished=finish,
        counts={},
    )
    end = End(task, "a1", "applied", device=1, version=version, staleness=0, weight=0.5)
    after = Progress(State(version, model_of(LAYOUT, float(version))))
    return Change(record.entry, record, (), after, made, end, finish=finish)


def refused(task: str, version: int, reason: str = "digest") -> Change:
    """An update that was refused on top of a version."""
    record = Taken(
        entry=f"{task}-0",
        upload=upload_of(task),
        outcome="refused",
        reason=reason,
        staleness=0,
        version=version,
        time=3.0,
        received=1.0,
        counts={},
    )
    end = End(task, "a1", "refused", reason, 1, version, 0)
    return Change(record.entry, record, (), Progress(State(version, model_of(LAYOUT))), end=end)


def closed(entry: str, version: int) -> Change:
    """A round that ended without making a version."""
    record = RoundClosed(
        entry=entry,
        round=version,
        why="over",
        late=False,
        version=version,
        time=3.0,
        received=1.0,
        counts={},
    )
    return Change(entry, record, (), Progress(State(version, model_of(LAYOUT))))
