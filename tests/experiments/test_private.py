"""Results of private runs are kept, and shown beside what they are compared with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import private
from experiments.private import LiveRow


def test_table_and_picture_are_of_the_kept_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "RESULTS", tmp_path)
    plain = LiveRow("plain", 0, 0.95, 0.97, 0.96, 150, 750, 0, 0, 0, None, 9.0, 83.3, "intact", "c")
    for seed, lost in enumerate((0.01, 0.03)):
        private.add(replace(plain, cell="private", seed=seed, last=0.95 - lost, participations=31))
        private.add(replace(plain, seed=seed))
    audit = private.AUDITS[2.0]
    private.add(replace(plain, cell=audit.name, epsilon=3.19))
    rng = np.random.default_rng(0)
    for seed in range(2):
        sent, unsent = 0.7 + rng.standard_normal(200), rng.standard_normal(1_000)
        private.keep_scores(audit, seed, sent, unsent)
    private.show()
    table = (tmp_path / private.TABLE).read_text()
    assert "- private against plain, seed by seed: last -0.0200 ± 0.0141, best +0.0000" in table
    assert (
        "| private | 2 | 0.9300 ± 0.0141 | 0.9700 ± 0.0000 | 0.9600 ± 0.0000 | 31 | none |" in table
    )
    (row,) = (line.split(" | ") for line in table.splitlines() if line.startswith("| 2 | 400 |"))
    assert float(row[5].partition(" ")[0]) == pytest.approx(2.94, rel=0.25)
    assert row[6:] == ["2.94", "3.19 |"]
    assert (tmp_path / private.PICTURE).stat().st_size > 1_000


def test_a_cell_is_a_command() -> None:
    assert private.CROWD.words[:5] == [
        "--private", "--devices-over-http", "100", "--set", 'strategy.name="fedbuff"',
    ]  # fmt: skip
