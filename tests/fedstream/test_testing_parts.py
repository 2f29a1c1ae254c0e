"""The checks for users' solvers, partitions and policies find faults, and none in built-in ones."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from fedstream.coordinator.policies import Anarchic, InFlight, Poisson, Policy, Traffic
from fedstream.testing import Fault, check_partition, check_policy, check_solver
from fedstream.trainer.partitions import PARTITIONS, Partition
from fedstream.trainer.solvers import SOLVERS, Iterate, Solver, Trained, Work


@pytest.mark.parametrize("solver", SOLVERS.built_in.values())
def test_built_in_solvers_keep_what_is_relied_on(solver: type[Solver]) -> None:
    check_solver(solver)


@pytest.mark.parametrize("partition", PARTITIONS.built_in.values())
def test_built_in_partitions_are_partitions(partition: type[Partition]) -> None:
    check_partition(partition)


@pytest.mark.parametrize("policy", [InFlight(n=3, mean_delay_s=0.1), Poisson(), Anarchic()])
def test_built_in_policies_are_functions_of_what_they_see(policy: Policy) -> None:
    check_policy(policy)


# each is wrong in one thing


class Writes(Solver):
    def direction(self, g: Any, at: Iterate) -> Any:
        g[0].mul_(2.0)
        return g


class Moves(Solver):
    def direction(self, g: Any, at: Iterate) -> Any:
        at.x[0].add_(1.0)
        return g


class Rolls(Solver):
    def direction(self, g: Any, at: Iterate) -> Any:
        return [part * random.SystemRandom().random() for part in g]


class Explodes(Solver):
    def rate(self, n: int) -> float:
        return 1e38

    def direction(self, g: Any, at: Iterate) -> Any:
        return [part * 1e38 for part in g]


class Shrinks(Solver):
    def direction(self, g: Any, at: Iterate) -> Any:
        return g[:1]


class Counts(Solver):
    def train(self, task: Any, model: Any, data: Any, work: Work) -> Trained:
        return Trained(0, -1, 0.0)


@pytest.mark.parametrize(
    ("solver", "words"),
    [
        (Writes, r"Writes: direction\(\) writes to g"),
        (Moves, r"Moves: direction\(\) writes to at.x"),
        (Rolls, "the same task gives another model the second time"),
        (Explodes, "the trained model is not finite"),
        (Shrinks, r"direction\(\) must return a list with one tensor"),
        (Counts, "expected at least 1 step"),
    ],
)
def test_a_faulty_solver_is_found(solver: type[Solver], words: str) -> None:
    with pytest.raises(Fault, match=words):
        check_solver(solver)


def test_a_solver_that_keeps_its_state_elsewhere_is_found() -> None:
    steps: list[int] = []

    class Elsewhere(Solver):
        def direction(self, g: Any, at: Iterate) -> Any:
            if at.n == 0:
                steps.clear()
            steps.append(at.n)
            return [part / len(steps) for part in g]

    with pytest.raises(Fault, match="interrupted after 1 of 7 steps and resumed, it gives another"):
        check_solver(Elsewhere)


def drawn(labels: Any, devices: int, seed: int) -> list[Any]:
    return np.array_split(np.random.permutation(len(labels)), devices)


def short(labels: Any, devices: int, seed: int, n: int = 5) -> list[Any]:
    return np.array_split(np.arange(n), devices)


@pytest.mark.parametrize(
    ("partition", "given", "words"),
    [
        (drawn, {}, "drawn: device 0 gets other rows the second time"),
        (short, {}, "short: .* device 5 has no rows"),
        (short, {"n": 50}, "350 of 400 rows are on no device"),
        (short, {"m": 50}, "m\n.*not permitted"),
        (lambda labels, devices: [], {}, "must take labels, devices, seed"),
    ],
)
def test_a_faulty_partition_is_found(partition: Any, given: dict[str, int], words: str) -> None:
    with pytest.raises(Fault, match=words):
        check_partition(partition, **given)  # type: ignore[arg-type]


class Moody(Policy):
    def in_flight(self, traffic: Traffic) -> int:
        return random.randint(1, 9)


class Clocked(Policy):
    def in_flight(self, traffic: Traffic) -> int:
        return 3

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        return time.time() + 1e9


class Nobody(Policy):
    def in_flight(self, traffic: Traffic) -> int:
        return len(traffic.at_work)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Moody, "Moody: asked twice, it decides differently"),
        (Clocked, "Clocked: asked twice, it decides differently"),
        (Nobody, r"in_flight\(\) returned 0: it must return a whole number of at least 1"),
        (Policy, r"Policy has no in_flight\(\): write it"),
    ],
)
def test_a_faulty_policy_is_found(policy: Any, words: str) -> None:
    with pytest.raises(Fault, match=words):
        check_policy(policy)
