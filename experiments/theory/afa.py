"""AFA-CD's and AFA-CS's floors (Anarchic Federated Learning, theorems 1 to 4).

With one Hessian, H = 1 and no noise every floor of |grad f|^2 is known. If device i is in a batch
of m with probability pi_i, AFA-CD tends to the optimum of the objective that weights devices by
pi_i / m, where |grad f|^2 = |A (sum_i (pi_i / m) b_i - mean b)|^2, whatever the step
s = eta eta_L. The paper's bounds on the mean of E|grad f|^2, as T grows and with eta_L near 0:
theorem 2 (any arrivals) 6 sigma_G^2, for 2 L s + 3 (tau L s)^2 <= 1; theorem 3 (uniform arrivals)
12 c (L s + (tau L s)^2) sigma_G^2, c = (M - m) / (m (M - 1)), for 12 c tau (L s + (tau L s)^2) < 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from experiments.theory import pictures
from experiments.theory.arrivals import batches, inclusion
from experiments.theory.claims import (
    Measured,
    TheoremClaim,
    exponent,
    figure,
    judged,
    near,
)
from experiments.theory.loop import closed_loop, points
from experiments.theory.quadratics import Quadratics, fan, stationary
from experiments.theory.sgd import Wide
from fedstream.strategies import AfaCdSettings, AfaCsSettings, State

DEVICES, BATCH, OLDEST = 10, 5, 4
BIASED = np.array([0.19, 0.19, *[0.1] * 6, 0.01, 0.01])
UNIFORM = np.full(DEVICES, 0.1)
ABSENT = np.array([1.0] * 9 + [0.0])
STEPS = (0.08, 0.04, 0.02, 0.01)  # server_lr, all within the theorems' conditions
TRAJECTORY = 0.04  # the step whose trajectories are kept
VARIANCE = 1.0  # sigma^2, where there is noise
LOCAL = 5  # H, where there are several local steps
LOCAL_LRS = (0.4, 0.2, 0.1)
WORST = (1.0, 2.0, 4.0)  # G of theorem 1's worst case

EitherAfa = AfaCdSettings | AfaCsSettings


@dataclass(frozen=True, slots=True)
class GradientPath:
    """The course of |grad f(x_t)|^2 over a run."""

    floors: Wide
    """(runs,): the mean after the burn-in."""
    path: list[tuple[int, float]]
    """(t, |grad f(x_t)|^2) of the first run, thinned to even log-steps."""
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
    seed: int = 0,
    runs: int = 1,
) -> GradientPath:
    """Runs from x_0 = ``start`` in every coordinate, each with its own arrivals.

    ``burn_in`` and ``average`` are in units of 1 / server_lr versions: the slowest mode shrinks by
    e every 10 of them. The local rate ``lr`` cancels where H = 1, but float32 has most digits of G
    where it is 1.
    """
    drawn, noise = np.random.default_rng(seed).spawn(2)
    x_0 = np.full((runs, problem.dimensions), start, np.float32)
    skip, count = round(burn_in / rule.server_lr), round(average / rule.server_lr)
    arriving = batches(
        drawn, odds, rule.buffer_size, oldest=OLDEST, steps=(local, local), runs=runs
    )
    states = closed_loop(
        rule.build(problem.devices), problem, x_0, arriving, lr=lr, oldest=OLDEST, rng=noise
    )
    slopes = np.empty((skip + count, runs))
    for t, state in enumerate(islice(states, skip + count)):
        slopes[t] = problem.slope(points(state, x_0.shape))
    shown = np.unique(np.geomspace(1, skip + count, 300).round().astype(int)) - 1
    path = [(int(t), float(slopes[t, 0])) for t in shown]
    return GradientPath(slopes[skip:].mean(axis=0), path, state)


def rounding(state: State) -> float:
    """|kept sum - sum of kept vectors|^2 / M^2 of AFA-CS: its direction's rounding error."""
    kept, vectors = state.memory.model, state.memory.devices
    if kept is None or vectors is None:
        raise RuntimeError("AFA-CS remembers every device")
    exact = np.sum([vectors[i] for i in range(vectors.devices)], axis=0, dtype=np.float64)
    return float((((kept.parameters - exact) / vectors.devices) ** 2).sum())


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
    steps: tuple[float, ...] = STEPS,
    *,
    average: float = 40.0,
    settle: float = 180.0,
    repeats: int = 5,
    side_by_side: int = 24,
) -> Measured:
    """What is predicted; in every repeat, the floors of AFA-CD and AFA-CS, and where AFA-CS stalls.

    A repeat of AFA-CD is the mean of ``side_by_side`` runs.
    """
    problem, different = objective(), uneven()
    everybody, nine = slice(None), slice(0, 9)
    found: Measured = {
        "steps": list(steps),
        "predicted": biased_floor(problem),
        "sigma_g": heterogeneity(problem),
        "theorem_2": [theorem_2(problem, step)[0] for step in steps],
        "theorem_3": [theorem_3(problem, step)[0] for step in steps],
        "conditions": all(
            theorem(problem, step)[1] for step in steps for theorem in (theorem_2, theorem_3)
        ),
        "variance": VARIANCE,
        "local": LOCAL,
        "local_lrs": list(LOCAL_LRS),
        "cs_local_predicted": [
            float(different.slope(stationary(different, everybody, steps=LOCAL, lr=lr)))
            for lr in LOCAL_LRS
        ],
        "cs_absent_predicted": float(problem.slope(stationary(problem, nine, steps=1, lr=1.0))),
        "worst_sigma_g": [heterogeneity(worst_case(g)) for g in WORST],
    }
    paths: dict[str, list[tuple[int, float]]] = {}
    for name, odds in (("cd_biased", BIASED), ("cd_uniform", UNIFORM)):
        courses = {
            step: run(
                cd(step), problem, odds, burn_in=60.0, average=average, runs=repeats * side_by_side
            )
            for step in steps
        }
        means = [courses[step].floors.reshape(repeats, -1).mean(axis=1) for step in steps]
        found[name] = np.transpose(means).tolist()
        paths[name] = courses[TRAJECTORY].path
    again = [_repeat(steps, average, settle, seed) for seed in range(repeats)]
    found |= {key: [one[key] for one in again] for key in again[0] if key != "paths"}
    return found | {"paths": paths | again[0]["paths"]}


