"""A simulation adapts the rule's step as a live run does, and its journal has the changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.core.errors import ConfigError
from fedstream.journal import StepScaled
from fedstream.journal.replay import Replayer
from fedstream.settings.config import read
from fedstream.simulation import SimulationResult, simulate
from tests.fedstream.simulation.test_simulation import Small

FREELY = ("strategy.adapt.every=4", "strategy.adapt.least=0.001", "strategy.alpha=0.05")


def simulated(*sets: str, journal: Path | None = None) -> SimulationResult:
    settings = read(None, ["run.versions=40", "simulation.threads=1", *sets])
    return simulate(settings, Small(), journal=journal)


def scaled(folder: Path) -> list[StepScaled]:
    """The recorded changes; every version has its recorded bits."""
    with Replayer(folder) as replayer:
        return [one.message for one in replayer if isinstance(one.message, StepScaled)]


@pytest.mark.parametrize(
    "rule",
    [
        FREELY,
        ("strategy.name=fedbuff", "strategy.buffer_size=2", *FREELY[:2], "strategy.server_lr=0.05"),
        (
            "strategy.name=fedbuff",
            "scheduler.policy.kind=rounds",
            "strategy.buffer_size=3",
            "strategy.server_lr=0.05",
            *FREELY[:2],
        ),
    ],
    ids=["fedasync", "fedbuff", "rounds"],
)
def test_a_step_that_is_too_short_grows(rule: tuple[str, ...], tmp_path: Path) -> None:
    """The journal replays to the same bits, and another simulation makes the same changes."""
    result = simulated(*rule, journal=tmp_path / "journal")
    found = scaled(tmp_path / "journal")
    assert [(one.at, one.rate) for one in found] == result.steps
    assert result.steps[0] == (8, 0.1)
    assert max(rate for _, rate in result.steps) > 0.2
    assert all(one.at % 4 == 0 and len(one.scores) > 1 for one in found)
    assert simulated(*rule).steps == result.steps


def test_a_run_that_does_not_adapt_has_no_changes(tmp_path: Path) -> None:
    result = simulated("strategy.alpha=0.05", journal=tmp_path / "journal")
    assert result.steps == []
    assert scaled(tmp_path / "journal") == []


def test_what_scores_a_model_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.adapt\.metric: .*speed"):
        simulated("strategy.adapt.metric=speed")
    with pytest.raises(ConfigError, match=r"did you mean 'accuracy'\?$"):
        simulated("strategy.adapt.metric=accuracies")
    with pytest.raises(ConfigError, match=r"journal\.weights = false"):
        simulated(*FREELY, "journal.weights=false")
