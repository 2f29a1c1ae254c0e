"""Replay: versions per second, next to only reading the file and only mixing; and its memory.

    python -m benchmarks.replay [--runs 5] [--sizes 61706,11000000]

Writes a journal of at most 4 GB to a temporary folder, deleted at the end. Replay checks every
version's digest. A run measures the three one after the other; the ratio within a run is what
counts: replay over the slower of the other two. It is measured with the file only on disk (evicted
from the page cache before each reading, like an old journal), where it must be at least 0.6, and
with the file in the page cache, which shows what replay itself costs. The memory is that of a
process that only replays; with small models it is mostly read-ahead.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import keep
from experiments import machine
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.core.messages import Upload
from fedstream.journal import SegmentHead, Taken, Writer, segments
from fedstream.journal.progress import Progress, take
from fedstream.journal.rebuild import standing_of
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings, State
from fedstream.strategies.mixing import mix

DISK = 4 << 30  # bytes, at most
RATIO = 0.6
MODELS = 3  # in memory, at most
IN_MEMORY = 8  # updates that mixing alone cycles through


def write(folder: Path, parameters: int, most: int = 5000) -> int:
    """Write the journal of a FedAsync run of at most ``most`` updates; return how many it has."""
    layout = Layout((Tensor("x", (parameters,), "float32", "parameter"),))
    count = min(most, int(0.9 * DISK) // layout.nbytes)
    settings = FedAsyncSettings()
    rule, rng = settings.build(), np.random.default_rng(0)
    model = Model(layout)
    model.floats[:] = 0.0
    progress = Progress(State(0, model))
    head = SegmentHead(
        epoch=1,
        number=0,
        lineage="benchmark",
        run="benchmark",
        task="none",
        devices=10,
        versions=count,
        seed=0,
        created=0.0,
        strategy=settings.model_dump(mode="json"),
        layout=layout.encode(),
        release="benchmark",
        time=0.0,
    )
    standing, models = standing_of(progress, "begun", digest=model.digest(), time=0.0)
    writer = Writer(folder, head, standing, *models)
    update, spare = Model(layout), Model(layout)
    for n in range(count):
        update.floats[:] = rng.standard_normal(parameters, np.float32)
        upload = Upload(
            task=f"task-{n}",
            attempt="a",
            device=n % 10,
            trainer="t",
            tau=max(0, n - 1),
            base="b",
            layout=layout.signature,
            digest=update.digest(),
            size=layout.nbytes,
            samples=10,
            steps=5,
            lr=0.1,
            loss=0.5,
        )
        before = progress.state.model
        step = take(rule, progress, upload, update, spare)
        assert step.decision
        progress, spare = step.after, before
        record = Taken(
            entry=f"{n}-0",
            upload=upload,
            outcome="applied",
            staleness=step.decision.staleness,
            weight=step.decision.weight,
            version=n + 1,
            digest=progress.state.model.digest(),
            time=float(n),
            received=float(n),
        )
        writer.append(record, update)
    writer.sync()
    writer.close()
    return count


def read_alone(folder: Path, layout: Layout) -> float:
    """Seconds to read the journal into one model's buffer."""
    into = Model(layout).buffer.data
    [path] = folder.iterdir()
    started = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(into):
            pass
    return time.perf_counter() - started


def evict(folder: Path) -> None:
    """Drop the journal from the page cache. Works because it has been synced."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def mix_alone(layout: Layout, count: int) -> float:
    """Seconds to mix ``count`` updates that are already in memory."""
    rng = np.random.default_rng(0)
    x, spare, *updates = [Model(layout) for _ in range(2 + IN_MEMORY)]
    for model in (x, spare, *updates):
        model.floats[:] = rng.standard_normal(layout.floats, np.float32)
    started = time.perf_counter()
    for n in range(count):
        mix(x, updates[n % IN_MEMORY], 0.4, into=spare)
        x, spare = spare, x
    return time.perf_counter() - started


def replay(folder: Path) -> tuple[float, int]:
    """Seconds to replay the journal, and the number of versions that came out identical."""
    started = time.perf_counter()
    with Replayer(folder) as replayer:
        made = sum(moment.identical is True for moment in replayer)
    return time.perf_counter() - started, made


def peak(folder: Path) -> int:
    """Peak memory of a replay in bytes, beyond its process's peak at the start."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.replay import replay, high_water;"
        "begin = high_water(); replay(Path(sys.argv[1])); print(high_water() - begin)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def high_water() -> int:
    """This process's peak memory so far (VmHWM), in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def measured(parameters: int, runs: int) -> dict[str, Any]:
    """Medians over the runs; rates are in updates per second."""
    with tempfile.TemporaryDirectory(prefix="fedstream-replay-") as name:
        folder = Path(name)
        count = write(folder, parameters)
        [segment] = segments(folder)
        layout = segment.layout
        segment.close()
        kept = {
            where: [_run(folder, layout, count, cold=where == "disk") for _ in range(runs)]
            for where in ("disk", "cache")
        }
        memory = peak(folder)
    found: dict[str, Any] = {
        "parameters": parameters,
        "updates": count,
        "bytes": count * layout.nbytes,
        "peak_bytes": memory,
        "peak_models": round(memory / layout.nbytes, 2),
    }
    for where, rows in kept.items():
        reading, mixing, seconds, ratio = (
            statistics.median(part) for part in zip(*rows, strict=True)
        )
        found[where] = {
            "read_per_s": round(count / reading, 1),
            "mix_per_s": round(count / mixing, 1),
            "replay_per_s": round(count / seconds, 1),
            "ratio": round(ratio, 3),
            "ratios": [round(row[3], 3) for row in rows],
        }
    return found


def _run(
    folder: Path, layout: Layout, count: int, *, cold: bool
) -> tuple[float, float, float, float]:
    """Seconds to read, to mix and to replay; replay's speed as a ratio of the slower of the two."""
    prepare = evict if cold else (lambda folder: read_alone(folder, layout))
    prepare(folder)
    reading = read_alone(folder, layout)
    mixing = mix_alone(layout, count)
    prepare(folder)
    seconds, made = replay(folder)
    assert made == count
    return reading, mixing, seconds, max(reading, mixing) / seconds


def main() -> None:
    """Measure, print a table, and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs per size")
    parser.add_argument("--sizes", default="61706,11000000", help="numbers of parameters")
    wanted = parser.parse_args()
    results = [measured(int(size), wanted.runs) for size in wanted.sizes.split(",")]
    print("parameters  updates  where   read/s    mix/s  replay/s  ratio            peak, models")
    for row in results:
        for where in ("disk", "cache"):
            found = row[where]
            verdict = "held" if found["ratio"] >= RATIO else "MISSED"
            print(
                f"{row['parameters']:>10} {row['updates']:>8}  {where:<5} "
                f"{found['read_per_s']:>8.0f} {found['mix_per_s']:>8.0f} "
                f"{found['replay_per_s']:>9.0f} {found['ratio']:>6.2f} "
                f"{verdict if where == 'disk' else '':>8} {row['peak_models']:>13.2f}"
            )
    report = {"machine": machine.described(), "load": os.getloadavg()[0], "results": results}
    keep("replay", report)


if __name__ == "__main__":
    main()
