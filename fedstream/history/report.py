"""Files that a run leaves: summary, table and model. The numbers come from pure functions."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedstream.core import __version__
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.messages import OUTCOMES
from fedstream.core.records import Tally
from fedstream.history.timeline import History, SeenVersion
from fedstream.journal import FOLDER, journal_of
from fedstream.journal.chain import opened
from fedstream.journal.errors import NotRecorded
from fedstream.journal.inspection import model_at
from fedstream.settings.recording import CONFIG, SUMMARY
from fedstream.trainer.goals import is_over_devices

if TYPE_CHECKING:
    from torch import nn

    from fedstream.core.layout import Model

METRICS = "metrics.csv"
DEVICES = "devices.csv"
MODEL = "model.safetensors"
BEST = "best.safetensors"
CURVES = "curves.png"

_LOOK_S = 1.0  # for how long a reader may be looking, which takes a shared lock for a moment

_COLUMNS = (
    "version",
    "seconds",
    "updates",
    "total_updates",
    "staleness",
    "weight",
    "device",
    "task",
    "loss",
    "accuracy",
    "test_loss",
)


@dataclass(frozen=True)
class Facts:
    """Facts about a run that its streams don't contain."""

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
    privacy: Mapping[str, Any] | None = None  # of a private run


def default_out(name: str, now: datetime) -> Path:
    """The output folder of a run, which does not exist yet: ``runs/NAME-TIME``, with ``-2`` or
    another number if runs begin within one second.
    """
    first = Path("runs") / f"{name}-{now:%Y%m%d-%H%M%S}"
    others = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return next(folder for folder in chain([first], others) if not folder.exists())


def beside(folder: Path, what: str, out: Path | None, files: Sequence[str]) -> Path:
    """Folder for files made from a recording: ``out``, or the first free ``<what>-<n>`` of the run.

    Raises ConfigError for a folder inside the journal's, or one that has any of ``files`` already.
    """
    journal = journal_of(folder)
    if out is None:
        run = folder
        if folder == journal:
            run = folder.parent if folder.name not in ("", "..") else folder / ".."
        taken = {path.name for path in run.glob(f"{what}-*")}
        names = (f"{what}-{n}" for n in range(1, len(taken) + 2))
        out = next(run / name for name in names if name not in taken)
    if out.resolve().is_relative_to(journal.resolve()):
        raise ConfigError(
            f"--out {out}: is inside the journal's folder, where nothing else may be: choose "
            "another folder"
        )
    for name in files:
        if (out / name).exists():
            raise ConfigError(f"--out {out}: already contains {name}: choose another folder")
    return out


def taken(out: Path) -> str | None:
    """The name of a file by which the folder already holds a run; None if there is none."""
    with usable(out):
        return next((name for name in (CONFIG, SUMMARY, FOLDER) if (out / name).exists()), None)


@contextmanager
def usable(out: Path) -> Iterator[None]:
    """Turn OSErrors about the folder into ConfigError, because the user has to fix them."""
    try:
        yield
    except BrokenPipeError:  # what is shown meanwhile, not a file
        raise
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}: choose a writable folder") from error


def summary(facts: Facts, history: History, view: Tally | None) -> dict[str, Any]:
    """The run in numbers.

    ``view`` must have been read after the services stopped; None: there never was a run. ``tasks``
    adds up: issued = applied + buffered + refused + given up + dead + open. Seconds and updates per
    second cover this invocation only, not earlier ones of a resumed run.
    """
    late = history.staleness()
    begun = max(facts.started, view.run.created) if view else facts.ended
    made = [version for version in history.versions.values() if version.time > begun]
    seconds = max((version.time for version in made), default=begun) - begun
    updates = sum(len(version.updates) for version in made)
    return {
        **measurements(history),
        "versions": view.head.version if view else 0,
        "versions_before": _before(history, begun),
        "versions_wanted": view.run.versions if view else facts.target,
        "updates": late.total(),
        "seconds": round(seconds, 3),
        "updates_per_s": round(updates / seconds, 3) if seconds else 0.0,
        "tasks": tasks_of(view),
        "encoded": view.encoded if view else None,
        "refused": view.reasons("refused") if view else {},
        "given_up": view.reasons("given_up") if view else {},
        "dead": view.reasons("dead") if view else {},
        "strays": view.reasons("stray") if view else {},
        "evaluated": view.reasons("evaluated") if view else {},
        "failing": view.failing_devices if view else {},
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
        "start": (view.run.start or None) if view else None,
        "parameters": view.run.layout.parameters if view else None,
        "created": stamp(view.run.created) if view else None,
        "started": stamp(facts.started),
        "finished": stamp(facts.ended),
        "wall_seconds": round(facts.ended - facts.started, 3),
        "fedstream": __version__,
        "torch": facts.torch,
        "privacy": facts.privacy and dict(facts.privacy),
        "python": platform.python_version(),
    }


