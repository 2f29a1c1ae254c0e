"""Whole runs in virtual time: training, the rule, the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from broker.errors import ConfigError, Fenced
from fedstream.config import read
from fedstream.simulation import Outcome, VersionMade, simulate
from trainer.task import Task
from updater.replay import Replayer

DEVICES = 6


class Small(Task):
    """Three classes of points in five dimensions, devices of 20 to 35 points."""

    devices = DEVICES

    def __init__(self, module: Any = None) -> None:
        rng = torch.Generator().manual_seed(1)
        self._module = module or (lambda: nn.Linear(5, 3))
        self._y = torch.arange(3).repeat(100)
        centres = torch.randn(3, 5, generator=rng)
        self._x = centres[self._y] + 0.7 * torch.randn(300, 5, generator=rng)

    def model(self) -> nn.Module:
        module: nn.Module = self._module()
        return module

    def device_data(self, device: int) -> TensorDataset:
        rows = slice(40 * device, 40 * device + 20 + 3 * device)
        return TensorDataset(self._x[rows], self._y[rows])

    def test_data(self) -> TensorDataset:
        return TensorDataset(self._x[240:], self._y[240:])


class Looking(Small):
    """A loss that looks at its value, which can't be done for several devices at once."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss if loss.item() < 1e6 else loss * 0.0


def run(*sets: str, task: Task | None = None, **more: Any) -> Outcome:
    base = (
        "run.versions=12", "simulation.threads=1", "simulation.evaluate_every=4",
        "solver.batch_size=8", "solver.lr=0.2",
    )  # fmt: skip
    return simulate(read(None, [*base, *sets]), task or Small(), **more)


AFA = ("strategy.name=afa-cd", "strategy.buffer_size=4", "strategy.server_lr=0.2")
SCAFFOLD = ("strategy.name=scaffold", "strategy.buffer_size=4", "solver.kind=scaffold")
RULES = {
    "fedasync": ("simulation.staleness.most=4",),
    "fedavg": ("strategy.name=fedavg", "strategy.clients_per_round=4",
               "simulation.staleness.kind=none"),
    "fedbuff": ("strategy.name=fedbuff", "strategy.buffer_size=4"),
    "afa-cd": AFA,
    "afa-cs": ("strategy.name=afa-cs", "strategy.buffer_size=4"),
    "scaffold": SCAFFOLD,
    "scaffold, per step": (*SCAFFOLD, "strategy.per_step=true", "strategy.server_lr=0.2"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_run_learns_and_its_journal_gives_every_version_again(rule: str, tmp_path: Path) -> None:
    found = run(*RULES[rule], "scheduler.steps.kind=uniform", journal=tmp_path / "journal")
    assert (found.state, found.why) == ("finished", "version 12 reached")
    assert [made.version for made in found.versions] == list(range(13))
    assert found.last("loss") < found.measured[0].metrics["loss"]
    with Replayer(tmp_path / "journal") as replayer:
        moments = [moment.identical for moment in replayer if moment.message.digest]
        assert moments == [True] * 12
        last = replayer.newest
    assert last == 12


@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("solver.sampling=fresh",),
        ("solver.kind=proximal", "solver.rho=0.5"),
        ("solver.momentum=0.9", "solver.weight_decay=0.01", "solver.clip_norm=0.5"),
        SCAFFOLD,
    ],
)
@pytest.mark.parametrize("steps", ["kind=fixed", "kind=uniform", "kind=epochs"])
def test_together_gives_what_one_after_the_other_gives(sets: tuple[str, ...], steps: str) -> None:
    about = (*(() if sets == SCAFFOLD else AFA), *sets, f"scheduler.steps.{steps}")
    module = lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # noqa: E731
    alone = run(*about, "simulation.batched=false", task=Small(module))
    together = run(*about, task=Small(module))
    assert (alone.together, together.together >= 24) == (0, True)
    np.testing.assert_allclose(
        together.model.floats, alone.model.floats, rtol=0, atol=2e-6 * abs(alone.model.floats).max()
    )
    for one, other in zip(alone.versions[1:], together.versions[1:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert [(u.device, u.tau, u.steps, u.samples) for u in one.updates] == [
            (u.device, u.tau, u.steps, u.samples) for u in other.updates
        ]


@pytest.mark.parametrize(
    "task",
    [
        Small(lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 3))),
        Small(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))),
        Looking(),
    ],
    ids=["dropout", "batch norm", "a loss that looks"],
)
def test_what_cannot_be_trained_together_is_trained_one_after_the_other(task: Task) -> None:
    found = run(*AFA, task=task)
    assert (found.state, found.together) == ("finished", 0)


