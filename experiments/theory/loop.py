"""The closed loop: arriving devices train, the production rule makes versions of their updates."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from experiments.theory.arrivals import DrawnArrival
from experiments.theory.quadratics import Quadratics
from experiments.theory.sgd import Objective, Wide
from fedstream.core.layout import Floats, Layout, Model, Tensor
from fedstream.strategies import State, Strategy, Update


def closed_loop(
    rule: Strategy,
    problem: Objective,
    start: Floats,
    arrivals: Iterator[DrawnArrival],
    *,
    lr: float,
    oldest: int,
    rng: np.random.Generator,
) -> Iterator[State]:
    """Yield the state at versions 0, 1, 2, ... for ever; each is valid until the next is requested.

    ``start`` is (runs, d): several runs in one model; the rules work element by element, so the
    runs cannot interact. A rule is told the device, staleness and H of the first run: if it uses
    one of these, all runs need the same arrivals. ``rng`` draws the noise, for each run its own.
    """
    layout = Layout((Tensor("x", start.shape, "float32", "parameter"),))
    pool = [Model(layout) for _ in range(3)]  # the current one, the batch's sum, a spare
    pool[0].floats[:] = start.ravel()
    sent = Model(layout)
    state = State(0, pool[0])
    past = np.tile(start.astype(np.float32), (oldest + 1, 1, 1))  # x_t at t modulo oldest + 1
    rows = np.arange(len(start))
    yield state
    for devices, staleness, steps in arrivals:
        before = state.version
        tau = before - np.minimum(staleness, before)
        x_tau = past[tau % (oldest + 1), rows]
        x_new = problem.train(devices, x_tau, steps, lr, rng)
        sent.floats[:] = (x_new - x_tau if rule.sends == "delta" else x_new).ravel()
        held = tuple(state.models())
        spare = next(model for model in pool if all(model is not one for one in held))
        update = Update(
            sent, tau=int(tau[0]), device=int(devices[0]), samples=1, steps=int(steps[0]), lr=lr
        )
        state, _ = rule.receive(state, update, spare)
        if state.version > before:
            past[state.version % (oldest + 1)] = points(state, start.shape)
            yield state


def points(state: State, shape: tuple[int, ...]) -> Floats:
    """(runs, d): the runs of a state (a view)."""
    return state.model.parameters.reshape(shape)


def mean_slopes(states: Iterator[State], problem: Quadratics, runs: int, versions: int) -> Wide:
    """(runs,): the mean of |grad f(x_t)|^2 over the next ``versions`` states, of each run."""
    shape = (runs, problem.dimensions)
    total = np.zeros(runs)
    for state in islice(states, versions):
        total += problem.slope(points(state, shape))
    return total / versions
