"""Checks for strategies, solvers and other rules of your own, to be called in your tests.

    from fedstream.testing import check_strategy

    def test_mine() -> None:
        check_strategy(Mine)

What is wrong is raised as a Fault, which says what, where, and at which arrival. Arrivals are drawn
from a seed, so a fault comes back until it is mended.
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
