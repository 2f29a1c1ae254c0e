"""Devices that leave something of their update out."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats, Model
from fedstream.core.messages import GiveUp, Upload
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.compression import Bf16, Compression, NoCompression, TopK, compress
from fedstream.trainer.learner import as_sent
from fedstream.trainer.solvers import Sgd, SolverGroup, SolverSettings, Trained
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Make
from tests.trainer.stepping import content
from tests.trainer.test_choices import Small


def compressed(values: list[float], how: Compression) -> list[float]:
    vector = np.array(values, np.float32)
    compress(vector, how)
    return [float(value) for value in vector]


# the transformations, by hand


@pytest.mark.parametrize(
    ("value", "rounded"),
    [  # bfloat16 has eight bits: between 1 and 2 its step is 1/128
        (1 + 1 / 256, 1.0),  # half way: the even one, below
        (1 + 3 / 256, 1 + 4 / 256),  # half way: the even one, above
        (1 + 1 / 256 + 2**-20, 1 + 2 / 256),
        (-1 - 3 / 256, -1 - 4 / 256),
        (0.0, 0.0),
        (3.0e-40, 3.0e-40 // 2**-133 * 2**-133),  # below the normal numbers the step is 2^-133
        (1.5, 1.5),
    ],
)
def test_bf16_rounds_to_the_nearest_and_ties_to_even(value: float, rounded: float) -> None:
    assert compressed([value], Bf16()) == [rounded]


@pytest.mark.parametrize(
    ("share", "left"),
    [
        (1.0, [3.0, -4.0, 0.5, 4.0, -0.5, 1.0]),
        (0.5, [3.0, -4.0, 0.0, 4.0, 0.0, 0.0]),
        (1 / 3, [0.0, -4.0, 0.0, 4.0, 0.0, 0.0]),
        (1 / 6, [0.0, -4.0, 0.0, 0.0, 0.0, 0.0]),  # of two that are as large: the first
        (5 / 6, [3.0, -4.0, 0.5, 4.0, 0.0, 1.0]),
        (0.001, [0.0, -4.0, 0.0, 0.0, 0.0, 0.0]),  # never nothing
    ],
)
def test_topk_keeps_the_largest(share: float, left: list[float]) -> None:
    assert compressed([3.0, -4.0, 0.5, 4.0, -0.5, 1.0], TopK(share=share)) == left


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40),
    st.floats(0.01, 1.0),
)
def test_topk_contracts(values: list[float], share: float) -> None:
    """Stich, Cordonnier, Jaggi, equation 7: |x - top_k(x)|^2 <= (1 - k/d) |x|^2."""
    x, left = np.array(values), np.array(compressed(values, TopK(share=share)))
    k = max(1, round(share * len(values)))
    assert np.count_nonzero(left) == min(k, np.count_nonzero(x))
    assert ((x - left) ** 2).sum() <= (1 - k / len(values)) * (x**2).sum() * (1 + 1e-9) + 1e-300
    assert all(one in (0.0, other) for one, other in zip(left, x, strict=True))


@pytest.mark.parametrize("how", [Bf16(), TopK(share=0.25)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_stay_non_finite(how: Compression, wrong: float) -> None:
    assert not np.isfinite(compressed([wrong, wrong, 1.0, 2.0], how)).all()


# what is sent


class Point(nn.Module):
    """Two parameters, and a buffer that a step moves too."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(2))


def sent(how: Compression, **of: Floats | None) -> Model:
    """Of x_tau = (1, 1, 1, 1), x_new = (1.5, 1.01, 0, 1), with buffers (7, 8)."""
    layout = layout_of(Point())
    layout = layout.with_controls() if of else layout
    into, base = Model(layout), Model(layout)
    base.parameters[:], base.buffers[:] = 1.0, 0.0
    into.parameters[:], into.buffers[:] = [1.5, 1.01, 0.0, 1.0], [7.0, 8.001]
    as_sent(Trained(1, 1, 0.0, **of), into, base, None, "delta", how)  # type: ignore[arg-type]
    return into


