"""Solvers of a user's own: the seam that the built-in ones use, by name and for groups."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import ConfigError, DataError
from fedstream.core.layout import Model
from fedstream.runtime.config import dump
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.solvers import Cancelled, Iterate, Sgd, Solver, Trained, Work
from fedstream.trainer.task import Task, initial
from fedstream.trainer.vector import layout_of
from fedstream.trainer.vector import read as read_module
from fedstream.trainer.workspace import Workspace
from tests.trainer.stepping import work_of

if TYPE_CHECKING:
    from fedstream.trainer.solvers import Tensors

PROGRAM = """
import torch
from fedstream import Solver

class Adam(Solver):
    beta_1: float = 0.9
    beta_2: float = 0.999

    def direction(self, g, at):
        m, v = at.remembered("m"), at.remembered("v")
        for m_i, v_i, g_i in zip(m, v, g):
            m_i.lerp_(g_i, 1 - self.beta_1)
            v_i.lerp_(g_i * g_i, 1 - self.beta_2)
        a, b = 1 - self.beta_1 ** (at.n + 1), 1 - self.beta_2 ** (at.n + 1)
        return [(m_i / a) / ((v_i / b).sqrt() + 1e-8) for m_i, v_i in zip(m, v)]
"""


class Small(Task):
    """Ten samples for each of six devices."""

    devices = 6

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def device_data(self, device: int) -> TensorDataset:
        draws = torch.Generator().manual_seed(device)
        x = torch.randn(10, 3, generator=draws)
        return TensorDataset(x, (x[:, 0] > 0).long())


class Fading(Solver):
    """A step size that halves."""

    def rate(self, n: int) -> float:
        return float(self.lr / 2**n)


class Still(Solver):
    """No training loop of ours at all."""

    def train(self, task: Task, model: nn.Module, data: Any, work: Work) -> Trained:
        return Trained(1, len(data), 0.0)


TASK = Small()
START = initial(TASK, 0)


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a solver in a file."""
    file: Path = tmp_path_factory.mktemp("own") / "own_solvers.py"
    file.write_text(PROGRAM)
    return f"{file}:Adam"


def work(solver: Solver, **more: Any) -> Work:
    return work_of(solver, **{"device": 2, "steps": 5} | more)


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return TASK.model()


def trained(piece: Work) -> tuple[Model, Trained]:
    module = fresh()
    result = TASK.train(module, TASK.device_data(piece.device), piece)
    model = Model(layout_of(module))
    read_module(module, model)
    return model, result


def test_adam_by_one_method_is_torchs_adam(adam: str) -> None:
    solver = read(None, [f"solver.kind={adam}", "solver.lr=0.05", "solver.batch_size=0"]).solver
    found, _ = trained(work(solver))
    module, data = fresh(), TASK.device_data(2)
    theirs = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(5):
        theirs.zero_grad()
        nn.functional.cross_entropy(module(data.tensors[0]), data.tensors[1]).backward()  # type: ignore[no-untyped-call]
        theirs.step()
    expected = Model(layout_of(module))
    read_module(module, expected)
    torch.testing.assert_close(
        torch.tensor(found.floats), torch.tensor(expected.floats), rtol=1e-4, atol=1e-6
    )


def test_what_it_remembers_survives_an_interruption(adam: str) -> None:
    solver = read(None, [f"solver.kind={adam}", "solver.batch_size=3"]).solver
    whole, _ = trained(work(solver))
    asked = iter([False, False, True])
    with pytest.raises(Cancelled) as caught:
        trained(work(solver, cancelled=lambda: next(asked)))
    assert caught.value.workspace is not None
    saved = Workspace.decode(caught.value.workspace.encode())
    assert sorted(saved.memory) == ["m", "v"]
    resumed, _ = trained(work(solver, resume=saved))
    assert resumed.digest() == whole.digest()


def test_a_direction_of_another_shape_is_refused_at_any_step() -> None:
    class Shrinking(Solver):
        def direction(self, g: Any, at: Iterate) -> Any:
            return g if at.n < 2 else [part[:1] for part in g]  # which would be broadcast

    told = r"direction\(\) must .*; it returned .*\[1, 3\]\) in place 0 instead of .*\[4, 3\]\)$"
    with pytest.raises(ConfigError, match=told):
        trained(work(Shrinking()))


