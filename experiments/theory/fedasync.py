"""FedAsync, theorem 1 (2019 edition): strongly convex, option I, constant alpha.

The theorem: E[F(x_T) - F*] <= beta^T gap_0 + (1 - beta^T) (V1 + V2) / (2 gamma mu^2), with
beta = 1 - alpha + alpha (1 - gamma mu)^H_min. V2 covers the gradient at x_0, so the bound never
falls below gap_0: true, but empty. The steps of its proof, keeping delays up to D rather than
bounding them by V2, give E gap_T <= V1 / (2 mu) + beta^(T / (D + 1)) max(0, gap_0 - V1 / (2 mu)).
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np

from experiments.reproduction import Margin
from experiments.theory import pictures
from experiments.theory.arrivals import batches
from experiments.theory.claims import Measured, TheoremClaim, figure, judged
from experiments.theory.loop import closed_loop, points
from experiments.theory.quadratics import Quadratics, fan
from experiments.theory.sgd import Wide
from fedstream.strategies import FedAsyncSettings
from fedstream.strategies.staleness import Constant

ALPHA, GAMMA, STEPS, OLDEST, DEVICES = 0.6, 0.5, (2, 6), 4, 10
VARIANCE, SPREAD, START = 0.5, 0.3, 3.0  # sigma^2, of the centres, every coordinate of x_0


def objective() -> Quadratics:
    """Ten devices with one Hessian, eigenvalues .2 to 1; centres and noise are our choice."""
    centres = np.random.default_rng(0).normal(0.0, SPREAD, (DEVICES, 10))
    return Quadratics(fan(0.2, 1.0, DEVICES), centres, VARIANCE)


def bounds(problem: Quadratics, x_0: Wide, versions: int) -> tuple[Wide, Wide]:
    """(versions + 1,) each: the theorem's bound, and the one that its proof's steps give.

    V1 = max_i E|grad f_i(x; z) - grad F(x)|^2. V2 must hold at every x on the way; with its value
    at x_0 the bound is no larger than the theorem's.
    """
    mu, t = problem.convexity, np.arange(versions + 1)
    beta = 1 - ALPHA + ALPHA * (1 - GAMMA * mu) ** STEPS[0]
    v1 = float(problem.diversity(x_0).max()) + problem.variance
    own = ((problem.hessians * (x_0 - problem.centres)) ** 2).sum(axis=1)
    v2 = float(own.max()) + problem.variance
    gap, floor = float(problem.gap(x_0)), v1 / (2 * mu)
    theorem = beta**t * gap + (1 - beta**t) * (v1 + v2) / (2 * GAMMA * mu**2)
    proof = floor + beta ** (t / (OLDEST + 1)) * max(0.0, gap - floor)
    return theorem, proof


def measure(repeats: int = 400, versions: int = 200) -> Measured:
    """The gap F(x_t) - F* of every version, mean and standard error over independent runs."""
    problem = objective()
    start = np.full((repeats, problem.dimensions), START, np.float32)
    odds = np.full(DEVICES, 1 / DEVICES)
    arriving, noise = np.random.default_rng(0).spawn(2)
    states = closed_loop(
        FedAsyncSettings(alpha=ALPHA, staleness=Constant()).build(),
        problem,
        start,
        batches(arriving, odds, 1, oldest=OLDEST, steps=STEPS, runs=repeats),
        lr=GAMMA,
        oldest=OLDEST,
        rng=noise,
    )
    gaps = np.array([problem.gap(points(s, start.shape)) for s in islice(states, versions + 1)]).T
    theorem, proof = bounds(problem, start[0].astype(np.float64), versions)
    return {
        "repeats": repeats,
        "gap": gaps.mean(axis=0).tolist(),
        "standard_error": (gaps.std(axis=0, ddof=1) / repeats**0.5).tolist(),
        "theorem": theorem.tolist(),
        "proof": proof.tolist(),
    }


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorem 1 and its proof."""
    gap, error, theorem, proof = (
        np.array(found[key]) for key in ("gap", "standard_error", "theorem", "proof")
    )
    last, least = len(gap) - 1, (proof / gap)[1:].min()
    above = (gap > proof)[1:]  # at T = 0 they are equal

    def under(bound: Wide) -> list[Margin]:
        return [Margin(t, found["repeats"]) for t in (bound - gap)[1:] / error[1:]]

    return [
        TheoremClaim(
            "FedAsync, theorem 1",
            "E[F(x_T) - F*] <= beta^T gap_0 + (1 - beta^T)(V1 + V2)/(2 gamma mu^2)",
            f"True but empty: the bound rises from {figure(theorem[0])} to {figure(theorem[-1])} "
            f"and is never below the starting gap ({figure(gap[0])}); "
            f"measured {figure(gap[-1])} at T = {last}.",
            judged(under(theorem)),
        ),
        TheoremClaim(
            "FedAsync, theorem 1: the proof's steps, delays up to D",
            "E gap_T <= V1/(2 mu) + beta^(T/(D+1)) max(0, gap_0 - V1/(2 mu))",
            f"Holds at each of {last} versions, mean of {found['repeats']} runs: final gap "
            f"{figure(gap[-1])} under {figure(proof[-1])}; the bound is never less than "
            f"{figure(least)} times the gap."
            if not above.any()
            else f"Broken at {int(above.sum())} of {last} versions.",
            judged(under(proof)),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """The gap over versions under both bounds."""
    gap, error = np.array(found["gap"]), np.array(found["standard_error"])
    versions = np.arange(len(gap))
    with pictures.picture(path, 1) as (axes,):
        axes.semilogy(versions, found["theorem"], color=pictures.FAINT, label="theorem 1 (empty)")
        axes.semilogy(
            versions,
            found["proof"],
            color=pictures.BOUND,
            linestyle="--",
            label="what the proof's steps give, delays up to D = 4",
        )
        axes.semilogy(versions, gap, color=pictures.MAIN, label=f"mean of {found['repeats']} runs")
        axes.fill_between(
            versions, gap - 2 * error, gap + 2 * error, color=pictures.MAIN, alpha=0.3, linewidth=0
        )
        axes.axhline(gap[0], color="#888888", linewidth=0.8, linestyle=":", label="starting gap")
        axes.set(
            title="FedAsync on quadratics: theorem 1 is true, but never below the starting gap",
            xlabel="version T (updates applied)",
            ylabel="gap F(x_T) - F* (dimensionless)",
        )
        axes.legend(loc="center right", bbox_to_anchor=(1.0, 0.27))
