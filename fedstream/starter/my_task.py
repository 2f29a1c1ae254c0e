"""A task: a model, each device's data, and test data. Replace the parts with your own.

fedstream run --config fedstream.toml
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream import Task


class MyTask(Task):
    """Points of two classes, inside and outside a circle; each device has its own corner."""

    # How many devices the data is split over.
    devices = 10

    # Metrics of your own need a goal, "min" or "max"; accuracy and loss have theirs.
    # goal = {"bits": "min"}

    def model(self) -> nn.Module:
        """A new, untrained model. Frozen layers (requires_grad = False) are not trained."""
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def device_data(self, device: int) -> TensorDataset:
        """The data of one device: the same at every call. Any data set of torch will do."""
        return points(200, seed=device, shift=0.1 * (device - 5))

    def test_data(self) -> TensorDataset:
        """The data to measure on; return None if there is none."""
        return points(500, seed=1_000_000)

    def device_test_data(self, device: int) -> TensorDataset:
        """A device's test data, for evaluator.per_device or evaluator.on_devices. Optional."""
        return points(50, seed=1_000_001 + device, shift=0.1 * (device - 5))

    # The default is the cross entropy of (x, y). Another loss:
    # def loss(self, model, batch):
    #     x, y = batch
    #     return nn.functional.mse_loss(model(x).squeeze(1), y)

    # The default is accuracy and loss. Other metrics, without gradients, in evaluation mode:
    # def metrics(self, model, data):
    #     x, y = self.gather(data, torch.arange(len(data)))
    #     return {"rmse": float((model(x).squeeze(1) - y).square().mean().sqrt())}

    # Rows drawn with weights, all random numbers from the generator:
    # def sampler(self, data, generator):
    #     return WeightedRandomSampler(self.weights, len(data), generator=generator)

    # Items of different lengths:
    # def collate(self, items):
    #     xs, ys = zip(*items)
    #     return nn.utils.rnn.pad_sequence(xs, batch_first=True), torch.tensor(ys)


def points(rows: int, seed: int, shift: float = 0.0) -> TensorDataset:
    """Random points, and whether each is inside the circle."""
    x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(seed)) + shift
    return TensorDataset(x, (x.norm(dim=1) < 1.2).long())


task = MyTask()
