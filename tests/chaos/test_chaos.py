"""The short form of `make chaos`: every kind of fault at least once."""

from __future__ import annotations

import sys

import pytest

from tests.chaos.driver import run
from tests.chaos.faults import Kind, plan
from tests.chaos.report import told

FAULTS = 4
SEEDS = (0, 1, 2)

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="stops another process's files growing"),
]


def test_the_seeds_cover_all_that_can_go_wrong() -> None:
    assert {fault.kind for seed in SEEDS for fault in plan(seed, FAULTS).faults} == set(Kind)


@pytest.mark.parametrize("seed", SEEDS)
async def test_a_run_under_faults_keeps_what_is_promised(seed: int) -> None:
    outcome = await run(plan(seed, FAULTS))
    assert not outcome.complaints, told(outcome)
