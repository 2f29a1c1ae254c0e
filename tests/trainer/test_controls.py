"""What a device has to know, and what it sends back: control variates and deltas."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model, vector_of
from fedstream.trainer.compression import NoCompression
from fedstream.trainer.descent import solve
from fedstream.trainer.learner import as_sent
from fedstream.trainer.solvers import SolverSettings, Trained
from fedstream.trainer.vector import layout_of, load, read
from tests.support import Hand, context, counted, model_of, running, wait_until
from tests.trainer.adding import Make, Point
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
    work_of,
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
    work = work_of(SGD, device=1, task=name, version=1, seed=1, steps=H)
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


# the answer


@pytest.mark.parametrize(
    ("trained", "error", "said"),
    [
        (None, TypeError, "not NoneType"),
        (Trained(1, 1, 0.5), TypeError, "control="),
        (Trained(-1, 1, 0.5), ValueError, "no negative numbers"),
    ],
)
def test_train_must_return_trained(trained: object, error: type[Exception], said: str) -> None:
    layout = layout_of(Point()).with_controls()
    with pytest.raises(error, match=said):
        as_sent(trained, Model(layout), Model(layout), None, "delta", NoCompression())


@pytest.mark.parametrize("known", [None, 0.5])
def test_update_is_the_difference_from_the_base(known: float | None) -> None:
    layout = layout_of(Point()).with_controls()
    base, into = Model(layout), Model(layout)
    base.floats[:], into.floats[:] = 1.0, 3.0
    control = np.full(4, 2.0, np.float32)
    device_control = None if known is None else np.full(4, known, np.float32)
    some: Any = np.int64(2)  # numpy's numbers are no JSON
    trained = Trained(some, some, 0.5, control)
    took = as_sent(trained, into, base, device_control, "delta", NoCompression())
    assert into.parameters.tolist() == [2.0] * 4
    assert into.controls.tolist() == [2.0 - (known or 0.0)] * 4
    assert (took, type(took.steps)) == (Trained(2, 2, 0.5), int)
