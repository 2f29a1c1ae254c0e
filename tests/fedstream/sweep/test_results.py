"""The table of a sweep, and the file that it is made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.messages import Goal
from fedstream.sweep.results import Ranking, SweepFolder, as_csv, lines
from fedstream.sweep.trials import Configuration, Finished

A, B, C = (Configuration({"solver.lr": lr}, f"lr = {lr}") for lr in (0.1, 0.2, 0.3))


def run(
    of: Configuration, repeat: int, *accuracy: float | None, state: str = "finished"
) -> Finished:
    curve: dict[str, list[float | None]] = {
        "version": [*range(len(accuracy))],
        "updates": [*range(len(accuracy))],
        "accuracy": list(accuracy),
    }
    return Finished(of.name, repeat, repeat, state, "", 4, 4, 40, 1.5, 2.0, curve)


def test_the_best_mean_comes_first() -> None:
    runs = [run(A, 0, 0.5), run(A, 1, 0.7), run(B, 0, 0.9), run(B, 1, 0.5), run(C, 0, 0.65)]
    found = lines([A, B, C], runs, Ranking(), repeats=2)
    assert [line.keys["solver.lr"] for line in found] == [0.2, 0.3, 0.1]
    assert found[0].mean == pytest.approx(0.7)
    assert found[0].deviation == pytest.approx(0.2828427)  # sqrt(2 * 0.2^2 / (2 - 1))
    assert found[1].deviation is None  # of a single run
    lowest = lines([A, B, C], runs, Ranking(goal="min"), repeats=2)
    assert [line.keys["solver.lr"] for line in lowest] == [0.1, 0.3, 0.2]


def test_the_last_measurement_counts_unless_the_best_is_asked_for() -> None:
    runs = [run(A, 0, 0.9, 0.4), run(B, 0, 0.1, 0.5)]
    assert lines([A, B], runs, Ranking(), 1)[0].mean == 0.5
    assert lines([A, B], runs, Ranking(which="best"), 1)[0].mean == 0.9
    assert lines([A, B], runs, Ranking(which="best", goal="min"), 1)[0].mean == 0.1


def test_best_values_and_their_versions_are_told_whatever_counts() -> None:
    runs = [run(A, 0, 0.5, 0.9, 0.9, 0.4), run(A, 1, 0.7, None, 0.3), run(A, 2, 0.1, None)]
    (line,) = lines([A], runs, Ranking(), 3)
    assert line.bests == ((0.9, 1), (0.7, 0))
    assert line.best == ((0.9 + 0.7) / 2, 0.5)
    assert lines([A], runs[2:], Ranking(), 3)[0].best is None


def test_the_main_metric_counts_unless_another_is_asked_for() -> None:
    def measured(of: Configuration, loss: float, **about: Any) -> Finished:
        curve: dict[str, list[float | None]] = {"version": [0], "loss": [loss], "f1": [loss]}
        return replace(run(of, 0), curve=curve, **about)

    runs = [measured(A, 2.0), measured(B, 1.0)]
    assert [line.metric for line in lines([A, B], runs, Ranking(), 1)] == ["f1", "f1"]
    assert lines([A, B], runs, Ranking(), 1)[0].mean == 2.0
    stopping = [replace(one, stop_metric="loss") for one in runs]
    assert lines([A, B], stopping, Ranking(), 1)[0].mean == 1.0
    assert lines([A, B], stopping, Ranking("f1"), 1)[0].mean == 2.0


@pytest.mark.parametrize("lost", [run(A, 1, 0.99, None), run(A, 1, 0.99, state="failed")])
def test_a_configuration_that_failed_once_is_no_better_than_one_that_never_did(
    lost: Finished,
) -> None:
    found = lines([A, B], [run(A, 0, 0.95), lost, run(B, 0, 0.3)], Ranking(which="best"), 2)
    assert [line.keys["solver.lr"] for line in found] == [0.2, 0.1]
    assert [line.failed for line in found] == [0, 1]
    assert found[1].values == (0.95,)


def test_runs_beyond_the_repeats_and_of_other_configurations_do_not_count() -> None:
    runs = [run(A, 0, 0.5), run(A, 1, 0.9), run(C, 0, 0.9)]
    (line,) = lines([A, B], runs, Ranking(), repeats=1)
    assert (line.mean, len(line.runs)) == (0.5, 1)


def test_an_unknown_metric_names_the_ones_there_are() -> None:
    near = r"--metric accuraci: the task measures accuracy.*; did you mean 'accuracy'\?"
    with pytest.raises(ConfigError, match=near):
        lines([A], [run(A, 0, 0.5)], Ranking("accuraci"), 1)
    with pytest.raises(ConfigError, match="--metric f1: the task measures accuracy"):
        lines([A], [run(A, 0, 0.5)], Ranking("f1"), 1)


def test_the_goal_comes_from_the_task_and_is_asked_for_if_nobody_knows_it() -> None:
    def scored(of: Configuration, score: float, goal: Goal | None = None) -> Finished:
        goals: dict[str, Goal] = {"score": goal} if goal else {}
        return replace(run(of, 0), curve={"version": [0], "score": [score]}, goal=goals)

    low = [scored(A, 2.0, "min"), scored(B, 1.0, "min")]
    assert [one.mean for one in lines([A, B], low, Ranking("score"), 1)] == [1.0, 2.0]
    unknown = [scored(A, 2.0), scored(B, 1.0)]
    asked = r'--metric score: .* unknown: set Task\.goal = \{"score": "min"\} or "max", or give --'
    with pytest.raises(ConfigError, match=asked):
        lines([A, B], unknown, Ranking("score"), 1)
    assert lines([A, B], unknown, Ranking("score", "max"), 1)[0].mean == 2.0


def test_the_table_has_a_row_for_each_configuration() -> None:
    found = lines([A, B], [run(A, 0, 0.5), run(B, 0, 0.7), run(B, 1, None)], Ranking(), 2)
    rows = as_csv(found, "accuracy").splitlines()
    assert rows == [
        "place,solver.lr,accuracy,deviation,best,best_version,runs,failed,updates,staleness,seconds,reason,configuration",
        f"1,0.1,0.5,,0.5,0,1,0,4,1.5,2,,{A.name}",
        f"2,0.2,0.7,,0.7,0,2,1,4,1.5,2,the metric is not finite,{B.name}",
    ]


def test_runs_are_read_as_they_were_stored(tmp_path: Path) -> None:
    store, runs = SweepFolder(tmp_path / "out"), [run(A, 0, 0.5, None), run(B, 1, 0.25)]
    store.begin([A, B])
    for one in runs:
        store.add(one)
    assert list(store.runs()) == runs
    assert store.file(A).read_text() == A.text


def test_a_run_whose_writing_was_cut_off_is_run_again(tmp_path: Path) -> None:
    store = SweepFolder(tmp_path)
    store.begin([A])
    store.add(run(A, 0, 0.5))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"configuration": "')
    store.begin([A])
    store.add(run(A, 1, 0.6))
    assert [one.repeat for one in store.runs()] == [0, 1]


def test_a_line_from_elsewhere_is_named(tmp_path: Path) -> None:
    store = SweepFolder(tmp_path)
    store.add(run(A, 0, 0.5))
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write('{"hello": 1}\n')
    with pytest.raises(ConfigError, match=r"runs\.jsonl:2: not a run of a sweep"):
        list(store.runs())
