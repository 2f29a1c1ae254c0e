"""Linear speed-up: AFA-CD in m (corollaries 1 and 2) and AFA-CS in M (corollary 3).

With eta_L = 1/sqrt(T) and eta = sqrt(m), or sqrt(M), the mean of E|grad f|^2 over t < T should go
as 1/sqrt(m T), or 1/sqrt(M T): 1.41 times less with each doubling. For M this is impossible at a
fixed m: each G of AFA-CS is used for about M/m versions at weight 1/M, so its noise enters with
total weight 1/m, as AFA-CD's does, and the step sqrt(M/T) only makes it larger.
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
from fedstream.strategies import AfaCdSettings, AfaCsSettings

VERSIONS, OLDEST, SIDE_BY_SIDE = 1000, 4, 16
BATCHES = (1, 2, 4, 8, 16, 32)  # m of AFA-CD, M = 32
MEMBERS = (8, 16, 32, 64)  # M of AFA-CS, m = 4 or M/2
FIXED = 4


def objective(devices: int) -> Quadratics:
    """One Hessian, eigenvalues .1 to .3; devices differ less than minibatches do (sigma^2 = 1)."""
    centres = np.random.default_rng(0).normal(0.0, 0.1, (devices, 10))
    return Quadratics(fan(0.1, 0.3, devices), centres - centres.mean(axis=0), variance=1.0)


def errors(
    rule: AfaCdSettings | AfaCsSettings,
    devices: int,
    versions: int,
    *,
    seed: int = 1,
    runs: int = SIDE_BY_SIDE,
    shared: bool = False,
) -> Wide:
    """(runs,): the mean of |grad f(x_t)|^2 over t < versions, one local step, uniform arrivals.

    ``shared``: all runs have the same arrivals, as a rule needs that remembers devices.
    """
    problem = objective(devices)
    start = np.full((runs, problem.dimensions), 1.0, np.float32)
    arriving, noise = np.random.default_rng(seed).spawn(2)
    odds = np.full(devices, 1 / devices)
    states = closed_loop(
        rule.build(devices),
        problem,
        start,
        batches(arriving, odds, rule.buffer_size, oldest=OLDEST, runs=1 if shared else runs),
        lr=versions**-0.5,
        oldest=OLDEST,
        rng=noise,
    )
    return mean_slopes(states, problem, runs, versions)


def measure(
    sizes: tuple[int, ...] = BATCHES,
    members: tuple[int, ...] = MEMBERS,
    versions: int = VERSIONS,
    repeats: int = 5,
) -> Measured:
    """The error over m, over M at a fixed m, and over M with m = M/2, in each repeat.

    A repeat is the mean of SIDE_BY_SIDE runs: for AFA-CD each with its own arrivals, for AFA-CS
    with the same arrivals and noise of its own.
    """
    most = max(sizes)
    over_m = [
        errors(
            AfaCdSettings(buffer_size=m, server_lr=(m / versions) ** 0.5),
            most,
            versions,
            runs=repeats * SIDE_BY_SIDE,
        )
        .reshape(repeats, SIDE_BY_SIDE)
        .mean(axis=1)
        for m in sizes
    ]

    def cs(devices: int, size: int, seed: int) -> float:
        rule = AfaCsSettings(buffer_size=size, server_lr=(devices / versions) ** 0.5)
        return float(errors(rule, devices, versions, seed=seed, shared=True).mean())

    seeds = range(1, repeats + 1)
    return {
        "versions": versions,
        "fixed": FIXED,
        "m": list(sizes),
        "over_m": np.transpose(over_m).tolist(),
        "M": list(members),
        "fixed_m": [[cs(devices, FIXED, seed) for devices in members] for seed in seeds],
        "half": [[cs(devices, devices // 2, seed) for devices in members] for seed in seeds],
    }


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on corollaries 1 to 3: the factor by which the error falls with each doubling."""
    measured = {key: np.array(found[key]) for key in ("over_m", "fixed_m", "half")}
    in_m, fixed, half = (
        np.array([2 ** -exponent(found[sizes], repeat) for repeat in measured[key]])
        for sizes, key in (("m", "over_m"), ("M", "fixed_m"), ("M", "half"))
    )

    def ends(sizes: str, key: str) -> str:
        first, *_, last = measured[key].mean(axis=0)
        return f"{figure(first)} at {found[sizes][0]}, {figure(last)} at {found[sizes][-1]}"

    return [
        TheoremClaim(
            "AFL, corollary 2",
            "AFA-CD, uniform arrivals: the error falls by 1.41 with each doubling of m",
            f"By {in_m.mean():.2f} ({ends('m', 'over_m')}; T = {found['versions']}).",
            judged(near(in_m, 2**0.5, 0.1)),
        ),
        TheoremClaim(
            "AFL, corollary 3, at a fixed m",
            "AFA-CS: the error falls by 1.41 with each doubling of M",
            f"m = {found['fixed']}: divided by {fixed.mean():.2f} with each doubling "
            f"({ends('M', 'fixed_m')}, least at "
            f"{found['M'][int(np.argmin(measured['fixed_m'].mean(axis=0)))]}).",
            judged([fixed - 1.3]),
        ),
        TheoremClaim(
            "AFL, corollary 3, where m grows with M",
            "AFA-CS: the error falls by 1.41 with each doubling of M",
            f"m = M/2: by {half.mean():.2f} ({ends('M', 'half')}).",
            judged(near(half, 2**0.5, 0.1)),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """The three errors over m or M, with the claimed slope."""
    with pictures.picture(path, 1) as (axes,):
        for x, y, color, label in (
            ("m", "over_m", pictures.MAIN, f"AFA-CD over m, M = {found['m'][-1]}"),
            ("M", "fixed_m", pictures.OTHER, f"AFA-CS over M, m = {found['fixed']}"),
            ("M", "half", pictures.THIRD, "AFA-CS over M, m = M/2"),
        ):
            sizes, error = np.array(found[x]), np.array(found[y]).mean(axis=0)
            axes.loglog(sizes, error, color=color, marker="o", markersize=4, label=label)
            axes.loglog(
                sizes,
                error[0] * (sizes / sizes[0]) ** -0.5,
                color=color,
                linestyle=":",
                linewidth=1,
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(
            title="Speed-up over m and over M (dotted: the claimed slope)",
            xlabel="devices: m in a batch (AFA-CD), M in all (AFA-CS)",
            ylabel=f"mean |grad f|² over t < {found['versions']} (dimensionless)",
        )
        axes.legend(loc="lower left")
