"""A run's record, read from the run's folder or from a bare journal."""

from __future__ import annotations

import tomllib
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstream.core.errors import FedstreamError
from fedstream.history import pictures, report, summary, tables
from fedstream.history import tensors as models
from fedstream.history.index import columns_of, marks
from fedstream.history.measurements import Measurement, device_metrics, fill, measurements
from fedstream.history.summary import stands
from fedstream.history.table import Columns, Texts, texts
from fedstream.history.timeline import History
from fedstream.journal import SegmentHead, journal_of, opened
from fedstream.journal.replay import Replayer
from fedstream.runtime.plugins import allowing
from fedstream.runtime.process import read_regular
from fedstream.runtime.text import escaped
from fedstream.settings.recording import CONFIG, SUMMARY
from fedstream.trainer.goals import goal_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor


def open_run(
    path: Path | str, *, trust_recorded_code: bool = False, changed_rules: bool = False
) -> RunRecord:
    """Open a run's folder, finished or still going on, or a bare journal.

    The folder is only read. If the run's strategy is a user's program, models are rebuilt by this
    program: :meth:`RunRecord.model` and the like raise ConfigError unless ``trust_recorded_code``
    lets the program run. If its source has changed since the recording, they also raise ConfigError
    unless ``changed_rules`` is set. The command line has the same options.

    Raises FedstreamError if there is no run.
    """
    return RunRecord(path, trust_recorded_code=trust_recorded_code, changed_rules=changed_rules)