def _repeat(steps: tuple[float, ...], average: float, settle: float, seed: int) -> Measured:
    """One repeat of what cannot share a model with others: AFA-CS's floors and theorem 1's."""
    problem, different = objective(), uneven()

    def stall(
        of: Quadratics,
        step: float = TRAJECTORY,
        odds: Wide = BIASED,
        burn_in: float = settle,
        average: float = 20.0,
        local: int = 1,
        lr: float = 1.0,
    ) -> GradientPath:
        return run(
            cs(step), of, odds, burn_in=burn_in, average=average, local=local, lr=lr, seed=seed
        )

    exact = {step: stall(problem, step) for step in steps}
    noisy = {
        step: stall(replace(problem, variance=VARIANCE), step, burn_in=60.0, average=average)
        for step in steps
    }
    local = [stall(different, burn_in=settle / 2, local=LOCAL, lr=lr) for lr in LOCAL_LRS]
    absent = stall(problem, odds=ABSENT, burn_in=settle / 2)
    found: Measured = {
        "cs_biased": [float(course.floors[0]) for course in exact.values()],
        "cs_rounding": [rounding(course.last) for course in exact.values()],
        "cs_noise": [float(course.floors[0]) for course in noisy.values()],
        "cs_local": [float(course.floors[0]) for course in local],
        "cs_local_other_step": float(
            stall(different, max(steps), local=LOCAL, lr=LOCAL_LRS[0]).floors[0]
        ),
        "cs_different_one_step": float(
            stall(different, max(steps), burn_in=1.4 * settle).floors[0]
        ),
        "cs_absent": float(absent.floors[0]),
        "paths": {
            "cs_biased": exact[TRAJECTORY].path,
            "cs_noise": noisy[TRAJECTORY].path,
            "cs_local": local[0].path,
            "cs_absent": absent.path,
        },
    }
    for name, build in (("worst_cd", AfaCdSettings), ("worst_cs", AfaCsSettings)):
        alone = build(buffer_size=1, server_lr=0.05)
        found[name] = [
            float(
                run(
                    alone, worst_case(g), np.array([1.0, 0.0]), burn_in=30, average=5, seed=seed
                ).floors[0]
            )
            for g in WORST
        ]
    return found


