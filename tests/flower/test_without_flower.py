"""What can be said without Flower: who refuses an app's strategy, and that Flower is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fedstream.cli.options import task_options
from fedstream.core.errors import ConfigError
from fedstream.flower import apps
from fedstream.settings.config import read
from fedstream.settings.services import devices_of
from fedstream.trainer.task import Task

OWN = """
from fedstream.strategies import Batch

class Careful(Batch):
    @property
    def by_steps(self):
        return {by_steps}
"""


class ByItself(Task):
    exact_steps = False

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def device_data(self, device: int) -> Any:
        return [device]


class Exact(ByItself):
    exact_steps = True


@pytest.mark.parametrize("name", ["afa-cd", "afa-cs", "aced"])
def test_strategy_that_divides_by_steps_is_refused_by_name(name: str) -> None:
    settings = read(None, [f"strategy.name={name}"])
    with pytest.raises(ConfigError, match=rf"strategy\.name = '{name}' .*: choose fedasync"):
        devices_of(settings, ByItself())
    assert devices_of(settings, Exact()) == 10
    assert devices_of(read(None, ["strategy.name=fedbuff"]), ByItself()) == 10


def test_own_strategy_is_asked_too(tmp_path: Path) -> None:
    for by_steps in (True, False):
        file = tmp_path / f"careful_{by_steps}.py".lower()
        file.write_text(OWN.format(by_steps=by_steps))
        settings = read(None, [f"strategy.name={file}:Careful"])
        if by_steps:
            with pytest.raises(ConfigError, match=r"careful_true\.py:Careful' divides by"):
                devices_of(settings, ByItself())
        else:
            assert devices_of(settings, ByItself()) == 10


def test_flower_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apps, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"Flower is not installed here: .*fedstream\[flower\]"):
        task_options(None, "my_app.client:app", None)


def test_an_app_is_the_task() -> None:
    with pytest.raises(ConfigError, match="--flower names the task: leave out --task"):
        task_options("digits", "my_app.client:app", None)
    assert task_options("digits", None, None) == {"task": "digits", "model": None}
