"""Which end of a metric is good, and how often a metric lost what it had gained."""

from __future__ import annotations

import math
import random
from math import inf, nan
from typing import Any

import pytest
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import ConfigError
from fedstream.trainer.goals import (
    MOST_RELAPSES,
    Goals,
    Stopping,
    StopSettings,
    Swings,
    goal_of,
    main_metric,
    ordered,
    reaches,
)
from fedstream.trainer.task import Task, declared_goals


@pytest.mark.parametrize(
    ("metric", "goal"),
    [
        *(
            (name, "min")
            for name in (
                "rmse",
                "mae",
                "wer",
                "loss_test",
                "Val Loss",
                "test/MSE",
                "word_error_rate",
                "device_worst_tenth_rmse",
                "device_deviation_accuracy",
            )
        ),
        *(
            (name, "max")
            for name in (
                "accuracy",
                "top5_accuracy",
                "f1_macro",
                "mean_iou",
                "r2",
                "device_mean_accuracy",
                "device_worst_tenth_auc",
                "devices_accuracy",
            )
        ),
        *(
            (name, None)
            for name in (
                "closs",
                "error_free_rate",
                "score",
                "test",
                "",
                "device_worst_tenth_score",
            )
        ),
    ],
)
def test_a_goal_is_known_by_the_whole_name_or_not_at_all(metric: str, goal: str | None) -> None:
    assert goal_of(metric, {}) == goal


def test_what_the_task_declares_goes_first() -> None:
    declared = declared_goals(Declaring({"score": "min", "loss": "max"}))
    found = [goal_of(name, declared) for name in ("score", "device_mean_score", "loss", "rmse")]
    assert found == ["min", "min", "max", "min"]


class Declaring(Task):
    def __init__(self, goal: object) -> None:
        self.goal = goal  # type: ignore[assignment]

    def model(self) -> nn.Module:
        raise NotImplementedError

    def device_data(self, device: int) -> TensorDataset:
        raise NotImplementedError


@pytest.mark.parametrize("goal", ["min", {"rmse": "low"}, {3: "min"}, {"rmse": ["min"]}])
def test_a_wrong_declaration_is_refused(goal: object) -> None:
    with pytest.raises(ConfigError, match=r"^Task\.goal = .*'min' or 'max', such as"):
        declared_goals(Declaring(goal))


def test_a_target_is_reached_from_the_right_side() -> None:
    assert [reaches(value, 2.0, "min") for value in (1.0, 2.0, 3.0, math.nan)] == [
        True,
        True,
        False,
        False,
    ]
    assert [reaches(value, 2.0, "max") for value in (1.0, 2.0, 3.0)] == [False, True, True]


def test_the_main_metric_does_not_depend_on_the_order() -> None:
    for names in (["loss", "rmse", "device_mean_accuracy", "mae"], ["mae", "rmse", "loss"]):
        assert main_metric(names, {}) == "mae"
    assert main_metric(["f1", "loss", "accuracy"], {}) == "accuracy"
    assert [main_metric(names, {}) for names in (["loss"], [])] == ["loss", None]


def test_metrics_of_the_test_data_come_before_those_over_devices() -> None:
    names = ["device_deviation_f1", "devices_f1", "f1", "loss", "bits", "devices_f1"]
    over = ["devices_f1", "device_deviation_f1"]
    assert ordered(names, {}) == ("f1", "loss", "bits", *over)
    assert ordered(names, {}, "devices_f1") == ("devices_f1", "loss", "f1", "bits", over[1])


def test_the_main_metric_has_a_goal_if_any_has() -> None:
    assert main_metric(["bits", "rmse", "loss"], {}) == "rmse"
    assert main_metric(["bits", "rmse"], {"bits": "min"}) == "bits"
    assert main_metric(["bits", "loss"], {}) == "bits"


@pytest.mark.parametrize(
    ("measured", "main"),
    [
        (["device_worst_tenth_f1", "device_mean_accuracy", "devices_f1", "loss"], "loss"),
        (["device_mean_accuracy", "devices_loss", "devices_f1"], "devices_f1"),
        (["device_mean_loss", "device_mean_accuracy", "device_mean_auc"], "device_mean_accuracy"),
        (["device_deviation_accuracy", "device_worst_tenth_accuracy"], None),
    ],
)
def test_metrics_over_devices_are_the_main_one_only_without_central_ones(
    measured: list[str], main: str | None
) -> None:
    assert main_metric(measured, {}) == main


def test_the_metric_that_stops_the_run_is_the_main_one() -> None:
    measured = ["accuracy", "loss", "device_worst_tenth_accuracy"]
    for stop in ("loss", "device_worst_tenth_accuracy"):
        assert main_metric(measured, {}, stop) == stop
    assert main_metric(measured, {}, "rmse") == "accuracy"  # not measured


def relapses(metric: str, *values: float, goal: Goals | None = None) -> int | None:
    swings = Swings(goal or {"score": "min"})
    for value in values:
        swings.add({metric: value, "device_mean_accuracy": value})
    assert swings.keys() <= {metric}
    return swings[metric].times if swings else None


