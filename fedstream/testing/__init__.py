"""Checks for your own strategies, solvers and other rules, for use in your tests.

    from fedstream.testing import check_strategy

    def test_mine() -> None:
        check_strategy(Mine)

An error is raised as a Fault, which names the method and the arrival. Arrivals are drawn from a
seed, so a fault recurs until it is fixed.
"""

from fedstream.testing.rules import Fault, check_partition, check_policy, check_staleness
from fedstream.testing.solvers import check_solver
from fedstream.testing.strategies import check_strategy

__all__ = [
    "Fault",
    "check_partition",
    "check_policy",
    "check_solver",
    "check_staleness",
    "check_strategy",
]
