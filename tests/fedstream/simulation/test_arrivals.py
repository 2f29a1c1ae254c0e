"""Who trains, from which version, and in which order answers arrive."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import pytest

from fedstream.core.errors import ConfigError
from fedstream.settings.config import Settings, read
from fedstream.simulation.arrivals import Arrival, PlannedEvent, RoundOver, plan, without_effect

SHARES = (0.19, 0.19, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01)


def settings(*sets: str) -> Settings:
    return read(None, sets)


def events(count: int, *sets: str, devices: int = 10) -> list[PlannedEvent]:
    return list(islice(plan(settings(*sets), devices), count))


def arrivals(count: int, *sets: str, devices: int = 10) -> list[Arrival]:
    return [event for event in events(count, *sets, devices=devices) if isinstance(event, Arrival)]


def latency(*sets: str) -> tuple[str, ...]:
    return (
        "simulation.staleness.kind=latency",
        "devices.latency.kind=uniform",
        "devices.latency.low_s=0.5",
        "devices.latency.high_s=1.5",
        *sets,
    )


def test_staleness_is_uniform_among_the_versions_that_exist() -> None:
    found = arrivals(4000, "simulation.staleness.kind=uniform", "simulation.staleness.most=4")
    assert all(0 <= one.tau <= one.version for one in found)
    late = Counter(one.version - one.tau for one in found if one.version >= 4)
    assert set(late) == {0, 1, 2, 3, 4}
    assert all(abs(count / late.total() - 0.2) < 0.03 for count in late.values())
    assert {one.version - one.tau for one in found if one.version == 1} <= {0, 1}


def test_recent_staleness_is_at_most_four_versions() -> None:
    found = arrivals(2000, "simulation.staleness.kind=recent", "strategy.name=afa-cd")
    assert {one.version - one.tau for one in found} == {0, 1, 2, 3, 4}


def test_without_staleness_all_start_from_the_newest() -> None:
    found = arrivals(100, "simulation.staleness.kind=none", "strategy.name=fedavg")
    assert all(one.tau == one.version for one in found)
    assert [one.version for one in found] == [n // 10 for n in range(100)]


def test_batch_has_distinct_devices_and_makes_a_version() -> None:
    found = arrivals(500, "strategy.name=afa-cd", "strategy.buffer_size=5")
    for version in range(100):
        batch = found[5 * version : 5 * version + 5]
        assert len({one.device for one in batch}) == 5
        assert [one.makes for one in batch] == [False] * 4 + [True]
        assert {one.version for one in batch} == {version}


def test_every_device_arrives_before_any_arrives_twice() -> None:
    batch = arrivals(7, "strategy.name=fedbuff", "strategy.buffer_size=7", devices=3)
    assert {one.device for one in batch[:3]} == {one.device for one in batch[3:6]} == {0, 1, 2}


def test_drawn_round_of_all_devices_may_be_smaller_than_k() -> None:
    """As it does live: no device answers twice in a round."""
    found = events(8, "strategy.name=fedavg", "strategy.clients_per_round=9", devices=3)
    assert [isinstance(one, RoundOver) for one in found] == ([False] * 3 + [True]) * 2
    assert [one.version for one in found] == [0] * 4 + [1] * 4
    for begin in (0, 4):
        answered = {one.device for one in found[begin : begin + 3] if isinstance(one, Arrival)}
        assert answered == {0, 1, 2}
    assert found[3].makes


def test_default_staleness_depends_on_the_policy() -> None:
    late = [one.version - one.tau for one in arrivals(200, "strategy.name=fedavg")]
    assert max(late) == 0
    late = [one.version - one.tau for one in arrivals(200, "strategy.name=fedbuff")]
    assert max(late) == 4


AFL = "participation=[{devices=[0, 1], rate=1.9}, {devices=[8, 9], rate=0.1}]"


def test_devices_arrive_in_proportion_to_their_rates() -> None:
    alone = Counter(one.device for one in arrivals(10_000, AFL))
    assert [alone[device] / 10_000 for device in range(10)] == pytest.approx(SHARES, abs=0.012)
    found = arrivals(10_000, AFL, "strategy.name=afa-cd", "strategy.buffer_size=5")
    share = Counter(one.device for one in found)
    assert 0.7 < share[0] / 2000 < 0.85, "without replacement it is not 5 times its share"
    assert share[9] / 2000 < 0.12


def test_afls_biased_arrivals_match_the_stored_results() -> None:
    """Another way to draw by rates would make experiments/results another program's."""
    shares = "[{devices=[0, 1], rate=0.19}, {devices=[2, 3, 4, 5, 6, 7], rate=0.1}, "
    shares += "{devices=[8, 9], rate=0.01}]"
    found = arrivals(15, "strategy.name=afa-cd", f"participation={shares}")
    assert [one.device for one in found] == [4, 0, 3, 2, 6, 1, 2, 4, 7, 0, 7, 6, 4, 9, 0]


