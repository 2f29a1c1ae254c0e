"""Sentences of different lengths: `collate` pads them to a batch, and the model skips the padding.

fedstream simulate --task examples/text_padding.py:task --versions 100 \
    --set solver.kind=adamw --set solver.lr=0.02
"""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

from fedstream import Task

WORDS = ["PADDING", "the", "plot", "of", "this", "film", "is", "not", "good", "bad"]


def review(draw):
    """A sentence as numbers of words, and its class: 1 for "good" and "not bad", otherwise 0."""
    before, after = (draw.choices(WORDS[1:7], k=draw.randint(0, 8)) for _ in range(2))
    verdict = draw.choice(["good", "bad", "not good", "not bad"])
    words = [*before, *verdict.split(), *after]
    return torch.tensor([WORDS.index(word) for word in words]), int(verdict in ("good", "not bad"))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 8)
        self.gru, self.scores = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, words):  # of shape (batch, longest)
        lengths = (words != 0).sum(1).cpu()
        packed = pack_padded_sequence(self.embedding(words), lengths, True, enforce_sorted=False)
        return self.scores(self.gru(packed)[1][-1])  # from the state after the last word


class Reviews(Task):
    devices = 10

    def model(self):
        return Reader()

    def device_data(self, device):
        draw = random.Random(device)
        return [review(draw) for _ in range(200)]

    def test_data(self):
        return self.device_data(10)

    def collate(self, items):
        sentences, classes = zip(*items, strict=True)
        return pad_sequence(sentences, batch_first=True), torch.tensor(classes)  # pads with 0


task = Reviews()
