"""What a run leaves behind: summary, table, model and picture. The numbers are pure functions."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from broker.ledger import View
from broker.messages import OUTCOMES, Version
from fedstream import __version__
from fedstream.observer import History

if TYPE_CHECKING:
    from torch import nn

    from broker.layout import Model

SUMMARY = "summary.json"
METRICS = "metrics.csv"
MODEL = "model.safetensors"
CURVES = "curves.png"

_COLUMNS = (
    "version", "seconds", "updates", "staleness", "weight", "device", "task", "loss",
    "accuracy", "test_loss",
)  # fmt: skip


@dataclass(frozen=True)
class Facts:
    """What is known of a run beside its streams."""

    run: str
    task: str
    strategy: str
    devices: int
    trainers: int
    seed: int
    target: int  # versions
    started: float  # seconds since 1970
    ended: float
    state: str  # finished, interrupted or failed
    why: str
    restarts: Mapping[str, int]
    torch: str


def summary(facts: Facts, history: History, view: View | None) -> dict[str, Any]:
    """The run in numbers. ``view`` must have been read after its services stopped; None: there
    never was a run.

    ``tasks`` adds up: issued = applied + buffered + refused + given up + dead + open.
    """
    last = history.evaluations.get(history.newest) or (history.measured or (0, {}))[1]
    measured = history.measured
    best = history.best_accuracy
    late = history.staleness()
    seconds = _seconds(history, view)
    tasks = tasks_of(view)
    done = tasks["applied"] + tasks["buffered"]
    return {
        "accuracy": last.get("accuracy"),
        "loss": last.get("loss"),
        "metrics": last,
        "measured_version": measured[0] if measured else None,
        "best_accuracy": best[1] if best else None,
        "best_accuracy_version": best[0] if best else None,
        "versions": view.head.version if view else 0,
        "versions_wanted": view.run.versions if view else facts.target,
        "seconds": round(seconds, 3),
        "updates_per_s": round(done / seconds, 3) if seconds else 0.0,
        "tasks": tasks,
        "refused": view.reasons("refused") if view else {},
        "given_up": view.reasons("given_up") if view else {},
        "dead": view.reasons("dead") if view else {},
        "strays": view.reasons("stray") if view else {},
        "dead_letters": view.dead if view else 0,
        "mean_staleness": round(history.mean_staleness, 4),
        "max_staleness": max(late, default=0),
        "restarts": dict(facts.restarts),
        "state": facts.state,
        "why": facts.why,
        "run": facts.run,
        "task": facts.task,
        "strategy": facts.strategy,
        "devices": facts.devices,
        "trainers": facts.trainers,
        "seed": facts.seed,
        "parameters": view.run.layout.parameters if view else None,
        "started": _stamp(facts.started),
        "finished": _stamp(facts.ended),
        "wall_seconds": round(facts.ended - facts.started, 3),
        "fedstream": __version__,
        "torch": facts.torch,
        "python": platform.python_version(),
    }


def tasks_of(view: View | None) -> dict[str, int]:
    """All tasks: issued, and what they came to, which adds up to it."""
    if view is None:
        return dict.fromkeys(("issued", *OUTCOMES, "open"), 0)
    ended = {str(outcome): count for outcome, count in view.outcomes.items()}
    return {"issued": view.issued, **ended, "open": len(view.open)}


def _seconds(history: History, view: View | None) -> float:
    """From version 0 to the last one that was made."""
    if view is None or not history.versions:
        return 0.0
    return max(0.0, history.versions[history.newest].time - view.run.created)


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def table(history: History, created: float) -> Iterator[list[object]]:
    """The rows of metrics.csv, the first with the columns' names: one for each version.

    ``seconds`` count from version 0. Where a version is of several updates (rounds), staleness,
    weight and training loss are their means, and devices and tasks are separated by spaces.
    """
    names = {name for metrics in history.evaluations.values() for name in metrics}
    more = sorted(names - {"accuracy", "loss"})
    yield [*_COLUMNS, *(f"test_{name}" for name in more)]
    for number, version in sorted(history.versions.items()):
        metrics = history.evaluations.get(number, {})
        yield [
            number,
            f"{max(0.0, version.time - created):.4f}",
            *_made_of(version),
            *(_number(metrics.get(name)) for name in ("accuracy", "loss", *more)),
        ]


def _made_of(version: Version) -> list[object]:
    updates = version.updates
    losses = [u.loss for u in updates if u.loss is not None]
    return [
        len(updates),
        _number(fmean([u.staleness for u in updates]) if updates else None),
        _number(fmean([u.weight for u in updates]) if updates else None),
        " ".join(str(u.device) for u in updates),
        " ".join(u.task for u in updates),
        _number(fmean(losses) if losses else None),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def write_summary(out: Path, numbers: Mapping[str, Any]) -> None:
    """summary.json."""
    # A diverged model has a loss that JSON has no number for.
    text = json.dumps(_finite(numbers), indent=2, allow_nan=False)
    (out / SUMMARY).write_text(text + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return value


def write_table(out: Path, history: History, created: float) -> None:
    """metrics.csv."""
    with (out / METRICS).open("w", newline="") as file:
        csv.writer(file).writerows(table(history, created))


def write_model(out: Path, model: Model, module: nn.Module, about: Mapping[str, str]) -> None:
    """model.safetensors: the names and dtypes of ``state_dict``, so that ``load_state_dict`` takes
    it (tied tensors under each of their names)."""
    from safetensors.torch import save_file
    from torch import Tensor

    from trainer import vector

    vector.load(model, module)
    tensors = {
        name: value.detach().clone().contiguous()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    save_file(tensors, out / MODEL, metadata=dict(about))
