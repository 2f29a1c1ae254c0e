"""A simulation that was killed continues from its checkpoint, with the same bits."""

from __future__ import annotations

from itertools import accumulate, count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from fedstream.core.errors import ConfigError
from tests.fedstream.simulation.test_simulation import RULES, Small, run

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fedstream.simulation import VersionMade
    from fedstream.trainer.solvers import Trained, Work

VERSIONS, KILLED = 12, 7


class Partly(Small):
    """Two layers, of which devices keep one; one device raises in every third task."""

    local: tuple[str, ...] = ("1.*",)

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)))

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        if work.device == 1 and int(work.task.split("-")[-1]) % 3 == 0:
            raise ValueError("out of order")
        return super().train(model, data, work)


class Killed(Exception):
    """Stands for the end of the process."""


def kill(made: VersionMade, _model: object) -> None:
    if made.version == KILLED:
        raise Killed


ADAPTIVE = ("strategy.alpha=0.05", "strategy.adapt.every=2", "strategy.adapt.least=0.001")
CLOCK = (
    "simulation.staleness.kind=latency",
    "scheduler.policy={kind='in_flight', n=3}",
    "devices.latency={kind='exponential', mean_s=1.0}",
)
PARTLY = ("run.dry_step=false",)
CASES: dict[str, tuple[tuple[str, ...], type[Small]]] = {
    **{name: (keys, Small) for name, keys in RULES.items()},
    "adaptive": (ADAPTIVE, Small),
    "clock": (CLOCK, Small),
    "feedback": (("strategy.name=fedbuff", "wire.update=int4", "wire.model=int8"), Small),
    "local, failing": (("simulation.staleness.most=4", *PARTLY), Partly),
    "rounds, failing": ((*RULES["fedavg"], *PARTLY), Partly),
}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_as_it_would_have(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, task = CASES[case]
    expected = run(*keys, task=task())
    monkeypatch.setattr("fedstream.simulation.engine._SAVE_S", 0.0)
    file, told = tmp_path / "a.checkpoint", list[int]()
    with pytest.raises(Killed):
        run(*keys, task=task(), checkpoint=file, on_version=kill)
    found = run(
        *keys,
        task=task(),
        checkpoint=file,
        on_version=lambda made, _model: told.append(made.version),
    )
    assert told == [*range(KILLED, VERSIONS + 1)]
    assert found.model.digest() == expected.model.digest()
    assert (found.versions, found.steps) == (expected.versions, expected.steps)
    assert (found.given_up, found.update_bytes) == (expected.given_up, expected.update_bytes)
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_a_continued_run_keeps_its_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 was the faster of two steps; where the run goes on, it is the slower."""

    def clock(steps: Iterator[float]) -> None:
        ticks = accumulate(steps)
        monkeypatch.setattr(
            "fedstream.trainer.precision.time", SimpleNamespace(perf_counter=lambda: next(ticks))
        )

    keys = ("solver.precision=bf16",)
    clock(1 / n for n in count(1))
    expected = run(*keys)
    monkeypatch.setattr("fedstream.simulation.engine._SAVE_S", 0.0)
    clock(1 / n for n in count(1))
    with pytest.raises(Killed):
        run(*keys, checkpoint=tmp_path / "a.checkpoint", on_version=kill)
    clock(map(float, count(1)))
    assert run(*keys).precision == "float32"
    found = run(*keys, checkpoint=tmp_path / "a.checkpoint")
    assert (found.precision, found.model.digest()) == ("bf16", expected.model.digest())


def test_a_run_that_stops_early_remembers_its_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two measurements without a better one, of which the first was before the end."""
    keys = (
        "run.versions=100",
        "simulation.evaluate_every=1",
        "run.stop={metric='accuracy', patience=5}",
    )
    expected = run(*keys)
    assert KILLED + 1 < len(expected.versions) < 100
    monkeypatch.setattr("fedstream.simulation.engine._SAVE_S", 0.0)
    file = tmp_path / "a.checkpoint"
    last = expected.versions[-1].version - 2

    def killed(made: VersionMade, _model: object) -> None:
        if made.version == last:
            raise Killed

    with pytest.raises(Killed):
        run(*keys, checkpoint=file, on_version=killed)
    found = run(*keys, checkpoint=file)
    assert (found.why, found.versions) == (expected.why, expected.versions)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.checkpoint"
    file.write_bytes(b"\x80\x05.")
    with pytest.raises(ConfigError, match=r"a\.checkpoint is damaged, or of another release: del"):
        run(checkpoint=file)


def test_no_checkpoint_beside_a_journal(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a simulation with a journal has no checkpoint"):
        run(checkpoint=tmp_path / "a.checkpoint", journal=tmp_path / "journal")
