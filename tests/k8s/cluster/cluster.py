"""The cluster: objects, the pods that come of them, and what is done to both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any, Self

from tests.k8s.cluster.controllers import CONTROLLERS, StatefulSet, Workload
from tests.k8s.cluster.image import Image
from tests.k8s.cluster.kubelet import Manners, Pod
from tests.k8s.cluster.manifests import Manifest, Manifests, selects, share, texts
from tests.k8s.cluster.network import Addresses, Service, translator
from tests.k8s.cluster.pod import Inside, Place
from tests.support import wait_until

_WITHIN_S = 120.0  # a guard against waiting for ever: many pods start at once, beside others' work
_RESTARTED = "kubectl.kubernetes.io/restartedAt"


class Refused(Exception):
    """An eviction that a disruption budget does not allow now."""


class Cluster:
    """One namespace. A context manager: whatever runs in it ends with the block, at once."""

    def __init__(
        self, folder: Path, images: Mapping[str, Image], manners: Manners | None = None
    ) -> None:
        self.objects = Manifests(())
        self.claims = folder / "claims"
        self._folder = folder / "pods"
        self._images = images
        self._manners = manners or Manners()
        self._workloads: dict[str, Workload] = {}
        self._services: dict[str, Service] = {}
        self._every: list[Pod] = []
        self._numbers = count(1)
        self._lives: set[asyncio.Task[None]] = set()
        self._failed: list[asyncio.Task[None]] = []
        self._something = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._addresses = Addresses()
        self._begin(self._reconciling())
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._lives:
            task.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        for service in self._services.values():
            await service.__aexit__()
        self._addresses.close()
        self._raise()

    # objects

    async def apply(self, objects: Iterable[Manifest]) -> None:
        """As `kubectl apply`: what is there already is changed to what is given."""
        given = [deepcopy(one) for one in objects]
        for one in given:
            self.objects.put(one)
        for one in given:
            name = one["metadata"]["name"]
            if one["kind"] == "Service" and name not in self._services:
                address = self._addresses.of(f"service {name}")
                service = Service(one, address, self._manners.lag_s)
                self._services[name] = await service.__aenter__()
        for one in given:
            if make := CONTROLLERS.get(one["kind"]):
                name = one["metadata"]["name"]
                if name in self._workloads:
                    self._workloads[name].set(one)
                else:
                    self._workloads[name] = make(one, self)
        self._changed()

    def put(self, one: Manifest) -> None:
        """An object that nobody runs, such as a claim."""
        self.objects.put(one)

    def find(self, kind: str, name: str) -> Manifest | None:
        """An object, if it is there."""
        return self.objects.find(kind, name)

    def secret(self, name: str) -> dict[str, str]:
        """What a Secret holds, decoded."""
        return texts(self.objects.get("Secret", name))

    # looking

    def __getitem__(self, name: str) -> Workload:
        """A Deployment or StatefulSet."""
        return self._workloads[name]

    def service(self, name: str) -> Service:
        """A Service."""
        return self._services[name]

    @property
    def findings(self) -> list[str]:
        """What containers did that nobody had asked for, in all the cluster's time."""
        return [finding for pod in self._every for finding in pod.findings]

    @property
    def restarts(self) -> int:
        """Of the containers of all pods that ever were."""
        return sum(pod.restarts for pod in self._every)

    @property
    def story(self) -> str:
        """What there is, and the last words of everybody."""
        return "\n".join(pod.story for each in self._workloads.values() for pod in each.pods)

    @property
    def addresses(self) -> list[str]:
        """Of all pods and Services that there may ever be."""
        return self._addresses.every

    def here(self, text: str) -> str:
        """A text with addresses in place of the names of hosts, as pods get it."""
        services = {name: each.address for name, each in self._services.items()}
        hosts = {
            host: self._addresses.of(pod)
            for each in self._workloads.values()
            if isinstance(each, StatefulSet)
            for host, pod in each.hosts().items()
        }
        return translator(services | hosts, self.objects.namespace)(text)

    async def until(
        self, condition: Callable[[], Any], *, within_s: float = _WITHIN_S, what: str
    ) -> Any:
        """Waits for a condition: what it gave. AssertionError, with everybody's last words."""

        def holds() -> Any:
            self._raise()
            return condition()

        try:
            return await wait_until(holds, timeout=within_s, what=what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story}") from None

    async def settled(self, *names: str, within_s: float = _WITHIN_S) -> None:
        """Waits until workloads (all, if none is named) have the pods they want, ready."""
        each = [self[name] for name in names or self._workloads]
        what = f"{', '.join(names) or 'all'} as wanted"
        await self.until(lambda: all(one.settled for one in each), within_s=within_s, what=what)

    # doing

    def scale(self, name: str, replicas: int) -> None:
        """As `kubectl scale`."""
        self[name].replicas = replicas
        self._changed()

    async def restart(self, name: str) -> None:
        """As `kubectl rollout restart`: the template changes by an annotation."""
        changed = deepcopy(self._object_of(name))
        changed["spec"].pop("replicas", None)
        annotations = changed["spec"]["template"]["metadata"].setdefault("annotations", {})
        annotations[_RESTARTED] = str(next(self._numbers))
        await self.apply([changed])

    def evict(self, pod: Pod) -> None:
        """As a node that is drained does: with the pod's grace, if every budget allows it."""
        for budget in self.objects.of("PodDisruptionBudget"):
            spec = budget["spec"]
            if not selects(spec["selector"], pod.labels):
                continue
            workloads = [
                each
                for each in self._workloads.values()
                if selects(spec["selector"], each.spec["template"]["metadata"]["labels"])
            ]
            wanted = sum(each.replicas for each in workloads)
            healthy = sum(len(each.ready) for each in workloads)
            if "minAvailable" in spec:
                needed = share(spec["minAvailable"], wanted, up=True)
            else:
                needed = wanted - share(spec["maxUnavailable"], wanted, up=True)
            if pod.ready and healthy - 1 < needed:
                raise Refused(
                    f"{pod.name}: budget {budget['metadata']['name']} wants {needed} of {wanted}"
                )
        pod.delete()

    # pods

    def create(self, manifest: Manifest) -> Pod:
        """A pod, which begins to live."""
        name = manifest["metadata"]["name"]
        stable = any(
            isinstance(each, StatefulSet) and name in each.hosts().values()
            for each in self._workloads.values()
        )
        address = self._addresses.of(name) if stable else self._addresses.new()
        folder = self._folder / f"{next(self._numbers)}-{name}"
        folder.mkdir(parents=True)
        links: dict[str, str] = {}
        for service in self._services.values():
            links |= service.links
        place = Place(self.objects, self._images, links, self.claims, self.here)
        inside = Inside(manifest, address, folder, place)
        pod = Pod(inside, self._manners, self._changed, self._admitted)
        self._every.append(pod)
        self._begin(pod.run())
        return pod

    def long_ready(self, pod: Pod, seconds: float) -> bool:
        """Whether a pod is ready and has been for so long."""
        if not pod.ready:
            return False
        loop = asyncio.get_running_loop()
        missing = pod.became_ready + seconds - loop.time()
        if missing > 0:
            loop.call_later(missing, self._changed)
        return missing <= 0

    def _admitted(self, pod: Pod) -> str:
        """Why a pod has to wait; '' if nothing is in its way."""
        for claim in pod.inside.claims:
            manifest = self.find("PersistentVolumeClaim", claim)
            if manifest is None:
                return f"persistentvolumeclaim {claim!r} not found"
            if "ReadWriteOncePod" not in manifest["spec"]["accessModes"]:
                continue
            for other in self._every:
                holds = not other.waiting and not other.gone.is_set()
                if other is not pod and holds and claim in other.inside.claims:
                    return f"claim {claim!r} is still {other.name}'s"
        return ""

    # in the background

    def _begin(self, life: Any) -> None:
        task = asyncio.create_task(life)
        self._lives.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lives.discard(task)
        if not task.cancelled() and task.exception():
            self._failed.append(task)

    def _raise(self) -> None:
        for task in self._failed:
            task.result()

    def _changed(self) -> None:
        self._something.set()

    async def _reconciling(self) -> None:
        while True:
            await self._something.wait()
            self._something.clear()
            for workload in self._workloads.values():
                workload.reconcile()
            pods = [pod for each in self._workloads.values() for pod in each.pods]
            for service in self._services.values():
                service.set(
                    pod for pod in pods if selects(service.selector, pod.labels)
                    and (pod.ready or (service.unready_too and not pod.terminating.is_set()))
                )  # fmt: skip

    def _object_of(self, name: str) -> Manifest:
        for kind in CONTROLLERS:
            if (found := self.find(kind, name)) is not None:
                return found
        raise KeyError(name)
