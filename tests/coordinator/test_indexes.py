"""The scheduler's indexes of devices and of open tasks answer as plain lists do."""

from __future__ import annotations

import math
import random
from bisect import insort
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.coordinator.device_set import DeviceSet
from fedstream.coordinator.open_tasks import OpenTasks
from fedstream.core.messages import Trigger
from fedstream.runtime.task_settings import FixedSteps, Participation, ParticipationGroup


def same(devices: DeviceSet, plain: list[int], limit: int) -> None:
    assert (list(devices), len(devices)) == (plain, len(plain))
    assert [devices[n] for n in range(len(plain))] == plain
    assert [devices.index(device) for device in plain] == list(range(len(plain)))
    assert [device in devices for device in range(-1, limit + 1)] == [
        device in plain for device in range(-1, limit + 1)
    ]


@given(
    st.integers(0, 20).flatmap(
        lambda limit: st.tuples(
            st.just(limit),
            st.sets(st.integers(0, limit - 1)) if limit else st.just(set[int]()),
            st.lists(st.tuples(st.booleans(), st.integers(0, limit - 1))) if limit else st.just([]),
        )
    )
)
def test_it_is_a_sorted_list(
    about: tuple[int, set[int], list[tuple[bool, int]]],
) -> None:
    limit, members, steps = about
    devices, plain = DeviceSet(limit, members), sorted(members)
    same(devices, plain, limit)
    for is_added, device in steps:
        if is_added:
            devices.add(device)
            if device not in plain:
                insort(plain, device)
        else:
            devices.discard(device)
            if device in plain:
                plain.remove(device)
        same(devices, plain, limit)


@given(st.sets(st.integers(0, 30)), st.data())
def test_what_is_taken_out_for_a_while_comes_back(members: set[int], data: st.DataObject) -> None:
    devices, plain = DeviceSet(31, members), sorted(members)
    with devices:
        for _ in range(data.draw(st.integers(0, len(plain)))):
            place = data.draw(st.integers(0, len(plain) - 1))
            assert devices.pop(place) == plain.pop(place)
        same(devices, plain, 31)
    same(devices, sorted(members), 31)


RATES = st.dictionaries(st.integers(0, 30), st.sampled_from([0.25, 1.0, 2.0, 3.0]), min_size=1)


@given(RATES, st.sets(st.integers(0, 30), min_size=1), st.data())
def test_draws_by_rate_are_those_from_a_list(
    rates: dict[int, float], members: set[int], data: st.DataObject
) -> None:
    """Also after devices came and went."""
    groups = [ParticipationGroup(devices=(d,), rate=rate) for d, rate in rates.items()]
    parts = Participation(FixedSteps(), groups)
    before = data.draw(st.sets(st.integers(0, 30)))
    devices = DeviceSet(31, before, parts.shares(31))
    for device in before - members:
        devices.discard(device)
    for device in members:
        devices.add(device)
    for seed in range(20):
        plain = parts.pick(random.Random(seed), sorted(members))
        assert parts.pick(random.Random(seed), devices) == plain


def test_any_rate_will_do() -> None:
    parts = Participation(
        FixedSteps(),
        [
            ParticipationGroup(devices=(0,), rate=1e-300),
            ParticipationGroup(devices=(2,), rate=1e300),
        ],
    )
    devices = DeviceSet(4, range(4), parts.shares(4))
    assert {devices[parts.pick(random.Random(seed), devices)] for seed in range(50)} == {2}
    devices.discard(2)
    assert {devices[parts.pick(random.Random(seed), devices)] for seed in range(50)} == {1, 3}


def test_places_that_are_not_there() -> None:
    devices = DeviceSet(5, [1, 3])
    assert (devices[-1], devices[1:]) == (3, (3,))
    for place in (2, -3):
        with pytest.raises(IndexError):
            devices[place]
    for device in (2, 7, -1):
        devices.discard(device)
        with pytest.raises(ValueError, match=f"device {device} is not there"):
            devices.index(device)


# open tasks

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
