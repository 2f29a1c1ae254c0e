"""The rules once more, in float64, from the papers' formulas alone: one function for each rule.

Nothing here comes from fedstream. Each function plays the same arrivals and returns x after each of
them. ``bug`` plants an error that other programs made; a test must notice it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arrival:
    """An update: x_new - x_tau of a device, which took ``steps`` steps of ``lr``."""

    device: int
    tau: int
    delta: Vector
    steps: int
    lr: float


def batches(
    x0: Vector, arrivals: Sequence[Arrival], size: int, most: int | None, found: list[Vector]
) -> Iterator[tuple[int, list[Arrival]]]:
    """Every full batch with the version that it starts from; fills ``found`` with x so far.

    Updates staler than ``most`` are dropped.
    """
    version, batch = 0, list[Arrival]()
    for arrival in arrivals:
        if most is None or version - arrival.tau <= most:
            batch.append(arrival)
        found.append(found[-1] if found else x0)
        if len(batch) == size:
            yield version, batch
            version, batch = version + 1, []


def ca2fl(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    devices: int,
    size: int,
    rate: float,
    most: int | None = None,
    bug: str = "",
) -> list[Vector]:
    """CA2FL: v = h + mean over S of (Delta_i - h_i); x += rate v; h_i = Delta_i for S."""
    x, caches, found = x0.copy(), np.zeros((devices, x0.size)), list[Vector]()
    for _, batch in batches(x0, arrivals, size, most, found):
        last = {arrival.device: arrival.delta for arrival in batch}
        h, corrections = caches.mean(axis=0), [new - caches[i] for i, new in last.items()]
        if bug != "caches of the batch never recorded":
            for i, new in last.items():
                caches[i] = new
        if bug == "mean cache after replacement":
            h = caches.mean(axis=0)
        v = h + np.sum(corrections, axis=0) / len(last)
        if bug == "divided by K twice":
            v = h + np.sum(corrections, axis=0) / len(last) / size
        x = x + rate * v
        found[-1] = x
    return found


def aced(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    devices: int,
    size: int,
    rate: float,
    age: int,
    most: int | None = None,
    bug: str = "",
) -> list[Vector]:
    """ACED: x -= rate times the mean G_i of devices whose last answer is at most ``age`` old.

    G_i = (x_tau - x_new) / (gamma H). ``age``: in versions, 0 for the batch's own.
    """
    x, found = x0.copy(), list[Vector]()
    caches, since = dict[int, Vector](), dict[int, int]()
    for t, batch in batches(x0, arrivals, size, most, found):
        for arrival in batch:
            caches[arrival.device] = -arrival.delta / (arrival.lr * arrival.steps)
            since[arrival.device] = t
        recent = [cache for i, cache in caches.items() if t - since[i] <= age]
        n = devices if bug == "divided by all devices" else len(recent)
        x = x - rate * np.sum(recent, axis=0) / n
        found[-1] = x
    return found


def fadas(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    size: int,
    eta: float,
    edition: str,
    tau_c: int,
    most: int | None = None,
    bug: str = "",
) -> list[Vector]:
    """FADAS: AMSGrad (0.9, 0.99, 1e-8) along the batch's mean, with a smaller eta if it is late.

    "code" is g_delay_adaptive.py with --optimizer=fedams.
    """
    x, found = x0.copy(), list[Vector]()
    m, v, most_v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for t, batch in batches(x0, arrivals, size, most, found):
        mean = np.mean([arrival.delta for arrival in batch], axis=0)
        m = 0.9 * m + 0.1 * mean
        v = 0.99 * v + 0.01 * mean**2
        most_v = v if bug == "adam" else np.maximum(most_v, v)
        late = max(t - arrival.tau for arrival in batch)
        eta_t, first, second = eta, 1.0, 1.0
        if edition == "paper" and late > tau_c:
            eta_t = min(eta, 1 / late)
        elif edition == "code":
            eta_t = eta / late if late > tau_c else eta
            first, second = 1 - 0.9 ** (t + 1), 1 - 0.99 ** (t + 1)
        x = x + eta_t / first * m / (np.sqrt(most_v) / math.sqrt(second) + 1e-8)
        found[-1] = x
    return found


def ringmaster(
    x0: Vector, arrivals: Sequence[Arrival], *, threshold: int, rate: float, bug: str = ""
) -> list[Vector]:
    """Ringmaster: x += rate Delta for every arrival with t - tau < threshold."""
    x, t, found = x0.copy(), 0, list[Vector]()
    for arrival in arrivals:
        d = t - arrival.tau
        if d < threshold or (bug == "one version more" and d == threshold):
            x, t = x + rate * arrival.delta, t + 1
        found.append(x)
    return found


def ringleader(
    x0: Vector, arrivals: Sequence[Arrival], *, devices: int, rate: float, bug: str = ""
) -> list[Vector]:
    """Ringleader: every version x += rate times the mean over devices of each one's mean delta.

    Phase 1 collects deltas until all devices have one; phase 2 makes a version with one delta more
    of each, and keeps what else they send for the next round.
    """
    x, found = x0.copy(), list[Vector]()
    table = {device: list[Vector]() for device in range(devices)}
    later = {device: list[Vector]() for device in range(devices)}
    waiting: set[int] = set()  # devices without a version, in phase 2
    for arrival in arrivals:
        i, in_phase_2 = arrival.device, bool(waiting)
        if bug == "no second table" or not in_phase_2 or i in waiting:
            table[i].append(arrival.delta)
        elif bug != "what comes too early is dropped":
            later[i].append(arrival.delta)
        if not in_phase_2 and all(table.values()):
            waiting = set(range(devices))
        if i in waiting:
            means = [np.mean(deltas, axis=0) for deltas in table.values()]
            if bug == "mean over all deltas":
                means = [delta for deltas in table.values() for delta in deltas]
            x = x + rate * np.mean(means, axis=0)
            waiting.discard(i)
            if not waiting:
                table, later = later, {device: list[Vector]() for device in range(devices)}
        found.append(x)
    return found
