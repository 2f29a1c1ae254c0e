"""A pipeline under faults: kills, partitions, a Redis that forgets, a disk that loses its power.

    python -m tests.chaos [--faults 240] [--of 12] [--seed N ...] [--only KIND ...]
                          [--sentinels | --gateway]

Plays runs of twelve faults each, across all rules and journal.sync = always and interval, until
there have been enough faults, and then prints a table. With --seed, plays only the runs of these
seeds; a seed's faults are the same every time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.driver import STUCK_S, Outcome, run
from tests.chaos.faults import ALONE, SENTINELED, WITH_GATEWAY, Kind, Plan, plan
from tests.chaos.report import table, told
from tests.chaos.services import Zygote

FAULTS = 12  # of a run
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


async def play(
    plans: Sequence[Plan],
    at_once: int,
    *,
    stuck_s: float = STUCK_S,
    within_s: float = math.inf,
    until_failure: bool = False,
) -> list[Outcome]:
    """Plays plans, some at the same time; says each as it ends. None begins after ``within_s``."""
    waiting, outcomes = list(reversed(plans)), []
    until = time.monotonic() + within_s

    async def play_some(zygote: Zygote) -> None:
        while waiting and time.monotonic() < until:
            outcome = await run(waiting.pop(), zygote, stuck_s=stuck_s)
            outcomes.append(outcome)
            sys.stdout.write(told(outcome) + "\n")
            sys.stdout.flush()
            if until_failure and outcome.complaints:
                waiting.clear()

    async with Zygote() as zygote, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(play_some(zygote))
    return sorted(outcomes, key=lambda outcome: outcome.plan.seed)


def main() -> int:
    """Plays, prints, and writes the table unless only some seeds were asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=240, help="faults in all")
    parser.add_argument("--of", type=int, default=FAULTS, help="faults per run")
    parser.add_argument("--seed", type=int, nargs="+", help="play only the runs of these seeds")
    parser.add_argument("--only", nargs="+", type=Kind, help="inject only these kinds of fault")
    parser.add_argument(
        "--sentinels", action="store_true", help="run Redis with sentinels and failovers"
    )
    parser.add_argument(
        "--gateway", action="store_true", help="run devices over HTTP through a gateway, too"
    )
    parser.add_argument(
        "--without", nargs="+", type=Kind, default=(), help="leave out these kinds of fault"
    )
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument(
        "--stuck-s", type=float, default=STUCK_S, help="fail after this long without progress"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="start no run after this many minutes"
    )
    parser.add_argument("--until-failure", action="store_true", help="stop at the first failure")
    options = parser.parse_args()
    seeds = options.seed or range(-(-options.faults // options.of))
    every = SENTINELED if options.sentinels else WITH_GATEWAY if options.gateway else ALONE
    kinds = [kind for kind in options.only or every if kind not in options.without]
    plans = [
        plan(seed, options.of, kinds, sentinels=options.sentinels, gateway=options.gateway)
        for seed in seeds
    ]
    outcomes = asyncio.run(
        play(
            plans,
            options.at_once,
            stuck_s=options.stuck_s,
            within_s=60 * options.minutes,
            until_failure=options.until_failure,
        )
    )
    text = table(outcomes)
    sys.stdout.write(text)
    if options.seed is None and set(kinds) == set(every):
        beside = "-sentinels" if options.sentinels else "-gateway" if options.gateway else ""
        name = f"chaos{beside}.md"
        (RESULTS / name).write_text(text)
    return int(any(outcome.complaints for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