def test_the_same_configuration_gives_the_same_bits() -> None:
    one, same, other = (run(*AFA, f"run.seed={seed}").model.digest() for seed in (5, 5, 6))
    assert one == same != other


def test_training_ahead_changes_nothing_but_rounding() -> None:
    """FedAsync's later arrivals are trained as soon as their version is there."""
    sets = ("simulation.staleness.most=5", "run.versions=40")
    ahead, alone = run(*sets), run(*sets, "simulation.batched=false")
    assert ahead.together > 20
    np.testing.assert_allclose(ahead.model.floats, alone.model.floats, rtol=0, atol=1e-5)


def test_what_was_spent_is_counted() -> None:
    made = run(*AFA, "scheduler.steps.n=3").versions[-1]
    assert (made.used, made.gradients, made.communications) == (48, 144, 96)
    samples = [20 + 3 * u.device for u in made.updates]
    assert sum(3 / -(-size // 8) for size in samples) < made.epochs


def test_a_version_is_heard_with_its_model() -> None:
    heard: list[tuple[int, str]] = []

    def hear(made: VersionMade, model: Any) -> None:
        heard.append((made.version, model.digest()))

    found = run(*AFA, on_version=hear)
    assert [version for version, _ in heard] == list(range(13))
    assert heard[-1][1] == found.model.digest()
    assert len({digest for _, digest in heard}) == 13


def test_only_the_versions_that_are_due_are_measured() -> None:
    found = run("run.versions=10")
    assert [made.version for made in found.measured] == [0, 4, 8, 10]
    found = run("run.versions=10", "simulation.evaluate_every=0")
    assert [made.version for made in found.measured] == [10]


def test_it_ends_at_its_target() -> None:
    found = run("run.versions=500", "run.target_accuracy=0.5", "simulation.evaluate_every=1")
    assert found.state == "finished"
    assert "accuracy" in found.why
    assert found.versions[-1].version < 500


def test_an_update_that_is_not_finite_is_refused_and_replayed_so(tmp_path: Path) -> None:
    class Sick(Small):
        def device_data(self, device: int) -> TensorDataset:
            data = super().device_data(device)
            bad = torch.full_like(data.tensors[0], torch.inf)
            return TensorDataset(bad, data.tensors[1]) if device == 2 else data

    found = run(*AFA, task=Sick(), journal=tmp_path / "journal")
    assert found.state == "finished"
    assert found.refused["not finite"] > 0
    assert all(u.device != 2 for made in found.versions for u in made.updates)
    assert np.isfinite(found.model.floats).all()
    with Replayer(tmp_path / "journal") as replayer:
        assert sum(moment.identical is True for moment in replayer) == 12


def test_a_model_that_diverges_ends_the_run() -> None:
    found = run("solver.lr=1e38", "strategy.alpha=1.0")
    assert found.state == "failed"
    assert "refused" in found.why


def test_rounds_that_time_out_are_replayed_too(tmp_path: Path) -> None:
    found = run(
        "strategy.name=fedavg", "strategy.clients_per_round=4", "scheduler.policy.kind=rounds",
        "scheduler.policy.k=4", "scheduler.policy.timeout_s=1.0",
        "simulation.staleness.kind=latency", "devices.latency.kind=uniform",
        "devices.latency.high_s=1.5", journal=tmp_path / "journal",
    )  # fmt: skip
    assert any(len(made.updates) < 4 for made in found.versions[1:])
    with Replayer(tmp_path / "journal") as replayer:
        assert sum(moment.identical is True for moment in replayer) == 12


def test_it_can_be_stopped() -> None:
    calls = iter(range(10**6))
    found = run("run.versions=1000", cancelled=lambda: next(calls) > 200)
    assert found.state == "interrupted"
    assert 0 < found.versions[-1].version < 1000


def test_lower_precision_costs_little() -> None:
    """bfloat16 trains from the weights as they are in every step, not as they were in the first."""
    exact = run("run.versions=60", "simulation.batched=false")
    rough = run("run.versions=60", "simulation.precision=bfloat16")
    assert exact.model.digest() != rough.model.digest()
    assert abs(exact.last() - rough.last()) < 0.05


def test_torch_is_left_as_it_was() -> None:
    threads = torch.get_num_threads()
    state = torch.get_rng_state()
    run("simulation.threads=2", "run.versions=2")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_journal_is_never_written_over(tmp_path: Path) -> None:
    run("run.versions=2", journal=tmp_path / "journal")
    with pytest.raises(Fenced):
        run("run.versions=2", journal=tmp_path / "journal")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said() -> None:
    with pytest.raises(ConfigError, match=r"simulation\.device"):
        run("simulation.device=cuda")