def test_the_worst_swing_says_over_how_many_measurements() -> None:
    swings = Swings({})
    assert swings.worst is None
    for number in range(25):
        swings.add({"loss": 1.0, "rmse": 9.0 if number % 10 == 9 else 1.0, "heard": 9.0})
        if number == 9:
            assert swings.worst == ("rmse", 1, 10)
    assert swings.worst == ("rmse", 2, 20)


def test_relapses_are_counted_on_the_side_that_is_bad() -> None:
    swinging = (0.1, 0.95, 0.0, 0.0, 0.94, 0.3, 0.95)
    assert relapses("accuracy", *swinging) == 2
    assert relapses("rmse", *(6 - 5 * value for value in swinging)) == 2
    assert relapses("rmse", *swinging) == 3  # 0.1 is good, 0.95 is lost, 0 is best
    assert relapses("score", 3.0, 1.0, 3.0) == 1
    assert relapses("unheard_of", *swinging) is None


def test_noise_and_progress_are_no_relapses() -> None:
    assert relapses("accuracy", *(0.10, 0.13, 0.09, 0.12, 0.08) * 3) == 0
    assert relapses("loss", 2.3, 0.5, 0.1, 0.02, 0.09, 0.01, 0.3, 0.02) == 0
    assert relapses("accuracy", *(n / 50 for n in range(50))) == 0


def test_independent_draws_at_chance_level_are_no_swing() -> None:
    draw = random.Random(1)
    for _ in range(200):
        swings = Swings({})
        for _ in range(20):
            hits = sum(draw.random() < 0.1 for _ in range(300))
            swings.add({"accuracy": hits / 300})
            assert swings["accuracy"].times <= MOST_RELAPSES


def test_one_huge_value_hides_no_swing() -> None:
    assert relapses("score", 1e6, 0.1, 3.0, 0.1, 3.0) == 2
    assert relapses("accuracy", 0.95, 0.0, 0.95, 0.0) == 2


def test_what_is_not_a_number_is_lost_once_there_was_one() -> None:
    assert relapses("loss", math.nan, 1.0, math.inf, math.nan, 1.0, math.nan) == 2
    assert relapses("loss", math.nan, math.nan) == 0


def test_old_relapses_are_forgotten() -> None:
    assert relapses("accuracy", 0.9, 0.0, 0.9, 0.0, *[0.9] * 16) == 2
    assert relapses("accuracy", 0.9, 0.0, 0.9, 0.0, *[0.9] * 19) == 0


# run.stop


def stopped(values: list[float], **settings: Any) -> int | None:
    """The place of the measurement that ends the run; None: none does."""
    stopping = Stopping(StopSettings(**settings), {"bits": "min"})
    metric = settings.get("metric", "accuracy")
    for n, value in enumerate(values):
        if stopping.add({metric: value, "other": 0.0}, 10 * n):
            return n
    return None


@pytest.mark.parametrize(
    ("values", "settings", "ends"),
    [
        ([0.1, 0.5, 0.9], {"target": 0.5}, 1),
        ([0.1, nan, 0.4], {"target": 0.5}, None),
        ([3.0, 2.0, 1.0], {"metric": "loss", "target": 2.0}, 1),
        ([3.0, 2.0, 1.0], {"metric": "bits", "target": 2.0}, 1),
        ([0.1, 0.5, 0.5, 0.4, 0.9], {"patience": 2}, 3),
        ([0.1, 0.5, 0.4, 0.6, 0.5, 0.5], {"patience": 2}, 5),
        ([0.1, 0.5, 0.505, 0.509], {"patience": 2, "min_delta": 0.01}, 3),
        ([1.0, 0.5, 0.495, 0.491], {"metric": "loss", "patience": 2, "min_delta": 0.01}, 3),
        ([nan, 0.5, nan, inf], {"patience": 2}, 3),
        ([nan, inf, 0.5], {"patience": 2}, 1),
        ([0.5, 0.4, 0.4, 0.6], {"patience": 9, "target": 0.6}, 3),
    ],
)
def test_a_run_stops_at_its_target_or_when_patience_ends(
    values: list[float], settings: dict[str, Any], ends: int | None
) -> None:
    assert stopped(values, **settings) == ends


def test_why_a_run_stops_is_known_before_the_measurement_counts() -> None:
    stopping = Stopping(StopSettings(patience=1), {})
    assert stopping.add({"accuracy": 0.5}, 10) == ""
    why = "accuracy not better than 0.5000 in 1 measurements after version 10, at version 20"
    assert [stopping.why({"accuracy": 0.4}, 20), stopping.add({"accuracy": 0.4}, 20)] == [why, why]
    assert stopping.add({"loss": 0.4}, 30) == ""  # not measured: nothing to decide by


def test_a_measurement_that_comes_again_counts_once() -> None:
    stopping = Stopping(StopSettings(patience=2), {})
    assert [stopping.add({"accuracy": 0.5}, 10) for _ in range(3)] == ["", "", ""]
    assert [stopping.add({"accuracy": 0.4}, 20) for _ in range(3)] == ["", "", ""]
    assert stopping.add({"accuracy": 0.4}, 30)


def test_a_metric_without_a_goal_cannot_stop_a_run() -> None:
    with pytest.raises(ConfigError, match=r"run\.stop\.metric: whether a low or a high odd is"):
        Stopping(StopSettings(metric="odd", target=1.0), {})
