"""Version 0 from another run's version, or from a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedstream.broker.keys import Keys
from fedstream.coordinator.service import Coordinator
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.history.report import write_model
from fedstream.journal import opened
from fedstream.journal.inspection import model_at
from fedstream.settings.config import options, read
from fedstream.settings.services import _BUILDERS, create_run
from fedstream.settings.start import StartingPoint, first_model
from fedstream.simulation import simulate
from fedstream.strategies import FedAsyncSettings, ScaffoldSettings, Strategy
from fedstream.trainer import vector
from fedstream.trainer.task import Task, initial
from tests.journals import Scribe


class Own(Task):
    """A task of which only the model matters."""

    def __init__(self, module: Any = lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))):
        self._module = module

    def model(self) -> nn.Module:
        """A new module."""
        made: nn.Module = self._module()
        return made

    def device_data(self, device: int) -> Any:
        """None is ever asked for."""
        raise NotImplementedError


TASK = Own()
LAYOUT = initial(TASK, 0).layout


def recorded(folder: Path, rule: Strategy | None = None) -> dict[int, Model]:
    """Versions 0 to 4 of a run, in two segments: each version's model."""
    rule = rule or FedAsyncSettings()
    layout = LAYOUT.with_controls() if rule.controls else LAYOUT
    scribe = Scribe(folder / "journal", rule, layout=layout, run="before")
    made = {0: scribe.progress.state.model.copy()}
    while scribe.version < 4:
        scribe.update()
        if scribe.version not in made:
            made[scribe.version] = scribe.progress.state.model.copy()
            if scribe.version == 2:
                scribe.segment()
    scribe.close()
    return made


def test_start_is_read_from_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert StartingPoint.parsed("runs/a@128") == StartingPoint(Path("runs/a"), 128)
    assert StartingPoint.parsed("runs/a") == StartingPoint(Path("runs/a"))
    assert StartingPoint.parsed("runs@2/a") == StartingPoint(Path("runs@2/a"))
    Path("b@3").mkdir()
    assert StartingPoint.parsed("b@3") == StartingPoint(Path("b@3"))
    assert StartingPoint.parsed("b@3@4") == StartingPoint(Path("b@3"), 4)
    settings = read(None, options=options(**{"from": "a@5"})).with_absolute_paths()
    assert settings.run.start == f"{tmp_path}/a@5"
    assert settings.with_absolute_paths() == settings


@pytest.mark.parametrize("version", [1, 3, None])
def test_version_of_a_journal_is_taken_over_bit_for_bit(
    tmp_path: Path, version: int | None
) -> None:
    made = recorded(tmp_path)
    at = "" if version is None else f"@{version}"
    model, said = first_model(TASK, 7, f"{tmp_path}{at}")
    number = 4 if version is None else version
    assert model.digest() == made[number].digest()
    assert said == f"before@{number} {made[number].digest()}"


@pytest.mark.parametrize("controls", [False, True])
def test_control_variates_begin_with_zero(tmp_path: Path, controls: bool) -> None:
    """SCAFFOLD's c is the mean of what is remembered of the devices, and that begins anew."""
    made = recorded(tmp_path, ScaffoldSettings(buffer_size=2) if controls else None)
    assert controls == bool(made[4].controls.any())
    model, said = first_model(TASK, 0, f"{tmp_path}@4", controls=True)
    assert model.layout == LAYOUT.with_controls()
    assert model.parameters.tolist() == made[4].parameters.tolist()
    assert model.buffers.tolist() == made[4].buffers.tolist()
    assert model.integers.tolist() == made[4].integers.tolist()
    assert not model.controls.any()
    assert said.endswith(made[4].digest())


