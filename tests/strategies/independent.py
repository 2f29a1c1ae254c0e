"""The rules once more, in float64, from the papers' formulas alone: one function for each rule.

Nothing here comes from fedstream. Each function plays the same arrivals and returns x after each of
them. ``bug`` plants an error that other programs made; a test must notice it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
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
    eps: float = 1e-8,
    most: int | None = None,
    bug: str = "",
) -> list[Vector]:
    """FADAS: AMSGrad (0.9, 0.99, eps) along the batch's mean, with a smaller eta if it is late.

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
        x = x + eta_t / first * m / (np.sqrt(most_v) / math.sqrt(second) + eps)
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


def middle(how: str, vectors: Sequence[Vector]) -> Vector:
    """The mean, the median of each coordinate, or 16 steps of Weiszfeld's algorithm from there."""
    if how == "mean":
        return np.asarray(np.mean(vectors, axis=0))
    z: Vector = np.median(vectors, axis=0)
    for _ in range(16 if how == "geometric median" else 0):
        shares = [1 / max(1e-6, float(np.linalg.norm(z - one))) for one in vectors]
        z = np.asarray(np.average(vectors, axis=0, weights=shares))
    return z


def fedbuff(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    size: int,
    rate: float,
    how: str = "mean",
    clip: float = math.inf,
    power: float = 0.0,
    most: int | None = None,
    bug: str = "",
) -> list[Vector]:
    """FedBuff: x += rate middle(s(d) min(1, S / |Delta|) Delta), with s(d) = (1 + d)^-power."""
    x, found = x0.copy(), list[Vector]()
    for t, batch in batches(x0, arrivals, size, most, found):
        sent = []
        for arrival in batch:
            s = (1 + t - arrival.tau) ** -power
            length = float(np.linalg.norm(arrival.delta))
            if bug == "clipped after weighing":
                length *= s
            sent.append(s * min(1, clip / length) * arrival.delta)
        x = x + rate * middle("mean" if bug == "mean" else how, sent)
        found[-1] = x
    return found


def basgd(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    buckets: int,
    rate: float,
    how: str,
    bug: str = "",
) -> list[Vector]:
    """BASGD: h_b is the mean of what devices b mod B sent; x += rate Aggr(h) once all have some."""
    x, found, h = x0.copy(), list[Vector](), [list[Vector]() for _ in range(buckets)]
    for arrival in arrivals:
        bucket = h[arrival.device % buckets]
        if bug == "newest only":
            bucket.clear()
        bucket.append(arrival.delta)
        if all(h):
            means = [np.asarray(np.mean(one, axis=0)) for one in h]
            if bug == "mean over updates":
                means = [delta for one in h for delta in one]
            x = x + rate * middle(how, means)
            if bug != "never emptied":
                h = [[] for _ in range(buckets)]
        found.append(x)
    return found


def aflguard(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    root: Sequence[int],
    radius: float,
    rate: float,
    bug: str = "",
) -> list[Vector]:
    """AFLGuard: x += rate g if |g - g_root| <= lambda |g_root|, g_root the newest of a root."""
    x, found, g_root = x0.copy(), list[Vector](), None
    for arrival in arrivals:
        g = arrival.delta
        if arrival.device in root:
            g_root = g
            x = x + rate * g if bug == "root moves the model" else x
        elif g_root is not None:
            unit = np.linalg.norm(g if bug == "by its own length" else g_root)
            if np.linalg.norm(g - g_root) <= radius * unit:
                x = x + rate * g
        found.append(x)
    return found


def adaptive(
    x0: Vector,
    arrivals: Sequence[Arrival],
    *,
    size: int,
    rate: float,
    every: int,
    factors: Sequence[float],
    least: float,
    most: float,
    loss: Callable[[Vector], float],
    bug: str = "",
) -> tuple[list[Vector], list[tuple[int, float]]]:
    """FedBuff with an adaptive step; also returns the versions that changed it, and the rate then.

    m_k is the mean of x over the versions (k-1) W + 1 to k W. After version k W, k > 1, the rate
    becomes the best of rate f in [least, most], by the loss at m_{k-1} + f (m_k - m_{k-1}).
    """
    x, now, means, window = x0.copy(), rate, list[Vector](), list[Vector]()
    found, changes, batch = list[Vector](), list[tuple[int, float]](), list[Vector]()
    version = 0
    for arrival in arrivals:
        batch.append(arrival.delta)
        if len(batch) == size:
            x, batch, version = x + now * np.mean(batch, axis=0), [], version + 1
            window.append(x)
        found.append(x)
        if len(window) < every:
            continue
        means.append(window[-1] if bug == "single models" else np.mean(window, axis=0))
        window = []
        if len(means) < 2:
            continue
        before, mean = means[-2:]
        if bug == "from the last model":
            before = x0
        rates = [now, *(min(max(now * f, least), most) for f in factors)]
        losses = [loss(before + (r / now) * (mean - before)) for r in rates]
        best = rates[losses.index(min(losses))]
        if best != now:
            now = best if bug != "of the configured rate" else rate * best / now
            changes.append((version, now))
    return found, changes
