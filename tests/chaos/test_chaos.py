"""The short form of `make chaos`: every kind of fault once."""

from __future__ import annotations

import sys

import pytest

from tests.chaos.driver import run
from tests.chaos.faults import ALONE, Kind, plan
from tests.chaos.report import told
from tests.chaos.services import Zygote

FAULTS = 8
SEEDS = (0, 1, 2)

pytestmark = [
    pytest.mark.process,
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]


def test_seeds_cover_every_kind_of_fault() -> None:
    drawn = {fault.kind for seed in SEEDS for fault in plan(seed, FAULTS).faults}
    assert drawn | {Kind.BLACKOUT} == set(ALONE), "BLACKOUT is for journal.sync always"


async def test_runs_under_faults_keep_the_guarantees() -> None:
    async with Zygote() as zygote:
        for seed in SEEDS:
            outcome = await run(plan(seed, FAULTS), zygote)
            assert not outcome.complaints, told(outcome)
