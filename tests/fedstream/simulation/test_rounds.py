"""Rounds: the rules alone, and that the scheduler's rounds are the simulation's."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstream.coordinator.cooldowns import Cooldowns
from fedstream.coordinator.rounds import Round, Rounds, verdict, wanted
from fedstream.coordinator.scheduling import HoldBack, Situation, plan
from fedstream.core.errors import ConfigError
from fedstream.core.messages import Trigger
from fedstream.history.index import columns_of
from fedstream.history.table import NONE
from fedstream.journal import RoundClosed
from fedstream.journal.replay import Replayer
from fedstream.runtime.task_settings import Participation
from fedstream.settings.config import Settings, read
from fedstream.settings.services import devices_of
from fedstream.simulation import arrivals, simulate
from fedstream.simulation.arrivals import Arrival, RoundOver
from fedstream.trainer.devices import behaviour
from fedstream.trainer.images import digits
from fedstream.trainer.partitions import Iid
from fedstream.trainer.task import TaskSettings

FREE = HoldBack(max_queue=64, target_staleness=None, memory_budget=None)
FEDAVG, AFA = ("strategy.name=fedavg",), ("strategy.name=afa-cd", "strategy.buffer_size=5")
ROUNDS = "scheduler.policy.kind=rounds"
QUIET = Situation(
    now=0.0,
    issued=0,
    version=0,
    open=(),
    queue=0,
    backlog=0,
    kept=1,
    held=(),
    round_ending=False,
    mean_staleness=0.0,
    trainers=1,
    workers=1,
    model_bytes=1,
    devices=tuple(range(10)),
    last=-1e9,
    round_since=0.0,
)


# the rules


@pytest.mark.parametrize(
    ("answered", "at_work", "coming", "now", "said"),
    [
        (0, 4, 0, 9.0, "goes on"),
        (1, 3, 0, 9.0, "goes on"),
        (2, 2, 0, 10.0, "over"),
        (3, 0, 0, 10.0, "over"),
        (1, 3, 0, 10.0, "again"),
        (1, 3, 1, 10.0, "goes on"),
        (0, 0, 0, 99.0, "again"),
        (4, 0, 0, 9.0, "goes on"),
    ],
)
def test_outcomes_of_a_round_of_four_with_at_least_two(
    answered: int, at_work: int, coming: int, now: float, said: str
) -> None:
    it = Round(4, answered, at_work, 0.0, coming)
    assert verdict(Rounds(k=4, min_answers=2, timeout_s=10.0), it, now) == said
    drops = Rounds(k=4, min_answers=2, timeout_s=10.0, too_few="drop")
    said = "dropped" if said == "again" and answered else said  # there may be nothing to drop
    assert verdict(drops, it, now) == said


@given(
    k=st.integers(1, 20),
    least=st.integers(1, 20),
    devices=st.integers(0, 30),
    room=st.none() | st.integers(-5, 30),
    answered=st.integers(0, 20),
    at_work=st.integers(0, 20),
    coming=st.integers(0, 3),
    now=st.floats(0, 30),
)
def test_too_few_answers_make_no_version(
    k: int,
    least: int,
    devices: int,
    room: int | None,
    answered: int,
    at_work: int,
    coming: int,
    now: float,
) -> None:
    policy = Rounds(k=k, min_answers=least, timeout_s=10.0)
    size, why = wanted(policy, devices, room)
    assert 1 <= size <= max(1, min(k, devices))
    assert size >= min(least, k, devices)
    assert (why == "memory") >= (size < min(k, devices))
    said = verdict(policy, Round(size, answered, at_work, 0.0, coming), now)
    assert said != "over" or answered >= least
    assert said != "again" or (now >= 10 and answered < least and not coming)
    assert said == "goes on" or now >= 10 or (answered >= size and not at_work)


# what the configuration makes of them


def test_round_asks_as_many_devices_as_a_version_needs() -> None:
    """Ten for batches of five threw half of the training away."""
    for sets, batch in ((FEDAVG, 10), (AFA, 5), (("strategy.name=fedbuff",), 10)):
        policy = read(None, [*sets, ROUNDS]).policy
        assert isinstance(policy, Rounds)
        assert policy.size == batch
    more = read(None, [*AFA, ROUNDS, "scheduler.policy.k=7"]).policy
    assert isinstance(more, Rounds)
    assert more.size == 7


def test_every_rule_drops_late_updates_in_rounds() -> None:
    for name in ("afa-cd", "afa-cs", "ca2fl", "aced", "fadas", "fedbuff", "fedavg", "scaffold"):
        sets = [f"strategy.name={name}", ROUNDS]
        sets += ["solver.kind=scaffold"] * (name == "scaffold")
        assert read(None, sets).rule.build(10).max_staleness == 0
    assert read(None, AFA).rule.build(10).max_staleness is None
    assert read(None, [*AFA, "strategy.max_staleness=3"]).rule.build(10).max_staleness == 3


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ([*AFA, ROUNDS, "scheduler.policy.k=4"], "policy.k = 4 is below strategy.buffer_size = 5"),
        (
            [*AFA, ROUNDS, "scheduler.policy.min_answers=6"],
            "min_answers = 6 is above strategy.buffer_size = 5",
        ),
        ([*AFA, ROUNDS, "strategy.max_staleness=2"], "strategy.max_staleness = 2 with .*rounds"),
    ],
)
def test_impossible_rounds_are_rejected(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(None, sets)


def test_more_answers_than_devices_are_rejected() -> None:
    found = read(None, [*AFA, ROUNDS, "scheduler.policy.min_answers=5", "task.devices=4"])
    with pytest.raises(ConfigError, match=r"min_answers = 5, but the run has 4 devices"):
        devices_of(found, digits(TaskSettings(devices=4, partition=Iid())))


# live and simulated: the same rounds

History = list[tuple[object, ...]]


def simulated(given: Settings, devices: int, broken: set[int], count: int) -> History:
    failed = set[int]()
    told: History = []
    for one in arrivals.plan(given, devices, failed):
        if len(told) == count:
            break
        if isinstance(one, RoundOver):
            told.append(("dropped" if one.drops else "over", one.version, round(one.time, 9)))
        elif one.device in broken:
            failed.add(one.n)
        else:
            told.append(
                (
                    one.n,
                    one.device,
                    (one.seed, one.steps),
                    one.tau,
                    one.version,
                    one.makes,
                    round(one.time, 9),
                )
            )
    return told


def live(given: Settings, devices: int, broken: set[int], count: int) -> History:
    """What the scheduler's plans come to, with an updater and trainers that take no time.

    Tasks of ``broken`` devices fail.
    """
    policy = given.policy
    assert isinstance(policy, Rounds)
    now, version, issued, since = 0.0, 0, 0, 0.0
    parts = Participation(given.scheduler.steps, given.participation)
    number: dict[str, int] = {}
    at_work: dict[str, Trigger] = {}
    ends: list[tuple[float, int, Trigger]] = []
    held: list[int] = []
    told: History = []
    rests = Cooldowns(0.0)
    while len(told) < count:
        resting = rests.after_failures(now)
        what = plan(
            policy,
            parts,
            FREE,
            given.run.seed,
            replace(
                QUIET,
                now=now,
                issued=issued,
                version=version,
                open=tuple(at_work.values()),
                held=tuple(held),
                devices=tuple(device for device in range(devices) if device not in resting),
                last=0.0,
                round_since=since,
            ),
        )
        if what.again:
            since = now
        if what.close is not None:
            closed, tasks = what.close
            for task in tasks:
                del at_work[task]
            if closed == version:
                assert what.drops in ((), tuple(held))
                told.append(("dropped" if what.drops else "over", version, round(now, 9)))
                version, held, since = version + (not what.drops), [], now
            continue
        for trigger in what.triggers:
            number[trigger.task], at_work[trigger.task] = issued, trigger
            seconds = behaviour(given.devices, trigger.device, trigger.seed)
            half = 0.5 if seconds.drops_out else 1.0
            heapq.heappush(ends, (now + half * seconds.latency_s, issued, trigger))
            issued += 1
        late = [t for t in at_work.values() if t.deadline is not None and t.deadline <= now]
        for trigger in late:  # their trainers give them up by themselves
            del at_work[trigger.task]
            rests.ended(trigger.device, now, failed=True)
        if late:
            continue
        while ends and ends[0][2].task not in at_work:
            heapq.heappop(ends)
        wakes = [rests.end(device) for device in resting]
        if what.wake_at is not None:
            wakes.append(what.wake_at)
        if not ends or ends[0][0] >= min(wakes):
            now = min(wakes)
            continue
        now, n, trigger = heapq.heappop(ends)
        del at_work[trigger.task]
        drops_out = behaviour(given.devices, trigger.device, trigger.seed).drops_out
        if drops_out:
            continue
        rests.ended(trigger.device, now, failed=trigger.device in broken)
        if trigger.device not in broken:
            makes = len(held) + 1 == given.strategy.batch
            told.append(
                (
                    n,
                    trigger.device,
                    (trigger.seed, trigger.steps),
                    trigger.version,
                    version,
                    makes,
                    round(now, 9),
                )
            )
            held.append(trigger.device)
            if makes:
                version, held, since = version + 1, [], now
    return told[:count]


@settings(deadline=None, max_examples=20)
@given(
    batch=st.integers(1, 6),
    more=st.integers(0, 3),
    least=st.integers(1, 6),
    devices=st.integers(1, 9),
    dropout=st.sampled_from([0.0, 0.3]),
    timeout_s=st.sampled_from([0.8, 1.2, 5.0]),
    seed=st.integers(0, 99),
    too_few=st.sampled_from(["extend", "drop"]),
    rule=st.sampled_from(["strategy.name=fedavg", "strategy.name=afa-cs"]),
    groups=st.sampled_from(["[]", "[{devices=[0], rate=9.0, steps={kind='uniform', c=3}}]"]),
    broken=st.sets(st.integers(1, 8), max_size=2),
)
def test_rounds_are_the_same_live_and_simulated(
    batch: int,
    more: int,
    least: int,
    devices: int,
    dropout: float,
    timeout_s: float,
    seed: int,
    too_few: str,
    rule: str,
    groups: str,
    broken: set[int],
) -> None:
    key = "clients_per_round" if "fedavg" in rule else "buffer_size"
    given = read(
        None,
        [
            rule,
            f"strategy.{key}={batch}",
            f"run.seed={seed}",
            ROUNDS,
            f"scheduler.policy.k={batch + more}",
            f"scheduler.policy.min_answers={min(least, batch, len(set(range(devices)) - broken))}",
            f"scheduler.policy.timeout_s={timeout_s}",
            f"scheduler.policy.too_few={too_few}",
            "simulation.staleness.kind=latency",
            "devices.latency.kind=uniform",
            "devices.latency.low_s=0.5",
            "devices.latency.high_s=1.5",
            f"devices.dropout={dropout}",
            f"participation={groups}",
        ],
    )
    told = simulated(given, devices, broken, 20)
    assert told == live(given, devices, broken, 20)
    assert all(one[3] == one[4] for one in told if len(one) > 3), "nobody is late"


def test_answers_of_dropped_rounds_are_in_no_version(tmp_path: Path) -> None:
    """Simulated, out of the journal again, and as a run's data frames have them."""
    given = read(
        None,
        [
            *FEDAVG,
            "strategy.clients_per_round=4",
            "run.versions=3",
            "task.name=digits",
            "scheduler.policy={kind='rounds', min_answers=4, timeout_s=1.2, too_few='drop'}",
            "simulation.staleness.kind=latency",
            "devices.latency.kind=uniform",
            "devices.latency.low_s=0.5",
            "devices.latency.high_s=1.5",
            "simulation.threads=1",
        ],
    )
    outcome = simulate(given, journal=tmp_path / "journal")
    assert [len(made.updates) for made in outcome.versions] == [0, 4, 4, 4]
    with Replayer(tmp_path / "journal") as again:
        moments = [(one.message, one.model.digest()) for one in again]
    assert moments[-1][1] == outcome.model.digest()
    dropped = sum(one.dropped for one, _ in moments if isinstance(one, RoundClosed))
    assert dropped > 0
    contained = columns_of(tmp_path / "journal").contained.tolist()
    assert contained.count(NONE) == dropped
    assert len(contained) == 12 + dropped


@pytest.mark.parametrize(
    "policy",
    ["kind='in_flight', n=1", "kind='poisson', rate=5.0, n=1"],
    ids=("in flight", "poisson"),
)
def test_tasks_one_at_a_time_are_the_same_live_and_simulated(policy: str) -> None:
    given = read(
        None,
        [
            f"scheduler.policy={{{policy}}}",
            "simulation.staleness.kind=latency",
            (
                "participation=[{devices=[3, 8], rate=0.1}, "
                "{devices=[4], steps={kind='uniform', c=9}}]"
            ),
        ],
    )
    parts = Participation(given.scheduler.steps, given.participation)
    triggered = [
        plan(given.policy, parts, FREE, given.run.seed, replace(QUIET, issued=n)).triggers[0]
        for n in range(300)
    ]
    live = [(one.device, one.seed, one.steps) for one in triggered]
    told = [one for one in islice(arrivals.plan(given, 10), 300) if isinstance(one, Arrival)]
    assert [(one.device, one.seed, one.steps) for one in told] == live
    assert {steps for device, _, steps in live if device == 4} > {5, 18}
