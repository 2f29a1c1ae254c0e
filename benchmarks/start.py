"""What a short local run waits for: its version 1, and the prompt after its last version.

    python -m benchmarks.start [--runs 5] [--versions 400]

Each run is `fedstream run` as a user types it: the digits, two trainers and a Redis of its own.
The journal has the versions' times. Processor time is that of all its processes together.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.history.record import open_run

BOUNDS = {"first": 3.0, "after": 1.0}
NAMES = {
    "first": "command to version 1",
    "training": "version 1 to the last",
    "after": "last version to the end",
    "whole": "whole command",
    "processor": "processor time of all processes",
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one run."""

    first: float  # from the command to version 1
    training: float  # from there to the last version
    after: float  # from there to the command's end
    whole: float
    processor: float  # user and system time of all processes


def measured(versions: int, folder: Path) -> Timing:
    """Run the command once. Raises CalledProcessError if it fails."""
    program = Path(sys.executable).with_name("fedstream")
    cpu, began = _cpu_s(), time.time()
    subprocess.run(
        [program, "run", "--versions", str(versions), "--out", folder],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    ended, cpu = time.time(), _cpu_s() - cpu
    times = open_run(folder).columns()[0].made["time"].tolist()
    first, last = times[1], times[-1]
    return Timing(first - began, last - first, ended - last, ended - began, cpu)


def _cpu_s() -> float:
    """Processor seconds of all processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def medians(runs: list[Timing]) -> dict[str, float]:
    """Median of each column."""
    return {name: statistics.median(asdict(run)[name] for run in runs) for name in NAMES}


def page(found: dict[str, float], runs: int, versions: int, about: dict[str, str | int]) -> str:
    """The results as Markdown."""
    rows = "\n".join(
        f"| {title} | {found[name]:.2f} | {f'<= {BOUNDS[name]:g}' if name in BOUNDS else ''} |"
        for name, title in NAMES.items()
    )
    return (
        "# Start and end of a local run\n\n"
        f"`python -m benchmarks.start`: `fedstream run --versions {versions}`, the digits with\n"
        f"two trainers. Medians of {runs} runs, in seconds.\n\n{conditions(about)}\n\n"
        f"| | seconds | bound |\n|---|---|---|\n{rows}\n"
    )


def main() -> None:
    """Measure, print the table, and write it to the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--versions", type=int, default=400)
    add_out(parser)
    asked = parser.parse_args()
    about = machine.described() | {"load when it began": f"{os.getloadavg()[0]:.1f}"}
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(asked.runs + 1):
            run = measured(asked.versions, Path(folder) / str(n))
            print({name: round(value, 2) for name, value in asdict(run).items()}, flush=True)
            if n:  # the first one reads the files from disk
                runs.append(run)
    found = medians(runs)
    text = page(found, asked.runs, asked.versions, about)
    print(text)
    kept = {"machine": about, "medians": found, "runs": [asdict(run) for run in runs]}
    keep("start", kept, text, asked.out)


if __name__ == "__main__":
    main()
