"""FedBuff's bound (Toghani and Uribe, theorem 1), with beta = 1/K and gamma = 1/(Q sqrt(L T)).

1/T sum E|grad f(w_t)|^2 <= 8 sqrt(L) (f_0 - f*) / sqrt(T) + 16 sqrt(L) (sigma^2 + g^2) / sqrt(T)
    + 320 L (Q + 1) (tau^2 + 1) (sigma^2 + n g^2) / T,   T >= 160 L (Q + 7) (tau + 1)^3,
for uniform arrivals and s = 1; sigma^2 is that of a minibatch (the paper's sigma^2 / b), g^2 the
mean of |grad f_i - grad f|^2 over the devices.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.theory import pictures
from experiments.theory.arrivals import batches
from experiments.theory.claims import (
    Measured,
    TheoremClaim,
    exponent,
    figure,
    judged,
    near,
)
from experiments.theory.loop import closed_loop, mean_slopes
from experiments.theory.quadratics import Quadratics, fan
from experiments.theory.sgd import Wide
from fedstream.strategies import FedBuffSettings, Strategy

L, LOCAL, OLDEST, BUFFER, DEVICES = 0.1, 2, 1, 4, 10  # L, Q, tau, K, n
HORIZONS = (1200, 2400, 4800, 9600, 19_200, 38_400, 76_800)
SIDE_BY_SIDE = 8  # runs in a repeat, each with its own arrivals and noise
START = 1.0  # every coordinate of w_0


def objective(devices: int = DEVICES) -> Quadratics:
    """Devices with one Hessian, eigenvalues .05 to L; centres and noise are our choice."""
    centres = np.random.default_rng(0).normal(0.0, 1.0, (devices, 10))
    return Quadratics(fan(L / 2, L, devices), centres, variance=0.05)


def start_gap(problem: Quadratics) -> float:
    """f(w_0) - f*."""
    return float(problem.gap(np.full(problem.dimensions, START)))


def first_horizon(steps: int = LOCAL, oldest: int = OLDEST) -> float:
    """The least T for which the theorem makes its promise."""
    return 160 * L * (steps + 7) * (oldest + 1) ** 3


def bound(
    problem: Quadratics,
    horizon: int,
    *,
    steps: int = LOCAL,
    oldest: int = OLDEST,
    uniform: bool = False,
) -> float:
    """The theorem's right-hand side; ``uniform``: with the diversity of remark 2.

    Remark 2 bounds |grad f_i - grad f|^2 by g^2 for every device, and has g^2 in place of n g^2.
    """
    diversity = problem.diversity(problem.optimum)
    sigma, g = problem.variance, float(diversity.max() if uniform else diversity.mean())
    root = float(np.sqrt(problem.smoothness / horizon))
    spread = sigma + (1 if uniform else problem.devices) * g
    rest = 320 * problem.smoothness * (steps + 1) * (oldest**2 + 1) * spread / horizon
    return 8 * root * start_gap(problem) + 16 * root * (sigma + g) + rest


def fedbuff(size: int = BUFFER, scale: float = 1.0) -> FedBuffSettings:
    """FedBuff with K = ``size`` and beta K = ``scale``."""
    return FedBuffSettings(buffer_size=size, server_lr=scale)


def errors(
    problem: Quadratics,
    horizon: int,
    *,
    rule: Strategy | None = None,
    steps: int = LOCAL,
    oldest: int = OLDEST,
    newest: int = 0,
    runs: int,
) -> Wide:
    """(runs,): the mean of |grad f(w_t)|^2 over t < T with the theorem's learning rate.

    ``rule``: None for FedBuff with the theorem's step; ``steps`` and ``oldest`` are Q and tau.
    Updates are ``newest`` to ``oldest`` versions late.
    """
    rule = rule or fedbuff()
    start = np.full((runs, problem.dimensions), START, np.float32)
    arriving, noise = np.random.default_rng(0).spawn(2)
    odds = np.full(problem.devices, 1 / problem.devices)
    states = closed_loop(
        rule.build(),
        problem,
        start,
        batches(
            arriving,
            odds,
            rule.batch,
            oldest=oldest,
            newest=newest,
            steps=(steps, steps),
            repeated=True,
            runs=runs,
        ),
        lr=1 / (steps * (problem.smoothness * horizon) ** 0.5),
        oldest=oldest,
        rng=noise,
    )
    return mean_slopes(states, problem, runs, horizon)


def measure(horizons: tuple[int, ...] = HORIZONS, sequences: int = 5) -> Measured:
    """The mean of |grad f(w_t)|^2 over t < T at each T; a sequence is the mean of 8 runs."""
    problem = objective()
    means = [
        errors(problem, horizon, runs=sequences * SIDE_BY_SIDE)
        .reshape(sequences, SIDE_BY_SIDE)
        .mean(axis=1)
        .tolist()
        for horizon in horizons
    ]
    return {
        "horizons": list(horizons),
        "first_horizon": first_horizon(),
        "runs": SIDE_BY_SIDE * sequences,
        "start_gap": start_gap(problem),
        "sequences": means,
        "mean": [float(np.mean(of)) for of in means],
        "bound": [bound(problem, horizon) for horizon in horizons],
    }


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorem 1."""
    horizons, mean, above = found["horizons"], found["mean"], found["bound"]
    slope, of_bound = exponent(horizons, mean), exponent(horizons, above)
    last = exponent(horizons[-2:], mean[-2:])
    means = np.array(found["sequences"])  # of each horizon and sequence of arrivals
    slopes = np.array([exponent(horizons, sequence) for sequence in means.T])
    applies = min(horizons) >= found["first_horizon"]
    return [
        TheoremClaim(
            "FedBuff, theorem 1",
            "1/T sum E|grad f(w_t)|^2 is under the bound at every T >= 160 L (Q+7)(tau+1)^3",
            f"{figure(mean[0])} under {figure(above[0])} at T = {horizons[0]}, "
            f"{figure(mean[-1])} under {figure(above[-1])} at T = {horizons[-1]}; "
            f"the mean of {found['runs']} runs.",
            judged([b - y for y, b in zip(means, above, strict=True)] if applies else []),
        ),
        TheoremClaim(
            "FedBuff, theorem 1: the rate",
            "O(1/sqrt(T))",
            f"Slope {slope:.2f} over all T, {last:.2f} over the last doubling; the bound's own "
            f"is {of_bound:.2f}.",
            judged(near(slopes, -0.5, 0.05)),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """The mean over T under the bound."""
    horizons, mean = np.array(found["horizons"]), np.array(found["mean"])
    with pictures.picture(path, 1) as (axes,):
        axes.loglog(
            horizons, found["bound"], color=pictures.BOUND, linestyle="--", label="theorem 1"
        )
        axes.loglog(
            horizons,
            mean,
            color=pictures.MAIN,
            marker="o",
            markersize=5,
            linestyle="",
            label=f"measured, {found['runs']} runs",
        )
        axes.loglog(
            horizons,
            mean[0] * (horizons / horizons[0]) ** -0.5,
            color="#888888",
            linestyle=":",
            label="slope -1/2 through the first",
        )
        axes.set(
            title="FedBuff on quadratics: the mean squared gradient, and its bound",
            xlabel="T (versions), each with its own learning rate 1/(Q sqrt(L T))",
            ylabel="mean |grad f|² over t < T (dimensionless)",
        )
        axes.legend(loc="upper right")
