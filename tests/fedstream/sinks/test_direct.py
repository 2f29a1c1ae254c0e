"""A simulation writes to trackers by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.cli.app import main
from fedstream.sinks.tensorboard import TensorBoard
from tests.fedstream.sinks.conftest import tensorboard_of


def simulated(folder: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "simulate",
                "--versions",
                "12",
                "--out",
                str(folder),
                "--track",
                "tensorboard",
                "--no-journal",
            ]
        )
    assert ended.value.code == 0


def test_simulation_is_tracked_with_its_model(tmp_path: Path) -> None:
    simulated(tmp_path / "run")
    [folder] = (tmp_path / "run" / "tensorboard").iterdir()
    found = tensorboard_of(folder)
    assert [step for step, _ in found["version/updates"]] == [*range(13)]
    assert found["test/accuracy"][-1][0] == 12
    model = (folder / "model.safetensors").read_bytes()
    assert model == (tmp_path / "run" / "model.safetensors").read_bytes()


def test_failing_tracker_is_left_out_of_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(TensorBoard, "write", fails)
    simulated(tmp_path / "run")
    said = capsys.readouterr().err
    assert said.count("tensorboard failed, and is left out from here on: no space") == 1
    assert (tmp_path / "run" / "summary.json").is_file()
