"""Handwritten digits: the model, one partition's data, training and testing."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """A perceptron with a batch norm."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.norm = nn.BatchNorm1d(32)
        self.out = nn.Linear(32, 10)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.hidden(x))))


@cache
def digits():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x / 16).float(), torch.tensor(y)


def load_data(partition, partitions, batch_size):
    """The loaders of one partition: four fifths to train on, the rest to test."""
    x, y = (values[partition::partitions] for values in digits())
    cut = len(x) * 4 // 5
    train, test = TensorDataset(x[:cut], y[:cut]), TensorDataset(x[cut:], y[cut:])
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(net, loader, epochs, lr):
    """Train in place; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(net, loader):
    """Mean loss and accuracy."""
    net.eval()
    loss, hits = 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            scores = net(x)
            loss += nn.functional.cross_entropy(scores, y, reduction="sum").item()
            hits += (scores.argmax(1) == y).sum().item()
    return loss / len(loader.dataset), hits / len(loader.dataset)
