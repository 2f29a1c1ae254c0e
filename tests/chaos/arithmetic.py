"""The rules' arithmetic once more: from the papers' formulas, in plain numpy, on whole vectors.

Nothing here comes from `updater/`: a rule that is wrong there gives other bits here. Each operation
is one element-wise float32 operation, which is all that decides a model's bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]
f4 = np.float32
CACHING = ("afa-cs", "aced", "ca2fl")  # they keep the sum over the last updates of all devices


@dataclass(frozen=True)
class Shape:
    """How many floats of a model are parameters, buffers and controls (it has no integers)."""

    parameters: int
    buffers: int
    controls: int

    @classmethod
    def of(cls, tensors: list[Any]) -> Shape:
        """Of a layout's rows: name, shape, dtype, kind."""
        sizes = {"parameter": 0, "buffer": 0, "control": 0}
        for _, shape, _, kind in tensors:
            sizes[kind] += math.prod(shape)
        return cls(sizes["parameter"], sizes["buffer"], sizes["control"])

    def split(self, whole: Vector) -> tuple[Vector, Vector, Vector]:
        """Parameters, buffers, controls."""
        first, second = self.parameters, self.parameters + self.buffers
        return whole[:first], whole[first:second], whole[second:]


def staleness_weight(rule: Mapping[str, Any], d: int) -> float:
    """s(d)."""
    a = float(rule.get("a", 0.0))
    match rule["kind"]:
        case "constant":
            return 1.0
        case "linear":
            return 1.0 / (a * d + 1.0)
        case "polynomial":
            return math.pow(d + 1.0, -a)
        case "exponential":
            return math.exp(-a * d)
        case "hinge":
            return 1.0 if d <= rule["b"] else 1.0 / (a * (d - rule["b"]) + 1.0)
    raise ValueError(f"no staleness {rule['kind']!r}")


def _toward(x: Vector, new: Vector, weight: float) -> Vector:
    return x + (new - x) * f4(weight)


def _plus(x: Vector, direction: Vector, weight: float) -> Vector:
    return x + direction * f4(weight)


def since(upload: Mapping[str, Any]) -> int:
    """The version that an update's staleness counts from.

    A site that is not trusted may say a newer one than its task was handed out at: that one counts.
    """
    tau, handed = upload["tau"], upload.get("handed")
    assert (handed is not None) == (upload.get("site", "pool") != "pool"), upload
    return int(tau if handed is None else min(tau, handed))


