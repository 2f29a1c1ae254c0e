"""A round of FedAvg in Apple's pfl, beside a plain loop over the same batches.

    python -m venv --system-site-packages .venv-pfl && .venv-pfl/bin/pip install pfl==0.6.0
    .venv-pfl/bin/python -m benchmarks.pfl_rounds [--runs 2]

10 of 100 devices of FedAsync's CIFAR-10 take an epoch of 10 steps of 50 images in each round, in
bfloat16 with the channels last and one thread, as in benchmarks.convolution; processor time counts.
FEDSTREAM_DATA must contain CIFAR-10. FLSim 0.1.0 cannot be measured: it fails to import on Python
3.11 (a mutable default of a dataclass).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any, cast

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from benchmarks.convolution import BATCH, STEPS, plain, settings_of
from benchmarks.results import conditions, keep
from experiments import machine
from fedstream.trainer.loading import load_task

DEVICES = 10  # in a round


class Network(nn.Module):
    """The network with the methods that pfl calls."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss(self, x: torch.Tensor, y: torch.Tensor, *, is_eval: bool = False) -> torch.Tensor:
        """Cross entropy."""
        self.train(not is_eval)
        return cross_entropy(self.network(x), y)

    def metrics(self, *_: object) -> dict[str, object]:
        """None: a round evaluates nothing."""
        return {}


class Timing(TrainingProcessCallback):  # type: ignore[misc]  # pfl ships no types
    """Times every round but the first, and a device's epoch of the plain loop after each."""

    def __init__(self, epoch: Any, runs: int) -> None:
        self.rounds, self.loops = list[float](), list[float]()
        self._epoch, self._runs, self._began = epoch, runs, 0.0

    def after_central_iteration(
        self, aggregate_metrics: object, model: object, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Stop after the wanted number of rounds."""
        if central_iteration:
            self.rounds.append(time.process_time() - self._began)
            began = time.process_time()
            self._epoch()
            self.loops.append(time.process_time() - began)
        self._began = time.process_time()
        return len(self.rounds) == self._runs, Metrics()


def main() -> None:
    """Measure, and write the result to benchmarks/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2, help="rounds")
    runs, load = parser.parse_args().runs, os.getloadavg()[0]
    torch.set_num_threads(1)
    settings = settings_of("bf16")
    task = load_task(settings.task.name, settings.task)
    network = Network(task.model())
    central = torch.optim.SGD(network.parameters(), lr=1.0)
    data = FederatedDataset(
        lambda device: Dataset([*cast(TensorDataset, task.device_data(device)).tensors]),
        get_user_sampler("random", [*range(settings.task.devices or 0)]),
    )
    epoch = plain(task, "bf16", last=True)
    epoch()
    timing = Timing(epoch, runs)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=runs + 2,
            evaluation_frequency=10**6,
            train_cohort_size=DEVICES,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data),
        PyTorchModel(network, torch.optim.SGD, central, amp_dtype=torch.bfloat16),
        NNTrainHyperParams(
            local_learning_rate=settings.solver.lr, local_num_epochs=1, local_batch_size=BATCH
        ),
        None,
        [timing],
    )
    ratio = statistics.median(
        one / (DEVICES * loop) for one, loop in zip(timing.rounds, timing.loops, strict=True)
    )
    found = {
        "machine": machine.described(),
        "load": load,
        "rounds_s": timing.rounds,
        "loops_s": timing.loops,
        "ratio": ratio,
    }
    step_ms = 1e3 * statistics.median(timing.rounds) / (DEVICES * STEPS)
    text = "\n".join(
        [
            "# Rounds in pfl",
            "",
            "`benchmarks/pfl_rounds.py`: FedAvg in pfl 0.6.0 beside the fastest plain loop,",
            "FedAsync's network for CIFAR-10, bf16 with the channels last; processor time.",
            "",
            conditions(machine.described()) + f"; load {load:.1f}",
            "",
            "| | ms a step | of the plain loop |",
            "|---|---|---|",
            f"| pfl | {step_ms:.1f} | {ratio:.2f} |",
            "",
            "fedstream's simulation is measured in the same way in [convolutions](convolution.md).",
            "",
        ]
    )
    print(text)
    keep("pfl", found, text)


if __name__ == "__main__":
    main()
