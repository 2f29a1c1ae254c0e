"""Whole runs in virtual time: training, the rule, the journal."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import accumulate, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.digest import algorithm_of
from fedstream.core.errors import ConfigError, DataError, Fenced
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from fedstream.settings import services
from fedstream.settings.config import read
from fedstream.settings.services import devices_of
from fedstream.simulation import SimulationResult, VersionMade, simulate
from fedstream.simulation.arrivals import plan
from fedstream.simulation.stacked import Draws
from fedstream.trainer.batches import Minibatches
from fedstream.trainer.solvers import Sgd, Trained, Work
from fedstream.trainer.task import Task, initial

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


def run(*sets: str, task: Task | None = None, **more: Any) -> SimulationResult:
    base = (
        "run.versions=12",
        "simulation.threads=1",
        "simulation.evaluate_every=4",
        "solver.batch_size=8",
        "solver.lr=0.2",
    )
    return simulate(read(None, [*base, *sets]), task or Small(), **more)


AFA = ("strategy.name=afa-cd", "strategy.buffer_size=4", "strategy.server_lr=0.2")
SCAFFOLD = ("strategy.name=scaffold", "strategy.buffer_size=4", "solver.kind=scaffold")
RULES = {
    "fedasync": ("simulation.staleness.most=4",),
    "fedavg": (
        "strategy.name=fedavg",
        "strategy.clients_per_round=4",
        "simulation.staleness.kind=none",
    ),
    "fedbuff": ("strategy.name=fedbuff", "strategy.buffer_size=4"),
    "afa-cd": AFA,
    "afa-cs": ("strategy.name=afa-cs", "strategy.buffer_size=4"),
    "ca2fl": ("strategy.name=ca2fl", "strategy.buffer_size=4"),
    "aced": ("strategy.name=aced", "strategy.max_age=3", "strategy.server_lr=0.2"),
    "fadas": (
        "strategy.name=fadas",
        "strategy.buffer_size=4",
        "strategy.server_lr=0.05",
        "strategy.delay_adaptive=code",
    ),
    "scaffold": SCAFFOLD,
    "ringmaster": (
        "strategy.name=ringmaster",
        "strategy.max_staleness=2",
        "simulation.staleness.kind=latency",
        "scheduler.policy.kind=in_flight",
        "scheduler.policy.n=4",
        "devices.latency={kind='fixed', mean_s=1.0}",
        "devices.slow_devices=[0]",
        "devices.slow_factor=20",
    ),
    "ringleader": ("strategy.name=ringleader",),
    "scaffold, per step": (*SCAFFOLD, "strategy.per_step=true", "strategy.server_lr=0.2"),
}


@pytest.mark.parametrize("rule", RULES)
def test_run_learns_and_its_journal_replays(rule: str, tmp_path: Path) -> None:
    found = run(*RULES[rule], "scheduler.steps.kind=uniform", journal=tmp_path / "journal")
    assert (found.state, found.why) == ("finished", "version 12 reached")
    assert [made.version for made in found.versions] == list(range(13))
    assert found.last("loss") < found.measured[0].metrics["loss"]
    with Replayer(tmp_path / "journal") as replayer:
        moments = [moment.identical for moment in replayer if moment.message.digest]
        assert moments == [True] * 12
        last = replayer.newest
    assert last == 12


def test_cancelled_tasks_are_counted() -> None:
    """The slow device works all the time, and its tasks end two versions after they began."""
    found = run(*RULES["ringmaster"], "devices.slow_factor=1000")
    assert found.refused == {}
    assert found.given_up == {"became too stale": found.given_up["became too stale"]}
    assert 1 <= found.given_up["became too stale"] <= 12
    waited = run(*RULES["ringmaster"], "strategy.cancel_stale=false")
    assert waited.given_up == {}


@pytest.mark.parametrize("rule", ["fedbuff", "basgd", "ringleader"])
def test_plan_knows_which_updates_make_versions(rule: str) -> None:
    """Devices start from what is the newest version then, and not from what a plan takes for it."""
    sets = f"strategy.name={rule}", "simulation.staleness.most=3"
    events = list(islice(plan(read(None, sets), DEVICES), 60))
    made = [one for one in events if one.makes]
    found = run(*sets, f"run.versions={len(made)}", arrivals=events)
    assert [one.time for one in found.versions[1:]] == [one.time for one in made]
    assert [one.version for one in made] == list(range(len(made)))


@pytest.mark.parametrize("algorithm", ["blake3", "sha256"])
@pytest.mark.parametrize("model", ["f32", "int8"])
def test_journal_has_digests_of_the_wanted_kind(algorithm: str, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    run(f"wire.digest={algorithm}", f"wire.model={model}", journal=folder)
    with Replayer(folder) as replayer:
        taken = [one.message for one in replayer if isinstance(one.message, Taken)]
    found = {algorithm_of(str(text)) for one in taken for text in (one.digest, one.upload.digest)}
    assert found | {algorithm_of(one.upload.base) for one in taken} == {algorithm}


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the number of threads
    "perceptron": (lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), 1),
    "regression": (lambda: nn.Linear(5, 3), 1),  # by its formula, in parts
    "regression in threads": (lambda: nn.Linear(5, 3, bias=False), 3),
}
SOLVERS = {
    "plain": (),
    "fresh": ("solver.sampling=fresh",),
    "proximal": ("solver.kind=proximal", "solver.rho=0.5"),
    "all": ("solver.momentum=0.9", "solver.weight_decay=0.01", "solver.clip_norm=0.5"),
    "scaffold": SCAFFOLD,
}


@pytest.mark.parametrize(
    ("module", "solver", "steps"),
    [
        ("perceptron", "proximal", "uniform"),
        ("perceptron", "all", "uniform"),
        ("perceptron", "scaffold", "epochs"),
        *(("regression", solver, "uniform") for solver in SOLVERS),
        ("regression", "plain", "fixed"),
        ("regression in threads", "all", "epochs"),
        ("regression in threads", "scaffold", "uniform"),
    ],
)
def test_batched_training_equals_sequential_training(
    module: str, solver: str, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (made, threads), sets = MODULES[module], SOLVERS[solver]
    monkeypatch.setattr("fedstream.simulation.stacked._OFTEN", 2)  # some steps with, some without
    monkeypatch.setattr("fedstream.simulation.stacked._PART", 2)
    rule = () if sets == SCAFFOLD else AFA
    about = (*rule, *sets, f"scheduler.steps.kind={steps}", "run.versions=3")
    alone = run(*about, "simulation.batched=false", task=Small(made))
    together = run(*about, f"simulation.threads={threads}", task=Small(made))
    assert (alone.together, together.together >= 8) == (0, True)
    np.testing.assert_allclose(
        together.model.floats, alone.model.floats, rtol=0, atol=2e-6 * abs(alone.model.floats).max()
    )
    for one, other in zip(alone.versions[1:], together.versions[1:], strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert [(u.device, u.tau, u.steps, u.samples) for u in one.updates] == [
            (u.device, u.tau, u.steps, u.samples) for u in other.updates
        ]


@pytest.mark.parametrize("sampling", ["passes", "fresh"])
@pytest.mark.parametrize("size", [0, 1, 8, 50])
def test_batched_minibatches_are_those_each_device_draws(sampling: str, size: int) -> None:
    solver = Sgd.model_validate({"sampling": sampling, "batch_size": size})
    jobs = [(20, 5, 12), (17, 6, 9), (20, 2**62, 9), (8, 7, 4)]  # samples, seed, steps
    draws = Draws(jobs, solver)
    each = [Minibatches(samples, solver, seed) for samples, seed, _ in jobs]
    for step in range(12):
        working = [n for n, (_, _, steps) in enumerate(jobs) if steps > step]
        drawn: dict[int, torch.Tensor] = {}
        for at, rows in draws.of(step):
            drawn |= dict(zip(torch.arange(len(jobs))[at].tolist(), rows, strict=True))
        assert sorted(drawn) == working
        assert all(torch.equal(drawn[n], each[n].next()) for n in working)


@pytest.mark.parametrize(
    "task",
    [
        Small(lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 3))),
        Small(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))),
        Looking(),
    ],
    ids=["dropout", "batch norm", "a loss that looks"],
)
def test_unbatchable_models_are_trained_sequentially(task: Task) -> None:
    about = (*AFA, "run.versions=3")
    found, alone = run(*about, task=task), run(*about, "simulation.batched=false", task=task)
    assert (found.state, found.together) == ("finished", 0)
    assert found.model.digest() == alone.model.digest()


class Pictures(nn.Module):
    """A convolution, whose weights' layout is noted while it trains."""

    def __init__(self, flat: Callable[[torch.Tensor], torch.Tensor], seen: list[bool]) -> None:
        super().__init__()
        self._first, self._last = nn.Linear(5, 8), nn.Linear(16, 3)
        self._convolution = nn.Conv2d(2, 4, 3, padding=1)
        self._flat, self._seen = flat, seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._seen.append(self._convolution.weight.is_contiguous())
        pictures = self._first(x).view(-1, 2, 2, 2)
        y: torch.Tensor = self._last(self._flat(self._convolution(pictures).relu()))
        return y