def worst_case(g: float) -> Quadratics:
    """Theorem 1's worst case: f_i = (x +- G)^2, where |f'|^2 = 4 G^2 if one device never comes."""
    return Quadratics(np.full((2, 1), 2.0), np.array([[-g], [g]]))


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on theorems 1 to 4 and corollary 1."""
    steps, floor, local_floors = found["steps"], found["predicted"], found["cs_local_predicted"]
    cd_biased, cd_uniform, cs_biased, cs_noise, local, other, one_step, absent = (
        np.array(found[key]).T  # (what is varied, repeats), or (repeats,)
        for key in (
            "cd_biased",
            "cd_uniform",
            "cs_biased",
            "cs_noise",
            "cs_local",
            "cs_local_other_step",
            "cs_different_one_step",
            "cs_absent",
        )
    )
    slope, rest = np.polyfit(steps, cd_biased, 1)
    spread = ", ".join(f"{y:.4f} at {x:g}" for x, y in zip(steps, cd_biased.mean(1), strict=True))
    uniform = np.array([exponent(steps[-2:], repeat) for repeat in cd_uniform[-2:].T])
    noise = np.array([exponent(steps, repeat) for repeat in cs_noise.T])
    cs_floor = float(cs_biased.max())
    worst = np.array([found["worst_cd"], found["worst_cs"]]) / found["worst_sigma_g"]
    applies = found["conditions"]
    return [
        TheoremClaim(
            "AFL, theorem 2 and corollary 1",
            "AFA-CD under biased arrivals stays at an error that no step removes: "
            "|A (sum_i (pi_i/m) b_i - mean b)|^2",
            f"{spread}; a line through these meets step 0 at {rest.mean():.4f}, the formula says "
            f"{floor:.4f}.",
            judged([*near(rest, floor, 0.05 * floor), 2 * floor - slope]),
        ),
        TheoremClaim(
            "AFL, theorem 2",
            "E|grad f|^2 <= 6 sigma_G^2 as T grows, eta_L near 0",
            f"Largest {figure(cd_biased.mean(1).max())} under {figure(found['theorem_2'][0])}.",
            judged(found["theorem_2"][0] - cd_biased if applies else []),
        ),
        TheoremClaim(
            "AFL, theorem 3",
            "AFA-CD under uniform arrivals falls linearly with a small step, under its bound",
            f"|grad f|^2 goes as step^{uniform.mean():.2f} from {steps[-2]:g} to {steps[-1]:g}; "
            f"{figure(cd_uniform[-1].mean())} under {figure(found['theorem_3'][-1])} at "
            f"step {steps[-1]:g}.",
            judged(
                [
                    *near(uniform, 1.0, 0.15),
                    *(b - y for y, b in zip(cd_uniform, found["theorem_3"], strict=True)),
                ]
                if applies
                else []
            ),
        ),
        TheoremClaim(
            "AFL, theorem 4",
            "AFA-CS removes the floor under biased arrivals (in float64: 1e-20)",
            f"Falls to float32's floor: |grad f|^2 at most {figure(cs_floor)} at any step, "
            f"{figure(floor / cs_floor)} times below AFA-CD's. The sum that the rule keeps as it "
            f"changes is off by its roundings; their square alone is up to "
            f"{figure(np.max(found['cs_rounding']))}, so 1e-20 is out of reach in float32.",
            judged(1e-9 - cs_biased),
        ),
        TheoremClaim(
            "AFL, theorem 4: sigma_L > 0",
            "With noise AFA-CS stalls, at an error that the step sets",
            f"sigma^2 = {found['variance']:g}: {figure(cs_noise[0].mean())} at step "
            f"{steps[0]:g}, {figure(cs_noise[-1].mean())} at {steps[-1]:g}; goes as "
            f"step^{noise.mean():.2f}.",
            judged([cs_noise[-1] - 1e3 * cs_floor, *near(noise, 1.0, 0.15)]),
        ),
        TheoremClaim(
            "AFL, theorem 4: K > 1",
            "With H > 1 and different Hessians AFA-CS stalls where the mean of G_i is zero, "
            "which gamma moves and server_lr does not",
            f"H = {found['local']}: "
            + ", ".join(
                f"{figure(y.mean())} (predicted {figure(b)}) at gamma {lr:g}"
                for lr, y, b in zip(found["local_lrs"], local, local_floors, strict=True)
            )
            + f", all at step {TRAJECTORY:g}; {figure(other.mean())} at gamma {LOCAL_LRS[0]:g} "
            f"and step {max(steps):g}; with H = 1 {figure(one_step.mean())}.",
            judged(
                [
                    *(
                        one
                        for y, b in zip(
                            (*local, other), (*local_floors, local_floors[0]), strict=True
                        )
                        for one in near(y, b, 0.02 * b)
                    ),
                    1e-9 - one_step,
                ]
            ),
        ),
        TheoremClaim(
            "AFL, theorem 4: bounded delay",
            "AFA-CS stalls if a device never comes (its G counts as zero)",
            f"{figure(absent.mean())}, predicted {figure(found['cs_absent_predicted'])}.",
            judged(near(absent / found["cs_absent_predicted"], 1.0, 0.02)),
        ),
        TheoremClaim(
            "AFL, theorem 1",
            "A device that never comes can cost an error of the order of sigma_G^2 "
            "(the paper's worst case: f_i = (x +- G)^2)",
            f"AFA-CD and AFA-CS both end at {worst.min():.3f} to {worst.max():.3f} times "
            f"sigma_G^2, sigma_G^2 from {figure(min(found['worst_sigma_g']))} to "
            f"{figure(max(found['worst_sigma_g']))}.",
            judged(one for rule in worst for of in rule.T for one in near(of, 1.0, 0.02)),
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
            mean = np.mean(found[name], axis=0)
            floors.loglog(steps, mean, color=color, marker="o", markersize=4, label=label)
        floors.axhline(
            found["predicted"], color="#555555", linestyle=":", label="AFA-CD's floor, predicted"
        )
        floors.loglog(
            steps,
            found["theorem_2"],
            color=pictures.BOUND,
            linestyle="--",
            label="bound: theorem 2, any arrivals",
        )
        floors.loglog(
            steps,
            found["theorem_3"],
            color=pictures.BOUND,
            linestyle="-.",
            label="bound: theorem 3, uniform arrivals",
        )
        floors.set_xticks(steps, [f"{step:g}" for step in steps])
        floors.minorticks_off()
        floors.set(
            title="AFA on quadratics: where each rule stays, by its step",
            xlabel="server step eta eta_L",
            ylabel="final |grad f|² (dimensionless)",
        )
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
            xlabel="version + 1",
            ylabel="|grad f|² (dimensionless)",
        )
        course.legend(loc="lower left")
