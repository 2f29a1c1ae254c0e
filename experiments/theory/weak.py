"""FedAsync on weakly convex objectives, option II (theorem 2 of 2019; 4.3 of the workshop edition).

f_i(x) = sum_j c_j (1 - cos(x_j - b_ij)), so that F(x) = sum_j (c_j - r_j cos(x_j - o_j)) with
r_j exp(i o_j) = c_j mean_i exp(i b_ij): L-smooth and mu-weakly convex with L = mu = max_j r_j, and
every minimum is a global optimum. Theorem 2, for gamma < min(1/L, 2 / (rho - mu)), rho > mu:

    E[F(x_T) - F*] <= beta^T gap_0 + (1 - beta^T) 2 C2 / (gamma (rho - mu))
    beta = 1 - alpha + alpha (1 - gamma (rho - mu) / 2)^H_min
    C1 = gamma V1 + 6 gamma rho^2 V2 / (rho - mu)^2
    C2 = 2 C1 / (gamma (rho - mu)) + 2 rho V2 / (rho - mu)^2 + V2 / (2 (rho - mu))

Its proof bounds every gap by V2 / (2 (rho - mu)), less than C2: the bound is never below gap_0,
whatever the objective. V2 must hold for every x and x', which no rho > 0 allows; its value for
x = x', used here, makes the bound no larger than the theorem's.

The workshop's corollary: with alpha = H_min^-1/2, gamma = T^-1/2 and T = H_min^5 the least
E|grad F(x_t)|^2 is O(H_min^-1/2). Its condition on rho, rho^2 e - (rho / 2) e >= (1 + 2 rho +
epsilon) V2 with e = |x_{tau,h-1} - x_tau|^2, fails for every rho at h = 1, where e = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from experiments.reproduction import Margin
from experiments.theory import pictures
from experiments.theory.arrivals import batches
from experiments.theory.claims import Measured, TheoremClaim, exponent, figure, judged
from experiments.theory.loop import closed_loop, points
from experiments.theory.sgd import Whole, Wide, descend
from fedstream.core.layout import Floats
from fedstream.strategies import FedAsyncSettings
from fedstream.strategies.staleness import Constant

ALPHA, GAMMA, STEPS, OLDEST, DEVICES = 0.6, 0.5, (2, 6), 4, 10
PULL = 1.5  # rho / mu
VARIANCE, SPREAD = 0.1, 0.4  # sigma^2, of the b_ij
START = 2.5  # x_0 - o in every coordinate: F is concave there
LEAST_STEPS = (2, 3, 4, 5, 6)  # H_min of the workshop's corollary; H is uniform to 2 H_min
SIDE_BY_SIDE = 40  # runs in a repeat of the corollary


@dataclass(frozen=True)
class Cosines:
    """M devices in d dimensions."""

    amplitudes: Wide
    """(d,): c_j"""
    phases: Wide
    """(M, d): b_ij"""
    rho: float
    """of option II"""
    variance: float = 0.0
    """sigma^2, over all coordinates together"""

    @property
    def dimensions(self) -> int:
        """d."""
        return len(self.amplitudes)

    @cached_property
    def mean(self) -> tuple[Wide, Wide]:
        """(d,) each: r and o."""
        phasors = np.exp(1j * self.phases).mean(axis=0)
        return self.amplitudes * np.abs(phasors), np.angle(phasors)

    @property
    def smoothness(self) -> float:
        """L and mu, of F."""
        return float(self.mean[0].max())

    def gap(self, x: Floats | Wide) -> Wide:
        """F(x) - F*, of each row of x."""
        r, o = self.mean
        return np.asarray((r * (1 - np.cos(np.asarray(x, np.float64) - o))).sum(axis=-1))

    def slope(self, x: Floats | Wide) -> Wide:
        """|grad F(x)|^2, of each row of x."""
        r, o = self.mean
        return np.asarray(((r * np.sin(np.asarray(x, np.float64) - o)) ** 2).sum(axis=-1))

    def constants(self) -> tuple[float, float]:
        """V1 = sup E|grad f_i(x; z) - grad F(x)|^2, and V2 = sup E|grad f_i(x; z)|^2."""
        r, o = self.mean
        apart = np.abs(self.amplitudes * np.exp(1j * self.phases) - r * np.exp(1j * o))
        v1 = float((apart**2).sum(axis=1).max()) + self.variance
        return v1, float((self.amplitudes**2).sum()) + self.variance

    @cached_property
    def _narrow(self) -> tuple[Floats, Floats]:
        return self.amplitudes.astype(np.float32), self.phases.astype(np.float32)

    def train(
        self, devices: Whole, x: Floats, steps: Whole, lr: float, rng: np.random.Generator
    ) -> Floats:
        """x_new: proximal SGD steps of a device from each row of x, all in float32."""
        amplitudes, phases = self._narrow[0], self._narrow[1][devices]
        return descend(
            lambda x: amplitudes * np.sin(x - phases),
            x,
            steps,
            lr,
            variance=self.variance,
            rng=rng,
            rho=self.rho,
        )


def objective() -> Cosines:
    """Ten devices, c_j from .2 to 1, rho = 1.5 mu."""
    phases = np.random.default_rng(0).normal(0.0, SPREAD, (DEVICES, 10))
    problem = Cosines(np.linspace(0.2, 1.0, 10), phases, rho=0.0, variance=VARIANCE)
    return Cosines(problem.amplitudes, phases, PULL * problem.smoothness, VARIANCE)


def bound(problem: Cosines, gap: float, versions: int) -> Wide:
    """(versions + 1,): theorem 2's right-hand side."""
    over = problem.rho - problem.smoothness  # rho - mu
    if min(1 / problem.smoothness, 2 / over) <= GAMMA:
        raise ValueError("theorem 2 needs gamma < min(1/L, 2 / (rho - mu))")
    v1, v2 = problem.constants()
    beta = 1 - ALPHA + ALPHA * (1 - GAMMA * over / 2) ** STEPS[0]
    c1 = GAMMA * v1 + 6 * GAMMA * problem.rho**2 * v2 / over**2
    c2 = 2 * c1 / (GAMMA * over) + 2 * problem.rho * v2 / over**2 + v2 / (2 * over)
    shrunk = beta ** np.arange(versions + 1)
    return np.asarray(shrunk * gap + (1 - shrunk) * 2 * c2 / (GAMMA * over))


