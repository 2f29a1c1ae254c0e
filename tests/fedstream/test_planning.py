"""The arithmetic of `fedstream plan`, with answers that were worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.errors import ConfigError
from fedstream.cli.app import main
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.planning import (
    Fleet,
    Rules,
    StepCosts,
    TaskCost,
    bytes_of,
    forecast,
)

# 86,400 devices with one task a day: one task a second in the mean, two in the busiest hour.
FLEET = Fleet(
    86_400, model_bytes=1_000_000, update_bytes=500_000, online=0.5, tasks_a_day=1.0,
    sessions_a_day=4.0, train_s=100.0, peak=2.0, poll_s=40.0, retry_s=10.0, heartbeat_s=5.0,
)  # fmt: skip
COSTS = StepCosts(
    arrival_ms=10.0, check_in_ms=2.0, beat_ms=1.0, gateway=TaskCost(5.0, 10.0),
    coordinator=TaskCost(1.0), scheduler=TaskCost(2.0), updater=TaskCost(3.0, 4.0),
    redis=TaskCost(1.0, 2.0), task_commands=20.0, check_in_commands=0.5, gateway_mb=100.0,
    device_kb=50.0, registered_bytes=1000.0, models_kept=3, check_in_redis_ms=0.05,
    token_redis_ms=0.1,
)  # fmt: skip
RULES = Rules(full=0.5, devices=20_000, spare=1)


def test_rates_of_the_busiest_hour() -> None:
    found = forecast(FLEET, COSTS, RULES)
    assert found.present == 43_200
    assert found.tasks == 2
    # 200 of those present train; the others check in every 50 s; and each task is a check-in.
    assert found.check_ins == (43_200 - 200) / 50 + 2 == 862
    assert found.heartbeats == 2 * 20
    assert found.arrivals == 8
    assert found.tokens == 43_200 / 480 + 8 == 98


def test_bytes_a_day_are_those_of_the_mean_and_per_second_those_of_the_busiest_hour() -> None:
    found = forecast(FLEET, COSTS, RULES)
    assert (found.down_gb, found.up_gb) == pytest.approx((86.4, 43.2))
    assert (found.down_mbit, found.up_mbit) == pytest.approx((16.0, 8.0))


def test_cores_are_rates_times_costs() -> None:
    found = forecast(FLEET, COSTS, RULES)
    assert found.cores == pytest.approx({
        # 2 tasks of 5 + 1.5 MB * 10, 862 check-ins, 40 heartbeats, 8 arrivals
        "gateway": (2 * 20 + 862 * 2 + 40 * 1 + 8 * 10) / 1000,
        "coordinator": 0.002, "scheduler": 0.004, "updater": 2 * (3 + 6) / 1000,
        # and 98 tokens
        "redis": (2 * (1 + 3) + 862 * 0.05 + 98 * 0.1) / 1000,
    })  # fmt: skip


def test_redis() -> None:
    found = forecast(FLEET, COSTS, RULES)
    assert found.redis_commands == 2 * 20 + 862 * 0.5 + 98 * 3
    # 1,000 bytes a device, three models, and the updates of a second
    assert found.redis_gb == pytest.approx((86_400_000 + 3_000_000 + 2 * 500_000) / 1e9)


def test_replicas_follow_the_scarcer_of_cores_and_places() -> None:
    by_cores = forecast(FLEET, COSTS, RULES)
    assert by_cores.cores["gateway"] / 0.5 == pytest.approx(3.768)
    assert by_cores.replicas == 4 + 1
    assert by_cores.replica_gb == pytest.approx(0.1 + 43_200 / 5 * 50e3 / 1e9)
    by_places = forecast(FLEET, COSTS, replace(RULES, devices=1000))
    assert by_places.replicas == 44 + 1
    assert forecast(replace(FLEET, devices=1), COSTS, RULES).replicas == 1 + 1


def test_new_connections_of_a_gateway_are_those_of_all_without_the_spare_ones() -> None:
    many = replace(FLEET, sessions_a_day=400.0)  # 800 a second, which take 8 of 9.7 cores
    found = forecast(many, COSTS, RULES)
    assert (found.arrivals, found.replicas) == (800, 20 + 1)
    assert found.replica_arrivals == 40


def test_default_rules_are_the_gateways() -> None:
    assert Rules().address_arrivals == GatewaySettings().address_arrivals
    assert Rules().devices == GatewaySettings().devices
    assert Rules().models == GatewaySettings().model_bytes


@pytest.mark.parametrize(("limit", "is_said"), [("1.2", True), ("1.3", False)])
def test_command_says_if_an_address_may_be_refused(
    capsys: pytest.CaptureFixture[str], limit: str, is_said: bool
) -> None:
    words = ["plan", "--devices", "100000", "--per-replica", "10000", "--address-arrivals", limit]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--sessions-a-day", "1.62"])  # 3.75 a second, for three gateways
    assert not ended.value.code
    said = " ".join(capsys.readouterr().out.split())
    assert ("raise gateway.address_arrivals" in said) == is_said
    assert f"{limit} new connections a second from an address" in said


def test_one_run_takes_what_its_updater_and_redis_take_with_one_core_each() -> None:
    found = forecast(FLEET, COSTS, RULES)
    # The updater uses 0.018 of the 0.5 cores that it may.
    assert found.runs == 1
    assert found.most_tasks_a_day == pytest.approx(0.5 / 0.018)
    idle = replace(COSTS, check_in_redis_ms=0.0, token_redis_ms=0.0)
    many = forecast(replace(FLEET, devices=86_400 * 100), idle, RULES)
    assert many.cores["updater"] == pytest.approx(1.8)
    assert many.runs == 4  # 3.6 times as much as one takes
    assert many.most_tasks_a_day == pytest.approx(1 / 3.6)
    slow_redis = replace(idle, redis=TaskCost(18.0))
    assert forecast(FLEET, slow_redis, RULES).most_tasks_a_day == pytest.approx(0.5 / 0.036)


def test_redis_has_less_left_for_tasks_the_more_devices_wait() -> None:
    costs = replace(COSTS, redis=TaskCost(10.0), token_redis_ms=0.0, check_in_redis_ms=0.29)
    # 862 check-ins take 0.25 of the 0.5 cores; the two tasks take 0.02.
    found = forecast(FLEET, costs, RULES)
    assert found.most_tasks_a_day == pytest.approx((0.5 - 0.24998) / 0.02)
    assert found.runs == 1
    full = forecast(FLEET, replace(costs, check_in_redis_ms=1.0), RULES)
    assert full.most_tasks_a_day == 0
    assert full.runs == 2


def test_changes_spare_bytes_if_the_gateway_still_has_a_devices_model() -> None:
    # 86,400 tasks, and half as many versions, until it is a device's turn again; 43,200 models fit.
    rules = replace(RULES, models=43_200 * 1_000_000)
    fleet = replace(FLEET, changes=0.6, batch=2.0)
    known = 1 - math.exp(-1)
    found = forecast(fleet, replace(COSTS, changes_ms_per_mb=3.0), rules)
    assert found.changes == pytest.approx(known)
    assert found.down_gb == pytest.approx(86.4 * (1 - 0.4 * known))
    assert found.up_gb == pytest.approx(43.2)
    without = forecast(FLEET, COSTS, RULES)
    assert without.changes == 0
    # Two tasks a second: changes of a MB are made, and 0.4 MB of it need not be sent.
    more_ms = 2 * known * (3.0 - 0.4 * 10.0)
    assert found.cores["gateway"] == pytest.approx(without.cores["gateway"] + more_ms / 1000)
    assert found.cores["updater"] == without.cores["updater"]


def test_large_models_and_many_devices_leave_little_to_changes() -> None:
    fleet = replace(FLEET, changes=0.6)
    shares = [
        forecast(replace(fleet, **more), COSTS, RULES).changes
        for more in ({}, {"devices": 8_640_000}, {"model_bytes": 300 << 20})
    ]
    assert shares == pytest.approx([268 / 86_400, 268 / 8_640_000, 0.0], rel=0.01)


def test_a_fleet_without_tasks_only_checks_in() -> None:
    found = forecast(replace(FLEET, tasks_a_day=0.0), COSTS, RULES)
    assert (found.tasks, found.up_gb, found.heartbeats) == (0, 0, 0)
    assert found.check_ins == 43_200 / 50
    assert found.most_tasks_a_day == float("inf")


@pytest.mark.parametrize(
    ("name", "size"), [("f32", 4000), ("bf16", 2000), ("int8", 1000 + 4 * 4), ("int4", 500 + 4 * 4)]
)
def test_bytes_of_a_model(name: str, size: int) -> None:
    assert bytes_of(1000, name) == size


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"online": 0.0}, "--online 0: must be above 0"),
        ({"online": 1.5}, "at most 1"),
        ({"peak": 0.5}, "--peak 0.5"),
        ({"changes": 0.0}, "--changes 0: must be above 0 and at most 1"),
        ({"changes": 1.2}, "--changes 1.2"),
        ({"batch": 0.5}, "--batch 0.5: a version takes at least one update"),
        ({"devices": 0}, "devices: must be above 0"),
        ({"train_s": -1.0}, "--train-s: must not be below 0"),
        ({"tasks_a_day": 500.0}, "would train 58% of the time and be present 50%"),
    ],
)
def test_fleets_that_cannot_be_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        replace(FLEET, **wrong)


RESULTS: dict[str, Any] = {
    # A MB both ways, and twenty check-ins a second.
    "asked": {"devices": 1000, "parameters": 125_000, "poll_s": 45.0, "pause_s": 5.0},
    "found": {
        "empty": {
            "memory_mb": 100.0, "share": {"gateway": 0.01, "redis": 0.02},
            "commands_per_s": 100.0, "redis_memory": 1e6,
        },
        "arrivals": {"ms": {"gateway": 6.0}},
        "idle": {
            "memory_mb": 140.0, "share": {"gateway": 0.05, "redis": 0.015},
            "commands_per_s": 130.0, "redis_memory": 3e6,
        },
        "work": {
            "per_s": 50.0,
            "ms": {"gateway": 9.0, "coordinator": 1.0, "scheduler": 1.0, "updater": 4.0,
                   "redis": 0.1, "load": 3.0},
            "commands": 25.0,
        },
    },
}  # fmt: skip


def test_costs_come_from_a_measurement() -> None:
    found, base = StepCosts.measured(RESULTS), StepCosts()
    assert found.arrival_ms == 6.0
    assert found.check_in_ms == found.beat_ms == pytest.approx(2.0)
    # Waiting devices took 0.05 of a core beside 50 tasks a second.
    per_mb = base.gateway.ms_per_mb
    assert found.gateway.ms == pytest.approx(9.0 - 1.0 - per_mb)
    assert found.gateway.ms_per_mb == per_mb
    assert found.updater == TaskCost(4.0 - base.updater.ms_per_mb, base.updater.ms_per_mb)
    assert (found.redis.ms, found.check_in_redis_ms) == (0.0, 0.0), "not less than nothing"
    assert (found.task_commands, found.check_in_commands) == (25.0, 1.5)
    assert (found.gateway_mb, found.device_kb, found.registered_bytes) == (100.0, 40.0, 2000.0)


def test_command_takes_measured_costs_and_refuses_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs"
    file.write_text(json.dumps(RESULTS))
    words = ["plan", "--devices", "1000", "--costs", str(file), "--json"]
    with pytest.raises(SystemExit):
        main(words)
    told = json.loads(capsys.readouterr().out)
    assert told["costs"]["arrival_ms"] == 6.0
    assert told["forecast"]["replicas"] == 2
    for text in ("{", "[]", '{"found": {}}'):
        file.write_text(text)
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "--costs" in capsys.readouterr().err or text == '{"found": {}}'
