"""`fedstream track`: runs that are over, written to trackers from their folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fedstream.history.record import open_run
from fedstream.history.report import occupied
from fedstream.settings.config import read
from fedstream.simulation.run import run
from fedstream.sinks.tensorboard import TensorBoard
from tests.fedstream.conftest import Command
from tests.fedstream.sinks.conftest import tensorboard_of

OWN = """
from fedstream.sinks import Sink, SinkSettings


class Away(SinkSettings):
    def build(self):
        return Tracker(away=True)


class Forgetful(SinkSettings):
    def build(self):
        return Tracker(away=False)


class Tracker(Sink):
    def __init__(self, away):
        self.away = away

    def begin(self, run):
        if self.away:
            raise ConnectionError("no route to tracker\\nand more")

    def write(self, points):
        raise AssertionError

    def end(self, summary, model):
        raise AssertionError

    def close(self):
        pass
"""


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def ended(simulated: Path, tmp_path: Path) -> Path:
    """A finished run that nobody tracked."""
    return shutil.copytree(simulated, tmp_path / "run")


def test_a_run_is_tracked_afterwards_and_a_second_time_adds_nothing(
    ended: Path, command: Command
) -> None:
    code, said, _ = command("track", ended, "--to", "tensorboard")
    assert code == 0
    assert said == "tensorboard: 31 versions and 4 measurements written; complete\n"
    [folder] = (ended / "tensorboard").iterdir()
    found, record = tensorboard_of(folder), open_run(ended)
    versions = record.versions
    assert [step for step, _ in found["version/updates"]] == [*range(31)]
    assert [value for _, value in found["staleness/mean"]] == [*versions["staleness"].iloc[1:]]
    measured = {one.version: one.metrics["accuracy"] for one in record.measurements}
    assert dict(found["test/accuracy"]) == pytest.approx(measured)
    assert (folder / "model.safetensors").read_bytes() == (ended / "model.safetensors").read_bytes()

    before = files(ended)
    code, said, _ = command("track", ended, "--to", "tensorboard")
    assert said == "tensorboard: 0 versions and 0 measurements written; complete\n"
    assert files(ended) == before


def test_a_run_that_was_tracked_while_it_went_on_continues_its_record(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tracker failed after version 3."""
    calls = 0
    write = TensorBoard.write

    def fails_later(self: TensorBoard, points: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError("no space")
        write(self, points)  # type: ignore[arg-type]

    keys = ["run.versions=12", "simulation.threads=1"]
    settings = read(None, [*keys, 'sinks=[{kind = "tensorboard", every_s = 1e-9}]'])
    with monkeypatch.context() as failing:
        failing.setattr(TensorBoard, "write", fails_later)
        run(settings, tmp_path / "run", journal=True, quiet=True)
    [folder] = (tmp_path / "run" / "tensorboard").iterdir()
    assert len(tensorboard_of(folder)["version/updates"]) == 4
    code, said, _ = command("track", tmp_path / "run")  # to the trackers that it had
    assert (code, said) == (0, "tensorboard: 9 versions and 2 measurements written; complete\n")
    assert [*(tmp_path / "run" / "tensorboard").iterdir()] == [folder]
    assert [step for step, _ in tensorboard_of(folder)["version/updates"]] == [*range(13)]


def test_mlflow_gets_parameters_numbers_and_the_end(
    ended: Path, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    for _ in range(2):
        assert command("track", ended, "--to", "mlflow")[0] == 0
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("fedstream")
    assert experiment is not None
    [found] = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "staleness/max")
    assert [one.step for one in history] == [*range(1, 31)]
    assert found.info.status == "FINISHED"
    assert found.data.params["solver.lr"] == "0.05"
    assert not [name for name in found.data.params if name.startswith(("redis", "sinks"))]
    names = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert names == {"summary.json", "model.safetensors"}


def test_what_can_t_be_tracked_is_refused_in_a_line(
    ended: Path, command: Command, tmp_path: Path
) -> None:
    code, _, said = command("track", ended)
    assert code == 2
    assert said == (
        f"fedstream: {ended}: the run had no tracker: name one, as in --to tensorboard\n"
    )
    with occupied(ended):
        code, _, said = command("track", ended, "--to", "tensorboard")
    assert (code, said) == (1, f"fedstream: {ended}: the run goes on: track it when it is over\n")
    file = ended / "run.toml"
    own = tmp_path / "own_tracker.py"
    own.write_text(OWN)
    text = file.read_text()
    assert "sinks = []" in text
    file.write_text(text.replace("sinks = []", f'sinks = [{{kind = "{own}:Away"}}]'))
    code, _, said = command("track", ended)  # a recording's program needs consent
    assert code == 2
    assert "runs its code" in said
    code, _, said = command("track", ended, "--trust-recorded-code")
    kind = f"{own}:Away"
    assert (code, said) == (1, f"fedstream: {kind}: ConnectionError: no route to tracker\n")
    code, _, said = command("track", ended, "--to", f"{own}:Forgetful")
    assert code == 2
    assert "Forgetful can't tell what it has of a run" in said