def test_file_of_a_run_is_taken_over(tmp_path: Path) -> None:
    model = recorded(tmp_path)[3]
    write_model(tmp_path, model, TASK.model(), {})
    again, said = first_model(TASK, 0, str(tmp_path / "model.safetensors"))
    assert again.digest() == model.digest()
    assert said == f"model.safetensors {model.digest()}"


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_model_is_refused(tmp_path: Path) -> None:
    """Whoever opened it would wait for somebody who writes into it."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"cannot be read: .*not a regular file"):
        first_model(TASK, 0, str(tmp_path / "model.safetensors"))


def test_other_dtypes_are_the_tasks(tmp_path: Path) -> None:
    half = Own(lambda: nn.Linear(3, 2).half())
    module = half.model()
    save_file(dict(module.state_dict()), tmp_path / "half.safetensors")
    model, _ = first_model(half, 1, str(tmp_path / "half.safetensors"))
    again = half.model()
    vector.load(model, again)
    assert all(
        torch.equal(a, b) for a, b in zip(module.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Own(lambda: nn.Linear(3, 2)), "weight is missing there, and 2x3 float32 (parameter) in"),
        (
            Own(lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))),
            "0.weight is 2x3 float32 (parameter) there, and 2x4 float32 (parameter) in the task",
        ),
        (
            Own(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()),
            "0.weight is 2x3 float32 (parameter) there, and 2x3 float64 (parameter) in the task",
        ),
    ],
)
def test_first_difference_to_the_task_is_named(tmp_path: Path, task: Own, said: str) -> None:
    write_model(tmp_path, recorded(tmp_path)[4], TASK.model(), {})
    for start in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(ConfigError) as raised:
            first_model(task, 0, str(start))
        assert f"run.start = '{start}' (--from) does not fit the task's model" in str(raised.value)
        assert said in str(raised.value)
        assert "\n" not in str(raised.value)
    shorter = Own(lambda: nn.Sequential(nn.Linear(3, 2)))
    with pytest.raises(ConfigError, match=r"it also has 1\.weight, which the task lacks"):
        first_model(shorter, 0, str(tmp_path))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    recorded(tmp_path)
    with pytest.raises(ConfigError, match=r"has versions 0 to 4: choose one of these"):
        first_model(TASK, 0, f"{tmp_path}@5")
    min((tmp_path / "journal").iterdir()).unlink()
    with pytest.raises(ConfigError, match=r"has versions 2 to 4: choose one of these"):
        first_model(TASK, 0, f"{tmp_path}@1")
    with pytest.raises(ConfigError, match=r"nowhere: no journal there"):
        first_model(TASK, 0, f"{tmp_path}/nowhere@1")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        first_model(TASK, 0, f"{tmp_path}/no.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"cannot be read: "):
        first_model(TASK, 0, f"{tmp_path}/bad.safetensors")


def test_model_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    state = dict(TASK.model().state_dict())
    state["0.bias"][1] = float("nan")
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="not finite"):
        first_model(TASK, 0, f"{tmp_path}/bad.safetensors")


def frozen_head() -> nn.Module:
    """A model that trains its BatchNorm alone."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    module[0].requires_grad_(requires_grad=False)
    return module


def test_frozen_values_come_from_the_start_too(tmp_path: Path) -> None:
    """From a file, and from a run that trained them."""
    model = recorded(tmp_path)[4]
    write_model(tmp_path, model, TASK.model(), {})
    task, module = Own(frozen_head), frozen_head()
    for start in (tmp_path, tmp_path / "model.safetensors"):
        first, _ = first_model(task, 0, str(start))
        assert first.layout == initial(task, 0).layout
        assert first.layout.unshared is not None
        assert first.layout.unshared.digest == first.layout.unshared.model().digest()
        vector.load(first, module)
        again = {name: values.tolist() for name, values in first.tensors().items()}
        assert again == {name: values.tolist() for name, values in model.tensors().items()}
        assert {name: x.tolist() for name, x in module.state_dict().items()} == again


def test_frozen_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    state = dict(TASK.model().state_dict())
    state["0.weight"][0, 0] = float("inf")
    save_file(state, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="not finite"):
        first_model(Own(frozen_head), 0, f"{tmp_path}/bad.safetensors")


def test_tensors_that_the_task_lacks_are_refused(tmp_path: Path) -> None:
    state = TASK.model().state_dict() | {"adapter": torch.zeros(2)}
    save_file(state, tmp_path / "more.safetensors")
    with pytest.raises(ConfigError, match="it also has adapter, which the task lacks"):
        first_model(TASK, 0, f"{tmp_path}/more.safetensors")


def test_simulated_run_records_where_it_came_from(tmp_path: Path) -> None:
    """And its own first version is the other's, to the bit."""
    small = ["run.versions=3", "simulation.threads=1"]
    simulate(read(None, [*small, "run.name=first"]), journal=tmp_path / "one")
    with opened(tmp_path / "one") as chain:
        _, digest = model_at(chain, 2)
    start = f"run.start={tmp_path}/one@2"
    settings = read(None, [*small, start, "run.seed=5", "strategy.name=fedbuff"])
    made = simulate(settings, journal=tmp_path / "two")
    assert made.start == f"first@2 {digest}"
    with opened(tmp_path / "two") as chain:
        assert chain[0].head.start == made.start
        assert chain[0].standing.digest == digest
    run, model = create_run(settings)
    assert (run.start, model.digest_like(digest)) == (made.start, digest)


@pytest.mark.parametrize(("name", "divides"), [("fedbuff", False), ("afa-cd", True)])
def test_run_says_whether_updates_are_divided_by_their_steps(name: str, divides: bool) -> None:
    """And its coordinator bounds learning rates then only."""
    settings = read(None, [f"strategy.name={name}", "solvers=[{devices=[3], lr=0.7}]"])
    run, _ = create_run(settings)
    assert run.by_steps is divides
    coordinator, _ = _BUILDERS["coordinator"](settings, Keys("a"), "coordinator-0")
    assert isinstance(coordinator, Coordinator)
    lr_of = coordinator._lr_of
    assert (lr_of and [lr_of(2, 0), lr_of(3, 0)]) == ([0.3, 0.7] if divides else None)
