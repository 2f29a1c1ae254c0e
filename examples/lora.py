"""Adapters: PEFT's low-rank changes (LoRA) of a frozen GPT-2; only they are trained and sent.

fedstream simulate --task examples/lora.py:task --versions 100 \
    --set solver.kind=adamw --set solver.lr=0.01
"""

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from fedstream import Task, iid

TOKENS = dict(vocab_size=128, bos_token_id=None, eos_token_id=None)  # characters of ASCII
SIZES = dict(n_positions=32, n_embd=64, n_layer=2, n_head=4, initializer_range=0.1)


class Adapted(Task):
    text = "".join(load().DESCR for load in (load_breast_cancer, load_digits, load_wine))
    data = TensorDataset(torch.tensor(list(text.encode("ascii", "ignore")[:9900])).view(-1, 33))
    test, *parts = iid(torch.zeros(len(data)), 11, seed=0)

    def model(self):  # random here; GPT2LMHeadModel.from_pretrained(FOLDER) is a real base
        gpt = GPT2LMHeadModel(GPT2Config(**TOKENS, **SIZES))
        lora = LoraConfig(r=4, target_modules="all-linear", fan_in_fan_out=True)
        return get_peft_model(gpt, lora)

    def device_data(self, device):
        return Subset(self.data, self.parts[device])

    def test_data(self):
        return Subset(self.data, self.test)

    def loss(self, model, batch):
        [characters] = batch  # (rows, 33): from 32 of them, each one's next is predicted
        logits = model(input_ids=characters[:, :-1]).logits
        return cross_entropy(logits.mT, characters[:, 1:])

    def metrics(self, model, data):
        return {"loss": self.loss(model, self.gather(data, torch.arange(len(data))))}


task = Adapted()
