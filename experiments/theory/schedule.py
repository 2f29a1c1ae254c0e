"""FedBuff's figure 1 and table I: which device trains when, from the records of simulated runs.

The figure has n = 5 devices, Q = 3 local steps, K = 2 for FedBuff and a sampling rate of .6 for
FedAvg. It names no durations: a task takes 1 to 3 s here, twice that on device 4. The runs are
those of ``fedstream simulate`` on the digits, in virtual time; FedAsync, table I's third rule, has
the same durations. A task begins when its device has answered and its base version exists, since no
device waits for anything else.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import fedstream
from experiments.theory import pictures
from experiments.theory.claims import Measured, TheoremClaim, judged, near
from experiments.theory.sgd import Wide

DEVICES, LOCAL, SLOW = 5, 3, 4
RULES: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg", "clients_per_round": 3},
    "FedAsync": {"name": "fedasync"},
    "FedBuff": {"name": "fedbuff", "buffer_size": 2},
}
VERSIONS = {"FedAvg": 30, "FedAsync": 170, "FedBuff": 85}  # more than SECONDS take
SECONDS = 60.0  # virtual seconds of a run that count
SHOWN = 16.0  # of them in the picture
Task = tuple[int, float, float, int, int]  # device, begin and end in s, tau, version made with it


def record(rule: str, seed: int) -> list[Task]:
    """The task of every update that is part of a version, in order, from a run's record."""
    in_flight: dict[str, object] = (
        {}
        if rule == "FedAvg"
        else {"scheduler.policy.kind": "in_flight", "scheduler.policy.n": DEVICES}
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fedstream.simulate(
            "digits",
            strategy=RULES[rule],
            versions=VERSIONS[rule],
            devices=DEVICES,
            out=Path(folder) / "run",
            progress=False,
            set={
                "run.seed": seed,
                "simulation.staleness.kind": "latency",
                "simulation.evaluate_every": 0,
                "scheduler.steps.kind": "fixed",
                "scheduler.steps.n": LOCAL,
                "devices.latency.kind": "uniform",
                "devices.latency.low_s": 1.0,
                "devices.latency.high_s": 3.0,
                "devices.slow_devices": [SLOW],
                "devices.slow_factor": 2.0,
            }
            | in_flight,
        )
        updates = run.updates
        made: list[float] = run.versions["seconds"].tolist()
    tasks: list[Task] = []
    answered = [0.0] * DEVICES
    used = updates[updates["outcome"] != "refused"]
    columns = used[["device", "tau", "version", "seconds"]].to_numpy(np.float64)
    for *whole, end in columns.tolist():
        device, tau, version = map(int, whole)
        tasks.append((device, max(answered[device], made[tau]), end, tau, version))
        answered[device] = end
    if tasks[-1][2] < SECONDS:
        raise RuntimeError(f"{rule}: {VERSIONS[rule]} versions end before {SECONDS:g} s")
    return tasks


def figures(tasks: list[Task]) -> dict[str, float]:
    """What the table and the figure say of a rule, over the tasks that ended in SECONDS."""
    used = [task for task in tasks if task[2] <= SECONDS]
    updates = np.bincount([version for *_, version in used])[1:-1]  # the last may be incomplete
    busy = sum(min(end, SECONDS) - begin for _, begin, end, *_ in tasks if begin < SECONDS)
    return {
        "staleness": float(np.mean([version - 1 - tau for *_, tau, version in used])),
        "fewest": float(updates.min()),
        "most": float(updates.max()),
        "busy": busy / (DEVICES * SECONDS),
        "rate": len(used) / SECONDS,
    }


def measure(repeats: int = 5) -> Measured:
    """Each rule's figures in every repeat, and the first repeat's tasks for the picture."""
    found: Measured = {"shown": {}}
    for rule in RULES:
        runs = [record(rule, seed) for seed in range(repeats)]
        found[rule] = [figures(tasks) for tasks in runs]
        found["shown"][rule] = [task for task in runs[0] if task[1] < SHOWN]
    return found


def claims(found: Measured) -> list[TheoremClaim]:
    """Verdicts on what figure 1 shows, and table I's columns for each rule."""

    def of(rule: str, figure: str) -> Wide:
        return np.array([repeat[figure] for repeat in found[rule]])

    def has(rule: str, updates: int) -> list[Wide]:
        return [
            x for of_version in ("fewest", "most") for x in near(of(rule, of_version), updates, 0.5)
        ]

    def busy(rule: str) -> str:
        return f"devices train {of(rule, 'busy').mean():.0%} of the time"

    def late(rule: str) -> str:
        return f"mean staleness {of(rule, 'staleness').mean():.2f}"

    ratio = of("FedBuff", "rate") / of("FedAvg", "rate")
    return [
        TheoremClaim(
            "FedBuff, figure 1 and table I: FedBuff",
            "Asynchronous updates, buffered: a version for every K = 2 uploads, no device waits",
            f"2 updates in every version; {late('FedBuff')}; {busy('FedBuff')}.",
            judged([*has("FedBuff", 2), of("FedBuff", "staleness"), of("FedBuff", "busy") - 0.99]),
        ),
        TheoremClaim(
            "FedBuff, figure 1 and table I: FedAvg",
            "Synchronous, no buffer: a version when all sampled devices have answered; others wait",
            f"3 updates in every version; {late('FedAvg')}; {busy('FedAvg')}.",
            judged(
                [*has("FedAvg", 3), 0.01 - of("FedAvg", "staleness"), 0.9 - of("FedAvg", "busy")]
            ),
        ),
        TheoremClaim(
            "FedBuff, table I: FedAsync",
            "Asynchronous updates, no buffer",
            f"1 update in every version; {late('FedAsync')}; {busy('FedAsync')}.",
            judged(
                [*has("FedAsync", 1), of("FedAsync", "staleness"), of("FedAsync", "busy") - 0.99]
            ),
        ),
        TheoremClaim(
            "FedBuff, after theorem 1",
            "Asynchronous updates are faster in practice (3.3 times, according to Nguyen et al.)",
            f"FedBuff uses {ratio.mean():.2f} times as many updates per second as FedAvg in this "
            "schedule. The 3.3 is another paper's, for its devices, and is not tested.",
            judged([ratio - 1]),
        ),
    ]


def draw(found: Measured, path: Path) -> None:
    """A bar for each task, and a line for each version, of the three rules."""
    with pictures.picture(path, len(RULES)) as panels:
        for axes, rule in zip(panels, RULES, strict=True):
            versions: dict[int, float] = {}
            for device, begin, end, tau, version in found["shown"][rule]:
                late = version - 1 - tau
                axes.barh(
                    device,
                    end - begin,
                    left=begin,
                    height=0.6,
                    color=pictures.OTHER if late else pictures.MAIN,
                    alpha=0.45,
                    edgecolor="white",
                )
                axes.text(
                    (begin + min(end, SHOWN)) / 2,
                    device,
                    f"{tau}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    clip_on=True,
                )
                versions[version] = max(end, versions.get(version, 0.0))
            for end in versions.values():
                axes.axvline(end, color="#555555", linewidth=0.8)
            axes.set(
                title=f"{rule}: tasks with their base version (orange: late), lines: new versions",
                xlabel="virtual seconds",
                ylabel="device",
                xlim=(0.0, SHOWN),
            )
            axes.set_yticks(range(DEVICES))
