"""What a device has to know, and what it sends back: control variates and deltas."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model, vector_of
from fedstream.trainer.descent import solve
from fedstream.trainer.solvers import SolverSettings, Work
from fedstream.trainer.vector import load, read
from tests.support import Hand, context, counted, model_of, running, wait_until
from tests.trainer.adding import Make
from tests.trainer.stepping import (
    SCAFFOLD,
    SGD,
    H,
    Steps,
    answers,
    asked,
    begun,
    content,
    control,
    newer,
    uninterrupted,
)


@pytest.fixture
def task() -> Steps:
    return Steps()


async def test_control_comes_from_redis_and_its_change_is_sent(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    async with running(make("t1", SCAFFOLD), context()):
        await asked(hand, device=1)
        await asked(hand, device=2)  # of which nothing is known
        known, unknown = [await content(hand, one) for one in await answers(hand, 2)]
    # c_i+ = c_i - c + (x_tau - x_new) / (H gamma), c being zero here
    for model, before in ((known, control(hand, 0.25)), (unknown, control(hand, 0.0))):
        after = before - model.parameters / (H * SCAFFOLD.lr)
        assert model.controls == pytest.approx(after - before, abs=1e-5)
        assert np.any(model.controls)


async def test_servers_control_comes_with_the_model(hand: Hand, make: Make, task: Steps) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    await newer(hand)  # all of which is 0.5, c too
    async with running(make("t1", SCAFFOLD), context()):
        await asked(hand)
        [upload] = await answers(hand)
    model = await content(hand, upload)
    # c_i+ - c_i = -c + (x_tau - x_new) / (H gamma)
    change = -0.5 - model.parameters / (H * SCAFFOLD.lr)
    assert model.controls == pytest.approx(change, abs=1e-5)


async def test_delta_is_the_distance_trained(hand: Hand, make: Make, task: Steps) -> None:
    await begun(hand, task, SGD, "delta")
    await newer(hand)
    async with running(make("t1"), context()):
        name = await asked(hand)
        [upload] = await answers(hand)
    found = await content(hand, upload)
    x_tau, x_new, module = model_of(hand.layout, 0.5), Model(hand.layout), task.model()
    load(x_tau, module)
    work = Work(
        device=1,
        task=name,
        version=1,
        seed=1,
        steps=H,
        epochs=None,
        solver=SGD,
        cancelled=lambda: False,
    )
    solve(task, module, task.device_data(1), work)
    read(module, x_new)
    # Nearly: it was trained by another thread, with as many of torch's own as its settings say.
    assert found.parameters == pytest.approx(x_new.parameters - x_tau.parameters, abs=1e-5)
    assert found.buffers == pytest.approx(x_new.buffers, abs=1e-5)  # which are no difference
    assert found.integers.tolist() == x_new.integers.tolist()


async def test_trainer_waits_for_a_control_being_written(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    wanted = await uninterrupted(hand, make, task, SCAFFOLD)
    junk = vector_of(control(hand, 9.0)).buffer.tobytes()
    theirs = hand.keys.control("pool", 1)
    await hand.client.call("HSET", theirs, "0", junk)  # not what its digest says
    task.begins()
    live = context()
    async with running(make("t1", SCAFFOLD), live):
        await asked(hand)
        await wait_until(lambda: counted(live, "fedstream_retries_total", loop="tasks") > 1)
        assert task.steps == 0
        await hand.client.call("COPY", hand.keys.device(1), theirs, "REPLACE")
        _, upload = await answers(hand, 2)
    assert upload.digest == wanted.digest


@pytest.mark.parametrize(
    ("strategy", "solver", "said"),
    [
        (
            "scaffold",
            SGD,
            r"solver.kind = 'sgd': run .* strategy 'scaffold': scaffold must be both",
        ),
        ("fedbuff", SCAFFOLD, "solver.kind = 'scaffold': run .* made with strategy 'fedbuff'"),
    ],
)
async def test_solver_that_does_not_fit_the_strategy_ends_the_trainer(
    hand: Hand, make: Make, task: Steps, strategy: str, solver: SolverSettings, said: str
) -> None:
    await begun(hand, task, SCAFFOLD if strategy == "scaffold" else SGD)
    with pytest.raises(ConfigError, match=said):
        await asyncio.wait_for(make("t1", solver).run(context()), 60)
