"""A round of FedAvg in Flower's simulation, beside the plain loop that its devices run.

    python -m venv --system-site-packages .venv-ray
    .venv-ray/bin/pip install 'flwr[simulation]==1.41.0'
    .venv-ray/bin/python -m benchmarks.flower_rounds [--runs 3]

10 of 100 devices of FedAsync's CIFAR-10 take an epoch of 10 steps of 50 images in each round, one
after the other, in bfloat16 with the channels last and one thread, as in benchmarks.convolution.
Each device runs the plain loop and tells how long that took: the rest of the round is Flower's, by
the clock. FEDSTREAM_DATA must contain CIFAR-10.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.convolution import BATCH, STEPS, loop, settings_of
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import Task

DEVICES, PART = 100, 0.1  # PART of the devices train in a round

client = ClientApp()


@cache  # one for each process
def prepared() -> Task:
    """The task, loaded."""
    torch.set_num_threads(1)
    settings = settings_of("bf16")
    return load_task(settings.task.name, settings.task)


@client.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """Train the received model for an epoch."""
    from benchmarks.flower_rounds import prepared  # not this process's __main__, which Ray copies

    task = prepared()
    network = task.model()
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = task.device_data(int(context.node_config["partition-id"]))
    epoch = loop(network, data, "bf16", last=True)
    began = time.perf_counter()
    epoch()
    metrics = {"num-examples": STEPS * BATCH, "seconds": time.perf_counter() - began}
    found = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(found), reply_to=message)


def main() -> None:
    """Measure, and write the result to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="rounds")
    runs, load = parser.parse_args().runs, os.getloadavg()[0]
    ends, loops = list[float](), list[float]()

    def heard(replies: list[RecordDict], _weighted_by: str) -> MetricRecord:
        ends.append(time.perf_counter())
        loops.append(sum(float(reply["metrics"]["seconds"]) for reply in replies))
        return MetricRecord()

    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        arrays = ArrayRecord(prepared().model().state_dict())
        rule = FedAvg(fraction_train=PART, fraction_evaluate=0.0, train_metrics_aggr_fn=heard)
        rule.start(grid, arrays, num_rounds=runs + 1)

    one = {"num_cpus": 1}
    backend: Any = {"init_args": {**one, "num_gpus": 0}, "client_resources": one}
    run_simulation(server, client, DEVICES, backend_config=backend)
    rounds = [end - began for began, end in pairwise(ends)]
    ratio = statistics.median(a / b for a, b in zip(rounds, loops[1:], strict=True))
    found: dict[str, Any] = {
        "machine": machine.described(),
        "load": load,
        "rounds_s": rounds,
        "loops_s": loops[1:],
        "ratio": ratio,
    }
    step_ms = 1e3 * statistics.median(rounds) / (DEVICES * PART * STEPS)
    text = "\n".join(
        [
            "# Rounds in Flower's simulation",
            "",
            "`benchmarks/flower_rounds.py`: FedAvg in flwr 1.41.0 with Ray, FedAsync's network for",
            "CIFAR-10, bf16 with the channels last; by the clock, beside the plain loop within.",
            "",
            conditions(found["machine"]) + f"; load {load:.1f}",
            "",
            "| | ms a step | of the plain loop |",
            "|---|---|---|",
            f"| Flower | {step_ms:.1f} | {ratio:.2f} |",
            "",
            "fedstream's simulation is beside a plain loop in [convolutions](convolution.md).",
            "",
        ]
    )
    print(text)
    keep("flower-rounds", found, text)


if __name__ == "__main__":
    main()