def course(
    problem: Cosines, runs: int, versions: int, alpha: float, lr: float, steps: tuple[int, int]
) -> tuple[Wide, Wide]:
    """(versions + 1, runs) each: F(x_t) - F* and |grad F(x_t)|^2 of independent runs."""
    start = np.tile((problem.mean[1] + START).astype(np.float32), (runs, 1))
    arriving, noise = np.random.default_rng(0).spawn(2)
    odds = np.full(DEVICES, 1 / DEVICES)
    states = closed_loop(
        FedAsyncSettings(alpha=alpha, staleness=Constant()).build(),
        problem,
        start,
        batches(arriving, odds, 1, oldest=OLDEST, steps=steps, runs=runs),
        lr=lr,
        oldest=OLDEST,
        rng=noise,
    )
    gaps, slopes = np.empty((2, versions + 1, runs))
    for t, state in enumerate(islice(states, versions + 1)):
        x = points(state, start.shape)
        gaps[t], slopes[t] = problem.gap(x), problem.slope(x)
    return gaps, slopes


def measure(
    runs: int = 400,
    versions: int = 200,
    least_steps: tuple[int, ...] = LEAST_STEPS,
    repeats: int = 5,
) -> Measured:
    """The gap at every version, and the least |grad F|^2 at each H_min of the corollary."""
    problem = objective()
    gaps, _ = course(problem, runs, versions, ALPHA, GAMMA, STEPS)
    least = []
    for h in least_steps:
        t = h**5
        _, slopes = course(problem, repeats * SIDE_BY_SIDE, t - 1, h**-0.5, t**-0.5, (h, 2 * h))
        least.append(slopes.reshape(t, repeats, SIDE_BY_SIDE).mean(axis=2).min(axis=0).tolist())
    gap = gaps.mean(axis=1)
    return {
        "runs": runs,
        "gap": gap.tolist(),
        "standard_error": (gaps.std(axis=1, ddof=1) / runs**0.5).tolist(),
        "bound": bound(problem, gap[0], versions).tolist(),
        "least_steps": list(least_steps),
        "start_slope": float(problem.slope(problem.mean[1] + START)),
        "least_slope": least,
    }


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorem 2 and on the rate of the workshop's corollary."""
    gap, error, above = (np.array(found[key]) for key in ("gap", "standard_error", "bound"))
    least = np.array(found["least_slope"])  # of each H_min and repeat
    slopes = np.array([exponent(found["least_steps"], repeat) for repeat in least.T])
    mean = least.mean(axis=1)
    return [
        TheoremClaim(
            "FedAsync, theorem 2 (2019)",
            "Weakly convex F, option II: E[F(x_T) - F*] <= beta^T gap_0 + (1 - beta^T) O(V1 + V2)",
            f"True but empty, for any objective: its proof bounds gap_0 by V2/(2 (rho - mu)), less "
            f"than the last term. Here it rises from {figure(above[0])} to {figure(above[-1])}; "
            f"measured {figure(gap[-1])} at T = {len(gap) - 1}, from x_0 where F is concave.",
            judged([Margin(t, found["runs"]) for t in (above - gap)[1:] / error[1:]]),
        ),
        TheoremClaim(
            "FedAsync, theorem 4.3 (workshop), its corollary's rate",
            "min_t E|grad F(x_t)|^2 = O(H_min^-1/2), alpha = H_min^-1/2, gamma = T^-1/2, "
            "T = H_min^5",
            f"Falls faster, as H_min^{slopes.mean():.2f}: {figure(mean[0])} at H_min = "
            f"{found['least_steps'][0]}, {figure(mean[-1])} at {found['least_steps'][-1]} "
            f"(delays to {OLDEST}, H to 2 H_min). The theorem itself promises nothing: no rho "
            "meets its condition at a first local step.",
            judged([-0.5 - slopes]),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """The gap under the bound, and the least slope over H_min."""
    gap, error = np.array(found["gap"]), np.array(found["standard_error"])
    versions = np.arange(len(gap))
    with pictures.picture(path, 2) as (course, rate):
        course.semilogy(
            versions,
            found["bound"],
            color=pictures.BOUND,
            linestyle="--",
            label="theorem 2 (empty)",
        )
        course.semilogy(versions, gap, color=pictures.MAIN, label=f"mean of {found['runs']} runs")
        course.fill_between(
            versions, gap - 2 * error, gap + 2 * error, color=pictures.MAIN, alpha=0.3, linewidth=0
        )
        course.axhline(gap[0], color="#888888", linewidth=0.8, linestyle=":", label="starting gap")
        course.set(
            title="FedAsync, option II, on sums of cosines: the bound is never below the start",
            xlabel="version T (updates applied)",
            ylabel="gap F(x_T) - F* (dimensionless)",
        )
        course.legend(loc="center right")
        steps, least = np.array(found["least_steps"]), np.array(found["least_slope"]).mean(axis=1)
        rate.loglog(
            steps,
            least,
            color=pictures.MAIN,
            marker="o",
            markersize=5,
            linestyle="",
            label="measured",
        )
        rate.loglog(
            steps,
            least[0] * (steps / steps[0]) ** -0.5,
            color=pictures.BOUND,
            linestyle="--",
            label="slope -1/2 through the first: the corollary's rate",
        )
        rate.set_xticks(steps, [str(h) for h in steps])
        rate.minorticks_off()
        rate.set(
            title="The workshop's corollary: T = H_min^5, alpha = H_min^-1/2, gamma = T^-1/2",
            xlabel="H_min",
            ylabel="min over t of E|grad F|² (dimensionless)",
        )
        rate.legend(loc="lower left")
