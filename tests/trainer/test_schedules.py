"""Learning rates over the versions of a run: the formulas, and that the rate used is recorded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset

from fedstream.core.errors import ConfigError
from fedstream.journal import Taken, segments
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.solvers import Sgd
from tests.trainer.test_own_solver import Small


def shares(*versions: int, **schedule: Any) -> list[float]:
    solver = Sgd.model_validate({"lr": 0.5, "schedule": schedule})
    return [solver.at(tau).lr / 0.5 for tau in versions]


@pytest.mark.parametrize(
    ("schedule", "versions", "expected"),
    [
        ({"kind": "constant"}, (0, 99), (1.0, 1.0)),
        ({"kind": "step", "every": 10, "factor": 0.1}, (0, 9, 10, 25), (1.0, 1.0, 0.1, 0.01)),
        ({"kind": "linear", "versions": 100, "end": 0.2}, (0, 50, 100, 500), (1.0, 0.6, 0.2, 0.2)),
        (
            {"kind": "linear", "versions": 104, "warmup": 4, "end": 0.2},
            (0, 3, 4, 54, 104),
            (0.2, 0.8, 1.0, 0.6, 0.2),
        ),
        (
            {"kind": "cosine", "versions": 100, "end": 0.1},
            (0, 25, 50, 100, 101),
            (1.0, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1, 0.1),
        ),
        ({"kind": "inverse_sqrt"}, (0, 3, 99), (1.0, 0.5, 0.1)),
        ({"kind": "inverse_sqrt", "warmup": 4}, (0, 3, 15), (0.25, 1.0, 0.5)),
    ],
)
def test_known_answers(
    schedule: dict[str, Any], versions: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    assert shares(*versions, **schedule) == pytest.approx(expected)


def test_an_own_function_has_its_parameters_as_keys(tmp_path: Path) -> None:
    program = tmp_path / "mine.py"
    program.write_text(
        "def halving(tau: int, every: int = 10):\n    return 0.5 ** (tau // every)\n"
    )
    kind = f"{program}:halving"
    assert shares(0, 9, 10, 20, kind=kind) == [1.0, 1.0, 0.5, 0.25]
    assert shares(4, kind=kind, every=2) == [0.25]
    program.with_name("zero.py").write_text("def zero(tau: int):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"zero.py:zero'.* above 0; for version 7 it gave 0.0"):
        shares(7, kind=f"{tmp_path}/zero.py:zero")


def test_a_solver_without_a_schedule_is_written_as_before() -> None:
    """The workspace of an interrupted task has it: an earlier release's must go on."""
    assert "schedule" not in Sgd().model_dump_json()
    decayed = Sgd.model_validate({"schedule": {"kind": "step", "every": 1}}).at(1)
    assert decayed == Sgd(lr=0.15)


class Counted(Small):
    """Notes the rate of each task's solver."""

    def __init__(self) -> None:
        self.used: dict[int, float] = {}

    def train(self, model: nn.Module, data: Dataset[Any], work: Any) -> Any:
        self.used[work.version] = work.solver.lr
        return super().train(model, data, work)


def test_the_rate_used_travels_with_the_update(tmp_path: Path) -> None:
    """Of rules that divide by it, too: the journal has the rate of the update's own tau."""
    task = Counted()
    settings = read(
        None,
        [
            "run.versions=12",
            "strategy.name=afa-cd",
            "strategy.buffer_size=2",
            "solver.lr=0.4",
            'solver.schedule={kind="step", every=4}',
        ],
    )
    simulate(settings, task, journal=tmp_path / "journal")
    recorded = {}
    chain = segments(tmp_path / "journal")
    for segment in chain:
        for record in segment.records():
            if isinstance(record.message, Taken):
                recorded[record.message.upload.tau] = record.message.upload.lr
        segment.close()
    wanted = {tau: 0.4 * 0.5 ** (tau // 4) for tau in recorded}
    assert recorded == pytest.approx(wanted)
    assert {0.4, 0.2, 0.1} == {round(rate, 9) for rate in recorded.values()}
    assert {tau: task.used[tau] for tau in recorded} == recorded
