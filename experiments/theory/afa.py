"""AFA-CD's and AFA-CS's floors (Anarchic Federated Learning, theorems 1 to 4).

With one Hessian, H = 1 and no noise every floor of |grad f|^2 is known. If device i is in a batch
of m with probability pi_i, AFA-CD tends to the optimum of the objective that weights devices by
pi_i / m, where |grad f|^2 = |A (sum_i (pi_i / m) b_i - mean b)|^2, whatever the step
s = eta eta_L. The paper's bounds on the mean of E|grad f|^2, as T grows and with eta_L near 0:
theorem 2 (any arrivals) 6 sigma_G^2, for 2 L s + 3 (tau L s)^2 <= 1; theorem 3 (uniform arrivals)
12 c (L s + (tau L s)^2) sigma_G^2, c = (M - m) / (m (M - 1)), for 12 c tau (L s + (tau L s)^2) < 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from fedstream.experiments.theory import pictures
from fedstream.experiments.theory.arrivals import batches, inclusion
from fedstream.experiments.theory.claims import Measured, TheoremClaim, exponent, figure, held
from fedstream.experiments.theory.loop import closed_loop, points
from fedstream.experiments.theory.quadratics import Quadratics, Wide, fan, stationary
from fedstream.strategies import AfaCdSettings, AfaCsSettings, State

DEVICES, BATCH, OLDEST = 10, 5, 4
BIASED = np.array([0.19, 0.19, *[0.1] * 6, 0.01, 0.01])
UNIFORM = np.full(DEVICES, 0.1)
ABSENT = np.array([1.0] * 9 + [0.0])
STEPS = (0.08, 0.04, 0.02, 0.01)  # server_lr, all within the theorems' conditions
TRAJECTORY = 0.02  # the step whose trajectories are kept
VARIANCE = 1.0  # sigma^2, where there is noise
LOCAL = 5  # H, where there are several local steps
LOCAL_LRS = (0.4, 0.2, 0.1)

EitherAfa = AfaCdSettings | AfaCsSettings


@dataclass(frozen=True, slots=True)
class GradientPath:
    """The course of |grad f(x_t)|^2 over a run."""

    floor: float
    """The mean after the burn-in."""
    path: list[tuple[int, float]]
    """(t, |grad f(x_t)|^2), thinned to even log-steps."""
    last: State


def objective() -> Quadratics:
    """Centres 3u on the first two devices and -3u on the last two; u all ones, of length 1."""
    u = np.full(10, 10**-0.5)
    return Quadratics(fan(0.1, 1.0, DEVICES), np.outer([3.0] * 2 + [0.0] * 6 + [-3.0] * 2, u))


def uneven() -> Quadratics:
    """The same centres, Hessians from .4 A on the first device to A on the last."""
    problem = objective()
    scales = np.linspace(0.4, 1.0, DEVICES)[:, None]
    return replace(problem, hessians=problem.hessians * scales)


def run(
    rule: EitherAfa,
    problem: Quadratics,
    odds: Wide,
    *,
    burn_in: float,
    average: float,
    local: int = 1,
    lr: float = 1.0,
    start: float = 2.0,
) -> GradientPath:
    """One run from x_0 = ``start`` in every coordinate.

    ``burn_in`` and ``average`` are in units of 1 / server_lr versions: the slowest mode shrinks by
    e every 10 of them. The local rate ``lr`` cancels where H = 1, but float32 has most digits of G
    where it is 1.
    """
    drawn, noise = np.random.default_rng(0).spawn(2)
    x_0 = np.full((1, problem.dimensions), start, np.float32)
    skip, count = round(burn_in / rule.server_lr), round(average / rule.server_lr)
    arriving = batches(drawn, odds, rule.buffer_size, oldest=OLDEST, steps=(local, local))
    states = closed_loop(
        rule.build(problem.devices), problem, x_0, arriving, lr=lr, oldest=OLDEST, rng=noise
    )
    slopes = np.empty(skip + count)
    for t, state in enumerate(islice(states, skip + count)):
        slopes[t] = problem.slope(points(state, x_0.shape))[0]
    shown = np.unique(np.geomspace(1, skip + count, 300).round().astype(int)) - 1
    path = [(int(t), float(slopes[t])) for t in shown]
    return GradientPath(float(slopes[skip:].mean()), path, state)


def rounding(state: State) -> float:
    """|kept sum - sum of kept vectors|^2 / M^2 of AFA-CS: its direction's rounding error."""
    kept, vectors = state.memory.model, state.memory.devices
    if kept is None or vectors is None:
        raise RuntimeError("AFA-CS remembers every device")
    exact = np.sum([vectors[i] for i in range(len(vectors))], axis=0, dtype=np.float64)
    return float((((kept.parameters - exact) / len(vectors)) ** 2).sum())


