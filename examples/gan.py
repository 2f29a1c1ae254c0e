"""A GAN: two networks in one module, each trained by its own part of the loss and its own rate.

fedstream simulate --task examples/gan.py:task --versions 100 --set scheduler.steps.n=40
"""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import softplus

from fedstream import Task


class Points(Task):
    devices = 10
    goal = {"distance": "min"}

    def model(self):
        generator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
        return nn.ModuleDict({"generator": generator, "critic": critic})

    def device_data(self, device):
        noise = torch.randn(500, 2, generator=torch.Generator().manual_seed(device))
        return noise @ torch.tensor([[1.0, 0.8], [0.0, 0.6]]) + torch.tensor([2.0, -1.0])

    def test_data(self):
        return self.device_data(10)

    def optimizers(self, model, solver):
        generator, critic = model["generator"].parameters(), model["critic"].parameters()
        return [torch.optim.SGD(generator, lr=0.05), torch.optim.SGD(critic, lr=0.2)]

    def loss(self, model, real):
        generator, critic = model["generator"], model["critic"]
        fake = generator(torch.randn_like(real))
        of_critic = softplus(-critic(real)) + softplus(critic(fake.detach()))
        # Constant weights: of_generator has no gradient for the critic.
        frozen = {name: value.detach() for name, value in critic.named_parameters()}
        of_generator = softplus(-functional_call(critic, frozen, fake))
        return (of_critic + of_generator).mean()

    def metrics(self, model, data):
        real = self.gather(data, torch.arange(len(data)))
        fake = model["generator"](torch.randn(500, 2, generator=torch.Generator().manual_seed(0)))
        means, covariances = real.mean(0) - fake.mean(0), real.T.cov() - fake.T.cov()
        return {"distance": means.norm() + covariances.norm()}


task = Points()
