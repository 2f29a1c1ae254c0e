"""The index of open tasks says what going through all of them says."""

from __future__ import annotations

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fedstream.coordinator.open_tasks import OpenTasks
from fedstream.core.messages import Trigger

TIMES = st.sampled_from([0.0, 1.0, 2.0, 3.0])
TRIGGERS = st.builds(
    Trigger,
    task=st.sampled_from("abcdef"),
    device=st.integers(0, 2),
    seed=st.just(0),
    version=st.none() | st.integers(0, 2),
    deadline=st.none() | TIMES,
)
STEPS = st.lists(st.tuples(TRIGGERS, TIMES) | st.sampled_from("abcdef"), max_size=15)


@given(STEPS, TIMES, TIMES)
def test_it_is_what_a_plain_list_of_tasks_says(
    steps: list[tuple[Trigger, float] | str], now: float, timeout_s: float
) -> None:
    index, plain = OpenTasks(), dict[str, tuple[Trigger, float]]()
    for step in steps:
        if isinstance(step, str):
            before = plain.pop(step, None)
            assert index.end(step) == (before and before[0])
        else:
            index.open(*step)
            plain.pop(step[0].task, None)
            plain[step[0].task] = step
    at_once = OpenTasks(
        (trigger for trigger, _ in plain.values()), {t.task: at for t, at in plain.values()}
    )
    for found in (index, at_once):
        agree(found, plain, now, timeout_s)


def agree(
    index: OpenTasks, plain: dict[str, tuple[Trigger, float]], now: float, timeout_s: float
) -> None:
    tasks = [trigger for trigger, _ in plain.values()]
    assert (list(index), len(index)) == (tasks, len(tasks))
    assert index.at_work == Counter(trigger.device for trigger in tasks)
    assert {task: index.since(task) for task in "abcdef"} == {
        task: plain[task][1] if task in plain else None for task in "abcdef"
    }
    for version in range(4):
        mine = [trigger for trigger in tasks if trigger.version == version]
        assert sorted(index.in_round(version)) == sorted(trigger.task for trigger in mine)
        assert index.count(version) == len(mine)
        assert index.count(version, now) == sum(
            trigger.deadline is None or now < trigger.deadline for trigger in mine
        )
        assert sorted(index.of_past_rounds(version)) == sorted(
            trigger.task
            for trigger in tasks
            if trigger.version is not None and trigger.version < version
        )
    ends = {
        trigger.task: at + timeout_s if trigger.deadline is None else trigger.deadline
        for trigger, at in plain.values()
    }
    assert dict(index.overdue(now, timeout_s)) == {
        trigger.task: "timed out" if trigger.deadline is None else "deadline passed"
        for trigger in tasks
        if ends[trigger.task] <= now
    }
    coming = [end for end in ends.values() if end > now]
    assert index.next_end(now, timeout_s) == min(coming, default=math.inf)


def test_tasks_of_a_round_stay_in_order() -> None:
    tasks = [Trigger(task=t, device=0, seed=0, version=1, deadline=5.0) for t in "cab"]
    index = OpenTasks(tasks[:1])
    for trigger in tasks[1:]:
        index.open(trigger, 0.0)
    assert index.in_round(1) == ["c", "a", "b"]