def test_device_that_takes_too_long_is_given_up() -> None:
    """Its slot is free again when the live scheduler would free it."""
    one_at_a_time = latency(
        "scheduler.policy.kind=in_flight",
        "scheduler.policy.n=1",
        "devices.slow_devices=[0,1,2,3]",
        "devices.slow_factor=1000",
    )
    waited = arrivals(20, *one_at_a_time)
    assert {one.device for one in waited} & {0, 1, 2, 3}
    found = arrivals(20, *one_at_a_time, "scheduler.task_timeout_s=10")
    assert not {one.device for one in found} & {0, 1, 2, 3}
    given_up = found[-1].n - 19
    assert given_up > 0
    worked = found[-1].time - 10 * given_up
    assert 0.5 * 20 <= worked <= 1.5 * 20


def test_a_round_with_too_few_answers_asks_others() -> None:
    """Three of four devices never answer in time: with the fourth alone no version is made."""
    slow = latency(
        "strategy.name=fedavg",
        "strategy.clients_per_round=3",
        "scheduler.policy.kind=rounds",
        "scheduler.policy.timeout_s=10",
        "scheduler.policy.min_answers=2",
        "devices.slow_devices=[0,1]",
        "devices.slow_factor=1000",
    )
    found = events(60, *slow, devices=4)
    assert {one.device for one in found if isinstance(one, Arrival)} == {2, 3}
    for version in range(20):
        first, second, over = found[3 * version : 3 * version + 3]
        assert isinstance(first, Arrival)
        assert isinstance(second, Arrival)
        assert isinstance(over, RoundOver)
        assert (over.version, over.makes) == (version, True)
        assert {first.tau, second.tau} == {version}
    whys = [one.why for one in found if isinstance(one, RoundOver)]
    assert whys[0] == "time-out"
    assert len(set(whys)) == 2, "once the slow devices rest, nobody waits for them"
    assert any(
        over.time - first.time > 10 for first, over in zip(found[::3], found[2::3], strict=True)
    )


def test_plan_is_a_function_of_its_seed() -> None:
    one, same, other = (arrivals(50, f"run.seed={seed}") for seed in (1, 1, 2))
    assert one == same
    assert [a.seed for a in one] != [a.seed for a in other]


def test_too_stale_updates_make_no_version() -> None:
    found = arrivals(1000, "simulation.staleness.most=4", "strategy.max_staleness=2")
    assert all(one.makes == (one.version - one.tau <= 2) for one in found)
    assert any(not one.makes for one in found)


@pytest.mark.parametrize(
    "policy",
    [
        ("scheduler.policy.kind=in_flight", "scheduler.policy.n=4"),
        ("scheduler.policy.kind=none", "trainer.anarchic.rate=0.3"),
    ],
)
def test_device_whose_update_would_be_too_stale_begins_anew_at_once(
    policy: tuple[str, ...],
) -> None:
    """The slow device is never done in time, and blocks no slot."""
    ring = (
        "strategy.name=ringmaster",
        "strategy.max_staleness=5",
        "devices.slow_devices=[3]",
        "devices.slow_factor=1000",
        "devices.latency={kind='fixed', mean_s=1.0}",
        "simulation.staleness.kind=latency",
        *policy,
    )
    found = arrivals(200, *ring)
    assert all(one.version - one.tau <= 5 and one.makes for one in found)
    assert {one.device for one in found} == set(range(10)) - {3}
    assert found[-1].n > 200 + 10, "the slow device begins again and again"
    waits = arrivals(200, *ring, "strategy.cancel_stale=false")
    assert waits[-1].n == 200, "once asked, the slow device works for a thousand seconds"


