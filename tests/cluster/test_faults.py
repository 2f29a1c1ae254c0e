"""What is drawn from a seed, and what becomes of faults that were played."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.faults import COLUMNS, Kind, plan, record


def test_a_seed_has_every_kind_once_in_its_own_order() -> None:
    first, other = (plan(seed, list(Kind)) for seed in (1, 2))
    assert plan(1, list(Kind)) == first != other
    assert sorted(fault.kind for fault in first) == sorted(Kind)
    assert [fault.kind for fault in first] != [fault.kind for fault in other]


def test_the_table_grows_with_the_runs(tmp_path: Path) -> None:
    def row(seed: int, pause: float, held: str) -> list[object]:
        known = {"seed": seed, "kind": "kill", "without_version_s": pause, "held": held}
        return [known.get(name, "") for name in COLUMNS]

    path = tmp_path / "faults.csv"
    record([row(1, 2.0, "yes")], path)
    assert "1 faults in 1 runs: all checks held" in path.with_suffix(".md").read_text()
    record([row(4, 9.0, "no"), row(4, 3.0, "no")], path)
    table = path.with_suffix(".md").read_text()
    assert "3 faults in 2 runs: NOT held: seeds 4" in table
    assert "| kill | 3 | 3.0 | 9.0 | 1 |" in table
