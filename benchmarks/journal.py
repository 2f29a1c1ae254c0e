"""What the journal costs: updates per second with it, next to a pipeline that records nothing.

    python -m benchmarks.journal [--runs 5] [--sizes 61706,11000000]

Measures pairs: both pipelines one after the other, each with a new Redis, alternating which goes
first. Then measures how long an updater takes to recover when it was killed 1,000 versions after
its checkpoint.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from benchmarks.end_to_end import Pipeline
from benchmarks.replay import write
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.journal import segments
from fedstream.journal.rebuild import recovered
from fedstream.local.redis_server import RedisServer

MOST = {61_706: 0.15, 11_000_000: 0.30}  # share of updates per second that `interval` may cost


def updates_per_second(size: int, sync: str) -> float:
    """Updates per second of a pipeline with its own Redis and journal."""
    versions = 2000 if size < 1_000_000 else 40
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        client = redis.Redis.from_url(server.url)
        client.ping()
        run = Pipeline(server.url, size, versions, Path(folder), sync).measure()
        return float(run["updates_per_s"])


def recovery_s(size: int, versions: int) -> float:
    """Seconds to recover the newest model from a segment."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), size, versions)
        began = time.perf_counter()
        [segment] = segments(Path(folder))
        found = recovered(segment)
        took = time.perf_counter() - began
        segment.close()
    assert found.version == versions
    return took


def main() -> None:
    """Measure, print a table, and write it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="pairs to measure per setting")
    parser.add_argument("--sizes", default="61706,11000000", help="numbers of parameters")
    parser.add_argument("--syncs", default="interval,always,never", help="values of journal.sync")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": machine.described(), "cost": {}, "recovery_s": {}}
    lines = []
    for size in (int(part) for part in options.sizes.split(",")):
        for sync in options.syncs.split(","):
            pairs = []
            for n in range(options.runs):
                order = ("none", sync) if n % 2 else (sync, "none")
                rates = {kind: updates_per_second(size, kind) for kind in order}
                pairs.append((rates["none"], rates[sync]))
                print(
                    f"{size:>11,} {sync}: {rates[sync]:.1f}/s, none {rates['none']:.1f}/s",
                    flush=True,
                )
            costs = [1 - with_it / without for without, with_it in pairs]
            cost = statistics.median(costs)
            results["cost"][f"{size} {sync}"] = {"pairs": pairs, "median": cost}
            bound = MOST.get(size) if sync == "interval" else None
            verdict = "" if bound is None else "held" if cost <= bound else "MISSED"
            said = "" if bound is None else f"{bound:.0%}"
            lines.append(
                f"| {size:,} | {sync} | {statistics.median(p[0] for p in pairs):.1f} "
                f"| {statistics.median(p[1] for p in pairs):.1f} | {cost:.1%} | {said} | {verdict} "
                f"| {', '.join(f'{c:.1%}' for c in costs)} |"
            )
    for size, versions in ((61_706, 1000), (1_000_000, 250)):
        took = statistics.median(recovery_s(size, versions) for _ in range(3))
        results["recovery_s"][f"{size} {versions}"] = took
        lines.append(f"recovery of {versions} versions of {size:,} parameters: {took:.2f} s")
    about = conditions(results["machine"])
    table = [line for line in lines if line.startswith("|")]
    rest = [f"- {line}" for line in lines if not line.startswith("|")]
    text = "\n".join(
        [
            "# What the journal costs",
            "",
            "`python -m benchmarks.journal`: updates per second end to end, without training, next",
            "to the same pipeline that records nothing; medians of pairs.",
            "",
            about,
            "",
            "| parameters | sync | none, updates/s | with it | cost | at most | | every pair |",
            "|---|---|---|---|---|---|---|---|",
            *table,
            "",
            *rest,
            "",
        ]
    )
    print(text)
    keep("journal", results, text)


if __name__ == "__main__":
    main()
