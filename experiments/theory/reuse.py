"""AFA-CS's bound (Anarchic Federated Learning, theorem 4), where its conditions can be met.

Two halves of the devices take turns, so that every device is heard in every second version and no
stored G is older than tau = D + 1 versions, D the most that an update is late. Counted from the
version t_0 at which every device has been heard, the bound on the mean of E|grad f(x_t)|^2 is

    4 (V(x_t0) - f*) / (s T) + 4 (alpha_L sigma_L^2 + alpha_G sigma_G^2),   s = eta eta_L
    p = 9 (M - m')^2 / M^2
    alpha_L = 3 L s / (2 M) + 5 K (L eta_L)^2 (p (1 + L s) + 3/2 + 3 L s)
    alpha_G = 30 (K L eta_L)^2 (p (1 + L s) + 3/2 + 3 L s)
    V(x_t) = f(x_t) + sum_{u<tau} beta_u |x_{t-u} - x_{t-u-1}|^2

m' counts the stored G without delay, here 0, which makes the bound largest. The least beta that
conditions (5) and (6) allow are beta_u = (tau - u) (p/2) 3 tau L^2 s (1 + L s). Condition (7),
3 sigma_L^2 / (2 M) <= (1/2 - beta_0 s) E|G_t|^2 for every t, holds for ever without noise. With
noise it cannot: E|G_t|^2 falls to the noise's share, sigma_L^2 / (M K).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

import numpy as np

from experiments.theory import afa, pictures
from experiments.theory.arrivals import DrawnArrival
from experiments.theory.claims import Measured, TheoremClaim, figure, judged
from experiments.theory.loop import closed_loop, points
from experiments.theory.quadratics import Quadratics
from experiments.theory.sgd import Wide
from fedstream.strategies import AfaCsSettings

DEVICES, HALF, LATE, STEP, LOCAL, LR = 10, 5, 1, 0.02, 2, 0.002  # M, m, D, s, K, eta_L
VARIANCE = 10.0  # sigma_L^2, where there is noise
TAU, FROM = LATE + 1, 2  # t_0: after both halves' first turns
VERSIONS = 4000
SHOWN = (100, 400, 1600, VERSIONS)
SIDE_BY_SIDE = 8  # runs in a repeat


@dataclass(frozen=True, slots=True)
class Bound:
    """Theorem 4's constants for an objective."""

    beta: Wide
    """(tau,): beta_u"""
    floor: float
    """4 (alpha_L sigma_L^2 + alpha_G sigma_G^2)"""
    least_direction: float
    """the least E|G_t|^2 that condition (7) allows"""


def constants(problem: Quadratics) -> Bound:
    """Theorem 4's constants; ValueError if a condition on the steps is not met."""
    smooth, p = problem.smoothness, 9.0  # p with m' = 0
    ls, k = smooth * STEP, (LOCAL * smooth * LR) ** 2
    fourth = 12 * ls + 540 * (1 + ls) * k * (1 + TAU) + 180 * k + 320 * ls * k
    beta = (TAU - np.arange(TAU)) * p / 2 * 3 * TAU * smooth**2 * STEP * (1 + ls)
    spare = 0.5 - beta[0] * STEP
    if fourth >= 1 or spare <= 0:
        raise ValueError("the steps are too large for theorem 4")
    shared = p * (1 + ls) + 1.5 + 3 * ls
    alpha_l = 3 * ls / (2 * DEVICES) + 5 * k / LOCAL * shared
    alpha_g = 30 * k * shared
    sigma_g = float(problem.diversity(problem.optimum).max())
    return Bound(
        beta=beta,
        floor=4 * (alpha_l * problem.variance + alpha_g * sigma_g),
        least_direction=1.5 * problem.variance / DEVICES / spare,
    )


def turns(rng: np.random.Generator, runs: int) -> Iterator[DrawnArrival]:
    """Both halves of the devices in turn, each run with staleness of its own, 0 or 1."""
    steps = np.full(runs, LOCAL)
    for n in count():
        yield DrawnArrival(
            np.full(runs, n % DEVICES), rng.integers(0, LATE, runs, endpoint=True), steps
        )


