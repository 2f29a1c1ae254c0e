"""KEDA and the autoscaler that it makes: replicas of a ScaledObject with a `metrics-api` trigger.

KEDA wakes a workload from zero when the number passes its activation value and puts it to sleep
when there was nothing for the cooldown; between one and many a HorizontalPodAutoscaler decides by
the same number.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.k8s.cluster.cluster import Cluster
from tests.k8s.cluster.manifests import Manifest, Unsupported
from tests.k8s.cluster.network import client

_POLLING_S, _COOLDOWN_S, _MAX = 30.0, 300.0, 100  # KEDA's defaults
_SYNC_S = 15.0  # of the autoscaler
_TOLERANCE = 0.1
_AVERAGE = "AverageValue"  # the number divided by the replicas; the only type here
_ANSWERS_WITHIN_S = 3.0
_SCALE_UP: Mapping[str, Any] = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
_SCALE_DOWN: Mapping[str, Any] = {
    "stabilizationWindowSeconds": 300,
    "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
}
_KNOWN = {"url", "valueLocation", "targetValue", "activationTargetValue", "format", "method"}


class NoAnswer(Exception):
    """The number could not be read: everything stays as it is."""


@dataclass
class Autoscaler:
    """A HorizontalPodAutoscaler of one external metric. Times in seconds, of any clock."""

    target: float  # of the number, for each replica
    least: int
    most: int
    behavior: Mapping[str, Any] = field(default_factory=dict)
    _wanted: list[tuple[float, int]] = field(default_factory=list)
    _had: list[tuple[float, int]] = field(default_factory=list)

    def replicas(self, now: float, value: float, current: int) -> int:
        """How many there should be, of ``current`` (not 0)."""
        if abs(value / (self.target * current) - 1) <= _TOLERANCE:
            wanted = current
        else:
            wanted = math.ceil(value / self.target)
        wanted = min(max(wanted, self.least, 1), self.most)
        up, down = ({**default, **(self.behavior.get(name) or {})} for name, default in (
            ("scaleUp", _SCALE_UP), ("scaleDown", _SCALE_DOWN),
        ))  # fmt: skip
        self._wanted.append((now, wanted))
        self._had.append((now, current))
        # Up to the lowest, down to the highest that was wanted within the window.
        highest = max(n for at, n in self._wanted if now - at <= down["stabilizationWindowSeconds"])
        lowest = min(n for at, n in self._wanted if now - at <= up["stabilizationWindowSeconds"])
        if lowest > current:
            return min(lowest, self._furthest(up, now, current, 1))
        if highest < current:
            return max(highest, self._furthest(down, now, current, -1))
        return current

    def _furthest(self, rule: Mapping[str, Any], now: float, current: int, way: int) -> int:
        """How far the policies let it go from where it was a period ago."""
        if rule.get("selectPolicy") == "Disabled":
            return current
        ends: list[int] = []
        for policy in rule["policies"]:
            before = [n for at, n in self._had if now - at <= policy["periodSeconds"]]
            began = min(before) if way > 0 else max(before)
            step = policy["value"]
            if policy["type"] == "Percent":
                step = began * step / 100
            ends.append(math.ceil(began + step) if way > 0 else math.floor(began - step))
        furthest = rule.get("selectPolicy", "Max") == "Max"
        return max(ends) if (way > 0) == furthest else min(ends)


class Scaler:
    """KEDA for one ScaledObject. ``faster``: its and the autoscaler's clocks run so fast."""

    def __init__(self, manifest: Manifest, cluster: Cluster, *, faster: float = 1.0) -> None:
        spec = manifest["spec"]
        self.target: str = spec["scaleTargetRef"]["name"]
        self.asked: list[float | None] = []  # what the endpoint said; None: no answer
        self.least: int = spec.get("minReplicaCount", 0)
        self._cluster = cluster
        self._faster = faster
        self._polling_s: float = spec.get("pollingInterval", _POLLING_S)
        self._cooldown_s: float = spec.get("cooldownPeriod", _COOLDOWN_S)
        [trigger] = spec["triggers"]
        if trigger["type"] != "metrics-api" or trigger.get("metricType", _AVERAGE) != _AVERAGE:
            raise Unsupported(f"ScaledObject of {self.target} with trigger {trigger}")
        about = trigger["metadata"]
        if unknown := about.keys() - _KNOWN or spec.keys() & {"fallback", "idleReplicaCount"}:
            raise Unsupported(f"ScaledObject of {self.target} with {sorted(unknown)}")
        self.url = cluster.here(about["url"])
        self._where: Sequence[str] = about["valueLocation"].split(".")
        self._activation = float(about.get("activationTargetValue", 0))
        behavior = (
            spec.get("advanced", {}).get("horizontalPodAutoscalerConfig", {}).get("behavior", {})
        )
        self._autoscaler = Autoscaler(
            float(about["targetValue"]), self.least, spec.get("maxReplicaCount", _MAX), behavior
        )
        self._active_at = -math.inf
        self._synced_at = -math.inf

    async def run(self) -> None:
        """Until it is cancelled."""
        async with client(_ANSWERS_WITHIN_S) as session:
            while True:
                try:
                    value = await self._value(session)
                except NoAnswer:
                    self.asked.append(None)
                else:
                    self.asked.append(value)
                    self._decide(value)
                await asyncio.sleep(self._polling_s / self._faster)

    async def _value(self, session: aiohttp.ClientSession) -> float:
        try:
            async with session.get(self.url) as answer:
                if answer.status != 200:
                    raise NoAnswer(f"{self.url}: {answer.status}")
                found = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise NoAnswer(f"{self.url}: {error!r}") from error
        for name in self._where:
            if not isinstance(found, dict) or name not in found:
                raise NoAnswer(f"{self.url} has no {'.'.join(self._where)}: {found}")
            found = found[name]
        return float(found)

    def _decide(self, value: float) -> None:
        now = asyncio.get_running_loop().time() * self._faster
        current = self._cluster[self.target].replicas
        if value > self._activation:
            self._active_at = now
        if current == 0:
            if value > self._activation:
                self._cluster.scale(self.target, max(1, self.least))
        elif self.least == 0 and now - self._active_at > self._cooldown_s:
            self._cluster.scale(self.target, 0)
        elif now - self._synced_at >= _SYNC_S:
            self._synced_at = now
            wanted = self._autoscaler.replicas(now, value, current)
            if wanted != current:
                self._cluster.scale(self.target, wanted)