def test_only_a_deltas_parameters_are_compressed() -> None:
    plain, half = sent(NoCompression()), sent(TopK(share=0.5))
    np.testing.assert_allclose(plain.parameters, [0.5, 0.01, -1.0, 0.0], atol=1e-6)
    assert half.parameters.tolist() == [0.5, 0.0, -1.0, 0.0]
    assert half.buffers.tolist() == plain.buffers.tolist()
    assert sent(Bf16()).buffers.tolist() == plain.buffers.tolist()


def test_controls_are_not_compressed() -> None:
    control = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    for how in (Bf16(), TopK(share=0.25)):
        assert sent(how, control=control).controls.tolist() == control.tolist()


def test_models_are_not_compressed() -> None:
    layout = layout_of(Point())
    with pytest.raises(ConfigError, match=r"compression.kind = 'bf16': devices send their models"):
        as_sent(Trained(1, 1, 0.0), Model(layout), Model(layout), None, "model", Bf16())


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (
            ["solver.compression={kind='bf16'}"],
            r"strategy.name = 'fedasync' with solver.compression.kind = 'bf16': its devices send",
        ),
        (
            [
                "strategy.name=fedavg",
                "solvers=[{devices=[2], compression={kind='topk', share=0.1}}]",
            ],
            r"'fedavg' with solver.compression.kind of device 2 = 'topk'",
        ),
        (["solver.compression={kind='topk', share=0.0}"], r"solver.*compression.*share"),
        (["solver.compression={kind='topk'}"], r"solver.*compression.*share"),
        (["solver.compression={kind='int8'}"], r"compression.*must be one of bf16, none, topk"),
    ],
)
def test_invalid_compression_is_a_one_line_error(sets: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read(None, sets)
    assert "\n" not in str(refused.value)


# in a run


class Choosy(Small):
    """Devices choose by themselves what they leave out."""

    def solver_of(self, device: int, solver: SolverSettings) -> SolverSettings:
        return solver.model_copy(update={"compression": TopK(share=0.125)}) if device else solver


TOPK = "compression={kind='topk', share=0.125}"  # one of eight parameters


@pytest.mark.parametrize("batched", ["true", "false"])
@pytest.mark.parametrize(
    ("sets", "task", "changed"),
    [
        ([f"solver.{TOPK}"], Small(), [1] * 6),
        ([f"solvers=[{{devices=[0, 2], {TOPK}}}]"], Small(), [1, 8, 1, 8, 8, 8]),
        ([], Choosy(), [8, 1, 1, 1, 1, 1]),
    ],
    ids=("all", "groups", "chosen"),
)
def test_simulated_device_sends_compressed_updates(
    sets: list[str], task: Task, changed: list[int], batched: str
) -> None:
    base = (
        "strategy.name=fedbuff",
        "strategy.buffer_size=1",
        "run.versions=30",
        "simulation.threads=1",
        "simulation.evaluate_every=0",
        "solver.batch_size=0",
        "simulation.staleness.kind=none",
        f"simulation.batched={batched}",
    )
    models: list[Floats] = []
    outcome = simulate(
        read(None, [*base, *sets]),
        task,
        on_version=lambda _made, model: models.append(model.floats.copy()),
    )
    moved = [np.count_nonzero(new != old) for old, new in pairwise(models)]
    devices = [made.updates[0].device for made in outcome.versions[1:]]
    assert set(devices) == set(range(6))
    assert moved == [changed[device] for device in devices]


async def test_trainer_sends_compressed_updates(hand: Hand, make: Make) -> None:
    task = Small()
    hand.layout = layout_of(task.model())
    await hand.create(sends="delta", devices=task.devices)
    groups = (SolverGroup(devices=(1,), compression=TopK(share=0.125)),)
    async with running(make(task=task, solver=Sgd(), solvers=groups), context()):
        for device in (0, 1):
            await hand.open(device=device)

        async def all_said() -> list[Upload | GiveUp] | None:
            said = await hand.answered()
            return said if len(said) == 2 else None

        said = await wait_until(all_said)
    left = {}
    for one in said:
        assert isinstance(one, Upload)
        left[one.device] = np.count_nonzero((await content(hand, one)).parameters)
    assert left == {0: 8, 1: 1}
