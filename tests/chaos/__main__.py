"""A pipeline under faults: kills, pauses, a Redis that forgets, a full disk.

    python -m tests.chaos [--faults 200] [--seed N] [--at-once N]

Runs of ten faults each, over four rules and journal.sync always and interval, until there were as
many as wanted; then a table. With --seed only that seed's run, whose faults are the same each time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.driver import Outcome, run
from tests.chaos.faults import Kind, Plan, plan
from tests.chaos.report import table, told
from tests.chaos.services import Zygote

FAULTS = 10  # of a run
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.md"


async def play(plans: Sequence[Plan], at_once: int) -> list[Outcome]:
    """Plays plans, some at the same time; says each as it ends."""
    free = asyncio.Semaphore(at_once)

    async def one(plan: Plan) -> Outcome:
        async with free:
            outcome = await run(plan, zygote)
        sys.stdout.write(told(outcome) + "\n")
        sys.stdout.flush()
        return outcome

    async with Zygote() as zygote:
        return await asyncio.gather(*(one(plan) for plan in plans))


def main() -> int:
    """Plays, prints, and writes the table unless only one seed was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, help="only this seed's run")
    parser.add_argument("--of", type=int, default=FAULTS, help="faults of a run")
    parser.add_argument("--only", nargs="+", type=Kind, default=tuple(Kind), help="kinds")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    options = parser.parse_args()
    runs = range(-(-options.faults // options.of))
    seeds = runs if options.seed is None else [options.seed]
    plans = [plan(seed, options.of, options.only) for seed in seeds]
    outcomes = asyncio.run(play(plans, options.at_once))
    text = table(outcomes)
    sys.stdout.write(text)
    if options.seed is None:
        RESULTS.write_text(text)
    return int(any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
