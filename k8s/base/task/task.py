"""What is learned: replace this with your own model and data (README, "Your own task")."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset, Subset, TensorDataset

from fedstream import Task, by_classes


class Digits(Task):
    """1,797 handwritten digits that come with scikit-learn; each device has two of the ten."""

    devices = 20

    def __init__(self) -> None:
        pixels, labels = load_digits(return_X_y=True)
        x = torch.tensor((pixels / 16 - 0.3) / 0.38).float()
        y = torch.tensor(labels)
        for_test = torch.arange(len(y)) % 5 == 0
        self.test = TensorDataset(x[for_test], y[for_test])
        self.train_data = TensorDataset(x[~for_test], y[~for_test])
        self.parts = by_classes(y[~for_test].numpy(), self.devices, p=2, seed=0)

    def model(self) -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
        )

    def device_data(self, device: int) -> Dataset:
        return Subset(self.train_data, self.parts[device])

    def test_data(self) -> Dataset:
        return self.test


task = Digits  # made where it is used: the updater needs it only once