def measurements(history: History) -> dict[str, Any]:
    """The summary's measurements: of the newest measured version, and each metric's best."""
    version, metrics = history.measured or (None, {})
    main = history.main
    best = {
        name: one for name, one in history.best.items() if name == main or not is_over_devices(name)
    }
    accuracy = history.best.get("accuracy", (None, None))
    return {
        "accuracy": metrics.get("accuracy"),
        "loss": metrics.get("loss"),
        "metrics": metrics,
        "measured_version": version,
        "best_accuracy": accuracy[1],
        "best_accuracy_version": accuracy[0],
        "best": {name: {"version": at, "value": value} for name, (at, value) in best.items()},
        "main_metric": main,
        "goal": history.goal,
        "never_finite": history.never_finite,
        "devices_lack": history.devices_lack,
    }


def tasks_of(view: Tally | None) -> dict[str, int]:
    """Tasks issued, and their outcomes, which add up to that number."""
    if view is None:
        return dict.fromkeys(("issued", *OUTCOMES, "open"), 0)
    ended = {str(outcome): count for outcome, count in view.outcomes.items()}
    return {"issued": view.issued, **ended, "open": view.tasks}


def _before(history: History, begun: float) -> int:
    """Version that a run was resumed from; 0 for a new run."""
    return max((n for n, version in history.versions.items() if version.time <= begun), default=0)


def stamp(seconds: float) -> str:
    """A time as text: ISO 8601, UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class Table:
    """metrics.csv: a row for each version, with its measurement.

    While a run goes on, rows are appended up to each measured version; a crash may tear the last
    one. ``seconds`` count from ``created``. If a version consists of several updates (rounds), its
    staleness, weight and training loss are means, and devices and tasks are separated by spaces.
    """

    def __init__(self, out: Path, created: float) -> None:
        self._path = out / METRICS
        self._created = created
        self._names: list[str] | None = None  # of metrics with columns; None: nothing written yet
        self._last = -1  # version written
        self._total = 0  # updates up to it
        self._revised = 0  # of the history, when it was written

    def follow(self, history: History) -> None:
        """Append the missing rows, up to the version measured last. Raises OSError."""
        if history.measured is None or history.measured[0] not in history.versions:
            return
        measured, metrics = history.measured
        known = {"accuracy", "loss", *(self._names or ())}
        if self._names is None or history.revised != self._revised or not metrics.keys() <= known:
            self.write(history, measured)
        elif measured > self._last:
            new = [n for n in range(self._last + 1, measured + 1) if n in history.versions]
            names, self._names = self._names, None  # if this fails, start over
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(self._rows(history, new, names))
            self._names = names

    def write(self, history: History, until: int | None = None) -> None:
        """Replace the file by the whole table, up to version ``until``. Raises OSError."""
        found = {name for metrics in history.evaluations.values() for name in metrics}
        names = sorted(found - {"accuracy", "loss"})
        versions = sorted(n for n in history.versions if until is None or n <= until)
        self._names, self._last, self._total = None, -1, 0
        self._revised = history.revised
        aside = self._path.with_name(f".{METRICS}")
        with aside.open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow([*_COLUMNS, *(f"test_{name}" for name in names)])
            table.writerows(self._rows(history, versions, names))
        aside.replace(self._path)
        self._names = names

    def _rows(
        self, history: History, versions: Sequence[int], names: Sequence[str]
    ) -> Iterator[list[object]]:
        for number in versions:
            version = history.versions[number]
            metrics = history.evaluations.get(number, {})
            self._last, self._total = number, self._total + len(version.updates)
            yield [
                number,
                f"{max(0.0, version.time - self._created):.4f}",
                len(version.updates),
                self._total,
                *_made_of(version),
                *(_number(metrics.get(name)) for name in ("accuracy", "loss", *names)),
            ]


def _made_of(version: SeenVersion) -> list[object]:
    updates = version.updates
    losses = [u.loss for u in updates if u.loss is not None]
    return [
        _number(fmean([u.staleness for u in updates]) if updates else None),
        _number(fmean([u.weight for u in updates]) if updates else None),
        " ".join(str(u.device) for u in updates),
        " ".join(u.task for u in updates),
        _number(fmean(losses) if losses else None),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def write_summary(out: Path, numbers: Mapping[str, Any]) -> None:
    """Write summary.json."""
    (out / SUMMARY).write_text(as_json(numbers) + "\n")


def as_json(value: Any) -> str:
    """Strictly valid JSON, for files and for ``--json``."""
    return json.dumps(_sayable(value), indent=2, allow_nan=False)


def _sayable(value: Any) -> Any:
    """Value without anything JSON can't express.

    A diverged model's loss may be NaN, and the last words of a process may be undecodable bytes.
    """
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: _sayable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(inner) for inner in value]
    return value


def write_devices(out: Path, found: Mapping[int, Mapping[str, float]]) -> None:
    """Write devices.csv: each device's own test metrics."""
    names = list(dict.fromkeys(name for metrics in found.values() for name in metrics))
    with (out / DEVICES).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["device", *map(column, names)])
        for device, metrics in sorted(found.items()):
            table.writerow([device, *(_number(metrics.get(name)) for name in names)])


