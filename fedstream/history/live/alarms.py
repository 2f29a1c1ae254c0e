"""The alerts of `k8s/components/monitoring`, judged by a snapshot: firing, pending or quiet.

Names, thresholds and durations equal those of the manifests; a test compares them. Alerts about
disks, gateways and restarts, which a snapshot doesn't contain, are left to Prometheus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core.messages import OUTCOMES
from fedstream.history.display import duration
from fedstream.history.live.snapshot import Snapshot
from fedstream.terminal import counted
from fedstream.trainer.goals import MOST_RELAPSES, Swings

Severity = Literal["critical", "warning"]
AlarmState = Literal["firing", "pending", "quiet"]
Flags: TypeAlias = npt.NDArray[np.bool_]
Evidence: TypeAlias = tuple[str, Flags]
"""A fault of the present, and whether each row of ``Snapshot.gauged`` had it."""

_MEASURED = 1000  # of the newest measurements are judged at each look
_LEADS = {"scheduler": 1, "updater": 2}


@dataclass(frozen=True)
class AlarmRule:
    """An alert rule of the manifests."""

    name: str
    severity: Severity
    for_s: float  # for which its condition has to hold before it fires
    says: str  # what it watches
    judge: Callable[[Snapshot, AlarmRule], Evidence]
    threshold: float = 0.0  # in the unit of its expression
    over_s: float = 0.0  # the time over which it looks back; 0: the moment
    role: str = ""  # its label, if one name has several rules


@dataclass(frozen=True)
class Alarm:
    """A rule and its state."""

    rule: AlarmRule
    state: AlarmState
    text: str  # what is wrong
    left_s: float = 0.0  # until it fires, while it is pending


def alarms(snapshot: Snapshot) -> list[Alarm]:
    """All rules with their states, firing ones first.

    A condition's duration is known only since the first viewer: an alert that fires in the cluster
    may be pending here.
    """
    found = [_judged(rule, snapshot) for rule in RULES]
    order = ("firing", "pending", "quiet")
    return sorted(found, key=lambda one: (order.index(one.state), one.rule.severity != "critical"))


def _judged(rule: AlarmRule, snapshot: Snapshot) -> Alarm:
    text, holds = rule.judge(snapshot, rule)
    if not len(holds) or not holds[-1]:
        return Alarm(rule, "quiet", "")
    off = np.flatnonzero(~holds)
    since = float(snapshot.gauged["time"][off[-1] + 1 if len(off) else 0])
    left = max(0.0, since + rule.for_s - snapshot.now)
    return Alarm(rule, "pending" if left else "firing", text, left)


def _while_running(snapshot: Snapshot, holds: Flags) -> Flags:
    return holds & (snapshot.tally.run.state == "running")


def _stalled(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    head = snapshot.tally.head.time
    holds = snapshot.gauged["time"] - head > rule.threshold
    text = f"no new version for {duration(max(0.0, snapshot.now - head))}"
    return text, _while_running(snapshot, holds)


def _no_leader(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    holds = (snapshot.gauged["leads"] & _LEADS[rule.role]) == 0
    return f"no {rule.role} leads", _while_running(snapshot, holds)


def _no_trainers(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    rows, tally = snapshot.gauged, snapshot.tally
    holds = (rows["trainers"] == 0) & (rows["open"] - rows["queue"] > rule.threshold)
    open_ = max(0, tally.tasks - tally.admitted)
    text = f"{counted(open_, 'task')} {'is' if open_ == 1 else 'are'} open, no trainer is alive"
    return text, _while_running(snapshot, holds)


def _refusals(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    bad = snapshot.ended["outcome"] == OUTCOMES.index("refused")
    return _share(snapshot, rule, bad, "were refused")


def _task_raises(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    raised = [n for n, name in enumerate(snapshot.reasons) if name.startswith("raised ")]
    bad = (snapshot.ended["outcome"] == OUTCOMES.index("given_up")) & np.isin(
        snapshot.ended["reason"], raised
    )
    return _share(snapshot, rule, bad, "raised in the user's code")


def _share(snapshot: Snapshot, rule: AlarmRule, bad: Flags, what: str) -> Evidence:
    """The share of bad outcomes among the tasks that ended in the last ``rule.over_s`` seconds."""
    times = np.append(snapshot.gauged["time"], snapshot.now)
    ends = snapshot.ended["time"]
    first, last = np.searchsorted(ends, times - rule.over_s), np.searchsorted(ends, times, "right")
    total = last - first
    sums = np.concatenate(([0], np.cumsum(bad)))
    share = (sums[last] - sums[first]) / np.maximum(total, 1)
    over = snapshot.now - float(ends[first[-1]]) if total[-1] else 0.0
    text = f"{share[-1]:.0%} of the {total[-1]:,} tasks that ended in {duration(over)} {what}"
    return text, share[:-1] > rule.threshold


def _metric_swings(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    swings = Swings(snapshot.tally.run.goal)
    measured, most, text = snapshot.measured[-_MEASURED:], [0], ""
    for one in measured:
        swings.add(one.metrics)
        worst = swings.worst
        most.append(worst.times if worst else 0)
        text = str(worst or "")
    times = [snapshot.tally.run.created + one.seconds for one in measured]
    at = np.searchsorted(times, snapshot.gauged["time"], side="right")
    return text, _while_running(snapshot, np.array(most)[at] > rule.threshold)


def _dead_letters(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    holds = snapshot.gauged["dead"] > rule.threshold
    return counted(snapshot.tally.dead, "dead letter"), holds


def _redis_nearly_full(snapshot: Snapshot, rule: AlarmRule) -> Evidence:
    limit = snapshot.memory.limit
    holds = snapshot.gauged["memory"] > (rule.threshold * limit if limit else np.inf)
    return f"Redis uses {snapshot.memory.used / max(1, limit):.0%} of its memory", holds


def _queue_full(snapshot: Snapshot, _rule: AlarmRule) -> Evidence:
    waiting, limit = snapshot.tally.backlog, snapshot.settings.scheduler.max_queue
    return f"{waiting:,} of {limit:,} entries in the queue", snapshot.gauged["queue"] >= limit


RULES = (
    AlarmRule("FedstreamStalled", "critical", 60, "no new version", _stalled, 600),
    AlarmRule(
        "FedstreamNoLeader", "critical", 120, "no scheduler leads", _no_leader, role="scheduler"
    ),
    AlarmRule("FedstreamNoLeader", "critical", 120, "no updater leads", _no_leader, role="updater"),
    AlarmRule(
        "FedstreamNoTrainers", "critical", 300, "tasks wait and no trainer is alive", _no_trainers
    ),
    AlarmRule("FedstreamRefusals", "warning", 300, "many updates are refused", _refusals, 0.1, 600),
    AlarmRule("FedstreamTaskRaises", "warning", 300, "many tasks raise", _task_raises, 0.1, 600),
    AlarmRule(
        "FedstreamMetricSwings",
        "warning",
        60,
        "a metric falls back again and again",
        _metric_swings,
        MOST_RELAPSES,
    ),
    AlarmRule(
        "FedstreamDeadLetters", "warning", 60, "something could not be processed", _dead_letters
    ),
    AlarmRule(
        "FedstreamRedisNearlyFull", "warning", 300, "Redis is nearly full", _redis_nearly_full, 0.9
    ),
    AlarmRule("FedstreamQueueFull", "warning", 600, "the queue is full", _queue_full),
)
"""The rules that a snapshot can judge, in the order of the manifests."""
