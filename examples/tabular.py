"""Tabular data that only its devices can test: each hospital keeps some patients for that.

fedstream simulate --task examples/tabular.py:task --versions 100 \
    --set evaluator.on_devices.fraction=1.0 \
    --set run.stop.metric=devices_loss --set run.stop.patience=3
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import Subset, TensorDataset

from fedstream import Mean, Task, by_dirichlet


class Hospitals(Task):
    x, y = load_breast_cancer(return_X_y=True)  # 569 patients, 30 measurements, 2 classes
    data = TensorDataset(torch.tensor((x - x.mean(0)) / x.std(0)).float(), torch.tensor(y))
    devices = 10
    patients = by_dirichlet(y, 10, alpha=1.0, seed=0)  # of unlike illness in each hospital

    def model(self):
        return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))

    def device_data(self, device):
        return Subset(self.data, self.patients[device][5:])

    def device_test_data(self, device):
        return Subset(self.data, self.patients[device][:5])

    def metrics(self, model, data):
        x, y = self.gather(data, torch.arange(len(data)))
        scores = model(x)
        ill = y == 0  # malignant
        found = {"loss": Mean(nn.functional.cross_entropy(scores, y, reduction="sum"), len(y))}
        if ill.any():  # the share of them that is found, over all hospitals' patients
            found["recall"] = Mean((scores.argmax(1)[ill] == 0).sum(), ill.sum())
        return found


task = Hospitals()
