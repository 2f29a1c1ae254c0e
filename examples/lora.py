"""Adapters: only low-rank changes (LoRA) of a frozen language model are trained and sent.

fedstream simulate --task examples/lora.py:task --versions 100 \
    --set solver.kind=adamw --set solver.lr=0.01
"""

import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import Subset, TensorDataset

from fedstream import Task, iid


class LowRank(nn.Module):  # weight + b a; with PEFT, model() returns get_peft_model(...) instead
    def __init__(self, rows, columns, rank=4):
        super().__init__()
        self.a = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight):
        return weight + self.b @ self.a


class Adapted(Task):
    text = "".join(load().DESCR for load in (load_breast_cancer, load_digits, load_wine))
    rows = torch.tensor(list(text.encode("ascii", "ignore")[:9900])).view(-1, 33)
    data = TensorDataset(rows[:, :-1], rows[:, 1:])  # 32 characters, and the ones that follow
    test, *parts = iid(torch.zeros(len(rows)), 11, seed=0)

    def model(self):  # random here; a real base comes with --from FILE.safetensors
        block = nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True, norm_first=True)
        gpt = nn.Sequential(nn.Embedding(128, 64), block, nn.Linear(64, 128))
        for linear in (block.linear1, block.linear2, gpt.requires_grad_(False)[2]):
            register_parametrization(linear, "weight", LowRank(*linear.weight.shape))
        return gpt

    def device_data(self, device):
        return Subset(self.data, self.parts[device])

    def test_data(self):
        return Subset(self.data, self.test)

    def loss(self, model, batch):
        (x, y), (embed, block, out) = batch, model
        mask = nn.Transformer.generate_square_subsequent_mask(32)
        return cross_entropy(out(block(embed(x), mask, is_causal=True)).mT, y)

    def metrics(self, model, data):
        return {"loss": self.loss(model, self.gather(data, torch.arange(len(data))))}


task = Adapted()
