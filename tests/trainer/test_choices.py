"""Devices that choose how they train, simulated and live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import ConfigError, DataError
from fedstream.core.layout import Model
from fedstream.core.messages import GiveUp, Upload
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.compression import NoCompression
from fedstream.trainer.learner import as_sent
from fedstream.trainer.solvers import (
    Proximal,
    Sgd,
    SolverGroup,
    Solvers,
    SolverSettings,
    Trained,
    Work,
)
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Make

DEVICES = 6


class Small(Task):
    """Points of two classes."""

    devices = DEVICES

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def device_data(self, device: int) -> TensorDataset:
        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self) -> TensorDataset:
        return self.device_data(99)


class Choosy(Small):
    """Devices choose their step by themselves."""

    def solver_of(self, device: int, solver: SolverSettings) -> SolverSettings:
        return solver.model_copy(update={"lr": solver.lr / (1 + device)})


class Says(Small):
    """Training with another step than the solver's, which it says."""

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        lr = work.solver.lr / (1 + work.device)
        work = replace(work, solver=work.solver.model_copy(update={"lr": lr}))
        return replace(super().train(model, data, work), lr=lr)


# configuration


def test_groups_inherit_missing_keys() -> None:
    usual = Proximal(lr=0.5, batch_size=7, momentum=0.3, rho=0.2)
    assert SolverGroup(devices=(1,), lr=0.1).of(usual) == usual.model_copy(update={"lr": 0.1})
    plain = SolverGroup(devices=(1,), kind="sgd", momentum=0.0).of(usual)
    assert plain == Sgd(lr=0.5, batch_size=7)
    solvers = Solvers(Sgd(), [SolverGroup(devices=(2, 4), kind="proximal", rho=0.7)])
    assert solvers[2] == solvers[4] == Proximal(rho=0.7)
    assert solvers[0] == solvers[3] == Sgd()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ("[{devices=[0], lr=-1.0}]", r"solvers\[0\]\.lr = -1.0: .*greater than 0"),
        ("[{devices=[1], lr=0.1}, {devices=[0, 1], lr=0.2}]", r"solvers\[1\].*device 1 is .*twice"),
        ("[{devices=[3], kind='scaffold'}]", "solver.kind of device 3 = 'scaffold'"),
        ("[{devices=[0], lrr=0.1}]", r"solvers\[0\]\.lrr.*did you mean solvers\[0\]\.lr"),
    ],
)
def test_invalid_groups_are_rejected(groups: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(None, [f"solvers={groups}"])


def test_unknown_device_in_a_group_is_rejected() -> None:
    with pytest.raises(ConfigError, match="solvers: there is no device 9"):
        trained("solvers=[{devices=[9], lr=0.1}]")


# simulated


def trained(*sets: str, task: Task | None = None) -> Model:
    base = (
        "strategy.name=afa-cd",
        "strategy.buffer_size=6",
        "strategy.server_lr=0.3",
        "run.versions=8",
        "simulation.threads=1",
        "simulation.evaluate_every=0",
        "solver.lr=0.2",
        "solver.batch_size=0",
        "scheduler.steps.n=1",
    )
    return simulate(read(None, [*base, *sets]), task or Small()).model


GROUPS = "solvers=[{devices=[0, 2], lr=0.01}, {devices=[5], lr=0.8, batch_size=20}]"


@pytest.mark.parametrize(
    ("sets", "task"),
    [((GROUPS,), Small()), ((), Choosy()), ((), Says())],
    ids=("groups", "chosen", "said"),
)
def test_afa_divides_by_each_devices_step(sets: tuple[str, ...], task: Task) -> None:
    """With one step on all data G is the gradient, whatever gamma was."""
    usual, found = trained().floats, trained(*sets, task=task).floats
    np.testing.assert_allclose(found, usual, rtol=0, atol=2e-5)
    mean = ("strategy.name=fedbuff", "strategy.buffer_size=6", "strategy.server_lr=1.0")
    other = trained(*mean, *sets, task=task).floats
    assert np.abs(other - trained(*mean).floats).max() > 1e-2, "they did take another step"


def test_task_must_choose_a_solver() -> None:
    class Wrong(Small):
        def solver_of(self, device: int, solver: SolverSettings) -> Any:
            return {"lr": 0.1}

    with pytest.raises(DataError, match=r"device \d: TypeError: solver_of\(\) must return"):
        trained(task=Wrong())


@pytest.mark.parametrize("lr", [0.0, float("nan")])
def test_impossible_learning_rate_is_not_sent(lr: float) -> None:
    layout = layout_of(nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"lr=\.\.\.\) with a finite lr above 0"):
        as_sent(
            Trained(1, 1, 0.5, lr=lr), Model(layout), Model(layout), None, "model", NoCompression()
        )


# live


@pytest.mark.parametrize(
    ("task", "groups", "wanted"),
    [
        (Small(), (SolverGroup(devices=(1,), lr=0.05),), {0: 0.2, 1: 0.05, 2: 0.2}),
        (Choosy(), (), {0: 0.2, 1: 0.1, 2: 0.2 / 3}),
        (Says(), (SolverGroup(devices=(1,), lr=0.4),), {0: 0.2, 1: 0.2, 2: 0.2 / 3}),
    ],
    ids=("groups", "chosen", "said"),
)
async def test_upload_contains_its_devices_learning_rate(
    hand: Hand, make: Make, task: Task, groups: tuple[SolverGroup, ...], wanted: dict[int, float]
) -> None:
    await hand.create(devices=DEVICES)
    async with running(make(solver=Sgd(lr=0.2), solvers=groups), context()):
        for device in wanted:
            await hand.open(device=device)

        async def all_said() -> list[Upload | GiveUp] | None:
            said = await hand.answered()
            return said if len(said) == len(wanted) else None

        said = await wait_until(all_said)
    assert {one.device: one.lr for one in said if isinstance(one, Upload)} == wanted
