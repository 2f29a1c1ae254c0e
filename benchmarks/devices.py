"""What asynchrony gains with slow devices: more trainers, or one straggler.

    python -m benchmarks.devices

Runs `fedstream run` on the digits. Scaling: one trainer against four, with every device taking
0.5 s. Straggler: the time to a test accuracy of .90 with four trainers, FedAsync against FedAvg
with all ten devices in each round; one device takes 20 times as long as the others, which take
0.2 s.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.results import keep
from experiments import machine


def _run(*options: str) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Run fedstream; return its summary and the rows of its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        subprocess.run(
            [sys.executable, "-m", "fedstream", "run", "--json", "--out", str(out), *options],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
        with (out / "metrics.csv").open() as table:
            return summary, list(csv.DictReader(table))


def _sets(**values: object) -> list[str]:
    return [
        part
        for name, value in values.items()
        for part in ("--set", f"{name.replace('__', '.')}={value}")
    ]


def scaling() -> dict[str, float]:
    """Updates per second with one trainer and with four, each device taking 0.5 s."""
    found = {}
    for trainers in (1, 4):
        _, rows = _run(
            "--trainers",
            str(trainers),
            "--versions",
            str(40 * trainers),
            *_sets(devices__latency__kind="fixed", devices__latency__mean_s=0.5),
        )
        first, last = rows[trainers], rows[-1]  # by then every trainer has started
        updates = int(last["version"]) - int(first["version"])
        found[str(trainers)] = updates / (float(last["seconds"]) - float(first["seconds"]))
    return found | {"ratio": found["4"] / found["1"]}


def straggler() -> dict[str, dict[str, float]]:
    """Seconds from version 0 to an accuracy of .90, and the versions and updates it took."""
    slow = _sets(
        devices__latency__kind="fixed",
        devices__latency__mean_s=0.2,
        devices__slow_devices="[0]",
        devices__slow_factor=20,
        evaluator__every=1,
        run__stop={"target": 0.9},
    )
    found = {}
    for strategy in ("fedasync", "fedavg"):
        summary, rows = _run("--strategy", strategy, "--trainers", "4", "--versions", "2000", *slow)
        reached = next(row for row in rows if row["accuracy"] and float(row["accuracy"]) >= 0.9)
        found[strategy] = {
            "seconds": float(reached["seconds"]) - float(rows[0]["seconds"]),
            "version": int(reached["version"]),
            "updates": summary["tasks"]["applied"] + summary["tasks"]["buffered"],
        }
    return found


def main() -> None:
    """Measure, print, and write benchmarks/results/devices.json."""
    found = {"machine": machine.described(), "scaling": scaling(), "straggler": straggler()}
    print(json.dumps(found, indent=1))
    keep("devices", found)


if __name__ == "__main__":
    main()