def course(problem: Quadratics, versions: int, repeats: int) -> Measured:
    """From t_0: the running means of |grad f|^2, of |G_t|^2, the bound, and condition (7)."""
    runs = repeats * SIDE_BY_SIDE
    start = np.full((runs, problem.dimensions), 2.0, np.float32)
    arriving, noise = np.random.default_rng(0).spawn(2)
    states = closed_loop(
        AfaCsSettings(buffer_size=HALF, server_lr=STEP).build(DEVICES),
        problem,
        start,
        turns(arriving, runs),
        lr=LR,
        oldest=LATE,
        rng=noise,
    )
    x = np.array([points(s, start.shape).copy() for s in islice(states, FROM + versions + 1)])
    moved = ((np.diff(x.astype(np.float64), axis=0)) ** 2).sum(axis=2)  # |x_{t+1} - x_t|^2
    theory = constants(problem)
    potential = problem.gap(x[FROM]) + (theory.beta[:, None] * moved[FROM - 1 :: -1][:TAU]).sum(0)
    t = np.arange(1, versions + 1)
    means = np.cumsum([problem.slope(one) for one in x[FROM:-1]], axis=0) / t[:, None]
    direction = moved[FROM:].mean(axis=1) / STEP**2
    breaks = np.flatnonzero(direction < theory.least_direction)
    return {
        "means": means.reshape(versions, repeats, -1).mean(axis=2),
        "bound": 4 * potential.mean() / (STEP * t) + theory.floor,
        "floor": theory.floor,
        "met": int(breaks[0]) if len(breaks) else versions,
    }


def measure(versions: int = VERSIONS, repeats: int = 5) -> Measured:
    """Without and with noise, at the shown T: each repeat's mean, the bound; and the whole path."""
    problem = afa.objective()
    found: Measured = {"versions": versions}
    for name, variance in (("exact", 0.0), ("noisy", VARIANCE)):
        of = course(replace(problem, variance=variance), versions, repeats)
        shown = [t for t in SHOWN if t <= versions] if name == "exact" else [of["met"]]
        thin = np.unique(np.geomspace(1, versions, 200).round().astype(int))
        found[name] = {
            "shown": shown,
            "means": [of["means"][t - 1].tolist() for t in shown],
            "bound": [float(of["bound"][t - 1]) for t in shown],
            "floor": of["floor"],
            "met": of["met"],
            "path": [
                [int(t), float(of["means"][t - 1].mean()), float(of["bound"][t - 1])] for t in thin
            ],
        }
    return found


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorem 4's bound."""

    def under(of: Measured) -> str:
        return judged(b - np.array(y) for y, b in zip(of["means"], of["bound"], strict=True))

    def said(of: Measured) -> str:
        return ", ".join(
            f"{figure(float(np.mean(y)))} under {figure(b)} at T = {t}"
            for t, y, b in zip(of["shown"], of["means"], of["bound"], strict=True)
        )

    exact, noisy = found["exact"], found["noisy"]
    return [
        TheoremClaim(
            "AFL, theorem 4: the bound, sigma_L = 0",
            "1/T sum E|grad f(x_t)|^2 <= 4 (V(x_0) - f*)/(eta eta_L T) + 4 alpha_G sigma_G^2",
            f"{said(exact)}; the bound tends to {figure(exact['floor'])}, the error to 0. Every "
            "condition is met at every version.",
            under(exact) if exact["met"] == found["versions"] else judged([]),
        ),
        TheoremClaim(
            "AFL, theorem 4: the bound, sigma_L > 0",
            "The same plus 4 alpha_L sigma_L^2, while condition (7) holds: "
            "3 sigma_L^2/(2M) <= (1/2 - beta_0 eta eta_L) E|G_t|^2",
            f"sigma^2 = {VARIANCE:g}: (7) holds for the first {noisy['met']} versions, then "
            f"E|G_t|^2 is too small and the theorem promises nothing; {said(noisy)}.",
            under(noisy),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """Running means under the bound, and the version from which condition (7) fails."""
    with pictures.picture(path, 1) as (axes,):
        for name, color, label in (
            ("exact", pictures.MAIN, "no noise"),
            ("noisy", pictures.OTHER, f"sigma² = {VARIANCE:g}"),
        ):
            t, mean, bound = zip(*found[name]["path"], strict=True)
            axes.loglog(t, mean, color=color, label=label)
            axes.loglog(t, bound, color=color, linestyle="--", label=f"theorem 4, {label}")
        axes.axvline(
            found["noisy"]["met"],
            color=pictures.OTHER,
            linestyle=":",
            label="condition (7) fails from here with noise",
        )
        axes.set(
            title="AFA-CS: theorem 4's bound, two halves of the devices taking turns",
            xlabel="T (versions since every device was heard)",
            ylabel="mean of |grad f|² over T versions (dimensionless)",
        )
        axes.legend(loc="lower left")
