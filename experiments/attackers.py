"""A task whose attackers send malicious updates, for experiments with rules that resist them.

    fedstream simulate --task experiments/attackers.py:attacked --strategy fedbuff \\
        --set 'task.args={data="mnist", devices=100, attack="flip", share=0.2}'

The data is that of a built-in task, split over ``devices`` by ``partition``, a table as
``task.partition``; by default devices have similar data (``iid``), as rules that resist attackers
assume. A share of the devices, drawn from ``seed``, attacks. Where its training would make the
update D = x_new - x_tau, an attacker sends

    none      D
    labels    D after training on class numbers c replaced by C - 1 - c
    flip      -D                       (sign flipping; Li et al. 2019, RSA)
    scaled    -10 D
    alie      mean - z std             (Baruch, Baruch and Goldberg 2019, A Little Is Enough)

For ALIE, attackers share their data: mean and standard deviation of each coordinate are over the
honest updates of the attacker and four others. z is given, 1.5 by default; the paper computes it
from the numbers of devices and attackers. Buffers stay those of the training.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedstream.core.errors import ConfigError
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

    from fedstream.trainer.solvers import Trained, Work

Attack = Literal["none", "labels", "flip", "scaled", "alie"]
_FACTORS = {"flip": -1.0, "scaled": -10.0}
_COLLUDE = 5  # attackers from whose updates ALIE knows mean and deviation


class Attacked(InMemory):
    """The task with its attackers."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        shares: Sequence[TensorDataset],
        test: TensorDataset,
        *,
        attackers: Sequence[int],
        attack: Attack,
        z: float,
    ) -> None:
        """``attackers``: their devices; ``z``: of ALIE."""
        super().__init__(model, shares, test)
        self.attackers, self.attack, self.z = tuple(attackers), attack, z

    def device_data(self, device: int) -> TensorDataset:
        """The device's share, with other labels if it flips labels."""
        from torch.utils.data import TensorDataset

        share = super().device_data(device)
        if self.attack != "labels" or device not in self.attackers:
            return share
        x, y = share.tensors
        return TensorDataset(x, self.test_data().tensors[1].max() - y)

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        """Train, and replace the model by a malicious one if the device attacks."""
        if work.device not in self.attackers or self.attack in ("none", "labels"):
            return super().train(model, data, work)
        start = _parameters(model)
        trained = super().train(model, data, work)
        updates = [_less(model, start)]
        if self.attack == "alie":
            at = self.attackers.index(work.device)
            for other in (*self.attackers[at + 1 :], *self.attackers[:at])[: _COLLUDE - 1]:
                _put(model, start)
                super().train(model, self.device_data(other), work)
                updates.append(_less(model, start))
            sent = [_shifted(list(same), self.z) for same in zip(*updates, strict=True)]
        else:
            sent = [_FACTORS[self.attack] * one for one in updates[0]]
        _put(model, [x + one for x, one in zip(start, sent, strict=True)])
        return trained


def attacked(
    data: str = "digits",
    devices: int = 10,
    attack: Attack = "flip",
    share: float = 0.2,
    seed: int = 0,
    partition: dict[str, Any] | None = None,
    data_root: str | None = None,
    z: float = 1.5,
) -> Attacked:
    """The task. Raises ConfigError, DataError."""
    if attack not in get_args(Attack):
        raise ConfigError(f"attack = {attack!r}: expected one of {', '.join(get_args(Attack))}")
    if not 0 <= round(share * devices) < devices:
        raise ConfigError(f"share = {share}: must be at least 0 and leave an honest device")
    keys = {"name": data, "devices": devices, "data_root": data_root}
    settings = TaskSettings.model_validate({**keys, "partition": partition or {"kind": "iid"}})
    task = load_task(data, settings)
    if not isinstance(task, InMemory):
        raise ConfigError(f"data = {data!r}: expected a built-in task of images")
    shares = [task.device_data(device) for device in range(devices)]
    attackers = attackers_of(devices, share, seed)
    return Attacked(task.model, shares, task.test_data(), attackers=attackers, attack=attack, z=z)


def attackers_of(devices: int, share: float, seed: int) -> list[int]:
    """The attackers. Device 0 is none of them: it may be AFLGuard's root device."""
    return sorted(random.Random(seed).sample(range(1, devices), round(share * devices)))


def _parameters(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def _less(model: nn.Module, start: list[Tensor]) -> list[Tensor]:
    return [new - x for new, x in zip(_parameters(model), start, strict=True)]


def _put(model: nn.Module, values: list[Tensor]) -> None:
    import torch

    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def _shifted(updates: list[Tensor], z: float) -> Tensor:
    """Mean - z std of each coordinate."""
    import torch

    stacked = torch.stack(updates)
    return stacked.mean(0) - z * stacked.std(0, correction=0)
