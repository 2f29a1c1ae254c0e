"""SCAFFOLD's two halves together, as the pipeline has them: the solver and the server's rule."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedstream.core.layout import Model
from fedstream.strategies import ScaffoldSettings, State, Update
from fedstream.trainer.solvers import DriftCorrected, Work
from fedstream.trainer.task import Task, initial
from fedstream.trainer.vector import load, read, to_delta

KNOWN = json.loads((Path(__file__).parents[1] / "data" / "known_answers_scaffold.json").read_text())


class Quadratics(Task):
    """Device i has f_i(x) = sum h_i (x - b_i)^2 / 2."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._h, self._b, self._x0 = (torch.tensor(case[key]) for key in ("h", "b", "x0"))

    def model(self) -> nn.Module:
        module = nn.Linear(len(self._x0), 1, bias=False)
        nn.Module.__setattr__(module, "weight", nn.Parameter(self._x0.clone()))
        return module

    def device_data(self, device: int) -> TensorDataset:
        return TensorDataset(self._h[[device]], self._b[[device]])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        h, b = batch
        [x] = model.parameters()
        total: Tensor = (h * (x - b) ** 2 / 2).sum()
        return total


@pytest.mark.parametrize("case", KNOWN, ids=lambda case: f"{case['devices']} devices")
def test_known_answers(case: dict[str, Any]) -> None:
    task = Quadratics(case)
    module = task.model()
    solver = DriftCorrected(lr=case["local_lr"], batch_size=0)
    now = State(0, initial(task, 0, controls=True))
    for version, known in enumerate(case["rounds"], 1):
        size = len(known["group"])
        rule = ScaffoldSettings(buffer_size=size, server_lr=case["server_lr"]).build(
            case["devices"]
        )
        base = now.model
        for device in known["group"]:
            kept = now.memory.devices
            before = kept[device] if kept else np.zeros(4, np.float32)
            work = Work(
                device=device,
                task="t",
                version=now.version,
                seed=0,
                epochs=None,
                solver=solver,
                steps=case["local_steps"],
                cancelled=lambda: False,
                control=base.controls,
                device_control=before,
            )
            load(base, module)
            trained = task.train(module, task.device_data(device), work)
            sent = Model(base.layout)
            read(module, sent)
            to_delta(sent, base)
            assert trained.control is not None
            sent.controls[:] = trained.control - before
            new = Update(sent, now.version, device, 1, trained.steps, solver.lr)
            now, _ = rule.receive(now, new, Model(base.layout))
        assert now.version == version
        kept = now.memory.devices
        assert kept is not None
        for found, wanted in (
            (now.model.parameters, known["x"]),
            (now.model.controls, known["c"]),
            *((kept[device], known["c_i"][device]) for device in range(case["devices"])),
        ):
            assert np.abs(found - wanted).max() <= 1e-5 * max(1e-30, np.abs(wanted).max())
        mean = np.mean([kept[device] for device in range(case["devices"])], axis=0)
        assert now.model.controls == pytest.approx(mean, abs=1e-5)