def test_a_varying_rate_is_reported_as_its_mean() -> None:
    _, usual = trained(work(Sgd(lr=0.4)))
    assert usual.lr is None
    _, result = trained(work(Fading(lr=0.4)))
    assert result.lr == pytest.approx(0.4 * (1 + 1 / 2 + 1 / 4 + 1 / 8 + 1 / 16) / 5)
    first, _ = trained(work(Fading(lr=0.4), steps=1))
    plain, _ = trained(work(Sgd(lr=0.4), steps=1))
    assert first.digest() == plain.digest()


def test_it_may_replace_the_whole_training() -> None:
    model, result = trained(work(Still()))
    assert model.digest() == START.digest()
    assert result.samples == 10


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        (None, "a NoneType"),
        ([], "0 tensors instead of 4"),
        ([torch.zeros(4, 3), 3.0], r"float in place 1 instead of torch.Size\(\[4\]\)"),
    ],
)
def test_a_wrong_direction_names_the_solver_and_what_it_returned(answer: Any, got: str) -> None:
    class Wrong(Solver):
        def direction(self, g: Tensors, at: Iterate) -> Tensors:
            return answer  # type: ignore[no-any-return]

    told = rf"test_own_solver.*Wrong': direction\(\) must return a .*; it returned {got}$"
    with pytest.raises(ConfigError, match=told):
        trained(work(Wrong()))


def test_a_rate_that_is_no_number_names_the_solver() -> None:
    class Forgets(Solver):
        def rate(self, n: int) -> float:  # type: ignore[return]
            self.lr / (n + 1)

    told = r"test_own_solver.*Forgets': rate\(\) must return a number; it returned a NoneType$"
    with pytest.raises(ConfigError, match=told):
        trained(work(Forgets()))


# by name


def test_its_keys_are_checked_and_kept(adam: str) -> None:
    settings = read(None, [f"solver.kind={adam}", "solver.beta_1=0.5"])
    assert f'kind = "{adam}"\n' in dump(settings)
    assert "beta_1 = 0.5\n" in dump(settings)
    with pytest.raises(ConfigError, match=r"solver.beta1 = 0.5 .*did you mean solver.beta_1\?"):
        read(None, [f"solver.kind={adam}", "solver.beta1=0.5"])
    with pytest.raises(ConfigError, match=r"is of type \w+: expected a class derived from fedst"):
        read(None, [f"solver.kind={adam.replace('Adam', 'torch')}"])


def test_a_group_of_devices_may_have_it(adam: str) -> None:
    group = f"solvers=[{{devices=[1], kind='{adam}', beta_1=0.7}}]"
    sets = (
        "strategy.name=fedbuff",
        "strategy.buffer_size=6",
        "run.versions=3",
        "simulation.threads=1",
        "simulation.staleness.kind=none",
        "solver.lr=0.1",
    )
    settings = read(None, [*sets, group])
    assert settings.solvers[0].of(settings.solver).beta_1 == 0.7  # type: ignore[attr-defined]
    assert settings.solvers[0].of(settings.solver).lr == 0.1
    usual, mixed = simulate(read(None, sets), TASK), simulate(settings, TASK)
    assert usual.together > mixed.together == 0  # what is unknown is trained one by one
    assert usual.model.digest() != mixed.model.digest()
    with pytest.raises(ConfigError, match=r"solvers\[0\].beta1 = 0.7: unknown key; did you mean"):
        read(None, [group.replace("beta_1", "beta1")])


def test_batched_and_one_by_one_are_the_same(adam: str) -> None:
    sets = (f"solver.kind={adam}", "run.versions=10", "simulation.threads=1", "solver.lr=0.01")
    both = [
        simulate(read(None, [*sets, f"simulation.batched={how}"]), TASK).model.digest()
        for how in ("true", "false")
    ]
    assert both[0] == both[1]