def test_channels_last_convolutions_give_the_same_result() -> None:
    seen: list[bool] = []
    task = Small(lambda: Pictures(lambda x: x.flatten(1), seen))
    alone = run("simulation.batched=false", "run.dry_step=false", task=task)
    assert all(seen)
    seen.clear()
    found = run("run.dry_step=false", task=task)
    assert not any(seen)
    assert found.together == 0
    np.testing.assert_allclose(found.model.floats, alone.model.floats, rtol=0, atol=1e-5)
    assert all(x.is_contiguous() for x in found.module.parameters())


def test_model_gets_its_preferred_memory_format() -> None:
    """The view of a result is no view of it any more with the channels last."""
    seen: list[bool] = []
    task = Small(lambda: Pictures(lambda x: x.view(len(x), 16), seen))
    found = run("run.dry_step=false", task=task)
    alone = run("simulation.batched=false", task=task)
    assert seen[:2] == [False, True]
    assert all(seen[1:])
    assert found.model.digest() == alone.model.digest()


def test_the_same_configuration_gives_the_same_bits() -> None:
    one, same, other = (run(*AFA, f"run.seed={seed}").model.digest() for seed in (5, 5, 6))
    assert one == same != other


def test_training_ahead_changes_only_rounding() -> None:
    """FedAsync's later arrivals are trained as soon as their version is there."""
    sets = ("simulation.staleness.most=5", "run.versions=40")
    ahead, alone = run(*sets), run(*sets, "simulation.batched=false")
    assert ahead.together > 20
    np.testing.assert_allclose(ahead.model.floats, alone.model.floats, rtol=0, atol=1e-5)


