"""Users' own policies: found by name, used live and in a simulation, and checked."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from fedstream.coordinator.policies import InFlight, Poisson, Policy, Traffic
from fedstream.coordinator.scheduling import HoldBack, Plan, Situation, plan
from fedstream.core.errors import ConfigError
from fedstream.runtime.task_settings import FixedSteps, Participation
from fedstream.settings.config import Settings, read
from fedstream.simulation import arrivals
from tests.coordinator.test_scheduling import CALM as PLAIN
from tests.coordinator.test_scheduling import FREE, NOW

CALM = replace(PLAIN, began=NOW - 60)


class Careful(Policy):
    """Fewer tasks while updates are stale; one a second; the device with the lowest number."""

    most: int = 6
    every_s: float = 0.0

    def in_flight(self, traffic: Traffic) -> int:
        return max(1, self.most - int(traffic.mean_staleness))

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        return traffic.last + self.every_s

    def choose(self, traffic: Traffic, idle: Sequence[int], draw: random.Random) -> int:
        return min(idle)


class Copy(Policy):
    """InFlight, written by somebody else."""

    n: int
    mean_delay_s: float

    def in_flight(self, traffic: Traffic) -> int:
        return self.n

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        return traffic.last + draw.expovariate(1 / self.mean_delay_s)


def planned(policy: Policy, seen: Situation = CALM, hold: HoldBack = FREE) -> Plan:
    return plan(policy, Participation(FixedSteps(n=5), ()), hold, 0, seen)


def devices(what: Plan) -> list[int]:
    return [trigger.device for trigger in what.triggers]


def test_it_says_how_many_tasks_there_are_and_on_which_devices() -> None:
    assert devices(planned(Careful(most=3))) == [0, 1, 2]
    stale = replace(CALM, mean_staleness=2.5, open=planned(Careful(most=2)).triggers)
    assert devices(planned(Careful(most=5), stale)) == [2]  # 3 of them, two are open
    assert devices(planned(Careful(most=99))) == list(range(10))  # one per device


def test_it_says_when_the_next_one_begins() -> None:
    what = planned(Careful(every_s=1.0), replace(CALM, last=NOW - 1.5))
    assert devices(what) == [0]  # the next counts from now
    assert (what.wake_at, what.last) == (NOW + 1.0, NOW)


def test_limits_are_outside_of_it() -> None:
    what = planned(Careful(most=6), replace(CALM, backlog=64))
    assert (what.limit, what.held, devices(what)) == (1, "queue", [0])


def test_the_moment_counts_what_this_plan_opens() -> None:
    seen = []

    class Watching(Careful):
        def choose(self, traffic: Traffic, idle: Sequence[int], draw: random.Random) -> int:
            seen.append((traffic.issued, sorted(traffic.at_work), traffic.now - traffic.began))
            return min(idle)

    planned(Watching(most=3), replace(CALM, issued=7))
    assert seen == [(7, [], 60.0), (8, [0], 60.0), (9, [0, 1], 60.0)]


@pytest.mark.parametrize(
    ("method", "answer", "words"),
    [
        ("in_flight", 0, r"in_flight\(\) returned 0: it must return a whole number of at least 1"),
        ("in_flight", 2.5, r"in_flight\(\) returned 2.5"),
        ("in_flight", True, r"in_flight\(\) returned True"),
        ("due", None, r"due\(\) returned None: it must return a finite time in seconds"),
        ("due", float("inf"), r"due\(\) returned inf"),
        ("choose", 77, r"choose\(\) returned 77: it must return one of the idle devices, or None"),
        ("choose", np.array([1, 2]), r"choose\(\) returned array\(\[1, 2\]\): it must"),
        ("in_flight", KeyError("x"), r"in_flight\(\) raised KeyError: 'x' at .*test_policies.py:"),
        ("choose", IndexError("none"), r"choose\(\) raised IndexError: none at "),
    ],
)
def test_nonsense_and_errors_name_the_policy_and_the_method(
    method: str, answer: Any, words: str
) -> None:
    def answers(*_: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    wrong = type("Wrong", (Careful,), {method: answers})(kind="rules.py:Wrong")
    with pytest.raises(ConfigError, match=rf"^scheduler.policy.kind = 'rules.py:Wrong': {words}"):
        planned(wrong)


# by name


PROGRAM = """
from tests.coordinator.test_policies import Careful, Policy

class Mine(Careful):
    pass

class Unfinished(Policy):
    n: int = 1
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The path of a file with policies."""
    file = tmp_path_factory.mktemp("own") / "own_policies.py"
    file.write_text(PROGRAM)
    return str(file)


def settings(kind: str, *sets: str) -> Settings:
    return read(None, [f"scheduler.policy.kind={kind}", *sets])


def test_it_is_chosen_by_name_with_keys_of_its_own(rules: str) -> None:
    policy = settings(f"{rules}:Mine", "scheduler.policy.most=4").policy
    assert isinstance(policy, Careful)
    assert (policy.kind, policy.most) == (f"{rules}:Mine", 4)
    with pytest.raises(ConfigError, match=r"scheduler.policy.mots = 4 .*did you mean .*\.most\?"):
        settings(f"{rules}:Mine", "scheduler.policy.mots=4")
    with pytest.raises(ConfigError, match=r"Unfinished has no in_flight\(\): write it"):
        settings(f"{rules}:Unfinished")
    with pytest.raises(ConfigError, match=r"did you mean 'poisson'\?"):
        settings("poison")


class Creeping(Copy):
    """Counts from now, so that its time never comes."""

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        return traffic.now + 0.1 + draw.random()


# in a simulation


def simulated(policy: Policy, events: int = 60, **more: Any) -> list[Any]:
    sets = (
        "simulation.staleness.kind=latency",
        "devices.latency.kind=exponential",
        "devices.latency.mean_s=1.0",
        "strategy.name=fedbuff",
        "strategy.buffer_size=3",
    )
    usual = read(None, sets)
    scheduler = usual.scheduler.model_copy(update={"policy": policy})
    found = usual.model_copy(update={"scheduler": scheduler, **more})
    return list(islice(arrivals.plan(found, 10), events))


def test_a_policy_whose_time_never_comes_ends_the_simulation() -> None:
    with pytest.raises(ConfigError, match=r"due\(\) put the same task off 1001 times, to \S+ s"):
        simulated(Creeping(n=2, mean_delay_s=1.0))


def test_the_same_rule_by_somebody_else_gives_the_same_arrivals() -> None:
    ours = InFlight(n=4, mean_delay_s=0.5)
    theirs = Copy(n=4, mean_delay_s=0.5)
    assert simulated(ours) == simulated(theirs)
    assert simulated(ours) != simulated(Poisson(rate=2.0, n=4))


def test_the_moment_shows_the_mean_staleness_of_what_was_used() -> None:
    seen: list[float] = []

    class Watching(Careful):
        def in_flight(self, traffic: Traffic) -> int:
            seen.append(traffic.mean_staleness)
            return 6

    late = [event.version - event.tau for event in simulated(Watching(), 40)]
    mean = 0.0
    means = {mean}
    for staleness in late:
        mean = 0.9 * mean + (1 - 0.9) * staleness
        means.add(mean)
    assert max(late) > 0
    assert set(seen) <= means
    assert len(set(seen)) > 10
