"""Where tasks are, and what holds them up."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.history.live.flow import flow
from fedstream.settings.config import Settings
from tests.fedstream.history.live.snapshots import NOW, gauged, snapshot, tasks


def test_each_place_has_its_count_and_what_passes_it() -> None:
    wave = np.arange(60)
    seen = gauged(issued=4 * wave, decided=3.5 * wave, version=1.5 * wave)
    phases = {"triggered": 1, "waiting": 2, "training": 3, "uploading": 4, "queue": 5}
    found = flow(snapshot(gauged=seen, queue=5, head_held=(7, 8), **tasks(phases)))  # type: ignore[arg-type]
    assert [(one.name, one.count, one.rate) for one in found.stages] == [
        ("triggers", 1, 4.0),
        ("waiting", 2, None),
        ("training", 3, None),
        ("uploads", 4, None),
        ("queue", 5, 3.5),
        ("updater", 2, 1.5),
    ]


def test_rates_are_left_out_until_they_are_known() -> None:
    assert {one.rate for one in flow(snapshot(gauged=gauged(seconds=1))).stages} == {None}


@pytest.mark.parametrize(
    ("seen", "place", "said"),
    [
        ({"open": 12, "training": 4}, "waiting", "The trainers are the bottleneck: 8.0 tasks on"),
        ({"open": 12, "training": 2, "queue": 10}, "queue", "The updater is the bottleneck: 10.0"),
        ({"open": 9, "training": 2, "uploading": 7}, "uploads", "The coordinators are the"),
        ({"open": 9, "training": 2, "triggers": 7}, "triggers", "The coordinators are the"),
    ],
)
def test_the_bottleneck_is_where_tasks_wait(seen: dict[str, int], place: str, said: str) -> None:
    found = flow(snapshot(gauged=gauged(**seen)))
    assert found.bottleneck == place
    assert found.text.startswith(said)


def test_it_counts_over_the_last_seconds_not_at_one_moment() -> None:
    open_ = np.array([12] * 59 + [4])  # nothing waits just now
    assert flow(snapshot(gauged=gauged(open=open_))).bottleneck == "waiting"
    long_ago = np.array([12] * 30 + [4] * 30)
    assert flow(snapshot(gauged=gauged(open=long_ago))).bottleneck is None


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_it_waits_for_three_looks(looks: int) -> None:
    """One often falls between two batches."""
    found = flow(snapshot(gauged=gauged(seconds=looks, open=12), **tasks({"waiting": 8})))
    assert (found.bottleneck, found.text) == (
        None,
        "What holds the tasks up is told after three looks.",
    )
    assert flow(snapshot(gauged=gauged(seconds=3, open=12))).bottleneck == "waiting"


def test_looks_that_are_far_apart_count_all_three() -> None:
    rows = gauged(seconds=3, open=np.array([22, 4, 4]))
    rows["time"] = NOW - np.array([20.0, 10.0, 0.0])
    assert (
        "6.0 tasks on average waited for them over the last 20 s"
        in flow(snapshot(gauged=rows)).text
    )


def test_if_nothing_waits_training_takes_the_time() -> None:
    found = flow(snapshot(**tasks({"training": 4})))
    assert found.bottleneck == "training"
    assert "More tasks in flight" in found.text


def test_a_round_waits_for_its_devices() -> None:
    own = Settings.model_validate({"strategy": {"name": "fedavg"}})
    found = flow(snapshot(settings=own, **tasks({"training": 1})))
    assert "the round waits for 1 device that still trains" in found.text


def test_the_scheduler_may_hold_back() -> None:
    own = Settings.model_validate({"scheduler": {"target_staleness": 2.0}})
    found = flow(snapshot(settings=own, head_mean_staleness=2.5, **tasks({"training": 1})))
    assert "The scheduler holds back: updates are 2.50 versions late on average" in found.text


def test_an_idle_and_a_finished_run_have_none() -> None:
    assert "too little is going on" in flow(snapshot(gauged=gauged(open=0, training=0))).text
    assert flow(snapshot(run_state="finished")).text == "The run is finished."
