"""Controllers: as many pods as a Deployment or a StatefulSet wants, of the newest kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Protocol

from tests.k8s.cluster.kubelet import Pod
from tests.k8s.cluster.manifests import Manifest, Unsupported, check, selects, share

_HASH = "pod-template-hash"
_BOTH = {"replicas", "selector", "template", "minReadySeconds", "revisionHistoryLimit"}
_MAX_SURGE = _MAX_UNAVAILABLE = "25%"  # Kubernetes' defaults


class Maker(Protocol):
    """What a controller asks of its cluster."""

    def create(self, manifest: Manifest) -> Pod:
        """A pod, which begins to live."""

    def put(self, one: Manifest) -> None:
        """An object, such as a claim."""

    def find(self, kind: str, name: str) -> Manifest | None:
        """An object, if it is there."""

    def long_ready(self, pod: Pod, seconds: float) -> bool:
        """Whether a pod is ready and has been for so long."""


class Workload:
    """What Deployment and StatefulSet share: a template, a number, pods of the template."""

    knows: frozenset[str]  # keys of its spec

    def __init__(self, manifest: Manifest, maker: Maker) -> None:
        self.name: str = manifest["metadata"]["name"]
        self.pods: list[Pod] = []
        self.replicas = 1
        self._maker = maker
        self.set(manifest)

    def set(self, manifest: Manifest) -> None:
        """From now on it wants this."""
        self.spec = deepcopy(manifest["spec"])
        self.replicas = self.spec.get("replicas", self.replicas)  # else whoever scales it says
        check(self.name, self.spec, self.knows)
        template = self.spec["template"]
        if not selects(self.spec["selector"], template["metadata"]["labels"]):
            raise Unsupported(f"{self.name}: its selector is not for its own pods")
        text = json.dumps(template, sort_keys=True)
        self.revision = hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def present(self) -> list[Pod]:
        """The pods that are to stay."""
        return [pod for pod in self.pods if not pod.terminating.is_set()]

    @property
    def ready(self) -> list[Pod]:
        """The pods that can work."""
        return [pod for pod in self.pods if pod.ready]

    @property
    def settled(self) -> bool:
        """Whether there are as many pods as wanted, all ready and of the newest kind."""
        return len(self.pods) == self.replicas == len(self.ready) == len(self._new)

    @property
    def _new(self) -> list[Pod]:
        return [pod for pod in self.present if pod.labels.get(_HASH) == self.revision]

    @property
    def _old(self) -> list[Pod]:
        return [pod for pod in self.present if pod.labels.get(_HASH) != self.revision]

    def reconcile(self) -> None:
        """Does what can be done now; called again whenever something changed."""
        self.pods = [pod for pod in self.pods if not pod.gone.is_set()]
        self._reconcile()

    def _reconcile(self) -> None:
        raise NotImplementedError

    def _available(self, pods: Sequence[Pod]) -> list[Pod]:
        seconds = self.spec.get("minReadySeconds", 0)
        return [pod for pod in pods if self._maker.long_ready(pod, seconds)]

    def _create(self, name: str, **labels: str) -> None:
        template = deepcopy(self.spec["template"])
        template["metadata"]["name"] = name
        template["metadata"]["labels"] |= {_HASH: self.revision, **labels}
        self._complete(template)
        self.pods.append(self._maker.create(template))

    def _complete(self, pod: Manifest) -> None:
        """What a controller adds to its template."""


class Deployment(Workload):
    """Pods that are all alike."""

    knows = frozenset({*_BOTH, "strategy", "progressDeadlineSeconds"})
    _made = 0

    def _reconcile(self) -> None:
        strategy = self.spec.get("strategy", {})
        if strategy.get("type", "RollingUpdate") == "Recreate":
            self._recreate()
        else:
            self._roll(strategy.get("rollingUpdate") or {})

    def _recreate(self) -> None:
        for pod in self._old:
            pod.delete()
        if all(pod.labels[_HASH] == self.revision for pod in self.pods):
            self._grow(self.replicas - len(self._new))
            self._shrink(self._new, len(self._new) - self.replicas)

    def _roll(self, how: dict[str, Any]) -> None:
        surge = share(how.get("maxSurge", _MAX_SURGE), self.replicas, up=True)
        missing = share(how.get("maxUnavailable", _MAX_UNAVAILABLE), self.replicas, up=False)
        if surge == missing == 0:
            missing = 1
        new, old = self._new, self._old
        self._grow(min(self.replicas - len(new), self.replicas + surge - len(new) - len(old)))
        self._shrink(new, len(new) - self.replicas)
        # Old ones go as far as enough are there without them; first those that are not ready.
        new = self._new
        fewest = self.replicas - missing
        unready_new = len(new) - len(self._available(new))
        may_go = len(new) + len(old) - fewest - unready_new
        unready_old = [pod for pod in old if not pod.ready]
        for pod in unready_old[: max(0, may_go)]:
            pod.delete()
        ready_old = self._available([pod for pod in old if pod.ready])
        spare = len(self._available(new)) + len(ready_old) - fewest
        for pod in ready_old[: max(0, spare)]:
            pod.delete()

    def _grow(self, by: int) -> None:
        for _ in range(by):
            self._made += 1
            self._create(f"{self.name}-{self.revision}-{self._made:05x}")

    def _shrink(self, pods: Sequence[Pod], by: int) -> None:
        """Those that are not ready go first, then the youngest."""
        oldest_last = list(reversed(pods))
        for pod in sorted(oldest_last, key=lambda pod: pod.ready)[: max(0, by)]:
            pod.delete()


class StatefulSet(Workload):
    """Pods with a number, a name and volumes of their own, that are made in order."""

    knows = frozenset({
        *_BOTH, "serviceName", "podManagementPolicy", "updateStrategy", "volumeClaimTemplates",
        "persistentVolumeClaimRetentionPolicy",
    })  # fmt: skip

    def _reconcile(self) -> None:
        by_number = {self._number(pod): pod for pod in self.pods}
        ordered = self.spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        for number in range(self.replicas):
            if number not in by_number:
                self._create(
                    f"{self.name}-{number}", **{"apps.kubernetes.io/pod-index": str(number)}
                )
            if ordered and not (number in by_number and self._available([by_number[number]])):
                return
        for number in sorted(by_number, reverse=True):
            if number >= self.replicas:
                by_number[number].delete()
                if ordered:
                    return
        self._update(by_number)

    def _update(self, by_number: dict[int, Pod]) -> None:
        """The newest kind comes from the last to the first, one at a time."""
        strategy = self.spec.get("updateStrategy", {})
        if strategy.get("type", "RollingUpdate") == "OnDelete":
            return
        if strategy.get("rollingUpdate", {}).get("partition"):
            raise Unsupported(f"StatefulSet {self.name} with a partition")
        for number in sorted(by_number, reverse=True):
            pod = by_number[number]
            if pod.terminating.is_set():
                return
            if pod.labels[_HASH] != self.revision:
                pod.delete()
                return
            if not self._available([pod]):
                return

    def _number(self, pod: Pod) -> int:
        return int(pod.name.removeprefix(f"{self.name}-"))

    def set(self, manifest: Manifest) -> None:
        """From now on it wants this."""
        super().set(manifest)
        retained = self.spec.get("persistentVolumeClaimRetentionPolicy", {})
        if "Delete" in retained.values():
            raise Unsupported(f"{self.name}: claims that are deleted")

    def _complete(self, pod: Manifest) -> None:
        """The claims, which outlive the pod."""
        name, volumes = pod["metadata"]["name"], pod["spec"].setdefault("volumes", [])
        for template in self.spec.get("volumeClaimTemplates", ()):
            which = template["metadata"]["name"]
            claim = f"{which}-{name}"
            if self._maker.find("PersistentVolumeClaim", claim) is None:
                self._maker.put(
                    {
                        **deepcopy(template),
                        "kind": "PersistentVolumeClaim",
                        "metadata": {**template["metadata"], "name": claim},
                    }
                )
            volumes[:] = [one for one in volumes if one["name"] != which]
            volumes.append({"name": which, "persistentVolumeClaim": {"claimName": claim}})

    def hosts(self) -> dict[str, str]:
        """Its pods' names in DNS, and the pods'."""
        service = self.spec.get("serviceName", "")
        names = [f"{self.name}-{number}" for number in range(self.replicas)]
        return {f"{name}.{service}": name for name in names} if service else {}


CONTROLLERS: dict[str, Callable[[Manifest, Maker], Workload]] = {
    "Deployment": Deployment, "StatefulSet": StatefulSet,
}  # fmt: skip
