"""MLflow: a run in an experiment, found again by a tag.

A batch isn't atomic (the file store appends number by number), so the start reads the newest step
of every key and writes only later ones. A version's ``updates`` is written last, which marks the
version as complete.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field

from fedstream.sinks.sink import (
    Reached,
    Sink,
    SinkSettings,
    TrackedPoint,
    TrackedRun,
    TrackedValue,
    needs,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TAG = "fedstream.run"
_DONE = "updates"  # the key written last for each version
_PARAMETERS, _METRICS = 100, 1000  # most in one request, by MLflow's limits
_LONGEST = 6000  # characters of a parameter's value
# No telemetry; requests to an absent server fail within seconds, as we retry ourselves.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}


class MLflowSettings(SinkSettings):
    """A run on an MLflow server, or in a folder."""

    kind: Literal["mlflow"] = "mlflow"
    tracking_uri: str | None = None  # None: MLFLOW_TRACKING_URI, or else the folder mlruns
    experiment: str = "fedstream"
    tags: dict[str, str] = Field(default_factory=dict)

    def placed(self, _out: Path) -> Self:
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"
        if "://" not in uri and not uri.startswith(("file:", "databricks")):
            uri = Path(uri).absolute().as_uri()
        return self.model_copy(update={"tracking_uri": uri})

    def build(self) -> MLflow:
        return MLflow(self)


class MLflow(Sink):
    """One MLflow run for each run of fedstream."""

    def __init__(self, settings: MLflowSettings) -> None:
        needs("mlflow", "mlflow")
        self._settings = settings
        self._open = False  # whether MLflow shows the run as running

    def begin(self, run: TrackedRun) -> Reached:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = client = MlflowClient(self._settings.tracking_uri)
        found = self._opened(client, run)
        self._open = True
        self._run: str = found.info.run_id
        self._newest = {
            key: max(metric.step for metric in client.get_metric_history(self._run, key))
            for key in found.data.metrics
        }
        self._tell(run.parameters, known=found.data.params)
        measured, there = (
            min((n for key, n in self._newest.items() if key.startswith(group)), default=-1)
            for group in ("test/", "devices/")
        )
        return Reached(self._newest.get(_DONE, -1), measured, there)

    def _opened(self, client: MlflowClient, run: TrackedRun) -> Any:
        """The MLflow run of this run, continued or new."""
        settings = self._settings
        known = client.get_experiment_by_name(settings.experiment)
        experiment = known.experiment_id if known else client.create_experiment(settings.experiment)
        before = client.search_runs([experiment], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
        if before:
            found = before[0]
            if found.info.status != "RUNNING":  # a kill during this write loses a folder's file
                client.update_run(found.info.run_id, status="RUNNING")
        else:
            found = client.create_run(
                experiment,
                start_time=round(run.created * 1000),
                run_name=run.name,
                tags={**settings.tags, _TAG: run.id},
            )
        return found

    def _tell(self, parameters: Mapping[str, TrackedValue], known: Mapping[str, str]) -> None:
        """Write missing parameters; MLflow refuses to change existing ones."""
        from mlflow.entities import Param

        new = [
            Param(key, str(value)[:_LONGEST])
            for key, value in parameters.items()
            if key not in known
        ]
        for at in range(0, len(new), _PARAMETERS):
            self._client.log_batch(self._run, params=new[at : at + _PARAMETERS])

    def write(self, points: Sequence[TrackedPoint]) -> None:
        from mlflow.entities import Metric

        new = []
        for point in points:
            keys = sorted(point.values, key=lambda key: key == _DONE)
            for key in keys:
                if point.version > self._newest.get(key, -1):
                    self._newest[key] = point.version
                    at = round(point.time * 1000)
                    new.append(Metric(key, float(point.values[key]), at, point.version))
        for at in range(0, len(new), _METRICS):
            self._client.log_batch(self._run, metrics=new[at : at + _METRICS])

    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        self._client.log_dict(self._run, dict(summary), "summary.json")
        if model is not None:
            self._client.log_artifact(self._run, str(model))
        self._client.set_terminated(self._run, "FINISHED")
        self._open = False

    def close(self) -> None:
        """Mark an unfinished run as killed until it is continued."""
        if self._open:
            self._client.update_run(self._run, status="KILLED")
            self._open = False