def test_its_error_names_the_device() -> None:
    class Fails(Solver):
        def rate(self, n: int) -> float:
            return 1 / n

    settings = read(None, ["run.versions=2", "simulation.threads=1"])
    with pytest.raises(DataError, match=r"device \d: ZeroDivisionError: .*test_own_solver.py:"):
        simulate(settings.model_copy(update={"solver": Fails()}), TASK)


# torch's optimizers


def parameters(*keys: str) -> bytes:
    """What five steps of a configured solver make of the model."""
    solver = read(None, [f"solver.{key}" for key in (*keys, "batch_size=0")]).solver
    return trained(work(solver))[0].floats.tobytes()


def test_an_optimizer_by_its_class_is_the_one_by_name() -> None:
    for name, keys in (("Adam", ["lr=0.01", "betas=[0.5, 0.9]"]), ("RMSprop", ["momentum=0.5"])):
        assert parameters(f"kind=torch.optim:{name}", *keys) == parameters(
            f"kind={name.lower()}", *keys
        )


def test_a_users_optimizer_is_a_solver_with_its_arguments_as_keys(tmp_path: Path) -> None:
    file = tmp_path / "halving.py"
    file.write_text(
        "import torch\n"
        "class Halving(torch.optim.SGD):\n"
        "    def __init__(self, params, lr=0.5, share: float = 0.5):\n"
        "        super().__init__(params, lr * share)\n"
    )
    assert parameters(f"kind={file}:Halving", "share=0.25") == parameters("lr=0.125")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["kind=adam", "momentum=0.9"], "kind = adam has no momentum: leave it out"),
        (["kind=adam", "nesterov=true"], "solver.nesterov = true .*: unknown key"),
        (["nesterov=true"], "nesterov = true needs momentum above 0"),
        (["kind=torch.optim:LBFGS"], "LBFGS.step needs a closure"),
        (["kind=torch.optim:NAdam", "bets=[0.5, 0.9]"], r"did you mean solver.betas\?"),
        (["groups=[{parameters=['0.*'], rho=1.0}]"], r"groups\[0\].rho: the optimizer has no such"),
        (["groups=[{parameters=['0.*'], lr=-1.0}]"], r"groups\[0\].lr = -1.0: .*greater than 0"),
        (
            ["groups=[{parameters=['base.*']}]"],
            r"solver.groups\[0\].parameters = .*: no trained",
        ),
        (["lr_scheduler={kind='Step'}"], "kind = 'Step': must be a class of torch.optim.lr_sch"),
        (["lr_scheduler={kind='StepLR'}"], "solver.lr_scheduler: .*missing 1 .*'step_size'"),
        (["lr_scheduler={kind='StepLR', step_sise=2}"], "no such key; did you mean 'step_size'"),
        (["kind=AdamW", "lr=0.1"], "did you mean 'adamw'"),
        (["lr_scheduler={kind='ReduceLROnPlateau'}"], "measures nothing to wait for"),
    ],
)
def test_a_wrong_key_of_an_optimizer_is_named(keys: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parameters(*keys)


def test_another_kind_of_schedule_drops_the_keys_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[solver]\nlr_scheduler = {kind = 'CosineAnnealingLR', T_max = 8}\n")
    keys = ["solver.lr_scheduler.kind=StepLR", "solver.lr_scheduler.step_size=4"]
    found = read(file, keys).solver.lr_scheduler
    assert found is not None
    assert found.model_dump() == {"kind": "StepLR", "step_size": 4}
    changed = read(file, ["solver.lr_scheduler.T_max=9"]).solver.lr_scheduler
    assert changed is not None
    assert changed.model_dump() == {"kind": "CosineAnnealingLR", "T_max": 9}


def test_a_schedule_over_versions_scales_the_rates_of_groups() -> None:
    group = "groups=[{parameters=['0.*'], lr=0.2}, {parameters=['2.bias'], momentum=0.5}]"
    keys = [f"solver.{key}" for key in (group, "lr=0.1", "schedule={kind='step', every=1}")]
    solver = read(None, keys).solver.at(2)
    found = solver.optimizer(solver.parameter_groups(fresh())).param_groups
    assert [one["lr"] for one in found] == [0.05, 0.025, 0.025]