def test_cost_is_counted() -> None:
    made = run(*AFA, "scheduler.steps.n=3").versions[-1]
    assert (made.used, made.gradients, made.communications) == (48, 144, 96)
    samples = [20 + 3 * u.device for u in made.updates]
    assert sum(3 / -(-size // 8) for size in samples) < made.epochs


def test_listener_gets_each_version_with_its_model() -> None:
    heard: list[tuple[int, str]] = []

    def hear(made: VersionMade, model: Any) -> None:
        heard.append((made.version, model.digest()))

    found = run(*AFA, on_version=hear)
    assert [version for version, _ in heard] == list(range(13))
    assert heard[-1][1] == found.model.digest()
    assert len({digest for _, digest in heard}) == 13


def test_only_due_versions_are_measured() -> None:
    found = run("run.versions=10")
    assert [made.version for made in found.measured] == [0, 4, 8, 10]
    found = run("run.versions=10", "simulation.evaluate_every=0")
    assert [made.version for made in found.measured] == [10]
    with pytest.raises(ConfigError, match="evaluate_every = 0 measures the last version"):
        run("simulation.evaluate_every=0", "run.stop.patience=2")


def test_the_best_value_is_on_the_side_of_the_metrics_goal() -> None:
    found = run("run.versions=10")
    for name, pick in (("accuracy", max), ("loss", min)):
        assert found.best(name) == pick(made.metrics[name] for made in found.measured)
    with pytest.raises(ConfigError, match="a low or a high odd is good is unknown"):
        found.best("odd")


def test_simulation_ends_at_its_target() -> None:
    found = run("run.versions=500", "run.stop.target=0.5", "simulation.evaluate_every=1")
    assert found.state == "finished"
    assert "accuracy" in found.why
    assert found.versions[-1].version < 500


def test_timed_out_rounds_are_replayed(tmp_path: Path) -> None:
    found = run(
        "strategy.name=fedavg",
        "strategy.clients_per_round=4",
        "scheduler.policy.kind=rounds",
        "scheduler.policy.k=4",
        "scheduler.policy.timeout_s=1.0",
        "simulation.staleness.kind=latency",
        "devices.latency.kind=uniform",
        "devices.latency.high_s=1.5",
        journal=tmp_path / "journal",
    )
    assert any(len(made.updates) < 4 for made in found.versions[1:])
    with Replayer(tmp_path / "journal") as replayer:
        assert sum(moment.identical is True for moment in replayer) == 12


@pytest.mark.parametrize("rule", ["fedavg", "scaffold"])
def test_extended_rounds_are_replayed(rule: str, tmp_path: Path) -> None:
    """What was answered before the time-out is in the version that is made after it."""
    slow = (
        "scheduler.policy.kind=rounds",
        "scheduler.policy.timeout_s=2.0",
        "scheduler.policy.min_answers=3",
        "simulation.staleness.kind=latency",
        "devices.latency.kind=uniform",
        "devices.latency.low_s=0.5",
        "devices.latency.high_s=1.5",
        "devices.slow_devices=[0, 1, 2]",
        "devices.slow_factor=100.0",
    )
    found = run(*RULES[rule], *slow, journal=tmp_path / "journal")
    assert found.state == "finished"
    assert {len(made.updates) for made in found.versions[1:]} == {3}
    assert {update.device for made in found.versions[1:] for update in made.updates} == {3, 4, 5}
    waited = [later.time - made.time for made, later in pairwise(found.versions)]
    assert max(waited) > 4.0, "more than one time-out"
    assert all(update.staleness == 0 for made in found.versions for update in made.updates)
    with Replayer(tmp_path / "journal") as replayer:
        assert sum(moment.identical is True for moment in replayer) == 12


def test_simulation_can_be_stopped() -> None:
    calls = iter(range(10**6))
    found = run("run.versions=1000", cancelled=lambda: next(calls) > 200)
    assert found.state == "interrupted"
    assert 0 < found.versions[-1].version < 1000


@pytest.mark.parametrize(
    "module",
    [
        lambda: nn.Linear(5, 3),
        lambda: nn.Sequential(
            *(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 6, 3, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(30, 3)),
        ),
    ],
    ids=["linear", "convolution"],
)
def test_lower_precision_costs_little(
    module: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 trains from the weights as they are in every step, not as they were in the first."""
    ticks = accumulate(1 / n for n in range(1, 10**3))  # the second of two steps is the faster
    monkeypatch.setattr(
        "fedstream.trainer.precision.time", SimpleNamespace(perf_counter=lambda: next(ticks))
    )
    exact = run("run.versions=60", "simulation.batched=false", task=Small(module))
    rough = run("run.versions=60", "solver.precision=bf16", task=Small(module))
    assert exact.model.digest() != rough.model.digest()
    assert abs(exact.last() - rough.last()) < 0.05


def test_existing_journal_is_never_overwritten(tmp_path: Path) -> None:
    run("run.versions=2", journal=tmp_path / "journal")
    with pytest.raises(Fenced):
        run("run.versions=2", journal=tmp_path / "journal")


class Odd(Small):
    """A task whose training answers with what a test wants, the model being what it was."""

    def __init__(self, answer: object, add: float = 0.0) -> None:
        super().__init__()
        self._answer = answer
        self._add = add

    def train(self, model: nn.Module, data: Any, work: Work) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(self._add)
        return self._answer


@pytest.mark.parametrize(
    ("sets", "task", "reason"),
    [
        (AFA, Odd(Trained(0, 9, 0.5)), "no steps"),
        (AFA, Odd(Trained(1, 9, 0.5), add=2.8e36), "norm too large"),
        ((*AFA, "solver.lr=0.001"), Odd(Trained(1, 9, 0.5), add=1e28), "norm too large"),
        (("strategy.name=fedbuff",), Odd(Trained(1, 9, 0.5), add=1e31), "norm too large"),
    ],
)
def test_updates_the_updater_refuses_are_refused(
    sets: tuple[str, ...], task: Task, reason: str, tmp_path: Path
) -> None:
    found = run(*sets, task=task, journal=tmp_path / "journal")
    assert (found.state, found.refused) == ("failed", {reason: 100})
    assert np.isfinite(found.model.floats).all()
    with Replayer(tmp_path / "journal") as replayer:
        said = {getattr(moment.message, "reason", "") for moment in replayer}
    assert said - {""} == {reason}


def test_training_on_no_samples_is_counted() -> None:
    assert run(task=Odd(Trained(1, 0, 0.5))).versions[-1].epochs == 12


@pytest.mark.parametrize(
    ("sets", "answer", "said"),
    [
        (SCAFFOLD, Trained(1, 1, 0.5), r"device \d: TypeError: train\(\) must .*control="),
        (AFA, None, r"device \d: TypeError: train\(\) must return .* not NoneType"),
    ],
)
def test_invalid_answer_is_reported(sets: tuple[str, ...], answer: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        run(*sets, task=Odd(answer))


class Raising(Small):
    """Training raises on some devices."""

    def __init__(self, *devices: int) -> None:
        super().__init__()
        self._raising = devices

    def device_data(self, device: int) -> TensorDataset:
        data = super().device_data(device)
        if device not in self._raising:
            return data
        x, y = data.tensors
        return TensorDataset(x, y + 7)


IN_TIME = (
    "simulation.staleness.kind=latency",
    "devices.latency={kind='uniform', low_s=0.5, high_s=1.5}",
)
PLANS = {
    "drawn": (*RULES["fedbuff"], "simulation.staleness.kind=recent"),
    "drawn rounds": ("strategy.name=fedavg", "strategy.clients_per_round=6"),
    "rounds": ("strategy.name=fedavg", "strategy.clients_per_round=6", *IN_TIME),
    "in flight": (*RULES["fedbuff"], *IN_TIME, "scheduler.policy={kind='in_flight', n=4}"),
    "poisson": (*IN_TIME, "scheduler.policy={kind='poisson', rate=5.0}"),
    "own triggers": (*AFA, *IN_TIME, "scheduler.policy.kind=none", "trainer.anarchic.rate=0.5"),
}


@pytest.mark.parametrize("name", PLANS)
def test_device_on_which_the_task_raises_rests(name: str, tmp_path: Path) -> None:
    """Whether or not devices train together, the plan is the same."""
    about = (*PLANS[name], "run.versions=16")
    found = run(*about, task=Raising(2), journal=tmp_path / "journal")
    alone = run(*about, "simulation.batched=false", task=Raising(2))
    together, one_by_one = (
        [[(one.task, one.device, one.staleness) for one in made.updates] for made in versions]
        for versions in (found.versions, alone.versions)
    )
    assert together == one_by_one
    assert (found.state, found.why) == ("finished", "version 16 reached")
    [(reason, count)] = found.given_up.items()
    assert reason == "raised IndexError"
    [(device, (failures, error))] = found.failing.items()
    assert (device, failures) == (2, count)
    assert error.startswith("IndexError: Target")
    assert 2 <= count < 8, "it is asked less and less often"
    trained = {update.device for made in found.versions for update in made.updates}
    assert trained == {0, 1, 3, 4, 5}
    if "rounds" in name:
        assert all(len(made.updates) == 5 for made in found.versions[1:])
    with Replayer(tmp_path / "journal") as replayer:
        assert all(moment.identical for moment in replayer if moment.message.digest)


def test_simulation_fails_if_no_device_works() -> None:
    with pytest.raises(
        DataError, match=r"no device works: .* on 6 of 6 devices: device \d at version 0: Index"
    ) as raised:
        run(*AFA, "run.dry_step=false", task=Untrainable())
    assert raised.value.trace.splitlines()[-1] == "IndexError: no device"
    assert run(*AFA, task=Raising(*range(1, DEVICES))).state == "finished"


def test_a_simulation_waits_for_its_root_device() -> None:
    """Device 0 is one of a hundred, and by chance the first hundred answers are of others."""

    class Many(Small):
        devices = 100

        def device_data(self, device: int) -> TensorDataset:
            return super().device_data(device % DEVICES)

    found = run("strategy.name=aflguard", "strategy.radius=100", "run.seed=4", task=Many())
    assert (found.state, found.why) == ("finished", "version 12 reached")
    assert found.refused["no root update yet"] > 100


def test_a_simulation_ends_if_nobody_is_near_the_root_device() -> None:
    found = run("strategy.name=aflguard", "strategy.radius=1e-9")
    assert (found.state, found.refused.total()) == ("failed", 100)
    assert found.why == "100 updates in a row were refused (far from the root)"


class Untrainable(Small):
    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        raise IndexError("no device")


class Lacking(Small):
    """Some devices have no data, or no rows. Its own training does not look at them."""

    def __init__(self, *devices: int, rows: int | None = None) -> None:
        super().__init__()
        self._lacking, self._rows = devices, rows

    def device_data(self, device: int) -> TensorDataset:
        if device not in self._lacking:
            return super().device_data(device)
        if self._rows is None:
            raise IndexError("no device")
        return TensorDataset(self._x[: self._rows], self._y[: self._rows])

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        return Trained(1, 1, 0.5)


@pytest.mark.parametrize(
    ("rows", "reason", "last"),
    [(None, "IndexError", "IndexError: no device"), (0, "DataError", "its data set is empty")],
    ids=["raises", "empty"],
)
def test_device_without_data_rests_and_its_error_is_told_once(
    rows: int | None, reason: str, last: str
) -> None:
    told: list[str] = []
    found = run("run.versions=40", task=Lacking(2, 3, rows=rows), on_error=told.append)
    assert found.state == "finished"
    assert [*found.given_up] == [f"raised {reason}"]
    assert [*found.failing] == [2, 3]
    [one] = told
    assert one.startswith("the task raised on device ")
    assert one.endswith(last)


class Wrong(Small):
    """A task with something wrong in a device's data, or in the test data (device -1)."""

    def __init__(self, device: int, change: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self._wrong = device
        self._change = change

    def device_data(self, device: int) -> TensorDataset:
        data = super().device_data(device)
        return TensorDataset(*self._change(*data.tensors)) if device == self._wrong else data

    def test_data(self) -> TensorDataset:
        data = super().test_data()
        return TensorDataset(*self._change(*data.tensors)) if self._wrong < 0 else data


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Wrong(-1, lambda x, y: (x[:, :4], y)), "test data: RuntimeError: mat1 and mat2"),
        (Wrong(-1, lambda x, y: (x, y + 7)), "test data: IndexError: Target"),
    ],
)
def test_error_of_a_task_names_the_device(task: Task, said: str) -> None:
    with pytest.raises(DataError, match=said) as error:
        run(*AFA, task=task)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (("strategy.name=afa-cs", "strategy.devices=4"), ("strategy.devices = 4", "has 6 devices")),
        ((*SCAFFOLD, "strategy.devices=7"), ("strategy.devices = 7", "has 6 devices")),
        (("strategy.name=basgd", "strategy.buckets=7"), ("strategy.buckets = 7", "run's 6 ")),
        (("strategy.name=aflguard", "strategy.root=[6]"), ("strategy.root", "no device 6")),
        (("devices.slow_devices=[1, 6]",), ("devices.slow_devices", "no device 6", "the run's 6 ")),
    ],
)
def test_unknown_devices_are_rejected(sets: tuple[str, ...], keys: tuple[str, ...]) -> None:
    settings = read(None, sets)
    for refuses in (lambda: simulate(settings, Small()), lambda: devices_of(settings, Small())):
        with pytest.raises(ConfigError) as error:
            refuses()
        assert all(key in str(error.value) for key in (*keys, "task.devices"))


