"""What changes between versions take, against whole models, and what making them costs.

    fedstream run --task mnist --strategy fedbuff --versions 60 --out runs/mnist
    python -m benchmarks.changes runs/mnist [RUN ...]

For versions from a quarter of a run on, each against those 1, 4 and 16 versions later, in each
format that models are published in: the mean share of the whole model's bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedstream.core import changes, compressed
from fedstream.core.formats import format_of
from fedstream.journal import opened
from fedstream.journal.inspection import model_at

GAPS = (1, 4, 16)
PUBLISHED = ("f32", "bf16", "int8")
Bytes = npt.NDArray[np.uint8]


def xor(old: Bytes, new: Bytes, width: int) -> Bytes:
    """The obvious way: what differs bit by bit."""
    return compressed.encode(old ^ new)


def xor_planes(old: Bytes, new: Bytes, width: int) -> Bytes:
    """The same, all words' lowest bytes first, then the next ones."""
    return compressed.encode(np.ascontiguousarray((old ^ new).reshape(-1, width).T))


def whole(old: Bytes, new: Bytes, width: int) -> Bytes:
    """The newer model alone."""
    return compressed.encode(new)


WAYS: dict[str, Callable[[Bytes, Bytes, int], Bytes]] = {
    "changes": changes.encode,
    "xor, planes": xor_planes,
    "xor": xor,
    "model+zstd": whole,
}


def main() -> None:
    """Measure runs, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of `fedstream run`")
    print(f"| run | parameters | format | apart | {' | '.join(WAYS)} | ms |")
    print("|---" * (5 + len(WAYS)) + "|")
    for run in parser.parse_args().runs:
        summary = json.loads((run / "summary.json").read_text())
        last, takes_models = summary["versions"], summary["strategy"] in ("fedasync", "fedavg")
        with opened(run / "journal") as chain:
            models = {n: model_at(chain, n)[0] for n in range(last // 4, last + 1)}
        size = models[last].layout.parameters
        for name in PUBLISHED:
            how = format_of(name)
            made = {
                n: how.encoded(one, seed=n if takes_models else None) for n, one in models.items()
            }
            for gap in (gap for gap in GAPS if gap <= len(made) // 2):
                pairs = [(made[n], made[n + gap]) for n in made if n + gap in made]
                row, ms = measured(pairs, changes.width_of(how.kind))
                shares = " | ".join(f"{share:.0%}" for share in row)
                print(f"| {run.name} | {size:,} | {name} | {gap} | {shares} | {ms:.2f} |")


def measured(pairs: list[tuple[Bytes, Bytes]], width: int) -> tuple[list[float], float]:
    """Shares of the model's bytes, one for each way, and milliseconds to make the changes."""
    shares = [
        statistics.mean(way(old, new, width).size / new.size for old, new in pairs)
        for way in WAYS.values()
    ]
    took = []
    for old, new in pairs:
        began = time.process_time()
        changes.encode(old, new, width)
        took.append(1000 * (time.process_time() - began))
    return shares, statistics.median(took)


if __name__ == "__main__":
    main()
