"""What the journal costs: updates a second with it, beside a pipeline that records nothing.

    python -m benchmarks.journal [--runs 5] [--sizes 61706,11000000]

Pairs: both pipelines one after the other on one Redis, the order changing from run to run. Then how
long an updater takes to be back that was killed 1,000 versions after its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import redis

from benchmarks import machine
from benchmarks.end_to_end import RESULTS, Pipeline
from broker.layout import Layout, Model, Tensor
from broker.messages import Upload
from fedstream.redis_server import RedisServer
from updater.journal import SegmentHead, Taken, Writer, segments
from updater.progress import Progress, take
from updater.rebuild import recovered, standing_of
from updater.strategies import FedAsyncSettings, State

MOST = {61_706: 0.15, 11_000_000: 0.30}  # of updates a second that `interval` may cost


def updates_per_second(size: int, sync: str) -> float:
    """Of a pipeline with a Redis and a journal of its own."""
    versions = 2000 if size < 1_000_000 else 40
    with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
        client = redis.Redis.from_url(server.url)
        client.ping()
        run = Pipeline(server.url, size, versions, Path(folder), sync).measure()
        return float(run["updates_per_s"])


def recovery_s(size: int, versions: int) -> float:
    """Seconds from reading the first byte of a segment to the newest model."""
    layout = Layout((Tensor("x", (size,), "float32", "parameter"),))
    settings = FedAsyncSettings()
    strategy = settings.build()
    model, update = Model(layout), Model(layout)
    model.floats[:] = 0.0
    update.floats[:] = np.random.default_rng(0).standard_normal(size)
    progress = Progress(State(0, model))
    head = SegmentHead(
        epoch=1, number=0, lineage="benchmark", run="demo", task="echo", devices=10,
        versions=versions, seed=0, created=0.0, strategy=settings.model_dump(mode="json"),
        layout=layout.encode(), release="", time=0.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        standing, models = standing_of(progress, "begun", digest=model.digest(), time=0.0)
        writer = Writer(Path(folder), head, standing, *models)
        free = [Model(layout)]
        for n in range(versions):
            upload = Upload(
                task=str(n), attempt="1", device=n % 10, trainer="t", tau=n, base="b",
                layout=layout.signature, digest=update.digest(), size=layout.nbytes,
                samples=1, steps=1, lr=0.1,
            )  # fmt: skip
            before = progress.state.model
            step = take(strategy, progress, upload, update, free.pop())
            progress = step.after
            free.append(before)
            decision = step.decision
            assert decision
            writer.append(
                Taken(
                    entry=f"{n}-0", upload=upload, outcome="applied", weight=decision.weight,
                    staleness=decision.staleness, version=n + 1, time=0.0, received=0.0,
                    digest=progress.state.model.digest(),
                ),
                update,
            )  # fmt: skip
        writer.sync()
        writer.close()
        began = time.perf_counter()
        [segment] = segments(Path(folder))
        found = recovered(segment)
        took = time.perf_counter() - began
        segment.close()
    assert found.version == versions
    return took


def main() -> None:
    """Measures, prints a table, and writes it to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sizes", default="61706,11000000")
    parser.add_argument("--syncs", default="interval,always,never")
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
                print(f"{size:>11,} {sync}: {rates[sync]:.1f}/s, none {rates['none']:.1f}/s",
                      flush=True)  # fmt: skip
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
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    table = [line for line in lines if line.startswith("|")]
    rest = [f"- {line}" for line in lines if not line.startswith("|")]
    text = "\n".join(
        [
            "# What the journal costs", "",
            "`python -m benchmarks.journal`: updates a second end to end, without training, beside",
            "the same pipeline that records nothing; medians of pairs.", "", about, "",
            "| parameters | sync | none, updates/s | with it | cost | at most | | every pair |",
            "|---|---|---|---|---|---|---|---|", *table, "", *rest, "",
        ]
    )  # fmt: skip
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "journal.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "journal.md").write_text(text)


if __name__ == "__main__":
    main()