def biased_floor(problem: Quadratics) -> float:
    """|A (sum_i (pi_i / m) b_i - mean b)|^2, AFA-CD's floor under the biased arrivals."""
    weights = inclusion(BIASED, BATCH) / BATCH
    return float(problem.slope(weights @ problem.centres))


def heterogeneity(problem: Quadratics) -> float:
    """sigma_G^2 = max_i |grad f_i - grad f|^2, for devices with one Hessian."""
    return float(problem.diversity(problem.optimum).max())


def theorem_3(problem: Quadratics, step: float) -> tuple[float, bool]:
    """The bound for uniform arrivals as T grows, and whether the step meets its condition."""
    c = (DEVICES - BATCH) / (BATCH * (DEVICES - 1))
    grown = problem.smoothness * step + (problem.smoothness * step * OLDEST) ** 2
    return 12 * c * grown * heterogeneity(problem), 12 * c * OLDEST * grown < 1


def theorem_2(problem: Quadratics, step: float) -> tuple[float, bool]:
    """The bound for any arrivals as T grows, and whether the step meets its condition."""
    ls = problem.smoothness * step
    return 6 * heterogeneity(problem), 2 * ls + 3 * (OLDEST * ls) ** 2 <= 1


def cd(step: float) -> AfaCdSettings:
    """AFA-CD with m = 5."""
    return AfaCdSettings(buffer_size=BATCH, server_lr=step)


def cs(step: float) -> AfaCsSettings:
    """AFA-CS with m = 5."""
    return AfaCsSettings(buffer_size=BATCH, server_lr=step)


def measure(
    steps: tuple[float, ...] = STEPS, *, average: float = 400.0, settle: float = 300.0
) -> Measured:
    """The floors of the three rules at several steps, and of AFA-CS where it stalls."""
    problem, paths = objective(), {}
    found: Measured = {
        "steps": list(steps),
        "predicted": biased_floor(problem),
        "sigma_g": heterogeneity(problem),
        "theorem_2": [theorem_2(problem, step)[0] for step in steps],
        "theorem_3": [theorem_3(problem, step)[0] for step in steps],
        "conditions": all(
            theorem(problem, step)[1] for step in steps for theorem in (theorem_2, theorem_3)
        ),
    }
    found["cs_rounding"] = []
    rows: dict[str, tuple[Callable[[float], EitherAfa], Wide]]
    rows = {"cd_biased": (cd, BIASED), "cd_uniform": (cd, UNIFORM), "cs_biased": (cs, BIASED)}
    for name, (rule, odds) in rows.items():
        found[name] = []
        for step in steps:
            if rule is cs:
                course = run(cs(step), problem, odds, burn_in=settle, average=20.0)
                found["cs_rounding"].append(rounding(course.last))
            else:
                course = run(rule(step), problem, odds, burn_in=60.0, average=average)
            found[name].append(course.floor)
            if step == TRAJECTORY:
                paths[name] = course.path
    found |= _stalls(problem, steps, paths, average, settle) | _worst_case()
    found["paths"] = paths
    return found


def _stalls(
    problem: Quadratics, steps: tuple[float, ...], paths: Measured, average: float, settle: float
) -> Measured:
    """AFA-CS with noise, with several local steps, and with one device missing."""
    noisy, different = replace(problem, variance=VARIANCE), uneven()
    found: Measured = {"variance": VARIANCE, "local": LOCAL, "local_lrs": list(LOCAL_LRS)}
    found["cs_noise"] = []
    for step in steps:
        course = run(cs(step), noisy, BIASED, burn_in=60.0, average=average)
        found["cs_noise"].append(course.floor)
        if step == TRAJECTORY:
            paths["cs_noise"] = course.path
    everybody, nine, rule = slice(None), slice(0, 9), cs(TRAJECTORY)
    found["cs_local"], found["cs_local_predicted"] = [], []
    for lr in LOCAL_LRS:
        course = run(rule, different, BIASED, burn_in=settle, average=20.0, local=LOCAL, lr=lr)
        at = stationary(different, everybody, steps=LOCAL, lr=lr)
        found["cs_local"].append(course.floor)
        found["cs_local_predicted"].append(float(different.slope(at)))
        paths.setdefault("cs_local", course.path)
    other = run(
        cs(max(steps)), different, BIASED, burn_in=settle, average=20.0,
        local=LOCAL, lr=LOCAL_LRS[0],
    )  # fmt: skip
    found["cs_local_other_step"] = [max(steps), other.floor]
    one_step = run(rule, different, BIASED, burn_in=1.4 * settle, average=20.0)
    found["cs_different_one_step"] = one_step.floor
    course = run(rule, problem, ABSENT, burn_in=settle, average=20.0)
    found["cs_absent"], paths["cs_absent"] = course.floor, course.path
    alone = stationary(problem, nine, steps=1, lr=1.0)
    found["cs_absent_predicted"] = float(problem.slope(alone))
    return found


