"""The short form of `make chaos`: every kind of fault once."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.chaos.driver import run
from tests.chaos.faults import ALONE, GATEWAYS, WITH_GATEWAY, Fault, Kind, plan
from tests.chaos.report import came_over_http, told
from tests.chaos.services import Zygote

FAULTS = 8
SEEDS = (0, 1, 2)

pytestmark = [
    pytest.mark.process,
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def zygote() -> AsyncIterator[Zygote]:
    """What forks the services of all runs."""
    async with Zygote() as zygote:
        yield zygote


def test_seeds_cover_every_kind_of_fault() -> None:
    drawn = {fault.kind for seed in SEEDS for fault in plan(seed, FAULTS).faults}
    assert drawn | {Kind.BLACKOUT} == set(ALONE), "BLACKOUT is for journal.sync always"


@pytest.mark.asyncio(loop_scope="module")
async def test_runs_under_faults_keep_the_guarantees(zygote: Zygote) -> None:
    for seed in SEEDS:
        outcome = await run(plan(seed, FAULTS), zygote)
        assert not outcome.complaints, told(outcome)
        assert outcome.plan.adapts == (outcome.facts.account.scale not in (None, 1.0))


@pytest.mark.asyncio(loop_scope="module")
async def test_devices_over_http_are_treated_as_trainers_are(zygote: Zygote) -> None:
    """Requests are lost, repeated and late all the time, and the gateway is killed besides.

    Redis forgets which devices have enrolled, too.
    """
    drawn = plan(0, len(WITH_GATEWAY), WITH_GATEWAY, gateway=True)
    outcome = await run(replace(drawn, faults=tuple(map(aimed, drawn.faults))), zygote)
    assert not outcome.complaints, told(outcome)
    assert came_over_http(outcome) > 10
    for what in (
        "requests lost",
        "requests sent twice at once",
        "requests repeated behind later ones",
        "uploads cut amid their bodies",
        "answers lost",
        "devices that Redis forgot",
    ):
        assert outcome.did[what], what


def aimed(fault: Fault) -> Fault:
    """The same fault, at a gateway if it has a target."""
    is_aimed = fault.kind in (Kind.KILL, Kind.PARTITION)
    return replace(fault, target=GATEWAYS[0]) if is_aimed else fault
