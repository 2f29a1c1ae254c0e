"""What a run that goes on knows of what was before."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.history import report
from fedstream.history.measurements import recall
from fedstream.history.timeline import History
from fedstream.strategies import FedAvgSettings
from tests.journals import Scribe


@pytest.mark.parametrize("rule", [None, FedAvgSettings(clients_per_round=2)])
def test_versions_come_from_the_journal_and_measurements_from_the_table(
    rule: FedAvgSettings | None, tmp_path: Path
) -> None:
    scribe = Scribe(tmp_path / "journal", rule)
    for n in range(6):
        scribe.update(n)
        if n == 2:
            scribe.refuse()
            scribe.segment()
    scribe.close()
    history = History()
    recall(history, tmp_path / "journal", tmp_path / report.METRICS)
    assert list(history.versions) == list(range(scribe.version + 1))
    assert [u.device for made in history.versions.values() for u in made.updates] == [*range(6)]
    assert history.measured is None
    history.measure(1, {"accuracy": 0.75, "loss": 0.5, "f1": 0.25})
    history.measure(2, {"accuracy": 0.5, "loss": 1.5})
    history.measure(99, {"accuracy": 1.0})  # the journal does not have it
    history.recall(99, history.versions[1])
    report.Table(tmp_path, created=1.0).write(history)
    again = History()
    recall(again, tmp_path / "journal", tmp_path / report.METRICS)
    assert again.evaluations == {
        1: {"accuracy": 0.75, "loss": 0.5, "f1": 0.25},
        2: {"accuracy": 0.5, "loss": 1.5},
    }
    assert again.best["accuracy"] == (1, 0.75)
    assert again.measured == (2, {"accuracy": 0.5, "loss": 1.5})
