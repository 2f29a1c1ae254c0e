"""A run that only its devices measure: it stops by their metric, and is replayed bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fedstream.history.journal_text import Filter, facts, lines
from fedstream.journal import EvaluationEnded, segments
from fedstream.journal.replay import Replayer
from fedstream.settings.config import Settings
from fedstream.trainer import vector
from fedstream.trainer.loading import load_task
from fedstream.trainer.on_devices import sums_of
from tests.integration.command import TEST_GUARD_S, Command

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

BLOBS = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Blobs(Task):
    devices = 4
    def model(self):
        return torch.nn.Linear(2, 2)
    def device_data(self, device):
        draw = torch.Generator().manual_seed(device)
        y = torch.arange(100) % 2
        return TensorDataset(torch.randn(100, 2, generator=draw) + y[:, None], y)
    def device_test_data(self, device):
        return self.device_data(device + 10) if device else None
task = Blobs()
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run that patience on a metric of devices ends."""
    sets = (
        "evaluator.every=10",
        "evaluator.on_devices.fraction=1.0",
        "run.stop.metric=devices_loss",
        "run.stop.patience=2",
        "run.stop.min_delta=0.01",
    )
    folder = tmp_path_factory.mktemp("devices")
    (folder / "task.py").write_text(BLOBS)
    command = Command(folder, "--versions 20000", "--task task.py:task", sets=sets)
    yield command
    command.clean_up()


def test_devices_alone_measure_a_run_and_end_it(stopped: Command) -> None:
    assert stopped.ended() == 0, stopped.stdout + stopped.stderr
    summary = stopped.summary
    assert summary["why"].startswith("devices_loss not better than ")
    assert summary["metrics"].keys() >= {"devices_accuracy", "devices_loss", "device_mean_loss"}
    assert summary["accuracy"] is None
    assert summary["best"]["devices_loss"]["value"] <= summary["metrics"]["devices_loss"]
    assert (stopped.out / "best.safetensors").exists()
    assert re.search(r"^devices_loss +[0-9]", stopped.stdout, re.MULTILINE)
    measured = [row for row in stopped.rows if row["test_devices_loss"]]
    assert len(measured) >= 3


def test_its_journal_has_what_the_devices_would_measure_again(stopped: Command) -> None:
    """Each recorded sum is that of the replayed version: live and simulated, the same functions."""
    stopped.ended()
    settings = Settings()
    task = load_task(f"{stopped.folder / 'task.py'}:task", settings.task)
    module, models = task.model(), dict[int, Any]()
    found: list[EvaluationEnded] = []
    with Replayer(stopped.out / "journal") as replayer:
        for moment in replayer:
            models[moment.version] = moment.model.copy()
            if isinstance(moment.message, EvaluationEnded):
                found.append(moment.message)
    known = [one for one in found if one.measured in models]
    assert len(known) >= 2
    torch.set_num_threads(1)
    for one in known:
        vector.load(models[one.measured], module)
        sums = [sums_of(task, module, task.device_test_data(d))[1] for d in (1, 2, 3)]  # type: ignore[arg-type]
        assert one.outcomes["measured"] == 3
        assert one.sums["accuracy"] == (
            sum(each["accuracy"][0] for each in sums),
            sum(each["accuracy"][1] for each in sums),
        )
        assert one.sums["loss"][0] == pytest.approx(sum(each["loss"][0] for each in sums))


def test_the_journal_shows_the_evaluations(stopped: Command) -> None:
    stopped.ended()
    chain = segments(stopped.out / "journal")
    shown = [facts(*line) for line in lines(chain, Filter())]
    ended = [one for one in shown if one["kind"] == "evaluation_ended"]
    assert len(ended) >= 3
    assert ended[-1]["metrics"]["devices_loss"] == stopped.summary["metrics"]["devices_loss"]
    for segment in chain:
        segment.close()