def _worst_case() -> Measured:
    """Theorem 1's worst case: f_i = (x +- G)^2, only the first device arrives, |f'|^2 = 4 G^2."""
    found: Measured = {"worst_sigma_g": [], "worst_cd": [], "worst_cs": []}
    for g in (1.0, 2.0, 4.0):
        two = Quadratics(np.full((2, 1), 2.0), np.array([[-g], [g]]))
        alone = np.array([1.0, 0.0])
        found["worst_sigma_g"].append(heterogeneity(two))
        rules: dict[str, EitherAfa] = {
            "worst_cd": AfaCdSettings(buffer_size=1, server_lr=0.05),
            "worst_cs": AfaCsSettings(buffer_size=1, server_lr=0.05),
        }
        for name, rule in rules.items():
            found[name].append(run(rule, two, alone, burn_in=30.0, average=5.0).floor)
    return found


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorems 1 to 4 and corollary 1."""
    steps, floor = found["steps"], found["predicted"]
    slope, rest = np.polyfit(steps, found["cd_biased"], 1)
    spread = ", ".join(f"{y:.4f} at {x:g}" for x, y in zip(steps, found["cd_biased"], strict=True))
    uniform = exponent(steps, found["cd_uniform"])
    noise = exponent(steps, found["cs_noise"])
    cs_floor = max(found["cs_biased"])
    local = list(zip(found["cs_local"], found["cs_local_predicted"], strict=True))
    other_step, other = found["cs_local_other_step"]
    absent = (found["cs_absent"], found["cs_absent_predicted"])
    worst = [
        measured / sigma
        for name in ("worst_cd", "worst_cs")
        for measured, sigma in zip(found[name], found["worst_sigma_g"], strict=True)
    ]
    return [
        TheoremClaim(
            "AFL, theorem 2 and corollary 1",
            "AFA-CD under biased arrivals stays at an error that no step removes: "
            "|A (sum_i (pi_i/m) b_i - mean b)|^2",
            f"{spread}; a line through these meets step 0 at {rest:.4f}, the formula says "
            f"{floor:.4f}.",
            held(abs(rest / floor - 1) < 0.05 and slope < 2 * floor),
        ),
        TheoremClaim(
            "AFL, theorem 2",
            "E|grad f|^2 <= 6 sigma_G^2 as T grows, eta_L near 0",
            f"Largest {figure(max(found['cd_biased']))} under {figure(found['theorem_2'][0])}.",
            held(found["conditions"] and max(found["cd_biased"]) <= found["theorem_2"][0]),
        ),
        TheoremClaim(
            "AFL, theorem 3",
            "AFA-CD under uniform arrivals falls linearly with the step, under its bound",
            f"|grad f|^2 goes as step^{uniform:.2f}; "
            f"{figure(found['cd_uniform'][-1])} under {figure(found['theorem_3'][-1])} at "
            f"step {steps[-1]:g}.",
            held(
                found["conditions"]
                and abs(uniform - 1) < 0.15
                and all(
                    y <= b for y, b in zip(found["cd_uniform"], found["theorem_3"], strict=True)
                )
            ),
        ),
        TheoremClaim(
            "AFL, theorem 4",
            "AFA-CS removes the floor under biased arrivals (in float64: 1e-20)",
            f"Falls to float32's floor: |grad f|^2 at most {figure(cs_floor)} at any step, "
            f"{figure(floor / cs_floor)} times below AFA-CD's. The sum that the rule keeps as it "
            f"changes is off by its roundings; their square alone is up to "
            f"{figure(max(found['cs_rounding']))}, so 1e-20 is out of reach in float32.",
            held(cs_floor < 1e-9),
        ),
        TheoremClaim(
            "AFL, theorem 4: sigma_L > 0",
            "With noise AFA-CS stalls, at an error that the step sets",
            f"sigma^2 = {found['variance']:g}: {figure(found['cs_noise'][0])} at step "
            f"{steps[0]:g}, {figure(found['cs_noise'][-1])} at {steps[-1]:g}; goes as "
            f"step^{noise:.2f}.",
            held(found["cs_noise"][-1] > 1e3 * cs_floor and abs(noise - 1) < 0.15),
        ),
        TheoremClaim(
            "AFL, theorem 4: K > 1",
            "With H > 1 and different Hessians AFA-CS stalls where the mean of G_i is zero, "
            "which gamma moves and server_lr does not",
            f"H = {found['local']}: "
            + ", ".join(
                f"{figure(y)} (predicted {figure(b)}) at gamma {lr:g}"
                for lr, (y, b) in zip(found["local_lrs"], local, strict=True)
            )
            + f", all at step {TRAJECTORY:g}; {figure(other)} at gamma {LOCAL_LRS[0]:g} and step "
            f"{other_step:g}; with H = 1 {figure(found['cs_different_one_step'])}.",
            held(
                all(abs(y / b - 1) < 0.02 for y, b in [*local, (other, local[0][1])])
                and found["cs_different_one_step"] < 1e-9
            ),
        ),
        TheoremClaim(
            "AFL, theorem 4: bounded delay",
            "AFA-CS stalls if a device never comes (its G counts as zero)",
            f"{figure(absent[0])}, predicted {figure(absent[1])}.",
            held(abs(absent[0] / absent[1] - 1) < 0.02),
        ),
        TheoremClaim(
            "AFL, theorem 1",
            "A device that never comes can cost an error of the order of sigma_G^2 "
            "(the paper's worst case: f_i = (x +- G)^2)",
            f"AFA-CD and AFA-CS both end at {min(worst):.3f} to {max(worst):.3f} times sigma_G^2, "
            f"sigma_G^2 from {figure(min(found['worst_sigma_g']))} to "
            f"{figure(max(found['worst_sigma_g']))}.",
            held(all(abs(ratio - 1) < 0.02 for ratio in worst)),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """Floors over the step, and trajectories over versions."""
    steps, paths = found["steps"], found["paths"]
    with pictures.picture(path, 2) as (floors, course):
        for name, color, label in (
            ("cd_biased", pictures.OTHER, "AFA-CD, biased arrivals"),
            ("cd_uniform", pictures.MAIN, "AFA-CD, uniform arrivals"),
            ("cs_noise", pictures.FOURTH, "AFA-CS, biased arrivals, noise"),
            ("cs_biased", pictures.THIRD, "AFA-CS, biased arrivals: float32's floor"),
        ):
            floors.loglog(steps, found[name], color=color, marker="o", markersize=4, label=label)
        floors.axhline(
            found["predicted"], color="#555555", linestyle=":", label="AFA-CD's floor, predicted"
        )
        floors.loglog(
            steps, found["theorem_2"], color=pictures.BOUND, linestyle="--",
            label="bound: theorem 2, any arrivals",
        )  # fmt: skip
        floors.loglog(
            steps, found["theorem_3"], color=pictures.BOUND, linestyle="-.",
            label="bound: theorem 3, uniform arrivals",
        )  # fmt: skip
        floors.set_xticks(steps, [f"{step:g}" for step in steps])
        floors.minorticks_off()
        floors.set(
            title="AFA: no step removes AFA-CD's floor under biased arrivals",
            xlabel="server step eta eta_L", ylabel="final |grad f|² (dimensionless)",
        )  # fmt: skip
        floors.legend(loc="center left", bbox_to_anchor=(0.0, 0.42), ncols=2)
        for name, color, label in (
            ("cd_biased", pictures.OTHER, "AFA-CD, biased"),
            ("cd_uniform", pictures.MAIN, "AFA-CD, uniform"),
            ("cs_noise", pictures.FOURTH, "AFA-CS, noise"),
            ("cs_local", "#777777", "AFA-CS, H > 1, different Hessians"),
            ("cs_absent", pictures.FAINT, "AFA-CS, a device never comes"),
            ("cs_biased", pictures.THIRD, "AFA-CS, biased"),
        ):
            if name in paths:
                x, y = zip(*paths[name], strict=True)
                course.loglog(np.array(x) + 1, y, color=color, linewidth=1.2, label=label)
        course.axhline(found["predicted"], color="#555555", linestyle=":", linewidth=1)
        course.axhline(found["cs_absent_predicted"], color="#555555", linestyle=":", linewidth=1)
        course.axhline(found["cs_local_predicted"][0], color="#555555", linestyle=":", linewidth=1)
        course.set(
            title=f"The course at step {TRAJECTORY:g} (dotted: predicted floors)",
            xlabel="version + 1", ylabel="|grad f|² (dimensionless)",
        )  # fmt: skip
        course.legend(loc="lower left")
