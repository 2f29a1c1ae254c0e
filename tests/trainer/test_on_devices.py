"""Metrics that devices measure: who is asked, and what their sums amount to."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import fedstream
from fedstream.core.errors import DataError
from fedstream.core.messages import METRICS, Measured
from fedstream.trainer.goals import Stopping, StopSettings, goal_of, main_metric
from fedstream.trainer.on_devices import (
    Choice,
    Names,
    OnDevicesSettings,
    metrics_over,
    result,
    sums_of,
    totals,
)
from fedstream.trainer.task import IGNORED, Mean, NoLabels, Task, measured


class Scores(Task):
    """A classifier of 60 random rows, some of whose labels don't count."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(60, 4, generator=draw)
        y = torch.randint(0, 3, (60,), generator=draw)
        y[::7] = IGNORED
        self.data = TensorDataset(x, y)

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def device_data(self, device: int) -> Dataset[Any]:
        return self.data


def module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def answer(
    device: int, sums: dict[str, tuple[float, float]] | None = None, **means: tuple[float, float]
) -> Measured:
    return of_site(device, sums or means)


def of_site(device: int, sums: dict[str, tuple[float, float]], *, trusted: bool = True) -> Measured:
    return Measured(
        task=f"t{device}",
        attempt="a",
        device=device,
        trainer="t",
        version=4,
        base="d",
        sums=sums,
        trusted=trusted,
    )


@given(cuts=st.sets(st.integers(1, 59), max_size=8))
def test_devices_that_split_the_rows_count_as_a_central_test_set_does(cuts: set[int]) -> None:
    """Whatever the split: the same hits over the same answers, to the last bit."""
    task, model = Scores(), module()
    edges = [0, *sorted(cuts), 60]
    answers = {}
    for device, (begin, end) in enumerate(pairwise(edges)):
        part = Subset(task.data, range(begin, end))
        if any(part[n][1] != IGNORED for n in range(len(part))):
            answers[device] = answer(device, sums_of(task, model, part)[1])
    whole = sums_of(task, model, task.data)[1]
    found = totals(answers)
    assert found["accuracy"] == whole["accuracy"]
    assert found["loss"][1] == whole["loss"][1]
    assert found["loss"][0] == pytest.approx(whole["loss"][0])
    metrics = metrics_over(found, answers, {})
    assert metrics["devices_accuracy"] == measured(task, model, task.data)["accuracy"]


def test_a_mean_is_a_number_that_knows_its_sum_and_count() -> None:
    mean = fedstream.Mean(3, 4)
    assert (mean, mean.sum, mean.count) == (0.75, 3.0, 4.0)
    copy = pickle.loads(pickle.dumps(mean))  # noqa: S301  (our own)
    assert (copy, copy.sum, copy.count) == (0.75, 3.0, 4.0)
    with pytest.raises(ValueError, match="a count above 0, not 0"):
        Mean(3, 0)


