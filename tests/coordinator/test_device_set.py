"""A set of devices in order says what a sorted list says."""

from __future__ import annotations

import random
from bisect import insort

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.coordinator.device_set import DeviceSet
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
