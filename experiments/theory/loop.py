"""The closed loop: arriving devices train, the production rule makes versions of their updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from experiments.theory.arrivals import DrawnArrival
from experiments.theory.quadratics import Quadratics
from fedstream.core.layout import Floats, Layout, Model, Tensor
from fedstream.strategies import State, Strategy, Update


def closed_loop(
    rule: Strategy,
    problem: Quadratics,
    start: Floats,
    arrivals: Iterator[DrawnArrival],
    *,
    lr: float,
    oldest: int,
    rng: np.random.Generator,
) -> Iterator[State]:
    """Yield the state at versions 0, 1, 2, ... for ever; each is valid until the next is requested.

    ``start`` is (runs, d): several runs in one model, with the same arrivals but separate noise;
    the rules work element by element, so the runs cannot interact. ``rng`` draws the noise.
    """
    layout = Layout((Tensor("x", start.shape, "float32", "parameter"),))
    pool = [Model(layout) for _ in range(3)]  # the current one, the batch's sum, a spare
    pool[0].floats[:] = start.ravel()
    sent = Model(layout)
    state = State(0, pool[0])
    past: deque[Floats] = deque([start.astype(np.float32)], maxlen=oldest + 1)  # the newest last
    yield state
    for device, staleness, steps in arrivals:
        d = min(staleness, len(past) - 1)
        x_tau = past[-1 - d]
        x_new = problem.train(device, x_tau, steps, lr, rng)
        sent.floats[:] = (x_new - x_tau if rule.sends == "delta" else x_new).ravel()
        held = tuple(state.models())
        spare = next(model for model in pool if all(model is not one for one in held))
        before = state.version
        update = Update(sent, tau=before - d, device=device, samples=1, steps=steps, lr=lr)
        state, _ = rule.receive(state, update, spare)
        if state.version > before:
            past.append(points(state, start.shape).copy())
            yield state


def points(state: State, shape: tuple[int, ...]) -> Floats:
    """(runs, d): the runs of a state (a view)."""
    return state.model.parameters.reshape(shape)