@dataclass
class Course:
    """A run's model, taken further by one update after the other."""

    rule: Mapping[str, Any]  # name and parameters, as the run was configured
    shape: Shape
    devices: int
    model: Vector
    version: int = 0
    sums: Vector | None = None  # over the batch that is growing; or over all devices
    arrivals: int = 0
    total: float = 0.0  # FedAvg: of weights
    last: dict[int, Vector] = field(default_factory=dict)  # what is kept of each device
    since: dict[int, int] = field(default_factory=dict)  # of it, the version before which it came
    before: Vector | None = None  # CA2FL: the sum before the batch
    moments: list[Vector] = field(default_factory=list)  # FADAS: m, v, the largest v
    late: int = 0  # FADAS: the largest staleness in the batch
    scale: float = 1.0  # of the length of a step
    scaled_at: int = 0  # the version for which it was chosen

    @property
    def name(self) -> str:
        """The rule's."""
        return str(self.rule["name"])

    @property
    def size(self) -> int:
        """The updates that make a version."""
        if self.name in ("fedasync", "ringmaster"):
            return 1
        return int(self.rule["clients_per_round" if self.name == "fedavg" else "buffer_size"])

    def weight(self, upload: Mapping[str, Any]) -> float:
        """What an update weighs, by the formula."""
        d = self.version - since(upload)
        match self.name:
            case "fedasync":
                schedule, at = self.rule["alpha_schedule"], self.version + 1
                alpha = float(self.rule["alpha"]) * self.scale
                if schedule["kind"] == "step" and at > schedule["at"]:
                    alpha *= schedule["factor"]
                elif schedule["kind"] == "inverse_sqrt":
                    alpha /= math.sqrt(at)
                return alpha * staleness_weight(self.rule["staleness"], d)
            case "fedbuff":
                return staleness_weight(self.rule["staleness"], d)
            case "fedavg" if self.rule["weighting"] == "samples":
                return float(upload["samples"])
        return 1.0

    def take(self, upload: Mapping[str, Any], sent: Vector, weight: float) -> bool:
        """One update, which weighs so much: whether it made a version."""
        if self.name == "fedasync":
            self.model = _toward(self.model, sent, weight)
            self.version += 1
            return True
        self.arrivals += 1
        if self.name == "fedavg":
            self.total += weight
            self.sums = (
                sent.copy()
                if self.sums is None
                else _toward(self.sums, sent, weight / self.total if self.total else 0.0)
            )
        else:
            self._add(upload, sent, weight)
        if self.arrivals < self.size:
            return False
        self.step()
        return True

    def _add(self, upload: Mapping[str, Any], sent: Vector, weight: float) -> None:
        """A delta joins the batch's sum."""
        if self.sums is None:
            self.sums = np.zeros_like(self.model)
        x, buffers, controls = self.shape.split(self.sums)
        new, its_buffers, change = self.shape.split(sent)
        self.late = max(self.late, self.version - since(upload))
        if self.name in CACHING:
            before = self.last.get(upload["device"], np.zeros_like(new))
            by = 1.0 if self.name == "ca2fl" else 1.0 / (upload["lr"] * upload["steps"])
            now = new * f4(by)
            x = x + (now - before) * f4(1.0)
            self.last[upload["device"]] = now
            self.since.pop(upload["device"], None)
            self.since[upload["device"]] = self.version
        elif self.name == "afa-cd":
            x = _plus(x, new, 1.0 / (upload["lr"] * upload["steps"]))
        elif self.name in ("fedbuff", "fadas", "ringmaster"):
            x = _plus(x, new, weight)
        else:
            x = _plus(x, new, 1.0)
            controls = _plus(controls, change, 1.0)
            before = self.last.get(upload["device"], np.zeros_like(change))
            self.last[upload["device"]] = _plus(before, change, 1.0)
        buffers = _toward(buffers, its_buffers, 1.0 / self.arrivals)
        self.sums = np.concatenate([x, buffers, controls])

    def step(self) -> None:
        """The version that the batch makes, of as many as came."""
        if self.sums is None:
            raise ValueError("a version of nothing")
        if self.name == "fedavg":
            made, self.sums, self.total = self.sums, None, 0.0
        else:
            x, _, c = self.shape.split(self.model)
            direction, buffers, changes = self.shape.split(self.sums)
            rate = float(self.rule["server_lr"]) * self.scale
            if self.name == "afa-cs":
                x = _plus(x, direction, rate / self.devices)
            elif self.name == "aced":
                x, direction = self._recent(x, direction, rate)
                self.sums = np.concatenate([direction, buffers, changes])
            elif self.name == "ca2fl":
                x = self._calibrated(x, direction, rate)
            elif self.name == "fadas":
                x = self._adaptive(x, direction * f4(1.0 / self.arrivals), rate)
            else:
                x = _plus(x, direction, rate / self.arrivals)
                c = _plus(c, changes, 1.0 / self.devices)
            made = np.concatenate([x, buffers, c])
            if self.name not in CACHING:
                self.sums = None
        self.model, self.arrivals, self.late = made, 0, 0
        self.version += 1

    def forget(self, device: int) -> None:
        """Take a quarantined device's cache out of the sum, and clear it."""
        if self.name not in CACHING or device not in self.last or self.sums is None:
            return
        x, buffers, controls = self.shape.split(self.sums)
        self.sums = np.concatenate([_plus(x, self.last[device], -1.0), buffers, controls])
        if self.name == "ca2fl" and device not in self.since and self.before is not None:
            self.before = _plus(self.before, self.last[device], -1.0)
        if self.name == "aced":
            self.since.pop(device, None)
        self.last[device] = np.zeros_like(self.last[device])

    def _recent(self, x: Vector, total: Vector, rate: float) -> tuple[Vector, Vector]:
        """ACED: along the mean of the updates that are not too old; the others leave the sum."""
        for device, version in list(self.since.items()):
            if self.version - version > self.rule["max_age"]:
                total = _plus(total, self.last[device], -1.0)
                self.last[device] = np.zeros_like(total)
                del self.since[device]
        return _plus(x, total, rate / len(self.since)), total

    def _calibrated(self, x: Vector, total: Vector, rate: float) -> Vector:
        """CA2FL: along the mean before the batch, and the mean change of its devices."""
        before = np.zeros_like(total) if self.before is None else self.before
        change = (total - before) * f4(1.0 / len(self.since))
        self.before = total.copy()
        self.since.clear()
        return _plus(x, _plus(change, before, 1.0 / self.devices), rate)

    def _adaptive(self, x: Vector, mean: Vector, rate: float) -> Vector:
        """FADAS: AMSGrad; as in the paper, or as in its program."""
        beta1, beta2, eps = (float(self.rule["server"][key]) for key in ("beta1", "beta2", "eps"))
        m, v, most = self.moments or [np.zeros_like(mean)] * 3
        m = m * f4(beta1) + mean * f4(1.0 - beta1)
        v = v * f4(beta2) + mean * mean * f4(1.0 - beta2)
        most = np.maximum(most, v)
        self.moments = [m, v, most]
        is_late = self.late > self.rule["tau_c"]
        if self.rule["delay_adaptive"] == "paper" and is_late:
            rate = min(rate, 1.0 / self.late)
        elif self.rule["delay_adaptive"] == "code":
            first, second = (1.0 - math.pow(b, self.version + 1) for b in (beta1, beta2))
            rate = (rate / self.late if is_late else rate) * (math.sqrt(second) / first)
            eps *= math.sqrt(second)
        return _plus(x, np.divide(m, np.sqrt(most) + f4(eps), dtype=f4), rate)
