"""Runs as they might be, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstream.core.layout import Layout, Tensor
from fedstream.core.messages import Contribution, Event, Trigger, Version
from fedstream.core.records import Head, Run, View

CREATED = 1_700_000_000.0


def view(counts: Mapping[str, int] | None = None, **given: Any) -> View:
    """A view of a run of 100 versions, at version 3."""
    run = Run(
        layout=Layout((Tensor("weight", (4,), "float32", "parameter"),)),
        strategy="fedasync",
        task="digits",
        devices=10,
        versions=100,
        seed=0,
        created=CREATED,
    )
    head = Head(version=3, digest="d3", blob="3.1", time=CREATED + 3, epoch=1)
    about: dict[str, Any] = {
        "run": run,
        "head": head,
        "counts": counts or {},
        "open": (),
        "admitted": 0,
        "queue": 0,
        "triggers": 0,
        "inbox": 0,
        "trainers": 2,
        "workers": 2,
        "kept": 4,
        "dead": 0,
        "owned": (),
        "pool": False,
        "now": CREATED + 4,
    }
    about |= given
    return View(**about, tasks=len(about["open"]), owners=len(about["owned"]))


def trigger(task: str) -> Trigger:
    """An open task."""
    return Trigger(task=task, device=0, seed=1, steps=1)


def version(number: int, *updates: Contribution) -> Version:
    """A version, published a second after the one before."""
    return Version(
        version=number,
        time=CREATED + number,
        epoch=1,
        parent=None,
        digest=f"d{number}",
        blob=f"{number}.1",
        size=16,
        updates=updates,
    )


def update(task: str, *, device: int = 0, staleness: int = 0, loss: float = 0.5) -> Contribution:
    """An update in a version."""
    return Contribution(
        task=task,
        device=device,
        tau=0,
        staleness=staleness,
        weight=0.4,
        samples=10,
        steps=5,
        loss=loss,
    )


def event(what: str, **given: Any) -> Event:
    """An event."""
    return Event(what=what, service="updater", time=CREATED, **given)
