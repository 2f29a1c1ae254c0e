"""Keyword parameters become configuration keys, with the command line's errors."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import fedstream
from fedstream.api.parameters import Tables, check_names, options
from fedstream.core.errors import ConfigError
from fedstream.settings.config import Settings, read


def settings(set: dict[str, object] | None = None, **parameters: object) -> Settings:  # noqa: A002
    return read(None, (), options(set, parameters))


def test_each_parameter_sets_its_key() -> None:
    made = settings(
        {"strategy.alpha": 0.3, "evaluator": {"every": 5}},
        task="mnist",
        versions=7,
        devices=20,
        redis="redis://here:1",
        data_root="/data",
        solver={"lr": 0.05},
        run={"seed": 3},
    )
    assert (made.task.name, made.task.devices, made.task.data_root) == ("mnist", 20, "/data")
    assert (made.run.versions, made.run.seed, made.redis.url) == (7, 3, "redis://here:1")
    assert made.strategy.model_dump()["alpha"] == 0.3
    assert made.solver.lr == 0.05


def test_a_table_may_stand_for_its_name() -> None:
    made = settings(
        {"strategy.buffer_size": 5},
        strategy={"name": "fedbuff", "staleness": {"kind": "hinge", "a": 3}},
        devices={"latency": {"kind": "fixed", "mean_s": 0.5}},
    )
    shown = made.strategy.model_dump()
    assert (shown["name"], shown["buffer_size"]) == ("fedbuff", 5)  # set's key stays beside
    assert (shown["staleness"]["kind"], shown["staleness"]["a"]) == ("hinge", 3)
    assert made.devices.latency.model_dump()["mean_s"] == 0.5


def test_numbers_of_numpy_are_numbers() -> None:
    made = settings({"strategy.alpha": np.float64(0.25)}, versions=np.int64(9))
    assert made.run.versions == 9
    assert made.strategy.model_dump()["alpha"] == 0.25


def test_all_errors_are_told_at_once_with_their_parameter() -> None:
    with pytest.raises(ConfigError) as caught:
        settings({"strategy.alhpa": 1}, versions=0, solver={"lr": "x"})
    assert str(caught.value).splitlines() == [
        "run.versions = 0 (from versions=): must be greater than or equal to 1",
        "strategy.alhpa = 1 (from set): unknown key; did you mean strategy.alpha?",
        'solver.lr = "x" (from solver=): must be a valid number',
    ]
    assert caught.value.__cause__ is None  # nobody has to read pydantic's


def test_a_misspelt_key_is_told_before_a_process_or_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process imports torch before it reads its request."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ConfigError, match=r"did you mean strategy\.alpha\?"):
        fedstream.run(set={"strategy.alhpa": 1}, out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({3: 1}, "set: 3 is not a key"),
        ({"solver.lr": object()}, r"solver.lr \(from set\): a value of type object can't"),
        ("solver.lr=1", "set: expected a dict"),
        ({"evaluator": 1}, r"evaluator = 1 \(from set\): must be a table"),
    ],
)
def test_what_is_no_key_or_value_is_said(keys: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(keys)  # type: ignore[arg-type]


def test_every_table_has_a_parameter() -> None:
    others = {"task", "strategy", "devices", "redis", "journal"}  # parameters that do more
    others |= {"helper", "private"}  # no part of a run that Python starts
    assert set(Tables.__annotations__) == Settings.model_fields.keys() - others


@pytest.mark.parametrize("function", [fedstream.run, fedstream.simulate])
def test_an_unknown_parameter_is_an_ordinary_type_error(function: object) -> None:
    with pytest.raises(TypeError, match=r"'verions'; did you mean 'versions'\?"):
        function(verions=3)  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"'sover'; did you mean 'solver'\?"):
        check_names("run", {"sover": {}}, ())


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (3, "task: a int is not a task"),
        (dict, "task: the class dict is not a task"),
        ("digit", "unknown task 'digit'"),
        (nn.Linear, r"task: it is a model alone.*model\(\).*fedstream.Task.*own-task.md"),
        (nn.Linear(2, 2), r"task: it is a model alone"),
        ({"args": {"hidden": 3}}, r"task.args.hidden has no effect on the built-in task"),
        ({"arg": {"hidden": 3}}, r"task.arg \(from task=\).*did you mean task.args"),
    ],
)
def test_what_is_no_task_is_said(task: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fedstream.simulate(task, versions=1, progress=False)  # type: ignore[arg-type]