def test_live_run_rejects_unknown_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.devices = 9"):
        services.create_run(read(None, ["strategy.name=afa-cs", "strategy.devices=9"]))
    with pytest.raises(ConfigError, match=r"devices\.slow_devices"):
        services.create_run(read(None, ["devices.slow_devices=[10]"]))
    elsewhere = Wrong(3, lambda x, y: 1 / 0)  # an updater need not have the devices' data
    monkeypatch.setattr(services, "load_task", lambda *_, **__: elsewhere)
    assert services.create_run(read(None, []))[0].devices == DEVICES


class Personal(Small):
    """Classes are numbered in another way on each device, so that a head of its own is needed."""

    local: tuple[str, ...] = ("head.*",)

    def model(self) -> nn.Module:
        return nn.Sequential(OrderedDict(body=nn.Linear(5, 8), head=nn.Linear(8, 3)))

    def device_data(self, device: int) -> TensorDataset:
        x, y = super().device_data(device).tensors
        return TensorDataset(x, (y + device) % 3)

    def device_test_data(self, device: int) -> TensorDataset:
        return TensorDataset(self._x[240:], (self._y[240:] + device) % 3)


class Common(Personal):
    """The same with one head for all."""

    local: tuple[str, ...] = ()


def test_devices_keep_their_own_layers(tmp_path: Path) -> None:
    """They are measured with them, and the journal has none."""
    settings = read(None, ["run.versions=60", "evaluator.per_device=last", "simulation.threads=1"])
    found = {}
    for task in (Personal(), Common()):
        outcome = simulate(settings, task, journal=tmp_path / type(task).__name__)
        found[type(task)] = outcome.versions[-1].metrics["device_mean_accuracy"]
    assert found[Common] < 0.6 < 0.9 < found[Personal]
    with Replayer(tmp_path / "Personal") as replayer:
        *_, last = replayer
        assert last.identical
        assert last.model.layout.parameters == 48
    again = simulate(settings, Personal(), journal=tmp_path / "again")
    assert again.versions[-1].metrics["device_mean_accuracy"] == found[Personal]


def test_final_model_has_the_local_layers_of_version_0() -> None:
    settings = read(None, ["run.versions=5", "simulation.threads=1"])
    outcome, first = simulate(settings, Personal()), initial(Personal(), 0).tensors()
    last = {name: x.tolist() for name, x in outcome.module.state_dict().items()}
    assert last["head.weight"] == first["head.weight"].tolist()
    assert last["body.weight"] != first["body.weight"].tolist()


def test_more_local_bytes_than_allowed_are_refused_at_the_start() -> None:
    most = DEVICES * 27 * 4 - 1
    settings = read(None, [f"trainer.local_bytes={most}"])
    with pytest.raises(ConfigError, match=f"local tensors of {DEVICES} devices have {most + 1}"):
        simulate(settings, Personal())
