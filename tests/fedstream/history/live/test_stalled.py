"""Why nothing moves: each cause by itself, and which one is told first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstream.core.messages import Quarantine
from fedstream.core.records import Failing, PrivacyLoss, Quarantines
from fedstream.history.live.snapshot import RedisMemory, Snapshot
from fedstream.history.live.stalled import stalled
from fedstream.settings.config import Settings
from tests.fedstream.history.live.snapshots import (
    NOW,
    ended,
    idle,
    made,
    measurement,
    snapshot,
    tasks,
    worker,
)
from tests.fedstream.views import CREATED


def told(of: Snapshot, **given: Any) -> str:
    found = stalled(of, **given)
    return "" if found is None else found.text


def settings(**tables: Any) -> Settings:
    return Settings.model_validate(tables)


def test_nothing_is_said_while_versions_are_made() -> None:
    assert stalled(snapshot(**tasks({"training": 2}))) is None


def test_patience_is_ten_times_the_usual_time_between_versions() -> None:
    often = made([NOW - 60 - n for n in range(50, 0, -1)])
    seldom = made([NOW - 60 - 30 * n for n in range(5, 0, -1)])
    working = tasks({"training": 1})
    assert told(idle(8, made=often, **working)) == ""
    assert "Stalled for 0:12" in told(idle(12, made=often, **working))
    assert told(idle(280, made=seldom, **working)) == ""


def test_the_first_version_may_take_longer() -> None:
    about = {"made": made([]), "head_version": 0, "trainers": 0}
    assert told(idle(20, run_created=NOW - 20, **about)) == ""
    assert "no trainer is alive" in told(idle(40, run_created=NOW - 40, **about))


def test_redis_is_away() -> None:
    of = snapshot(**tasks({"training": 2}))
    assert stalled(of, away_s=1.0) is None
    said = told(of, away_s=72.0)
    assert said.startswith("Stalled because Redis has not answered for 1:12: all services wait")


def test_a_finished_run_is_no_reason_to_worry() -> None:
    found = stalled(idle(run_state="finished", run_why="version 100 reached", trainers=0))
    assert found is not None
    assert not found.is_wrong
    assert found.text == (
        "Nothing moves any more because the run is finished (version 100 reached)."
    )


def test_redis_is_full() -> None:
    said = told(idle(memory=RedisMemory(255 << 20, 256 << 20), queue=9))
    assert "because Redis is full (100% of 256 MiB)" in said


def test_no_updater_leads() -> None:
    said = told(idle(leading=frozenset(("scheduler",)), queue=9, trainers=0))
    assert "because no updater is active, and 9 updates wait for one" in said
    assert "lease of 5 s" in said


def test_the_updater_is_silent() -> None:
    said = told(idle(queue=1, trainers=0))
    assert "because the updater takes nothing from the queue: 1 update waits (its log" in said


def test_the_queue_is_full() -> None:
    said = told(idle(queue=64, **tasks({"queue": 64})))
    assert "64 updates wait, at its limit of 64, so that no task begins either" in said


def test_no_trainer_is_alive() -> None:
    said = told(idle(trainers=0, workers=(), **tasks({"waiting": 3})))
    assert said == "Stalled for 1:00 because no trainer is alive, and 3 tasks are open."


def test_all_trainers_are_silent() -> None:
    silent = (worker("a", heard_s=9), worker("b", heard_s=7))
    said = told(idle(workers=silent, **tasks({"training": 2})))
    assert "none of the 2 trainers says anything" in said
    assert "b spoke last, 0:07 ago" in said
    assert "leases of 15 s" in said
    one = replace(silent[0], heard=NOW - 1)
    assert "says anything" not in told(idle(workers=(one, silent[1]), **tasks({"training": 2})))


def test_the_only_trainer_is_silent() -> None:
    said = told(idle(trainers=1, workers=(worker("a", heard_s=9),), **tasks({"training": 1})))
    assert "not even the only trainer says anything" in said


def test_no_device_is_at_a_gateway() -> None:
    gateway = worker("gateway-0", is_gateway=True)
    assert "no device is connected to the gateway" in told(idle(trainers=1, workers=(gateway,)))
    busy = replace(gateway, owns=3)
    assert "gateway" not in told(idle(trainers=1, workers=(busy,)))


def test_everything_is_refused() -> None:
    rows = [{"outcome": "refused", "reason": "not finite", "device": n} for n in range(7)]
    rows += [{"outcome": "given_up", "reason": "timed out"}]
    said = told(idle(ended=ended(rows), **tasks({"training": 2})))
    assert "every task that ends is refused: not finite (7 of the last 8)" in said


def test_everything_raises() -> None:
    rows = [{"outcome": "given_up", "reason": "raised ValueError"}] * 3
    said = told(idle(ended=ended(rows), **tasks({"training": 2})))
    assert "every task that ends is given up: raised ValueError (3 of the last 3)" in said


def test_no_scheduler_leads() -> None:
    said = told(idle(leading=frozenset(("updater",))))
    assert "no scheduler is active, so no task begins" in said


def test_all_devices_are_in_quarantine() -> None:
    group = Quarantine(devices=tuple(range(10)), since=CREATED, version=1)
    said = told(idle(head_quarantines=Quarantines(1, (group,))))
    assert "because all 10 devices are in quarantine" in said


def test_devices_without_privacy_budget() -> None:
    spent = PrivacyLoss(opened=9, dropped=0, epsilon=3.0, delta=1e-5, spent=frozenset(range(7)))
    assert "7 devices of 10 have no privacy budget left" in told(idle(head_privacy=spent))


def test_devices_decide() -> None:
    own = settings(scheduler={"policy": {"kind": "none"}}, trainer={"anarchic": {"rate": 1.0}})
    said = told(idle(settings=own, leading=frozenset(("updater",))))
    assert "the devices decide when they train (scheduler.policy none), and none has begun" in said


def test_no_device_is_available() -> None:
    known = {"kind": "on_off", "mean_on_s": 1e-6, "mean_off_s": 1e9}
    said = told(idle(settings=settings(devices={"availability": known})))
    assert "none of the 10 devices is available now (devices.availability)" in said


def test_no_device_works() -> None:
    failing = {device: Failing(4, NOW + 9, "raised OSError") for device in range(10)}
    said = told(idle(failing=failing))
    assert "no device works, and each is asked less and less often: device 0 failed 4" in said
    del failing[9]
    assert "no device works" not in told(idle(failing=failing))


def test_devices_rest() -> None:
    said = told(idle(settings=settings(scheduler={"rest_s": 60.0})))
    assert "devices that had one rest for 60 s (scheduler.rest_s)" in said


def test_nothing_is_open_for_no_known_reason() -> None:
    assert "no device may begin one now (scheduler.policy is in_flight" in told(idle())


@pytest.mark.parametrize(
    ("phase", "said"), [("uploading", "2 answers"), ("triggered", "2 triggers")]
)
def test_no_coordinator_takes_what_waits(phase: Any, said: str) -> None:
    assert f"no coordinator takes what waits for it: {said}" in told(idle(**tasks({phase: 2})))


def test_nobody_takes_tasks_until_a_lease_ends() -> None:
    said = told(idle(**tasks({"waiting": 2})))
    assert "2 tasks wait, and none of the 2 live trainers takes one" in said
    assert "lease of 15 s has run out" in said


def test_a_batch_waits_for_the_rest() -> None:
    own = settings(strategy={"name": "fedbuff", "buffer_size": 10})
    said = told(idle(settings=own, head_held=tuple(range(7)), **tasks({"training": 3}, age=45)))
    assert "a version takes 10 updates and 7 are there; the oldest open task began 0:45 ago" in said


def test_a_round_waits_for_its_slowest() -> None:
    own = settings(strategy={"name": "fedavg", "clients_per_round": 5})
    about = tasks({"training": 2})
    said = told(idle(settings=own, head_held=(1, 2, 3), deadline=NOW + 75, **about))
    assert "the round waits for 2 of 5 answers, for 1:15 at most" in said


def test_training_takes_long() -> None:
    said = told(idle(**tasks({"training": 2}, age=50)))
    assert "2 tasks are still being trained; the oldest open task began 0:50 ago" in said


def test_the_last_version_is_being_measured() -> None:
    about: dict[str, Any] = {
        "head_version": 100,
        "measured": (measurement(90, accuracy=0.9),),
    }
    said = told(idle(**about))
    assert "all 100 versions are made, and the evaluator has not measured the last one" in said
    assert "version 90" in said
    assert stalled(idle(2, **about)) is None
    assert stalled(idle(head_version=100, measured=(measurement(100),))) is None