class Own(Scores):
    """Own metrics: a plain number, a mean over other things than rows, and one that is undefined
    on few rows."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        rows = len(data)  # type: ignore[arg-type]
        return {"rmse": 2.0, "per_token": Mean(10, 5), "auc": 0.5 if rows > 1 else math.nan}


def test_own_metrics_are_weighted_by_samples_unless_they_say_how() -> None:
    task, model = Own(), module()
    assert sums_of(task, model, Subset(task.data, range(3))) == (
        3,
        {"rmse": (6.0, 3.0), "per_token": (10.0, 5.0), "auc": (1.5, 3.0)},
    )
    _, found = sums_of(task, model, Subset(task.data, range(1)))
    assert found == {"rmse": (2.0, 1.0), "per_token": (10.0, 5.0)}


def test_metrics_that_cannot_be_sent_are_the_tasks_error() -> None:
    """And data without rows have no metrics, whatever the task makes of them."""

    class Chatty(Scores):
        def __init__(self, names: list[str]) -> None:
            super().__init__()
            self.names = names

        def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
            return dict.fromkeys(self.names, 1.0)

    with pytest.raises(NoLabels, match="no rows"):
        sums_of(Chatty(["loss"]), module(), Subset(Scores().data, []))
    for names in ([f"m{n}" for n in range(METRICS + 1)], ["m" * 201], [""]):
        with pytest.raises(DataError, match=r"metrics\(\) returned \d+ metrics: a device sends"):
            sums_of(Chatty(names), module(), Scores().data)


def test_the_spread_is_over_devices_and_the_mean_over_rows() -> None:
    answers = {2: answer(2, accuracy=(9, 10)), 5: answer(5, accuracy=(1, 2))}
    assert metrics_over(totals(answers), answers, {}) == {
        "devices_accuracy": pytest.approx(10 / 12),
        "device_mean_accuracy": pytest.approx(0.7),
        "device_worst_tenth_accuracy": 0.5,
        "device_deviation_accuracy": pytest.approx(0.2),
    }


def test_what_an_untrusted_device_claims_is_bounded() -> None:
    """Its weight counts as 10 times the median, and its sum in proportion."""
    answers = {n: answer(n, loss=(10.0, 10.0)) for n in range(4)}
    answers[4] = of_site(4, {"loss": (5e9, 1e9)}, trusted=False)
    assert totals(answers)["loss"] == (40.0 + 500.0, 40.0 + 100.0)
    assert totals(answers, most_weight=20.0)["loss"] == (40.0 + 100.0, 40.0 + 20.0)
    answers[4] = answer(4, loss=(5e9, 1e9))
    assert totals(answers)["loss"][1] == 1e9 + 40.0


def test_one_of_two_untrusted_devices_does_not_set_the_limit_of_its_weight() -> None:
    answers = {n: of_site(n, {"loss": (w, w)}, trusted=False) for n, w in ((0, 10.0), (1, 1e12))}
    assert totals(answers)["loss"] == (110.0, 110.0)


def test_the_largest_metrics_that_count_do_not_overflow() -> None:
    answers = {n: of_site(n, {"loss": (1e30, 1e30)}, trusted=False) for n in range(3)}
    answers[3] = of_site(3, {"loss": (1e30, 1.0)}, trusted=False)
    assert all(one.outcome == "measured" for one in answers.values())
    metrics = metrics_over(totals(answers), answers, {})
    assert all(map(math.isfinite, metrics.values()))


def test_devices_cannot_name_metrics_without_limit() -> None:
    """What most devices report comes first, and a run knows 100 names."""
    names = Names()
    honest = [answer(n, loss=(1.0, 1.0)) for n in range(3)]
    forged = answer(3, {f"m{n:03}": (1.0, 1.0) for n in range(METRICS)})
    found = names.of([forged, *honest])
    assert len(found) == METRICS
    assert "loss" in found
    assert "m099" not in found
    again = answer(3, {f"other{n}": (1.0, 1.0) for n in range(METRICS)})
    assert names.of([again, *honest]) == ["loss"]
    answers = {one.device: one for one in [again, *honest]}
    settings = OnDevicesSettings(count=4)
    about: dict[str, Any] = {"evaluation": "e", "version": 4, "base": "d"}
    ended = result(answers, {"measured": 4}, settings, {}, names, **about)
    assert ended.sums == {"loss": (3.0, 3.0)}
    assert ended.metrics.keys() == {
        "devices_loss",
        "device_mean_loss",
        "device_worst_tenth_loss",
        "device_deviation_loss",
    }


def test_the_choice_of_devices_can_be_repeated() -> None:
    settings = OnDevicesSettings(fraction=0.3)
    first = Choice(settings, seed=7).of(range(100), 20)
    assert first == Choice(settings, seed=7).of(range(100), 20) == tuple(sorted(first))
    assert len({*first}) == 30
    assert first != Choice(settings, seed=7).of(range(100), 30)
    assert first != Choice(settings, seed=8).of(range(100), 20)
    assert Choice(OnDevicesSettings(count=5), seed=0).of([4, 9], 0) == (4, 9)
    assert Choice(settings, seed=0).of([4], 0) == (4,)


def test_devices_without_test_data_are_left_out_for_a_while() -> None:
    """Unless no others are there."""
    choice = Choice(OnDevicesSettings(fraction=1.0), seed=0)
    choice.without_data([1, 2])
    assert choice.of([1, 2], 0) == (1, 2)
    assert [choice.of(range(4), version) for version in range(1, 10)] == [(0, 3)] * 9
    assert choice.of(range(4), 10) == (0, 1, 2, 3)


def test_metrics_of_devices_have_the_goals_of_their_names() -> None:
    assert goal_of("devices_loss", {}) == "min"
    assert goal_of("devices_bits", {"bits": "max"}) == "max"
    assert main_metric(["devices_loss", "devices_accuracy"], {}) == "devices_accuracy"
    assert main_metric(["devices_accuracy", "loss", "rmse"], {}) == "rmse"


def test_other_measurements_of_a_version_do_not_count_for_patience() -> None:
    """The evaluator and the devices measure the same versions."""
    stopping = Stopping(StopSettings(metric="devices_loss", patience=2), {})
    for version, loss in enumerate([1.0, 0.5, 0.6]):
        assert stopping.add({"devices_loss": loss}, version) == ""
        assert stopping.add({"accuracy": 0.1}, version) == ""
    assert stopping.add({"devices_loss": 0.7}, 3) == (
        "devices_loss not better than 0.5000 in 2 measurements after version 1, at version 3"
    )