def test_steps_are_drawn_for_every_task() -> None:
    dynamic = arrivals(2000, "scheduler.steps.kind=uniform", "scheduler.steps.c=5")
    assert {one.steps for one in dynamic} == set(range(1, 11))
    assert {one.epochs for one in arrivals(9, "scheduler.steps.kind=epochs")} == {1}


def test_no_device_starts_from_a_discarded_version() -> None:
    for sets in (
        ("simulation.staleness.most=7",),
        latency("scheduler.policy.kind=in_flight", "scheduler.policy.n=5"),
    ):
        oldest = 0
        for one in arrivals(500, *sets):
            assert one.tau >= oldest
            oldest = one.oldest


def test_latency_creates_stragglers() -> None:
    found = arrivals(
        2000,
        *latency(
            "scheduler.policy.kind=in_flight",
            "scheduler.policy.n=8",
            "devices.slow_devices=[3]",
            "devices.slow_factor=20",
        ),
    )
    assert all(later.time >= one.time for one, later in pairwise(found))
    slow = [one.version - one.tau for one in found if one.device == 3]
    fast = [one.version - one.tau for one in found if one.device != 3]
    assert slow
    assert min(slow) > 60
    assert 4 < sum(fast) / len(fast) < 9, "seven others come while one trains"


def test_without_latency_tasks_in_flight_take_turns() -> None:
    sets = ("simulation.staleness.kind=latency", "scheduler.policy.kind=in_flight")
    found = arrivals(50, *sets, "scheduler.policy.n=4")
    assert [one.version - one.tau for one in found] == [0, 1, 2, *[3] * 47]


def test_vanished_device_does_not_arrive() -> None:
    found = arrivals(
        300,
        *latency("scheduler.policy.kind=in_flight", "scheduler.policy.n=4", "devices.dropout=0.5"),
    )
    assert found[-1].n > 450


def test_resting_device_finishes_later() -> None:
    rests = (
        "devices.availability.kind=diurnal",
        "devices.availability.period_s=10.0",
        "devices.availability.share=0.2",
    )
    always = arrivals(200, *latency("scheduler.policy.kind=in_flight", "scheduler.policy.n=5"))
    resting = arrivals(
        200, *latency("scheduler.policy.kind=in_flight", "scheduler.policy.n=5", *rests)
    )
    assert resting[-1].time > 1.5 * always[-1].time


@pytest.mark.parametrize(
    "policy",
    [
        ("scheduler.policy.kind=in_flight", "scheduler.policy.n=5"),
        ("strategy.name=fedavg", "strategy.clients_per_round=3", "scheduler.policy.kind=rounds"),
    ],
)
def test_devices_rest_between_two_tasks(policy: tuple[str, ...]) -> None:
    """All take a second, so answers are as far apart as tasks."""
    found = arrivals(
        100,
        "simulation.staleness.kind=latency",
        "devices.latency={kind='fixed', mean_s=1.0}",
        "scheduler.rest_s=20",
        *policy,
    )
    by_device: dict[int, list[float]] = {}
    for one in found:
        by_device.setdefault(one.device, []).append(one.time)
    assert len(by_device) == 10
    for times in by_device.values():
        assert all(later - time >= 20 for time, later in pairwise(times))
    assert found[-1].time < 12 * 20, "nobody rests longer than he has to"


def test_poisson_triggers_come_at_their_rate() -> None:
    poisson = ("scheduler.policy.kind=poisson", "scheduler.policy.rate=2.0")
    found = arrivals(1000, *latency(*poisson), devices=100)
    assert found[-1].time == pytest.approx(500, rel=0.15)


