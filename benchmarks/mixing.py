"""Would the updater gain by mixing an update in several threads? ``python -m benchmarks.mixing``.

FedAsync's paper allows several updater threads under a read-write lock. Here x_{t+1} depends on x_t
and the journal fixes the order of updates, so only the arithmetic of one update can be divided. Its
slices give the same bits with any number of threads. The variants take turns, so that other load on
the machine affects all alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import numpy as np

from fedstream.strategies.mixing import BLOCK, toward

SIZES = (61_706, 1_000_000, 11_000_000)
THREADS = (1, 2, 4)
TURNS = 60


def measure(size: int) -> dict[int, tuple[float, float, float]]:
    """Best and median wall time and median CPU time in ms, by number of threads."""
    rng = np.random.default_rng(0)
    x, new = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    made = {threads: np.empty_like(x) for threads in THREADS}

    def mix(threads: int, begin: int, end: int) -> None:
        toward(x[begin:end], new[begin:end], 0.37, into=made[threads][begin:end])

    def mix_in(threads: int, pool: ThreadPoolExecutor) -> None:
        blocks = -(-size // BLOCK)
        cuts = [min(size, BLOCK * (blocks * n // threads)) for n in range(threads + 1)]
        if threads == 1:
            mix(1, 0, size)
        else:
            list(pool.map(partial(mix, threads), cuts[:-1], cuts[1:]))

    took: dict[int, list[tuple[float, float]]] = {threads: [] for threads in THREADS}
    with ThreadPoolExecutor(max(THREADS)) as pool:
        for turn in range(TURNS + 1):
            for threads in THREADS:
                one = _timed(partial(mix_in, threads, pool))
                if turn:  # the first turn touches fresh memory
                    took[threads].append(one)
    if any(one.tobytes() != made[1].tobytes() for one in made.values()):
        raise AssertionError("other bits")
    return {
        threads: (min(clock), median(clock), median(busy))
        for threads, times in took.items()
        for clock, busy in [tuple(zip(*times, strict=True))]
    }


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """(wall time, CPU time) in ms."""
    began, busy = time.perf_counter(), time.process_time()
    work()
    return 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - busy)


def main() -> None:
    """Print a table of the results."""
    sys.stdout.write("| parameters | threads | best, ms | median, ms | processor, ms |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for size in SIZES:
        for threads, (best, usual, busy) in measure(size).items():
            sys.stdout.write(f"| {size:,} | {threads} | {best:.2f} | {usual:.2f} | {busy:.2f} |\n")


if __name__ == "__main__":
    main()
