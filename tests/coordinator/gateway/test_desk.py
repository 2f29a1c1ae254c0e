"""The desk: which devices are present or wait, and which device has which task."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.broker.streams import Entry
from fedstream.coordinator.gateway.device_sessions import DeviceSessions, Held, Woken
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.messages import Assignment

AWAY_S, LEASE_S = 10.0, 30.0


def desk(most: int = 100) -> DeviceSessions:
    return DeviceSessions(away_s=AWAY_S, lease_s=LEASE_S, most=most)


def task(name: str, device: int, entry: str = "1-0") -> Held:
    return Held(Assignment(task=name, device=device, seed=0), Entry(entry, b""), "tasks")


def poll() -> asyncio.Future[Woken]:
    return asyncio.get_running_loop().create_future()


def test_device_is_present_until_it_was_away() -> None:
    one = desk()
    one.arrive(3, 0.0)
    assert one.present() == (3,)
    one.heard(3, 6.0)
    assert one.gone(15.9) == []
    assert one.present() == (3,)
    one.gone(16.0)
    assert one.present() == ()


def test_list_of_those_present_is_the_same_object_until_it_changes() -> None:
    """An announcement's digest is computed once for each list."""
    one = desk()
    one.arrive(3, 0.0)
    one.arrive(1, 0.0)
    before = one.present()
    one.heard(3, 5.0)
    one.arrive(1, 6.0)
    assert one.present() is before
    one.arrive(2, 6.0)
    assert set(one.present()) == {1, 2, 3}


def test_present_devices_are_limited() -> None:
    one = desk(most=2)
    one.arrive(1, 0.0)
    one.arrive(2, 0.0)
    with pytest.raises(Refusal) as refused:
        one.arrive(3, 0.0)
    assert (refused.value.status, refused.value.reason) == (503, "busy")
    one.arrive(1, 1.0)  # it has its seat


def test_device_with_a_task_stays_until_its_lease_ends() -> None:
    one = desk()
    one.arrive(3, 0.0)
    held = task("a", 3)
    one.hold(held, 0.0)
    assert one.gone(LEASE_S - 0.1) == []
    assert one.present() == (3,)
    assert one.gone(LEASE_S) == [held]
    assert "a" in one, "until it was given up"
    one.ended("a")
    one.gone(LEASE_S)
    assert one.present() == ()


def test_device_whose_task_is_given_up_is_sent_no_other_until_it_comes() -> None:
    """Else the scheduler would replace the task by one for the same device, and so on."""
    one = desk()
    one.arrive(3, 0.0)
    one.hold(task("a", 3), 0.0)
    one.gone(LEASE_S)
    assert one.present() == ()
    one.ended("a")
    one.hold(late := task("b", 3), LEASE_S + 0.1)  # was on its way
    assert one.present() == ()
    assert one.gone(LEASE_S + 1.0) == [late]
    one.heard(3, LEASE_S + 2.0)
    assert one.present() == (3,)
    assert one.gone(LEASE_S + 3.0) == []


def test_device_that_left_is_not_brought_back_by_a_task_on_its_way() -> None:
    one = desk()
    late = task("a", 3)
    late.is_new = True
    one.hold(late, 0.0)
    assert one.present() == ()
    one.heard(3, 1.0)
    assert one.present() == (3,)


def test_task_that_its_device_never_came_for_is_given_up_once_it_is_away() -> None:
    one = desk()
    one.arrive(3, 0.0)
    begun, new = task("a", 3), task("b", 3, "2-0")
    new.is_new = True
    one.hold(begun, 0.0)
    one.hold(new, 1.0)
    assert one.gone(AWAY_S - 0.1) == []
    assert one.gone(AWAY_S) == [new]
    assert one.present() == (3,), "it may still be at work"


def test_ineligible_device_does_not_prolong_its_task() -> None:
    one = desk()
    one.arrive(3, 0.0)
    held = task("a", 3)
    one.hold(held, 1.0)
    one.leave(3)
    assert one.present() == (3,)
    assert one.gone(LEASE_S) == [held]


async def test_older_check_in_of_an_ineligible_device_does_not_bring_it_back() -> None:
    """Its connection may have been cut unnoticed."""
    one, waits = desk(), poll()
    one.park(3, waits, 0.0)
    one.leave(3)
    assert waits.result() == "replaced"
    assert (one.present(), one.polls) == ((), 0)


async def test_expelled_device_is_gone_once_its_tasks_are_given_up() -> None:
    one, waits = desk(), poll()
    one.arrive(3, 0.0)
    one.park(4, waits, 0.0)
    one.arrive(5, 0.0)
    held = task("a", 3)
    one.hold(held, 0.0)
    assert one.expel(frozenset({3, 4, 9})) == [held]
    assert one.present() == (5,)
    assert waits.result() == "replaced"
    assert one.expel(frozenset({3, 4, 9})) == [held], "it is in hand until it was given up"
    one.ended("a")
    assert one.expel(frozenset({3, 4, 9})) == []
    assert not one.is_present(3)


def test_task_that_was_sent_again_replaces_the_one_before() -> None:
    one = desk()
    one.arrive(3, 0.0)
    first, second = task("a", 3, "1-0"), task("a", 3, "2-0")
    one.hold(first, 0.0)
    one.hold(second, 0.0)
    assert list(one) == [second]
    assert one.first(3) == second
    assert first.attempt != second.attempt
    assert second.attempt == task("a", 3, "2-0").attempt, "also after a restart"


async def test_device_that_waits_is_not_away() -> None:
    one = desk()
    waits = poll()
    one.park(3, waits, 0.0)
    assert one.gone(LEASE_S * 2) == []
    assert one.present() == (3,)
    one.unpark(3, waits)
    one.gone(LEASE_S * 2)
    assert one.present() == ()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "heard", "leave", "hold", "ended", "gone"]),
        st.integers(0, 3),
        st.sampled_from("abc"),
        st.floats(0, 20),
    ),
    max_size=40,
)


@given(STEPS)
def test_desk_agrees_with_itself_whatever_happens(
    steps: list[tuple[str, int, str, float]],
) -> None:
    """Each task is in hand once, for its device; nobody stays for ever."""
    one, now, places = desk(), 0.0, dict[str, int]()
    for what, device, name, later in steps:
        now += later
        match what:
            case "arrive":
                one.arrive(device, now)
            case "heard":
                one.heard(device, now)
            case "leave":
                one.leave(device)
            case "hold":
                one.hold(task(name, device), now)
                places[name] = device
            case "ended":
                one.ended(name)
                places.pop(name, None)
            case "gone":
                for held in one.gone(now):
                    one.ended(held.task.task)
                    del places[held.task.task]
        assert {held.task.task: held.task.device for held in one} == places
        assert all(one.first(device) is not None for device in places.values())
        assert len(set(one.present())) == len(one.present())
    for _ in range(2):
        for held in one.gone(now + 2 * LEASE_S):
            one.ended(held.task.task)
    assert (len(one), one.present()) == (0, ())