def test_anarchic_devices_use_their_own_rates_and_lengths() -> None:
    """A device that decides at rate r and then works for a second comes every 1 / r + 1 seconds."""
    groups = "participation=[{devices=[0], rate=4.0, steps={kind='fixed', n=7}}]"
    found = arrivals(
        4000,
        "simulation.staleness.kind=latency",
        "devices.latency={kind='fixed', mean_s=1.0}",
        "scheduler.policy.kind=none",
        "trainer.anarchic.rate=0.25",
        groups,
    )
    came = Counter(one.device for one in found)
    others = sum(came[device] for device in range(1, 10)) / 9
    assert came[0] / others == pytest.approx((1 / 0.25 + 1) / (1 / 1.0 + 1), rel=0.1)
    assert {one.steps for one in found if one.device == 0} == {7}
    assert {(one.steps, one.epochs) for one in found if one.device > 0} == {(None, 1)}


def test_round_of_all_devices_may_be_smaller_than_k() -> None:
    found = events(8, *latency("strategy.name=fedavg", "strategy.clients_per_round=9"), devices=3)
    assert [isinstance(one, RoundOver) for one in found] == [False] * 3 + [True] + [False] * 3 + [
        True
    ]


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ("participation=[{devices=[3], steps={kind='seconds', s=1.0}}]",),
            r"participation\[0\].steps.kind = 'seconds'",
        ),
        (latency(), "scheduler.policy.n"),
        (
            latency(
                "scheduler.policy.kind=in_flight", "scheduler.policy.n=2", "devices.dropout=1.0"
            ),
            "devices.dropout",
        ),
        (latency(), "needs scheduler.policy.n, .* with scheduler.policy.kind = 'in_flight'"),
        (
            latency(
                "strategy.name=fedavg",
                "scheduler.policy.kind=rounds",
                "scheduler.policy.timeout_s=0.1",
            ),
            "scheduler.policy.timeout_s",
        ),
        (
            ("strategy.name=fedavg", "simulation.staleness.kind=recent"),
            "strategy.name = 'fedavg' with simulation.staleness.kind = 'recent'",
        ),
        (
            ("strategy.name=fedavg", "simulation.staleness.most=2"),
            "strategy.name = 'fedavg' with simulation.staleness.kind = 'uniform'",
        ),
    ],
)
def test_nonsensical_settings_are_rejected(sets: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        events(2000, *sets)


@pytest.mark.parametrize(
    ("sets", "vain"),
    [
        (
            ("devices.dropout=0.1", "devices.slow_devices=[1]"),
            "devices.slow_devices, devices.dropout",
        ),
        (("scheduler.policy.kind=in_flight", "scheduler.policy.n=9"), "scheduler.policy"),
        (("strategy.name=fedavg", "scheduler.policy.kind=rounds"), ""),
        (
            ("strategy.name=aflguard", "updater.quarantine_after=5"),
            "updater.quarantine_after",
        ),
        (("devices.dropout=0.1", "simulation.staleness.kind=latency"), ""),
    ],
)
def test_settings_without_effect_are_named(sets: tuple[str, ...], vain: str) -> None:
    told = [one.partition(", because ")[0] for one in without_effect(settings(*sets))]
    assert told == ([f"no effect: {vain}"] if vain else [])


@pytest.mark.parametrize(
    "sets",
    [
        ("strategy.name=scaffold",),
        ("solver.kind=scaffold",),
        ("strategy.name=fedasync", "scheduler.policy.kind=rounds"),
        ("strategy.cancel_stale=true",),
        ("strategy.name=fedavg", "strategy.cancel_stale=true"),
        ("strategy.name=fedbuff", "strategy.cancel_stale=true", "scheduler.policy.kind=rounds"),
        ("strategy.name=afa-cs", "strategy.devices=10", "task.devices=9"),
    ],
)
def test_conflicting_settings_are_rejected_with_both_keys(sets: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(*sets)
    keys = {item.partition("=")[0] for item in sets}
    named = [key for key in keys if key in str(refused.value)]
    assert named
    assert str(refused.value).count("strategy.") >= 1
