"""A run in numbers: from summary.json or from its journal alone, as lines for people; its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Layout
from fedstream.core.messages import OUTCOMES, Goal, first_wrong
from fedstream.history import report
from fedstream.history.display import failing_rows, fairness, main_row, never_finite, short
from fedstream.history.measurements import Measurement, measurements
from fedstream.history.timeline import History
from fedstream.runtime.process import read_regular
from fedstream.settings import run_toml
from fedstream.settings.recording import CONFIG, SUMMARY
from fedstream.trainer.goals import Goals, best_of, goal_of, is_over_devices, main_metric

if TYPE_CHECKING:
    from fedstream.history.table import Columns
    from fedstream.journal import SegmentHead


class _Best(BaseModel):
    """A metric's best value, and the version that had it first."""

    model_config = ConfigDict(allow_inf_nan=False)

    version: int
    value: float


class _Failing(BaseModel):
    """How many of a device's last tasks failed, and why the last one did."""

    tasks: int
    reason: str


class _Numbers(BaseModel):
    """The fields read of summary.json, validated as another program may have written the file."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    run: str
    task: str
    strategy: str
    state: str
    why: str | None = None
    devices: int
    versions: int
    versions_wanted: int
    updates: int | None = None
    tasks: dict[str, int] = {}
    refused: dict[str, int] = {}
    metrics: dict[str, float | None] = {}
    accuracy: float | None = None
    measured_version: int | None = None
    best_accuracy: float | None = None
    best_accuracy_version: int | None = None
    main_metric: str | None = None
    goal: dict[str, Goal] = {}
    best: dict[str, _Best] = {}
    never_finite: list[str] = []
    failing: dict[str, _Failing] = {}
    mean_staleness: float = 0.0
    max_staleness: int = 0
    seconds: float = 0.0
    updates_per_s: float | None = None
    created: str | None = None
    started: str | None = None
    virtual_seconds: float | None = None
    simulated: bool = False


def from_file(path: Path) -> dict[str, Any]:
    """The numbers in summary.json. Raises FedstreamError if the file is no summary."""
    try:
        found = _Numbers.model_validate_json(read_regular(path))
    except ValidationError as error:
        why = first_wrong(error).removeprefix(": ")
        raise FedstreamError(f"{path}: is not a run's summary: {why}") from error
    except OSError as error:
        raise FedstreamError(f"{path}: cannot be read: {error.strerror}") from error
    numbers = found.model_dump()
    if "best" not in found.model_fields_set:  # an older release's
        numbers["best"] = _bests(measurements(path.parent / report.METRICS), found.goal)
    if not numbers["best"] and None not in (found.best_accuracy, found.best_accuracy_version):
        numbers["best"] = {  # without metrics.csv
            "accuracy": {
                "version": found.best_accuracy_version,
                "value": found.best_accuracy,
            }
        }
    if not found.metrics and found.accuracy is not None:
        numbers["metrics"] = {"accuracy": found.accuracy}
    if "main_metric" not in found.model_fields_set:
        numbers["main_metric"] = main_metric(numbers["metrics"], found.goal)
    if found.updates is None:  # an older release's
        numbers["updates"] = found.tasks.get("applied", 0) + found.tasks.get("buffered", 0)
    numbers["simulated"] = found.simulated or found.virtual_seconds is not None
    return numbers


def _bests(measured: Sequence[Measurement], goals: Goals) -> dict[str, dict[str, float]]:
    """Each metric's best value, with the version that had it first."""
    found = {}
    for name in sorted({name for one in measured for name in one.metrics}):
        values = ((one.metrics[name], one.version) for one in measured if name in one.metrics)
        best = best_of(values, goal_of(name, goals))
        if best is not None and not is_over_devices(name):
            found[name] = {"version": best[1], "value": best[0]}
    return found


def summary(
    head: SegmentHead, columns: Columns, history: History, state: str, why: str
) -> dict[str, Any]:
    """The run in numbers, by the names of summary.json. ``history``: made of ``columns``.

    ``tasks`` are those in the journal, which lacks tasks that coordinators ended (given up, dead).
    """
    made, updates = columns.made, columns.updates
    first, last = (max(0.0, float(made["time"][at]) - head.created) for at in (0, -1))
    seconds = last - first
    used, late = int(columns.count().sum()), history.staleness()
    outcomes = [OUTCOMES[one] for one in updates["outcome"].tolist()]
    bad = updates["reason"][updates["outcome"] == OUTCOMES.index("refused")]
    refused = Counter(columns.reasons[one] for one in bad.tolist())
    is_simulated = head.created == 0.0
    clock = {"virtual_seconds": round(seconds, 3)} if is_simulated else {}
    return {
        **report.measurements(history),
        **clock,
        "versions": int(made["version"][-1]),
        "versions_wanted": head.versions,
        "updates": int(columns.total()[-1]),
        "seconds": round(seconds, 3),
        "updates_per_s": round(used / seconds, 3) if seconds > 0 else 0.0,
        "tasks": dict(Counter(outcomes)),
        "refused": dict(sorted(refused.items())),
        "mean_staleness": round(history.mean_staleness, 4),
        "max_staleness": max(late, default=0),
        "state": state,
        "why": why,
        "run": head.run,
        "task": head.task,
        "strategy": head.strategy.get("name"),
        "devices": head.devices,
        "seed": head.seed,
        "parameters": Layout.decode(head.layout).parameters,
        "created": None if is_simulated else report.stamp(head.created),
        "simulated": is_simulated,
    }


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A summary for people, as (name, value)."""
    why = numbers["why"]
    found = [
        ("run", f"{numbers['run']}, {numbers['state']}{f': {why}' if why else ''}"),
        ("task", f"{numbers['task']}, {numbers['devices']} devices"),
        ("strategy", short(str(numbers["strategy"]))),
        main_row(numbers) or ("accuracy", "not measured"),
        ("versions", _versions(numbers)),
        (
            "staleness",
            f"mean {numbers['mean_staleness']:.2f}, max {numbers['max_staleness']}",
        ),
    ]
    if served := fairness(numbers["metrics"]):
        found.insert(4, ("devices", served))
    if never := never_finite(numbers):
        found.insert(4, ("warning", never))
    if refused := numbers["refused"]:
        found.append(("refused", ", ".join(f"{why} {count}" for why, count in refused.items())))
    return found + failing_rows(numbers.get("failing", {}), {})


def _versions(numbers: Mapping[str, Any]) -> str:
    text = f"{numbers['versions']} of {numbers['versions_wanted']}, {numbers['updates']} updates"
    if numbers["simulated"]:
        return f"{text}, simulated"
    return f"{text}, {numbers['seconds']:.1f} s, {numbers['updates_per_s'] or 0:.1f} updates/s"


def stands(path: Path, finished: Callable[[], str | None]) -> tuple[str, str]:
    """The state of a run's folder or journal, and the reason for it.

    ``finished``: returns the reason for the run's end by its journal, or None; called only if the
    folder doesn't show the state.
    """
    config, numbers = path / CONFIG, path / SUMMARY
    if path.is_dir() and report.is_occupied(path):
        return "running", ""
    if config.is_file() and run_toml.is_left_behind(config):
        return "interrupted", "killed"
    if numbers.exists():
        told = from_file(numbers)
        return told["state"], told["why"] or ""
    if (why := finished()) is not None:
        return "finished", why
    return ("interrupted", "killed") if config.is_file() else ("unfinished", "")