class RunRecord:
    """A run: its versions, updates and measurements, and any of its models.

    Files are read when they are first needed. While the run is still going on, each access shows
    the run's newest state.
    """

    def __init__(
        self, path: Path | str, *, trust_recorded_code: bool = False, changed_rules: bool = False
    ) -> None:
        self._allowing = partial(allowing, recorded=trust_recorded_code, changed=changed_rules)
        self.path = Path(path)
        """the run's folder, or the journal"""
        self.journal = journal_of(self.path)
        """the journal's folder, or a single segment"""
        self._known: tuple[object, Columns, SegmentHead] | None = None
        self._texts: tuple[Columns, Texts] | None = None
        if not self._has_files() and not marks(self.journal):
            raise FedstreamError(
                f"{self.path}: no run there: name a run's folder, its journal folder or a segment"
            )

    # what it was

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The configuration as tables, from run.toml, or as a bare journal records it."""
        file = self.path / CONFIG
        if file.exists():
            try:
                return tomllib.loads(read_regular(file).decode())
            except (OSError, ValueError) as error:
                raise FedstreamError(f"{file}: cannot be read: {error}") from error
        return self._recorded()

    @property
    def is_configured(self) -> bool:
        """Whether the folder has the whole configuration; a bare journal records little of it."""
        return (self.path / CONFIG).is_file()

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._name_of("run")

    @property
    def task(self) -> str:
        """Name of the task."""
        return self._name_of("task")

    @property
    def strategy(self) -> str:
        """Name of the strategy."""
        return self._name_of("strategy")

    @property
    def state(self) -> str:
        """running, finished, interrupted or failed.

        A bare journal that does not say that its run is over is unfinished: a service may still be
        writing it.
        """
        return self.stands()[0]

    @property
    def summary(self) -> dict[str, Any]:
        """The run in numbers, by the names of summary.json.

        The numbers come from that file if the run has ended and left one, and otherwise from the
        journal and metrics.csv. Raises FedstreamError if there is neither.
        """
        file = self.path / SUMMARY
        state, why = self.stands()
        if file.exists() and state != "running":
            return summary.from_file(file) | {"state": state, "why": why}
        columns, head = self.columns()
        return summary.summary(head, columns, self.seen(), state, why)

    # what happened

    @property
    def versions(self) -> pd.DataFrame:
        """The versions, indexed by number.

        ``time`` (UTC; missing in a simulation), ``seconds`` since version 0 (a simulation's are
        virtual), ``updates`` in the version and ``total_updates`` up to it, the means of its
        updates' ``staleness`` (versions), ``weight`` and training ``loss``, the sums of their
        ``samples`` and local ``steps``, ``adopted`` (the model came from Redis, not from updates)
        and ``digest``.
        """
        columns, head = self.columns()
        return tables.versions(columns, head, self._texts_of(columns).digests)

    @property
    def updates(self) -> pd.DataFrame:
        """The admitted updates in the order in which they were decided, numbered from 0.

        ``version`` that contains it (missing if refused, or still waiting in a buffer), ``time``
        and ``seconds`` of the decision as for versions, ``device``, ``tau`` (the version it was
        trained from), ``staleness`` (versions), ``weight``, ``outcome`` (applied, buffered,
        refused), ``reason`` of a refusal, ``samples`` of the device, local ``steps`` and learning
        rate ``lr``, mean training ``loss``, ``norm`` (how far it alone would move the parameters,
        Euclidean), ``trained_s`` (seconds that the device trained) and ``waited_s`` (seconds from
        admission to decision), ``task``, ``trainer`` and ``site``.
        """
        columns, head = self.columns()
        return tables.updates(columns, head, self._texts_of(columns))

    @property
    def metrics(self) -> pd.DataFrame:
        """The measurements, indexed by version: ``accuracy``, ``test_loss``, other ``test_...``.

        They come from metrics.csv; a bare journal has none.
        """
        return tables.metrics({one.version: one.metrics for one in self.measurements})

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements without pandas: version, seconds, total updates, metrics by name."""
        return measurements(self.path / report.METRICS)

    def history(self) -> pd.DataFrame:
        """Each version with its measurement: the columns of :attr:`versions`, then of
        :attr:`metrics`, which are missing where a version was not measured."""
        return self.versions.join(self.metrics)

    @property
    def devices(self) -> pd.DataFrame:
        """The devices, indexed by number: their contributions, and the model's quality for them.

        ``updates`` used, the means of their ``staleness``, ``weight``, training ``loss`` and
        ``norm``, ``refused`` updates; and where ``evaluator.per_device`` asked for it, the last
        model's metrics on the device's own test data, named as in :attr:`metrics`.
        """
        own = device_metrics(self.path / report.DEVICES)
        return tables.devices(self.updates, own, range(self.head.devices))

    # models

    def model(self, version: int | None = None) -> dict[str, Tensor]:
        """A version's ``state_dict``, rebuilt from the nearest checkpoint; default: the newest.

        Tied tensors appear once, under the first of their names, so load those with
        ``strict=False``. Raises JournalError if the journal does not have the version.
        """
        if version is None:
            version = int(self.columns()[0].made["version"][-1])
        with self._allowing():
            return models.version(self.journal, version)

    def x_tau(self, update: int) -> dict[str, Tensor]:
        """The model that an update was trained from; ``update`` is its number in :attr:`updates`.

        Raises JournalError if the journal does not have that model.
        """
        with self._allowing():
            return models.x_tau(self.journal, self._place(update))

    def delta(self, update: int) -> dict[str, Tensor]:
        """A device's own change x_new - x_tau of the parameters, in float32, by name.

        It is the same whether devices send models or deltas. Raises JournalError if the update was
        refused or recorded without its bytes, or if x_tau is needed and not in the journal.
        """
        with self._allowing():
            return models.delta(self.journal, self._place(update))

    def replayer(self, **options: Any) -> Replayer:
        """A :class:`fedstream.journal.replay.Replayer` of the journal, with its options."""
        with self._allowing():
            return Replayer(self.journal, **options)

    # pictures

    def picture(self) -> Figure:
        """Accuracy and loss over versions and time, staleness, and updates per device.

        For a simulation without a journal, only the main metric.
        """
        if not marks(self.journal):
            measured, goal = self.measurements, self.summary["goal"]
            metric = self.summary["main_metric"] or "accuracy"
            points = [one for one in measured if metric in one.metrics]
            return pictures.overlaid(
                [self.name], [points], metric, "virtual time", None, goal_of(metric, goal)
            )
        return pictures.curves_of(self.summary, self.head, self.seen(), self.clock)

    def __repr__(self) -> str:
        """A few lines for a terminal."""
        rows = [*summary.rows(self.summary), ("folder", str(self.path))]
        return escaped("\n".join(f"{name:<10} {value}" for name, value in rows), lines=True)

    def _repr_html_(self) -> str:
        """A table and the picture, for a notebook."""
        rows = [*summary.rows(self.summary), ("folder", str(self.path))]
        return pictures.as_html(rows, self._repr_png_())

    def _repr_png_(self) -> bytes:
        """The picture as PNG."""
        return pictures.png(self.picture())

    @property
    def clock(self) -> str:
        """The label of an axis for the run's time."""
        if not self.is_simulated:
            return "seconds"
        staleness = self.settings.get("simulation", {}).get("staleness") or {}
        return "virtual seconds" if staleness.get("kind") == "latency" else "arrivals"

    def seen(self) -> History:
        """The history, as an observer of the run would have it."""
        columns, head = self.columns()
        history = History()
        history.goal.update(head.goal or {})
        history.stop_metric = head.stop_metric
        fill(history, columns, self.measurements, self._texts_of(columns).tasks)
        return history

    def stands(self) -> tuple[str, str]:
        """The state, and the reason for it."""
        return stands(self.path, lambda: self.columns()[0].finished)

    # files

    def columns(self) -> tuple[Columns, SegmentHead]:
        """The journal's versions and updates, and its newest head, read again if it has grown.

        Raises JournalError.
        """
        mark = marks(self.journal)
        if self._known is None or self._known[0] != mark:
            with opened(self.journal) as chain:
                head = chain[-1].head
            self._known = mark, columns_of(self.journal, keep=False).checked(), head
        return self._known[1:]

    def _texts_of(self, columns: Columns) -> Texts:
        """The texts of the columns' rows, read once for these columns."""
        if self._texts is None or self._texts[0] is not columns:
            self._texts = columns, texts(self.journal).of(columns)
        return self._texts[1]

    @property
    def head(self) -> SegmentHead:
        """The head of the journal's newest segment. Raises JournalError."""
        return self.columns()[1]

    @property
    def is_simulated(self) -> bool:
        """Whether times are a simulation's, which begins at zero."""
        return self.head.created == 0.0

    def _recorded(self) -> dict[str, Any]:
        """The configuration as far as the journal records it."""
        head = self.head
        return {
            "run": {"name": head.run, "versions": head.versions, "seed": head.seed},
            "task": {"name": head.task},
            "strategy": dict(head.strategy),
        }

    def _name_of(self, table: str) -> str:
        """A table's ``name``; as the journal has it if a hand-written run.toml leaves it out."""
        said = self.settings.get(table)
        if isinstance(said, dict) and "name" in said:
            return str(said["name"])
        return str(self._recorded()[table]["name"])

    def _has_files(self) -> bool:
        return any((self.path / name).is_file() for name in (CONFIG, SUMMARY))

    def _place(self, update: int) -> tuple[str, int]:
        columns, _ = self.columns()
        if not 0 <= update < len(columns.updates):
            raise FedstreamError(
                f"{self.path}: there is no update {update}: they are numbered from 0 to "
                f"{len(columns.updates) - 1}"
            )
        return columns.at(update)
