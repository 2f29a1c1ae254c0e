"""Wire formats: bytes an update takes, what encoding and decoding cost, and updates per second.

    python -m benchmarks.wire [--runs 1] [--sizes 61706,11000000] [--codec]

Devices send the same noise again and again, without training: normally distributed, so that
Zstandard finds no more in it than in real updates' last bits. In the pipeline, two trainers of the
pool keep what int4 and topk leave unsent in Redis, so these cost more than with owned devices.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from benchmarks import echo
from benchmarks.end_to_end import Pipeline
from benchmarks.results import add_out, conditions, keep
from experiments import machine
from fedstream.core.formats import format_of
from fedstream.core.layout import Layout, Model, Tensor
from fedstream.local.redis_server import RedisServer
from fedstream.trainer.solvers import Trained, Work

PLAIN = ("f32", "bf16", "int8", "int4", "topk:0.1", "topk:0.01")
CODEC = (*PLAIN, *(f"{name}+zstd" for name in PLAIN))
# What updates and models are sent in.
PAIRS = (
    ("f32", "f32"),
    ("bf16", "f32"),
    ("bf16", "bf16"),
    ("int8", "f32"),
    ("int8", "int8"),
    ("int8+zstd", "int8"),
    ("int4", "bf16"),
    ("topk:0.1", "bf16"),
    ("topk:0.01", "bf16"),
)

Rows = dict[str, dict[str, float]]  # by format, or formats
Lines = list[str]


class Noise(echo.Echo):
    """Every parameter moves, as in training; the same noise each time, as drawing it costs more."""

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        x = next(model.parameters())
        if self._step is None:
            self._step = 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            x.add_(self._step)
        return Trained(steps=1, samples=1, loss=0.0)


task = Noise()


def codec(size: int, name: str) -> dict[str, float]:
    """Bytes, and milliseconds of processor time to encode and decode: medians, after a first go."""
    how = format_of(name)
    model = Model(Layout((Tensor("x", (size,), "float32", "parameter"),)))
    model.floats[:] = 1e-3 * np.random.default_rng(0).standard_normal(size, np.float32)
    into, sent = Model(model.layout), how.encoded(model)

    def ms(work: Callable[[], object]) -> float:
        took = []
        for _ in range(200 if size < 1_000_000 else 5):
            began = time.process_time()
            work()
            took.append(1000 * (time.process_time() - began))
        return statistics.median(took)

    return {
        "bytes": sent.nbytes,
        "smaller": model.buffer.nbytes / sent.nbytes,
        "encode_ms": ms(lambda: how.encoded(model)),
        "decode_ms": ms(lambda: how.decode(sent, into)),
    }


def pipeline(size: int, update: str, model: str) -> dict[str, float]:
    """Updates per second through every service, and processor time of all processes for each."""
    settings = {
        "WIRE__UPDATE": update,
        "WIRE__MODEL": model,
        "STRATEGY__NAME": "fedbuff",
        "STRATEGY__BUFFER_SIZE": "1",
    }
    with RedisServer() as server, tempfile.TemporaryDirectory() as journal:
        versions = 600 if size < 1_000_000 else 24
        run = Pipeline(
            server.url,
            size,
            versions,
            Path(journal),
            task="benchmarks.wire:task",
            settings=settings,
        ).measure()
    return {
        "updates_per_s": run["updates_per_s"],
        "cpu_ms": run["cpu_ms_per_update"]["all"],
        "updater_peak_mb": run["updater_peak_mb"],
        "redis_peak_mb": run["redis_peak_mb"],
    }


def main() -> None:
    """Measure, print, and write the tables to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1, help="pipelines per format and size")
    parser.add_argument("--sizes", default="61706,11000000", help="numbers of parameters")
    parser.add_argument("--codec", action="store_true", help="only encode and decode")
    add_out(parser)
    options = parser.parse_args()
    about = machine.described() | {"load when it began": f"{os.getloadavg()[0]:.1f}"}
    sizes = [int(size) for size in options.sizes.split(",")]
    found: dict[str, Any] = {}
    for size in sizes:
        rows = found[f"{size:,}"] = {name: codec(size, name) for name in CODEC}
        for name, row in rows.items():
            print(f"{size:>11,} {name:15} " + _shown(row), flush=True)
    _keep("wire-codec", options.out, about, found, _coded)
    if options.codec:
        return
    found = {}
    for size in sizes:
        made = found[f"{size:,}"] = {}
        for update, model in PAIRS:
            runs = [pipeline(size, update, model) for _ in range(options.runs)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            made[f"{update} | {model}"] = row
            print(f"{size:>11,} {update:>10} {model:>5} " + _shown(row), flush=True)
    _keep("wire", options.out, about, found, _piped)


def _shown(row: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:,.2f}" for key, value in row.items())


def _keep(
    name: str,
    folder: Path,
    about: Mapping[str, object],
    found: Mapping[str, Rows],
    table: Callable[[Rows], Lines],
) -> None:
    what = f"`python -m benchmarks.wire{' --codec' if table is _coded else ''}`"
    lines = ["# Wire formats", "", f"{what}, of normally distributed updates.", ""]
    lines.append(conditions(about))
    for size, rows in found.items():
        lines += ["", f"## {size} parameters", "", *table(rows)]
    keep(name, {"machine": about, "measured": found}, "\n".join(lines) + "\n", folder)


def _coded(rows: Rows) -> Lines:
    """What encoding and decoding came to."""
    return [
        "Processor time, in ms.",
        "",
        "| format | bytes | smaller by | encode | decode |",
        "|---" * 5 + "|",
        *(
            f"| {name} | {row['bytes']:,.0f} | {row['smaller']:.1f} | {row['encode_ms']:.2f} | "
            f"{row['decode_ms']:.2f} |"
            for name, row in rows.items()
        ),
    ]


def _piped(rows: Rows) -> Lines:
    """What whole runs came to."""
    columns = (
        "updates",
        "models",
        "updates/s",
        "processor, ms an update",
        "updater's peak, MB",
        "Redis's peak, MB",
    )
    return [
        "Through every service, the journal synced at intervals, four in flight:",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(
            f"| {name} | {row['updates_per_s']:.1f} | {row['cpu_ms']:.2f} | "
            f"{row['updater_peak_mb']:.0f} | {row['redis_peak_mb']:.0f} |"
            for name, row in rows.items()
        ),
    ]


if __name__ == "__main__":
    main()