def column(metric: str) -> str:
    """The column of a test metric; the column ``loss`` is the training loss."""
    return metric if metric == "accuracy" else f"test_{metric}"


def write_model(
    out: Path, model: Model, module: nn.Module, about: Mapping[str, str], file: str = MODEL
) -> None:
    """Write a model as safetensors, with the names and dtypes of ``state_dict``.

    ``load_state_dict`` accepts it; tied tensors appear under each of their names.
    """
    from safetensors.torch import save_file
    from torch import Tensor

    from fedstream.trainer import vector

    vector.load(model, module)
    tensors = {
        name: value.detach().clone().contiguous()
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    save_file(tensors, out / file, metadata=dict(about))


def write_best(out: Path, numbers: Mapping[str, Any], module: nn.Module) -> bool:
    """Write best.safetensors, the best version of the folder's run, made again from the journal.

    ``numbers``: the summary, whose main metric decides. Returns False if no version was best, or
    the folder has no journal, or one without weights.
    """
    metric = numbers["main_metric"]
    best = numbers["best"].get(metric)
    if metric is None or best is None or not (out / FOLDER).exists():
        return False
    try:
        with opened(out / FOLDER) as segments:
            model, digest = model_at(segments, best["version"])
    except NotRecorded:
        return False
    about = {name: str(numbers[name]) for name in ("run", "task")}
    about |= {"version": str(best["version"]), "digest": digest, metric: repr(best["value"])}
    write_model(out, model, module, about, BEST)
    return True


# A run's process holds a lock (flock) of its folder. The system releases it however that ends.


@contextmanager
def occupied(out: Path) -> Iterator[None]:
    """Occupy an existing folder for the block. Raises FedstreamError if another process does.

    On a file system without locks, other processes can't see that the run is going on.
    """
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOOK_S
        while not _locked(folder, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise FedstreamError(
                    f"{out}: another process is writing a run there: wait for it, or choose "
                    "another folder"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def is_occupied(out: Path) -> bool:
    """Whether a run is going on in the folder. Raises OSError if it can't be opened."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _locked(folder, fcntl.LOCK_SH)
    finally:
        os.close(folder)


def _locked(folder: int, how: int) -> bool:
    """Lock the folder unless another process holds a lock that excludes this one."""
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return True
    return True
