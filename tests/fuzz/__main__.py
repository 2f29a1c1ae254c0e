"""Throw hostile inputs at everything that reads what others wrote, and print a table."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
from dataclasses import asdict
from pathlib import Path

from tests.fuzz.harness import Found, fuzz, kept, limit_memory
from tests.fuzz.targets import targets

FINDS = Path("build/fuzz")
_SHARE = 500  # inputs of a target that one process runs, with its own limit of memory


def _part(name: str, n: int, seed: int) -> Found:
    logging.disable()
    limit_memory()
    return fuzz(targets()[name], n, seed)


def _together(name: str, parts: list[Found]) -> Found:
    found = Found(name)
    for part in parts:
        found.inputs += part.inputs
        found.accepted += part.accepted
        found.refused += part.refused
        found.crashes += part.crashes
        found.hangs += part.hangs
        found.seconds += part.seconds
        found.slowest_s = max(found.slowest_s, part.slowest_s)
        found.grown = max(found.grown, part.grown)
        found.crashed = {**part.crashed, **found.crashed}
    return found


def main() -> int:
    """Runs the targets; inputs are divided among them evenly."""
    every = targets()
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", choices=[*every, []], metavar="TARGET")
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="number of inputs, divided among the targets"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes to run in parallel")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    options = parser.parse_args()
    names = options.target or [*every]
    each = -(-options.inputs // len(names))
    parts = [(name, n) for name in names for n in range(-(-each // _SHARE))]
    # A child for each part: the limit of memory is one process's, and so is what leaks.
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=1) as pool:
        asked = [
            (name, min(_SHARE, each - n * _SHARE), options.seed * 10**6 + n) for name, n in parts
        ]
        done = pool.starmap(_part, asked, chunksize=1)
    table = [_together(name, [part for part in done if part.target == name]) for name in names]
    head = ("target", "inputs", "accepted", "refused", "crashes", "hangs", "slowest", "grown by")
    print("{:<10}{:>9}{:>10}{:>9}{:>9}{:>7}{:>11}{:>11}".format(*head))
    for found in table:
        print(
            f"{found.target:<10}{found.inputs:>9,}{found.accepted:>10,}{found.refused:>9,}"
            f"{found.crashes:>9,}{found.hangs:>7,}{found.slowest_s:>9.2f} s"
            f"{found.grown / 2**20:>7.0f} MiB"
        )
    for found in table:
        for path, what in zip(kept(found, FINDS), found.crashed, strict=True):
            print(f"{path}: {what}")
    if options.json:
        rows = [asdict(found) | {"crashed": list(found.crashed)} for found in table]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(found.is_clean for found in table) else 1


if __name__ == "__main__":
    sys.exit(main())
