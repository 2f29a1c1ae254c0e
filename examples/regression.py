"""Regression: a loss and metrics of your own.

fedstream simulate --task examples/regression.py:task --versions 100 \
    --set solver.kind=adamw --set solver.lr=0.01
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import Subset, TensorDataset

from fedstream import Task, iid


class Diabetes(Task):
    x, y = load_diabetes(return_X_y=True, scaled=False)  # 442 patients, 10 measurements
    test, *parts = iid(y, 11, seed=0)  # rows: one part to test, one for each of 10 devices
    x = torch.tensor((x - x.mean(0)) / x.std(0)).float()
    data = TensorDataset(x, torch.tensor(y).float())  # y: from 25 to 346
    goal = {"within_50": "max"}  # rmse needs none: the name is well known

    def model(self):
        return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))

    def device_data(self, device):
        return Subset(self.data, self.parts[device])

    def test_data(self):
        return Subset(self.data, self.test)

    def loss(self, model, batch):
        x, y = batch
        return nn.functional.mse_loss(model(x), y / 100)

    def metrics(self, model, data):
        x, y = self.gather(data, torch.arange(len(data)))
        error = 100 * model(x) - y
        within_50 = (error.abs() <= 50).float().mean()
        return {"rmse": error.square().mean().sqrt(), "within_50": within_50}


task = Diabetes()
