"""Moments of a run as they might be, made by hand."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np

from fedstream.core.messages import OUTCOMES
from fedstream.core.records import Tally
from fedstream.history.live.snapshot import (
    GAUGED,
    PHASES,
    Phase,
    RedisMemory,
    SeenWorker,
    Snapshot,
)
from fedstream.history.measurements import Measurement
from fedstream.history.table import MADE, UPDATE, RowArray, update_row
from fedstream.settings.config import Settings
from tests.fedstream.views import CREATED, view

NOW = CREATED + 100.0
REASONS = ("", "not finite", "raised ValueError", "timed out")


def snapshot(**given: Any) -> Snapshot:
    """A run of 100 versions at version 3, which was made a second ago; two trainers, no tasks.

    ``given``: fields of a Snapshot, its tally, its head (``head_...``) or its run (``run_...``).
    """
    about: dict[str, Any] = {
        "settings": Settings(),
        "now": NOW,
        "memory": RedisMemory(64 << 20, 256 << 20),
        "leading": frozenset(("scheduler", "updater")),
        "phases": dict.fromkeys(PHASES, 0),
        "oldest": None,
        "deadline": None,
        "workers": (worker("trainer-1"), worker("trainer-2")),
        "measured": (),
        "ended": ended(()),
        "reasons": REASONS,
        "made": made((NOW - 3, NOW - 2, NOW - 1)),
        "gauged": gauged(seconds=60),
        "told": (),
        "suspects": {},
    }
    seen = view(now=NOW)
    tally = Tally(**{one.name: getattr(seen, one.name) for one in dataclass_fields(Tally)})
    fields = {name: given.pop(name) for name in list(given) if name not in about}
    phases = given.get("phases", about["phases"])
    fields["tasks"] = fields.pop("open_tasks", sum(phases.values()))
    parts: dict[str, dict[str, Any]] = {"head": {"time": NOW - 1}, "run": {}}
    for name in list(fields):
        part, _, field = name.partition("_")
        if part in parts:
            parts[part][field] = fields.pop(name)
    tally = replace(
        tally,
        head=replace(tally.head, **parts["head"]),
        run=replace(tally.run, **parts["run"]),
        **fields,
    )
    return Snapshot(**about | given, tally=tally)


def idle(seconds: float = 60.0, **given: Any) -> Snapshot:
    """The same without a version for so long."""
    return snapshot(head_time=NOW - seconds, **given)


def tasks(phases: dict[Phase, int], *, age: float = 20.0) -> dict[str, Any]:
    """Open tasks by phase, as fields of a snapshot."""
    return {
        "phases": dict.fromkeys(PHASES, 0) | phases,
        "oldest": NOW - age,
    }


def worker(name: str, *, heard_s: float = 0.5, **given: Any) -> SeenWorker:
    """A trainer that was heard so long ago."""
    about: dict[str, Any] = {"is_gateway": False, "owns": 0, "heard": NOW - heard_s}
    return SeenWorker(name, **about | given)


def measurement(version: int, seconds: float = 100.0, **metrics: float) -> Measurement:
    """A version's metrics; ``seconds`` since the run's creation."""
    return Measurement(version, seconds, version, metrics)


def ended(rows: Iterable[dict[str, Any]]) -> RowArray:
    """Ended tasks: a second ago, applied, by device 0, unless a row says otherwise."""
    usual: dict[str, Any] = {
        "time": NOW - 1,
        "device": 0,
        "outcome": "applied",
        "reason": "",
        "version": 3,
        "staleness": 0,
        "weight": 0.4,
        "loss": 0.5,
        "samples": 100,
    }
    found = []
    for row in rows:
        about = usual | row
        if about["outcome"] not in ("applied", "buffered"):
            about |= {"version": -1, "staleness": -1, "weight": nan, "loss": nan, "samples": -1}
        about |= {
            "outcome": OUTCOMES.index(about["outcome"]),
            "reason": REASONS.index(about["reason"]),
        }
        found.append(update_row(**about))
    return np.array(found, UPDATE)


def made(times: Iterable[float]) -> RowArray:
    """Versions, of an update each."""
    rows = [(n, time, -1, False, False, 0, 0, -1) for n, time in enumerate(times, 1)]
    return np.array(rows, MADE)


def gauged(*, seconds: int = 60, **given: Any) -> RowArray:
    """A look a second, up to now; ``given``: what there was, a number or one for each look."""
    usual = {
        "open": 4,
        "queue": 0,
        "triggers": 0,
        "trainers": 2,
        "memory": 64 << 20,
        "training": 4,
        "uploading": 0,
        "dead": 0,
        "leads": 3,
    }
    found = np.zeros(seconds, GAUGED)
    found["time"] = NOW - np.arange(seconds)[::-1]
    for name, value in (usual | given).items():
        found[name] = value
    return found


def busy(devices: int = 12, trainers: int = 4, seed: int = 1) -> Snapshot:
    """A run in full swing, with a device that stands out, refusals and a dead letter."""
    draw = random.Random(seed)
    rows = []
    for n in range(600):
        device = draw.randrange(devices)
        late = min(int(draw.expovariate(0.4 if n < 300 else 0.15)), n)
        row: dict[str, Any] = {
            "time": CREATED + 100 * n / 600,
            "device": device,
            "staleness": late,
            "version": n,
            "weight": 0.4 * (late + 1) ** -0.5,
            "loss": 1.5 / (1 + n / 100) + draw.random() / 10,
            "samples": 90 + device,
        }
        if device == 3:
            row["loss"] += 4.0
            if draw.random() < 0.5:
                row |= {"outcome": "refused", "reason": "not finite"}
        elif draw.random() < 0.02:
            row |= {"outcome": "given_up", "reason": "timed out"}
        rows.append(row)
    known = ended(rows)
    counts = {
        "issued": 612,
        "refused": 30,
        "refused:not finite": 30,
        "given_up": 10,
        "given_up:timed out": 10,
        "dead": 1,
        "dead:unreadable": 1,
        "applied": 559,
        "stray": 2,
        "stray:late": 2,
    }
    wave = np.arange(100)
    return snapshot(
        ended=known,
        made=made(known["time"][known["outcome"] == 0]),
        counts=counts,
        open_tasks=12,
        measured=tuple(
            measurement(v, v / 6, accuracy=1 - 0.9 / (1 + v / 60), loss=2 / (1 + v / 80))
            for v in range(0, 561, 20)
        ),
        gauged=gauged(
            seconds=100,
            open=12,
            training=4,
            queue=wave % 5,
            memory=(64 << 20) + wave * 300_000,
            dead=1,
            version=5.8 * wave,
        ),
        head_version=559,
        run_versions=1000,
        trainers=trainers,
        dead=1,
        run_devices=devices,
        head_mean_staleness=2.6,
        queue=2,
        admitted=2,
        workers=tuple(worker(f"trainer-{n}") for n in range(1, trainers + 1)),
        **tasks({"waiting": 6, "training": 4, "queue": 2}, age=3.0),
    )


def crowd(devices: int = 100_000, ends: int = 16_384, seed: int = 1) -> Snapshot:
    """As many ended tasks as a snapshot has, of so many devices that hardly one ended two."""
    draw = np.random.default_rng(seed)
    rows = np.zeros(ends, UPDATE)
    rows["time"] = NOW - np.arange(ends)[::-1] / 200
    rows["device"] = draw.integers(0, devices, ends)
    rows["version"], rows["samples"] = np.arange(ends), 100
    rows["staleness"] = draw.integers(0, 20, ends)
    rows["weight"], rows["loss"] = draw.random(ends), draw.random(ends)
    return snapshot(ended=rows, made=made(rows["time"]), run_devices=devices)
