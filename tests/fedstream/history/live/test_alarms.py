"""The alerts on the page are those of the manifests, and fire when they would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fedstream.history.live.alarms import RULES, Alarm, AlarmRule, alarms
from fedstream.history.live.snapshot import RedisMemory, Snapshot
from fedstream.history.measurements import Measurement
from tests.fedstream.history.live.snapshots import (
    NOW,
    ended,
    gauged,
    idle,
    measurement,
    snapshot,
)
from tests.fedstream.views import CREATED

ROOT = Path(__file__).parents[4]
MANIFEST = ROOT / "k8s" / "components" / "monitoring" / "alerts.yaml"
GROUPS = yaml.safe_load(MANIFEST.read_text())["spec"]["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]
SECONDS = {"s": 1, "m": 60}


def seconds(text: str) -> float:
    return float(text[:-1]) * SECONDS[text[-1]]


def key(rule: AlarmRule) -> str:
    return f"{rule.name} {rule.role}".strip()


JUDGED = [
    (one, one["labels"].get("role", ""))
    for one in ALERTS
    if (one["alert"], one["labels"].get("role", "")) in {(rule.name, rule.role) for rule in RULES}
]


def test_the_same_alerts_in_the_same_order() -> None:
    ours = [(rule.name, rule.role, rule.severity, rule.for_s) for rule in RULES]
    assert ours == [
        (one["alert"], role, one["labels"]["severity"], seconds(one.get("for", "0s")))
        for one, role in JUDGED
    ]


@pytest.mark.parametrize("place", range(len(RULES)), ids=map(key, RULES))
def test_the_same_thresholds_and_times(place: int) -> None:
    rule, expression = RULES[place], JUDGED[place][0]["expr"]
    windows = {seconds(found) for found in re.findall(r"\[(\d+[sm])\]", expression)}
    assert windows == ({rule.over_s} if rule.over_s else set())
    numbers = {float(found) for found in re.findall(r"> ([\d.]+)", expression)}
    if "_max_bytes" in expression:
        numbers.discard(0.0)  # a limit there has to be
    assert numbers == ({rule.threshold} if numbers else set())


def of(moment: Snapshot, name: str) -> Alarm:
    (found,) = (one for one in alarms(moment) if key(one.rule) == name)
    return found


def test_a_healthy_run_is_quiet() -> None:
    assert {one.state for one in alarms(snapshot())} == {"quiet"}


LONG = gauged(seconds=1000)


def measured(metric: str, *values: float) -> tuple[Measurement, ...]:
    """Measurements until two minutes ago, a second apart."""
    began = NOW - 120 - len(values)
    return tuple(
        measurement(n, began - CREATED + n, **{metric: value}) for n, value in enumerate(values)
    )


CASES: list[tuple[str, dict[str, Any], str]] = [
    ("FedstreamStalled", {"head_time": NOW - 700, "gauged": LONG}, "no new version for 11:40"),
    ("FedstreamNoLeader scheduler", {"gauged": gauged(seconds=130, leads=2)}, "no scheduler leads"),
    ("FedstreamNoLeader updater", {"gauged": gauged(seconds=130, leads=1)}, "no updater leads"),
    (
        "FedstreamNoTrainers",
        {"gauged": gauged(seconds=310, trainers=0), "trainers": 0, "open_tasks": 4},
        "4 tasks are open, no trainer is alive",
    ),
    (
        "FedstreamRefusals",
        {
            "gauged": LONG,
            "ended": ended(
                {"time": NOW - 400 + n, "outcome": "refused" if n % 5 == 0 else "applied"}
                for n in range(400)
            ),
        },
        "20% of the 400 tasks that ended in 6:40 were refused",
    ),
    (
        "FedstreamTaskRaises",
        {
            "gauged": LONG,
            "ended": ended(
                {"time": NOW - 400 + n, "outcome": "given_up", "reason": "raised ValueError"}
                for n in range(400)
            ),
        },
        "100% of the 400 tasks that ended in 6:40 raised in the user's code",
    ),
    (
        "FedstreamMetricSwings",
        {"gauged": LONG, "measured": measured("error", 0.0, 0.9, 0.1, 0.9, 0.2, 0.8, 0.1)},
        "error fell back 3 times in 7 measurements",
    ),
    ("FedstreamDeadLetters", {"gauged": gauged(seconds=70, dead=2), "dead": 2}, "2 dead letters"),
    (
        "FedstreamRedisNearlyFull",
        {
            "gauged": gauged(seconds=310, memory=95 << 20),
            "memory": RedisMemory(95 << 20, 100 << 20),
        },
        "Redis uses 95% of its memory",
    ),
    (
        "FedstreamQueueFull",
        {"gauged": gauged(seconds=610, queue=64), "queue": 64},
        "64 of 64 entries in the queue",
    ),
]


def test_a_metric_that_nobody_knows_is_not_watched_unless_the_task_declares_it() -> None:
    about: dict[str, Any] = {"gauged": LONG, "measured": measured("odd", 0, 9, 0, 9, 0, 9)}
    assert of(snapshot(**about), "FedstreamMetricSwings").state == "quiet"
    declared = snapshot(**about, run_goal={"odd": "max"})
    assert of(declared, "FedstreamMetricSwings").text.startswith("odd fell back 2 times")


@pytest.mark.parametrize(("name", "about", "said"), CASES, ids=[name for name, *_ in CASES])
def test_it_fires_when_its_condition_has_held(name: str, about: dict[str, Any], said: str) -> None:
    found = of(snapshot(**about), name)
    assert (found.state, found.text) == ("firing", said)
    short = snapshot(**about | {"gauged": about["gauged"][-5:]})
    waiting = of(short, name)
    assert waiting.state == "pending"
    assert waiting.left_s == pytest.approx(found.rule.for_s - 4)


def test_it_counts_from_when_the_condition_held_without_a_break() -> None:
    queue = np.array([64] * 400 + [3] + [64] * 300)
    found = of(snapshot(gauged=gauged(seconds=701, queue=queue), queue=64), "FedstreamQueueFull")
    assert found.state == "pending"
    assert found.left_s == pytest.approx(600 - 299)


def test_a_finished_run_does_not_stall() -> None:
    over = idle(900, run_state="finished", gauged=gauged(seconds=1000, leads=0, trainers=0))
    assert {one.state for one in alarms(over)} == {"quiet"}


def test_what_fires_comes_first_and_the_critical_of_it() -> None:
    about = {"gauged": gauged(seconds=1000, dead=1, leads=0), "dead": 1}
    found = [(key(one.rule), one.state) for one in alarms(snapshot(**about))][:3]
    assert found == [
        ("FedstreamNoLeader scheduler", "firing"),
        ("FedstreamNoLeader updater", "firing"),
        ("FedstreamDeadLetters", "firing"),
    ]


def test_each_has_a_part_in_the_docs() -> None:
    text = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    assert all(f"\n## {rule.name}\n" in text for rule in RULES)
