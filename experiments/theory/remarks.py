"""What FedBuff's text says of Q, tau, K, n and beta, of its rate, and of the rules of its table I.

Theorem 1's first two terms, of order T^-1/2, are free of Q, tau, K and n; its last, of order 1/T,
grows as (Q + 1)(tau^2 + 1), and with n unless the diversity is bounded for every device (remark 2).
Remark 1: any beta with beta K = O(1) gives the same rate. Each is varied alone from Q = 2, tau = 1,
K = 4, n = 10 and beta K = 1 (fedbuff.py), at one T or over several. Where Q, tau, K or n is varied,
w_0 is the optimum, so that the first term, 8 sqrt(L) (f_0 - f*) / sqrt(T), hides nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.theory import fedbuff, pictures
from experiments.theory.claims import Measured, TheoremClaim, exponent, figure, judged, near
from experiments.theory.quadratics import Quadratics
from experiments.theory.sgd import Wide
from fedstream.strategies import FedAsyncSettings, FedAvgSettings, Strategy
from fedstream.strategies.staleness import Constant

HORIZON = 4800  # where Q, tau, K and n are varied: enough for each of their values
HORIZONS = (1200, 2400, 4800)
STEPS, DELAYS, SIZES, DEVICES = (1, 2, 4, 8), (0, 1, 2), (1, 2, 4, 8), (5, 10, 20, 40)
SCALES = (0.5, 1.0, 2.0)  # beta K
LATE, LATE_HORIZONS = 3, (9600, 19_200, 38_400)  # with K = 1
ALPHA = 0.6
RULES: dict[str, tuple[Strategy, int]] = {  # with tau
    "FedAvg": (FedAvgSettings(clients_per_round=fedbuff.BUFFER), 0),
    "FedAsync": (FedAsyncSettings(alpha=ALPHA, staleness=Constant()), fedbuff.OLDEST),
}


def alike(devices: int) -> Quadratics:
    """The objective with n devices: w_0 is the optimum, and g the same for every n."""
    problem, model = fedbuff.objective(devices), fedbuff.objective()
    centres = problem.centres - problem.optimum
    apart, wanted = (float(of.diversity(of.optimum).mean()) for of in (problem, model))
    return replace(problem, centres=fedbuff.START + centres * (wanted / apart) ** 0.5)


def measure(
    horizon: int = HORIZON,
    horizons: tuple[int, ...] = HORIZONS,
    late_horizons: tuple[int, ...] = LATE_HORIZONS,
    repeats: int = 5,
) -> Measured:
    """The error in each repeat, over each parameter and over T, with the bounds.

    A repeat is the mean of 8 runs. The delay's excess is that of updates all LATE versions late,
    with the same devices and noise as without delay.
    """
    problem, runs = fedbuff.objective(), repeats * fedbuff.SIDE_BY_SIDE
    at_rest = alike(fedbuff.DEVICES)

    def error(t: int, of: Quadratics = at_rest, **varied: Any) -> Wide:
        return np.asarray(
            fedbuff.errors(of, t, runs=runs, **varied).reshape(repeats, -1).mean(axis=1)
        )

    alone = fedbuff.fedbuff(size=1)
    late, on_time = (
        [error(t, oldest=d, newest=d, rule=alone) for t in late_horizons] for d in (LATE, 0)
    )
    rows: dict[str, list[Wide]] = {
        "steps": [error(horizon, steps=q) for q in STEPS],
        "delays": [error(horizon, oldest=tau) for tau in DELAYS],
        "sizes": [error(horizon, rule=fedbuff.fedbuff(size=k)) for k in SIZES],
        "devices": [error(horizon, alike(n)) for n in DEVICES],
        "excess": [one - other for one, other in zip(late, on_time, strict=True)],
        "on_time": on_time,
    }
    for scale in SCALES:
        rows[f"scale_{scale:g}"] = [
            error(t, problem, rule=fedbuff.fedbuff(scale=scale)) for t in horizons
        ]
    for name, (rule, oldest) in RULES.items():
        rows[name] = [error(t, problem, rule=rule, oldest=oldest) for t in horizons]
    return {
        "horizon": horizon,
        "horizons": list(horizons),
        "late_horizons": list(late_horizons),
        **{name: [one.tolist() for one in of] for name, of in rows.items()},
        "steps_bound": [fedbuff.bound(at_rest, horizon, steps=q) for q in STEPS],
        "delays_bound": [fedbuff.bound(at_rest, horizon, oldest=tau) for tau in DELAYS],
        "sizes_bound": [fedbuff.bound(at_rest, horizon) for _ in SIZES],
        "devices_bound": [fedbuff.bound(alike(n), horizon) for n in DEVICES],
        "uniform_bound": [fedbuff.bound(alike(n), horizon, uniform=True) for n in DEVICES],
    }


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on what the text says of each parameter, of beta, and of table I's rates."""
    horizon, horizons = found["horizon"], found["horizons"]

    def under(of: str, bound: str) -> list[Wide]:
        return [b - np.array(y) for y, b in zip(found[of], found[bound], strict=True)]

    def said(of: str, values: tuple[int, ...], symbol: str) -> str:
        ends = [
            f"{figure(float(np.mean(found[of][i])))} at {symbol} = {values[i]}" for i in (0, -1)
        ]
        bounds = [figure(found[f"{of}_bound"][i]) for i in (0, -1)]
        return f"{ends[0]} (bound {bounds[0]}), {ends[1]} ({bounds[1]}); T = {horizon}"

    def slopes(name: str, over: list[int]) -> Wide:
        return np.array([exponent(over, repeat) for repeat in np.array(found[name]).T])

    sizes, devices = np.array(found["sizes"]), np.array(found["devices"])
    in_k = np.array([exponent(list(SIZES), repeat) for repeat in sizes.T])
    in_n = np.array([exponent(list(DEVICES), repeat) for repeat in devices.T])
    excess = slopes("excess", found["late_horizons"])
    shares = np.array(found["excess"]) / np.array(found["on_time"])
    scales = {scale: slopes(f"scale_{scale:g}", horizons) for scale in SCALES}
    rules = {name: slopes(name, horizons) for name in RULES}
    return [
        TheoremClaim(
            "FedBuff, theorem 1: Q",
            "The bound's last term grows with Q + 1; gamma = 1/(Q sqrt(L T)) keeps the first two",
            said("steps", STEPS, "Q") + ".",
            judged(under("steps", "steps_bound")),
        ),
        TheoremClaim(
            "FedBuff, theorem 1: tau",
            "The bound's last term grows with tau^2 + 1",
            said("delays", DELAYS, "tau") + ".",
            judged(under("delays", "delays_bound")),
        ),
        TheoremClaim(
            "FedBuff, after theorem 1: the delay's term decays faster",
            "O(tau^2/T): the same complexity as without delay",
            f"K = 1, tau = {LATE}: the excess over tau = 0 goes as T^{excess.mean():.2f}; "
            f"{shares[0].mean():.1%} of the error at T = {found['late_horizons'][0]}, "
            f"{shares[-1].mean():.1%} at {found['late_horizons'][-1]}.",
            judged([*near(excess, -1.0, 0.15), shares[0] - shares[-1]]),
        ),
        TheoremClaim(
            "FedBuff, theorem 1: K",
            "With beta = 1/K the bound is free of K; K = 1 is asynchronous FL without a buffer",
            f"{said('sizes', SIZES, 'K')}. The error is better than the bound says: it goes as "
            f"K^{in_k.mean():.2f}.",
            judged(under("sizes", "sizes_bound")),
        ),
        TheoremClaim(
            "FedBuff, theorem 1: n",
            "The bound's last term grows with n g^2",
            f"{said('devices', DEVICES, 'n')}, one optimum and one g for each n; the error goes as "
            f"n^{in_n.mean():.2f}.",
            judged(under("devices", "devices_bound")),
        ),
        TheoremClaim(
            "FedBuff, remark 2",
            "With g^2 >= |grad f_i - grad f|^2 for every device, g^2 replaces n g^2",
            f"{figure(float(devices[-1].mean()))} under {figure(found['uniform_bound'][-1])} at "
            f"n = {DEVICES[-1]} (with n g^2: {figure(found['devices_bound'][-1])}).",
            judged(under("devices", "uniform_bound")),
        ),
        TheoremClaim(
            "FedBuff, remark 1",
            "Any beta with beta K = O(1) gives the rate O(1/sqrt(T))",
            ", ".join(
                f"slope {of.mean():.2f} for beta K = {scale:g}" for scale, of in scales.items()
            )
            + f"; T from {horizons[0]} to {horizons[-1]}.",
            judged(one for of in scales.values() for one in near(of, -0.5, 0.05)),
        ),
        TheoremClaim(
            "FedBuff, table I: rates of FedAvg and FedAsync",
            "O(1/sqrt(T)) for FedAvg, with delays O(1/sqrt(T)) + O(tau^2/T) for FedAsync",
            f"With FedBuff's learning rate, T from {horizons[0]} to {horizons[-1]}: slope "
            + ", ".join(f"{of.mean():.2f} for {name}" for name, of in rules.items())
            + f" (k = {fedbuff.BUFFER}; alpha = {ALPHA:g}).",
            judged(one for of in rules.values() for one in near(of, -0.5, 0.05)),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """The error over Q, tau + 1, K and n, and over T for each beta K, rule and delay."""
    with pictures.picture(path, 2) as (varied, over_t):
        for values, name, color, label in (
            (STEPS, "steps", pictures.MAIN, "over Q"),
            ([tau + 1 for tau in DELAYS], "delays", pictures.OTHER, "over tau + 1"),
            (SIZES, "sizes", pictures.THIRD, "over K"),
            (DEVICES, "devices", pictures.FOURTH, "over n"),
        ):
            mean = np.mean(found[name], axis=1)
            varied.loglog(values, mean, color=color, marker="o", markersize=4, label=label)
            varied.loglog(values, found[f"{name}_bound"], color=color, linestyle="--", linewidth=1)
        varied.loglog(
            DEVICES, found["uniform_bound"], color=pictures.FOURTH, linestyle=":", linewidth=1
        )
        varied.set_xscale("log", base=2)
        varied.xaxis.set_major_formatter("{x:.0f}")
        varied.set(
            title="FedBuff: one parameter varied (dashed: the bound; dotted: with remark 2)",
            xlabel="Q, tau + 1, K or n; the others are 2, 1, 4 and 10",
            ylabel=f"mean |grad f|² over t < {found['horizon']}",
        )
        varied.legend(loc="center left", bbox_to_anchor=(0.0, 0.4))
        rows = [(found["horizons"], f"scale_{scale:g}", f"beta K = {scale:g}") for scale in SCALES]
        rows += [(found["horizons"], name, name) for name in RULES]
        late = found["late_horizons"]
        rows += [
            (late, "on_time", "K = 1, tau = 0"),
            (late, "excess", f"its excess at tau = {LATE}"),
        ]
        colors = [pictures.MAIN, pictures.OTHER, pictures.THIRD, pictures.FOURTH]
        colors += ["#777777", pictures.FAINT, pictures.BOUND]
        for (horizons, name, label), color in zip(rows, colors, strict=True):
            mean, t = np.mean(found[name], axis=1), np.array(horizons, float)
            power = -1.0 if name == "excess" else -0.5
            over_t.loglog(t, mean, color=color, marker="o", markersize=4, linestyle="", label=label)
            over_t.loglog(t, mean[0] * (t / t[0]) ** power, color=color, linestyle=":", linewidth=1)
        over_t.set(
            title="Rates (dotted: slope -1/2, for the excess -1, through the first)",
            xlabel="T (versions)",
            ylabel="mean |grad f|² over t < T",
        )
        over_t.legend(loc="center left", bbox_to_anchor=(0.0, 0.35))
