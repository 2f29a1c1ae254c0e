"""What is drawn from a seed, and what becomes of faults that were played."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.cluster.faults import KINDS, plan, record, recorded, steady, summary
from tests.cluster.stage import told


def test_a_seed_has_a_hundred_faults_in_its_own_order() -> None:
    first, other = plan(1), plan(2)
    assert plan(1) == first
    assert [number for number, _, _ in first] == list(range(100))
    assert Counter(kind for _, kind, _ in first) == {name: k.times for name, k in KINDS.items()}
    assert [kind for _, kind, _ in first] != [kind for _, kind, _ in other]


def test_a_clock_that_was_an_hour_off_makes_no_pause() -> None:
    seen = [(0, 100.0), (1, 102.0), (2, 3703.0), (3, 3704.0), (4, 106.5), (5, -3492.0)]
    assert steady(seen) == ((0, 100.0), (1, 102.0), (2, 103.0), (3, 104.0), (4, 106.5), (5, 108.0))


def test_the_results_grow_and_are_summed_up_by_kind(tmp_path: Path) -> None:
    def row(number: int, kind: str, pause: float, held: str = "yes") -> dict[str, object]:
        known = {"seed": 4, "number": number, "kind": kind, "without_version_s": pause}
        return {**known, "held": held}

    path = tmp_path / "faults.csv"
    record([row(0, "kill", 2.0), row(1, "cut", 7.0)], path)
    record([row(2, "kill", 9.0, "a task lost"), row(3, "kill", 3.0)], path)
    assert [told(one) for one in summary(recorded(path))] == [
        "faults | kill: 3 | 9.0 s | FAILED: seed 4, 2: a task lost | median 3.0 s",
        "faults | cut: 1 | 7.0 s | median 7.0 s; counts and replays hold",
    ]
