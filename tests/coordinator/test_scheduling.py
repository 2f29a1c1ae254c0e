"""When to open tasks, and for which devices, as pure functions: no clock, no Redis."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.coordinator.mirror import opened_at
from fedstream.coordinator.policies import Anarchic, InFlight, Poisson, Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduling import (
    HoldBack,
    Plan,
    Situation,
    Steering,
    draw,
    held_back,
    plan,
    steered,
)
from fedstream.core.messages import Trigger, task_id
from fedstream.journal.progress import mean_after
from fedstream.runtime.task_settings import (
    Epochs,
    FixedSteps,
    Length,
    Participation,
    ParticipationGroup,
    Seconds,
    Steps,
    UniformSteps,
)

NOW = 1_000_000.0
FIVE = FixedSteps(n=5)
FREE = HoldBack(max_queue=64, target_staleness=None, memory_budget=None)
CALM = Situation(
    now=NOW,
    issued=0,
    version=0,
    open=(),
    queue=0,
    backlog=0,
    kept=1,
    held=(),
    round_ending=False,
    mean_staleness=0.0,
    trainers=0,
    workers=4,
    model_bytes=1000,
    devices=tuple(range(10)),
    last=NOW,
    round_since=NOW,
)


def planned(
    policy: Policy | Rounds,
    seen: Situation = CALM,
    *,
    seed: int = 0,
    steps: Steps = FIVE,
    hold: HoldBack = FREE,
    groups: Sequence[ParticipationGroup] = (),
) -> Plan:
    return plan(policy, Participation(steps, groups), hold, seed, seen)


def opened(n: int, version: int | None = None) -> tuple[Trigger, ...]:
    """n open tasks, of devices 0 to n - 1."""
    return tuple(
        Trigger(task=task_id(1), device=device, seed=0, version=version) for device in range(n)
    )


def chosen(what: Plan) -> list[tuple[int, int, int | None, int | None]]:
    """All that was drawn: everything but the ids and times."""
    return [(t.device, t.seed, t.steps, t.epochs) for t in what.triggers]


# draws


@given(st.integers(0, 2**32), st.integers(0, 10**9))
def test_draw_n_depends_only_on_seed_and_n(seed: int, n: int) -> None:
    assert draw(seed, n).random() == draw(seed, n).random()
    assert draw(seed, n).random() != draw(seed, n + 1).random()
    assert draw(seed, n).random() != draw(seed + 1, n).random()


def test_successor_continues_its_predecessors_draws() -> None:
    steps = UniformSteps(c=5)
    whole = chosen(planned(InFlight(n=6), steps=steps))
    first = planned(InFlight(n=3), steps=steps)
    then = replace(CALM, issued=3, open=first.triggers, now=NOW + 60, last=NOW + 60)
    assert chosen(first) + chosen(planned(InFlight(n=6), then, steps=steps)) == whole


def test_draws_of_steps() -> None:
    assert FixedSteps(n=7).draw(random.Random(0)) == Length(steps=7)
    assert Epochs(n=2).draw(random.Random(0)) == Length(epochs=2)
    assert Seconds(s=0.5).draw(random.Random(0)) == Length(seconds=0.5)
    drawn = Counter(UniformSteps(c=3).draw(draw(0, n)) for n in range(3000))
    assert {length.steps for length in drawn} == {1, 2, 3, 4, 5, 6}  # uniform on [1, 2c]
    assert all(400 < count < 600 for count in drawn.values())


# N in flight


def test_n_tasks_stay_in_flight() -> None:
    assert len(planned(InFlight(n=3)).triggers) == 3
    assert planned(InFlight(n=3), replace(CALM, open=opened(3))).triggers == ()
    assert len(planned(InFlight(n=3), replace(CALM, open=opened(2))).triggers) == 1
    assert planned(InFlight(n=3), replace(CALM, open=opened(9))).triggers == ()


@pytest.mark.parametrize(("workers", "wanted"), [(0, 1), (1, 1), (4, 4), (50, 10)])
def test_without_n_it_follows_those_who_work(workers: int, wanted: int) -> None:
    seen = replace(CALM, trainers=1, workers=workers)  # and never more than there are devices
    assert len(planned(InFlight(mean_delay_s=0), seen).triggers) == wanted
    assert planned(InFlight(mean_delay_s=0), seen).limit == wanted


@given(st.integers(1, 12), st.integers(0, 8), st.integers(0, 1000))
def test_no_device_has_two_tasks_at_once(n: int, busy: int, seed: int) -> None:
    what = planned(InFlight(n=n), replace(CALM, open=opened(busy)), seed=seed)
    asked = [trigger.device for trigger in what.triggers]
    assert len(asked) == len(set(asked))
    assert set(asked).isdisjoint(range(busy))
    assert len({trigger.task for trigger in what.triggers}) == len(asked)


def test_only_reachable_devices_are_asked() -> None:
    what = planned(InFlight(n=5), replace(CALM, devices=(3, 7)))
    assert {trigger.device for trigger in what.triggers} == {3, 7}
    assert planned(InFlight(n=5), replace(CALM, devices=())).triggers == ()


SELDOM = ParticipationGroup(devices=(0, 1), rate=0.25)
MUCH = ParticipationGroup(devices=(9,), rate=2.0, steps=Epochs(n=3))


@pytest.mark.parametrize("policy", [InFlight(n=1), Poisson(rate=1e9, n=1), Rounds(k=1)])
def test_devices_are_asked_in_proportion_to_their_rates(policy: Policy) -> None:
    """Of .25, .25, seven times 1, and 2: in 9.5 parts."""
    seen = replace(CALM, last=NOW - 60)
    asked = Counter(
        planned(policy, replace(seen, issued=n), groups=(SELDOM, MUCH)).triggers[0].device
        for n in range(1900)
    )
    for device, expected in {0: 50, 1: 50, 5: 200, 9: 400}.items():
        assert abs(asked[device] - expected) < 4 * expected**0.5, device


def test_rates_apply_among_eligible_devices() -> None:
    some = replace(CALM, open=opened(1), is_eligible=lambda device: device in (0, 1, 9))
    asked = Counter(
        planned(InFlight(n=2), replace(some, issued=n), groups=(SELDOM, MUCH)).triggers[0].device
        for n in range(900)
    )
    assert set(asked) == {1, 9}
    assert abs(asked[1] - 100) < 40


@pytest.mark.parametrize("policy", [InFlight(n=10), Poisson(rate=1e9, n=10), Rounds(k=10)])
def test_device_trains_as_long_as_its_group_says(policy: Policy) -> None:
    what = planned(policy, replace(CALM, last=NOW - 60), groups=(SELDOM, MUCH))
    lengths = {trigger.device: (trigger.steps, trigger.epochs) for trigger in what.triggers}
    assert lengths == dict.fromkeys(range(9), (5, None)) | {9: (None, 3)}


@pytest.mark.parametrize("policy", [InFlight(n=10), Rounds(k=10)])
def test_plan_checks_each_devices_eligibility_once(policy: Policy) -> None:
    questions: list[int] = []

    def is_eligible(device: int) -> bool:
        questions.append(device)
        return device % 25 == 0  # of 4 of them

    seen = replace(CALM, devices=tuple(range(100)), is_eligible=is_eligible)
    assert {t.device for t in planned(policy, seen).triggers} == {0, 25, 50, 75}
    assert sorted(questions) == list(range(100))


@pytest.mark.parametrize("policy", [InFlight(n=10), Rounds(k=10)])
def test_only_drawn_devices_are_checked_if_all_are_eligible(policy: Policy) -> None:
    questions: list[int] = []

    def is_eligible(device: int) -> bool:
        questions.append(device)
        return True

    seen = replace(CALM, devices=tuple(range(100)), is_eligible=is_eligible)
    what = planned(policy, seen)
    assert [trigger.device for trigger in what.triggers] == questions
    assert len(questions) == 10
    assert chosen(what) == chosen(planned(policy, replace(seen, is_eligible=None)))


def test_every_trigger_has_a_random_delay() -> None:
    policy = InFlight(n=3, mean_delay_s=10.0)
    what = planned(policy)
    assert what.triggers == ()
    assert what.wake_at
    assert what.wake_at > NOW
    then = planned(policy, replace(CALM, now=what.wake_at))
    assert len(then.triggers) == 1  # the next one has a delay of its own
    assert then.wake_at
    assert then.wake_at > what.wake_at
    assert planned(policy, replace(CALM, now=what.wake_at - 0.001)).triggers == ()


def virtual_time(policy: Policy, seconds: float, seed: int) -> list[float]:
    """The times at which a scheduler triggers whose tasks end at once."""
    times: list[float] = []
    seen = CALM
    while seen.now < NOW + seconds:
        what = planned(policy, seen, seed=seed)
        assert what.wake_at
        times += [seen.now] * len(what.triggers)
        last = what.last if what.triggers else seen.last
        seen = replace(seen, now=what.wake_at, last=last, issued=len(times))
    return [at - NOW for at in times]


def test_live_tasks_begin_at_random_times_by_default() -> None:
    """A few each millisecond, and on the devices that a simulation chooses."""
    seen = replace(CALM, trainers=4, devices=tuple(range(200)), began=NOW - 5)
    opened: tuple[Trigger, ...] = ()
    groups = list[int]()
    while len(opened) < 200:
        now = NOW + 0.001 * len(groups)
        seen = replace(seen, now=now, open=opened, issued=len(opened))
        what = planned(InFlight(n=200), seen)
        groups.append(len(what.triggers))
        opened += what.triggers
        seen = replace(seen, last=what.last)
    assert len(set(groups)) > 4
    assert max(groups) < 40
    simulated = planned(InFlight(n=200), replace(CALM, devices=seen.devices)).triggers
    assert [one.device for one in opened] == [one.device for one in simulated]


@pytest.mark.parametrize("policy", [Poisson(rate=5.0), InFlight(n=9, mean_delay_s=0.2)])
def test_random_triggers_form_a_poisson_process(policy: Policy) -> None:
    times = virtual_time(policy, 400, seed=1)
    assert len(times) == pytest.approx(2000, rel=0.05)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.05)  # exponential: as large as the mean
    assert virtual_time(policy, 10, seed=1) != virtual_time(policy, 10, seed=2)


def test_poisson_process_stops_at_its_limit() -> None:
    seen = replace(CALM, now=NOW + 1000, open=opened(4))
    assert planned(Poisson(rate=5, n=4), seen).triggers == ()
    assert len(planned(Poisson(rate=5, n=5), seen).triggers) == 1


def test_poisson_process_keeps_its_rate_if_the_scheduler_is_late() -> None:
    times: list[float] = []
    seen = replace(CALM, devices=tuple(range(1000)))
    policy = Poisson(rate=500, n=1000)
    while seen.now < NOW + 8:
        what = planned(policy, seen)
        times += [seen.now] * len(what.triggers)
        last = what.last if what.triggers else seen.last
        seen = replace(seen, now=seen.now + 0.005, last=last, issued=len(times))
    assert len(times) == pytest.approx(4_000, rel=0.05)


def test_poisson_process_catches_up_at_most_a_second() -> None:
    seen = replace(CALM, now=NOW + 3600, devices=tuple(range(1000)))
    burst = len(planned(Poisson(rate=20, n=1000), seen).triggers)
    assert 10 < burst < 40


def test_anarchic_devices_are_not_triggered() -> None:
    assert planned(Anarchic()) == Plan()
    assert planned(Anarchic(), replace(CALM, trainers=100, now=NOW + 1000)) == Plan()


# holding back


@pytest.mark.parametrize(
    ("queue", "backlog", "n"), [(63, 63, 7), (64, 64, 1), (90, 63, 7), (90, 64, 1)]
)
def test_growing_queue_holds_back_but_processed_entries_do_not(
    queue: int, backlog: int, n: int
) -> None:
    seen = replace(CALM, queue=queue, backlog=backlog)
    assert held_back(7, FREE, seen)[0] == n


def closed_loop(
    target: float, began: int, updates: int, *, batch: int = 1, lost: int = 0
) -> tuple[list[int], list[float]]:
    """Tasks in flight and mean staleness after each update, with 64 devices that take turns.

    ``began``: tasks that are open when the scheduler begins to lead. ``batch``: updates in a
    version. ``lost``: every so many tasks bring no update.
    """
    hold = replace(FREE, target_staleness=target)
    at_work = deque((trigger, 0) for trigger in opened(began))
    version, used, ended, mean = 0, 0, 0, 0.0
    steering, in_flight, means = None, list[int](), list[float]()
    while len(means) < updates:
        seen = replace(
            CALM,
            open=tuple(trigger for trigger, _ in at_work),
            issued=ended + len(at_work),
            version=version,
            mean_staleness=mean,
            devices=tuple(range(64)),
            steering=steering,
        )
        what = planned(InFlight(n=64), seen, hold=hold)
        steering = what.steering
        at_work.extend((trigger, version) for trigger in what.triggers)
        in_flight.append(len(at_work))
        _, tau = at_work.popleft()
        ended += 1
        if lost and not ended % lost:
            continue
        mean, used = mean_after(mean, version - tau), used + 1
        means.append(mean)
        if used == batch:
            version, used = version + 1, 0
    return in_flight, means


@pytest.mark.parametrize(
    ("about", "within"),
    [
        ({"target": 8.0, "began": 1}, 40),
        ({"target": 8.0, "began": 64}, 160),
        ({"target": 1.0, "began": 64}, 160),
        ({"target": 2.0, "began": 1, "batch": 4}, 300),
        ({"target": 8.0, "began": 1, "lost": 2}, 400),
    ],
)
def test_tasks_in_flight_are_steered_to_the_staleness_wanted(
    about: dict[str, Any], within: int
) -> None:
    in_flight, means = closed_loop(**about, updates=within + 200)
    assert means[within:] == pytest.approx([about["target"]] * 200, rel=0.15, abs=0.3)
    assert max(in_flight[within:]) - min(in_flight[within:]) <= 2, "and stay as they are"
    assert max(in_flight[about["began"] :]) <= max(in_flight[-1] * 1.3, about["began"])


def test_no_more_tasks_than_the_policy_wants_are_steered_to() -> None:
    """However long there are fewer than the staleness allows: the target may change what counts."""
    hold, steering = replace(FREE, target_staleness=50.0), None
    for version in range(0, 1000, 100):
        seen = replace(CALM, version=version, steering=steering)
        what = planned(InFlight(n=5), seen, hold=hold)
        assert (what.limit, what.held) == (5, "")
        steering = what.steering
    assert steering == Steering(51.0, 900), "as at first"


def test_moment_in_which_the_policy_wants_few_tasks_is_not_remembered() -> None:
    hold = replace(FREE, target_staleness=8.0)
    seen = replace(CALM, version=10, steering=Steering(9.0, 0))
    steering = steered(1, hold, seen)
    assert steering == Steering(9.0, 0)
    assert held_back(1, hold, seen, steering) == (1, "")


@pytest.mark.parametrize(
    ("models", "n"), [(100, 7), (7 + 3 + 2 + 2, 7), (6 + 3 + 2 + 2, 6), (3, 1), (0, 1)]
)
def test_memory_holds_back(models: int, n: int) -> None:
    hold = replace(FREE, memory_budget=models * 1000 + 999)  # queue 3, kept 2, and 2 to spare
    limit, why = held_back(7, hold, replace(CALM, queue=3, kept=2))
    assert (limit, why) == (n, "" if n == 7 else "memory")


def test_empty_models_use_no_memory() -> None:
    hold = replace(FREE, memory_budget=1)
    assert held_back(7, hold, replace(CALM, model_bytes=0)) == (7, "")


def test_strongest_limit_decides() -> None:
    hold = HoldBack(max_queue=4, target_staleness=2.0, memory_budget=11_000)
    roomy = replace(CALM, queue=3)  # 11 models, less 3 in the queue, 1 kept and 2 to spare
    assert held_back(7, hold, roomy) == (5, "memory")
    assert held_back(7, hold, replace(roomy, backlog=4)) == (1, "queue")
    assert held_back(7, hold, roomy, steered(7, hold, roomy)) == (3, "staleness")


@given(
    st.integers(1, 100),
    st.integers(0, 10**4),
    st.integers(0, 10**4),
    st.floats(0, 1e6),
    st.integers(0, 10**9),
)
def test_at_least_one_task_and_never_more_than_wanted(
    wanted: int, queue: int, kept: int, staleness: float, budget: int
) -> None:
    hold = HoldBack(max_queue=1, target_staleness=0.1, memory_budget=budget)
    seen = replace(CALM, queue=queue, backlog=queue, kept=kept, mean_staleness=staleness)
    seen = replace(seen, version=100, steering=Steering(float(wanted), 0))
    limit, _ = held_back(wanted, hold, seen, steered(wanted, hold, seen))
    assert 1 <= limit <= wanted


# tasks that take too long


@given(
    st.lists(st.tuples(st.floats(0, 20), st.none() | st.floats(0, 20)), max_size=8),
    st.sampled_from([InFlight(n=3), Anarchic(), Rounds(k=4, timeout_s=60.0)]),
)
def test_only_overdue_tasks_are_given_up(
    ages: list[tuple[float, float | None]], policy: Policy
) -> None:
    """Each task was opened so long ago, and has a deadline so long after that, or none."""
    tasks = tuple(
        Trigger(task=f"t{n}", device=n, seed=0, deadline=None if left is None else NOW - age + left)
        for n, (age, left) in enumerate(ages)
    )
    since = {f"t{n}": NOW - age for n, (age, _) in enumerate(ages)}
    seen = replace(CALM, open=tasks, since=since)
    what = plan(policy, Participation(FIVE), FREE, 0, seen, task_timeout_s=10.0)
    ends = {t.task: t.deadline if t.deadline is not None else since[t.task] + 10 for t in tasks}
    assert dict(what.overdue) == {
        t.task: "timed out" if t.deadline is None else "deadline passed"
        for t in tasks
        if ends[t.task] <= NOW
    }
    coming = [end for end in ends.values() if end > NOW]
    assert what.wake_at is None or what.wake_at > NOW
    assert not coming or (what.wake_at is not None and what.wake_at <= min(coming))


def test_task_age_comes_from_ids_the_scheduler_made() -> None:
    trigger = Trigger(task=task_id(int((NOW - 50) * 1000)), device=0, seed=0)
    assert opened_at(trigger, NOW) == pytest.approx(NOW - 50)
    assert opened_at(trigger.model_copy(update={"origin": "ann"}), NOW) == NOW
    ahead = Trigger(task=task_id(int((NOW + 50) * 1000)), device=0, seed=0)
    assert opened_at(ahead, NOW) == NOW
    assert opened_at(Trigger(task="no-uuid", device=0, seed=0), NOW) == NOW


# rounds


ROUNDS = Rounds(k=4, timeout_s=60.0)


def round_of(n: int, version: int = 3) -> tuple[Trigger, ...]:
    return opened(n, version=version)


def test_round_asks_k_devices_with_one_version_and_deadline() -> None:
    what = planned(ROUNDS, replace(CALM, version=3))
    assert [(t.version, t.deadline, t.why) for t in what.triggers] == [(3, NOW + 60, "round")] * 4
    assert len({t.device for t in what.triggers}) == 4
    assert (what.limit, what.close, what.wake_at) == (4, None, NOW + 60)


def test_ongoing_round_is_left_alone() -> None:
    seen = replace(CALM, version=3, open=round_of(3), held=(9,))
    assert planned(ROUNDS, seen) == Plan(limit=3, wake_at=NOW + 60)


def test_tasks_ended_without_an_answer_are_replaced() -> None:
    seen = replace(CALM, version=3, open=round_of(2), held=(9,))
    what = planned(ROUNDS, seen)
    assert len(what.triggers) == 1
    assert what.triggers[0].device not in (0, 1)
    assert what.limit == 3


def test_round_waits_for_ineligible_devices() -> None:
    some = replace(CALM, is_eligible=lambda device: device in (2, 7))
    first = planned(ROUNDS, some)
    assert {t.device for t in first.triggers} == {2, 7}
    answered = replace(some, held=(2, 7), issued=2)
    waiting = planned(ROUNDS, answered)
    assert (waiting.triggers, waiting.close) == ((), None)  # it is of four, as ever
    later = replace(answered, is_eligible=lambda device: device in (2, 5, 7))
    assert [t.device for t in planned(ROUNDS, later).triggers] == [5]


def test_timeout_closes_a_round_with_arrivals_or_open_tasks() -> None:
    late = replace(CALM, version=3, now=NOW + 60, open=round_of(2), held=(9,))
    what = planned(ROUNDS, late)
    assert what.close == (3, tuple(trigger.task for trigger in late.open))
    assert what.triggers == ()
    assert planned(ROUNDS, replace(late, now=NOW + 59)).close is None
    assert planned(ROUNDS, replace(late, open=(), held=(8, 9))).close == (3, ())


def test_timeout_of_an_empty_round_closes_nothing() -> None:
    assert planned(ROUNDS, replace(CALM, version=3, now=NOW + 60)).close is None


def test_timed_out_round_with_too_few_answers_continues() -> None:
    policy = Rounds(k=4, min_answers=3, timeout_s=60.0)
    late = tuple(t.model_copy(update={"deadline": NOW + 60}) for t in round_of(2))
    seen = replace(CALM, version=3, now=NOW + 60, open=late, held=(8, 9))
    coming = planned(policy, replace(seen, backlog=1))
    assert (coming.close, coming.again, coming.triggers, coming.wake_at) == (None, False, (), None)
    what = planned(policy, seen)
    assert (what.close, what.again) == (None, True)
    assert what.overdue == tuple((t.task, "deadline passed") for t in late)
    # Once those are given up, others take their place, with a deadline of their own.
    then = planned(policy, replace(seen, open=(), now=NOW + 61, round_since=NOW + 60))
    assert [(t.version, t.deadline) for t in then.triggers] == [(3, NOW + 120)] * 2
    assert {t.device for t in then.triggers}.isdisjoint({8, 9})
    enough = planned(policy, replace(seen, held=(7, 8, 9)))
    assert enough.close == (3, tuple(t.task for t in late))


def test_no_device_is_asked_while_a_round_is_ending() -> None:
    seen = replace(CALM, version=3, now=NOW + 61, held=(8, 9), round_ending=True)
    assert planned(ROUNDS, seen) == Plan()


def test_past_rounds_tasks_are_closed_first() -> None:
    past = round_of(2, version=2)
    what = planned(ROUNDS, replace(CALM, version=3, open=past))
    assert (what.close, what.triggers) == ((2, tuple(t.task for t in past)), ())


def test_answered_device_is_not_asked_again_in_its_round() -> None:
    answered = (4, 5, 6, 7, 8)
    seen = replace(CALM, version=3, open=round_of(4), held=answered)
    for n in range(20):
        [trigger] = planned(Rounds(k=10), replace(seen, issued=n)).triggers
        assert trigger.device == 9


def test_round_ends_when_every_device_has_answered() -> None:
    devices = frozenset(range(10))
    seen = replace(CALM, version=3, held=tuple(devices))
    what = planned(Rounds(k=99), seen)
    assert (what.close, what.triggers) == ((3, ()), ())
    assert planned(Rounds(k=99), replace(seen, open=round_of(1))).close is None
    still = replace(seen, held=tuple(devices - {0}), open=round_of(1))
    assert planned(Rounds(k=99), still) == Plan(limit=1, wake_at=NOW + 600)
    assert planned(Rounds(k=10), seen).close is None  # the updater has all that it waits for


def test_round_larger_than_memory_asks_devices_in_turn() -> None:
    policy, hold = Rounds(k=6, min_answers=6), replace(FREE, memory_budget=6 * 1000)
    seen = replace(CALM, version=3)  # there is room for three: version 3, and 2
    assert len(planned(policy, seen, hold=hold).triggers) == 3
    assert len(planned(policy, replace(seen, open=round_of(2)), hold=hold).triggers) == 1
    assert len(planned(policy, replace(seen, open=round_of(3)), hold=hold).triggers) == 0


def test_round_size_is_limited_by_memory() -> None:
    hold = replace(FREE, memory_budget=8000)  # 1 kept, 2 to spare: 5 answers
    what = planned(Rounds(k=9), hold=hold)
    assert (len(what.triggers), what.limit, what.held) == (5, 5, "memory")
    # It goes on while answers wait in the queue, and ends with as many.
    seen = replace(CALM, queue=4, held=(1, 2, 3, 4))
    assert len(planned(Rounds(k=9), seen, hold=hold).triggers) == 1
    full = replace(CALM, queue=5, held=(1, 2, 3, 4, 5))
    assert planned(Rounds(k=9), full, hold=hold).close == (0, ())


@given(st.integers(0, 10**4), st.integers(0, 10**4), st.integers(0, 10), st.integers(1, 20))
def test_memory_never_stops_a_round(budget: int, kept: int, buffered: int, k: int) -> None:
    hold = replace(FREE, memory_budget=budget)
    answered = tuple(range(min(buffered, k - 1)))
    seen = replace(CALM, kept=kept, held=answered)
    what = planned(Rounds(k=k), seen, hold=hold)
    assert what.triggers or what.close  # nobody is asked at the moment: something has to happen
