"""The cluster: objects, the pods that come of them, and what is done to both."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any, Self

from tests.k8s.cluster.forks import Forks
from tests.k8s.cluster.image import Image
from tests.k8s.cluster.kubelet import Pod
from tests.k8s.cluster.manifests import Manifest, Manifests, selects, share
from tests.k8s.cluster.network import Addresses, Service, translator
from tests.k8s.cluster.pod import Inside, Place
from tests.support import wait_until

_WITHIN_S = 120.0  # a guard against waiting for ever: many pods start at once, beside others' work
_HASH = "pod-template-hash"
_INDEX = "apps.kubernetes.io/pod-index"


class Workload:
    """As many pods of a template as are wanted. ``create`` makes one, which begins to live."""

    def __init__(self, manifest: Manifest, create: Callable[[Manifest], Pod]) -> None:
        self.name: str = manifest["metadata"]["name"]
        self.pods: list[Pod] = []
        self.replicas = 1
        self._create_pod = create
        self.set(manifest)

    def set(self, manifest: Manifest) -> None:
        """From now on it wants this."""
        self.spec = deepcopy(manifest["spec"])
        self.replicas = self.spec.get("replicas", self.replicas)  # else whoever scales it says
        text = json.dumps(self.spec["template"], sort_keys=True)
        self.revision = hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def ready(self) -> list[Pod]:
        """The pods that can work."""
        return [pod for pod in self.pods if pod.ready]

    @property
    def settled(self) -> bool:
        """Whether there are as many pods as wanted, all ready and of the newest kind."""
        return len(self.pods) == self.replicas == len(self.ready) == len(self._of(new=True))

    def _of(self, *, new: bool) -> list[Pod]:
        """The pods that are to stay, of the newest kind or not."""
        staying = [pod for pod in self.pods if not pod.terminating.is_set()]
        return [pod for pod in staying if (pod.labels[_HASH] == self.revision) == new]

    def reconcile(self) -> None:
        """Does what can be done now; called again whenever something changed."""
        self.pods = [pod for pod in self.pods if not pod.gone.is_set()]
        self._reconcile()

    def _reconcile(self) -> None:
        raise NotImplementedError

    def _create(self, name: str, **labels: str) -> None:
        pod = deepcopy(self.spec["template"])
        pod["metadata"]["name"] = name
        pod["metadata"]["labels"] |= {_HASH: self.revision, **labels}
        for template in self.spec.get("volumeClaimTemplates", ()):
            which = template["metadata"]["name"]
            claim = {"claimName": f"{which}-{name}"}
            pod["spec"]["volumes"].append({"name": which, "persistentVolumeClaim": claim})
        self.pods.append(self._create_pod(pod))


class Deployment(Workload):
    """Pods that are all alike."""

    _made = 0

    def _reconcile(self) -> None:
        new, old = self._of(new=True), self._of(new=False)
        how = self.spec["strategy"]
        if how.get("type") == "Recreate":
            for pod in old:
                pod.delete()
            if all(pod.labels[_HASH] == self.revision for pod in self.pods):
                self._grow(self.replicas - len(new))
        else:
            surge = share(how["rollingUpdate"]["maxSurge"], self.replicas, up=True)
            most = self.replicas + surge - len(old)
            self._grow(min(self.replicas, most) - len(new))
            self._retire(old, how["rollingUpdate"]["maxUnavailable"])
        youngest_last = sorted(self._of(new=True), key=lambda pod: not pod.ready)
        for pod in youngest_last[self.replicas :]:
            pod.delete()

    def _retire(self, old: list[Pod], unavailable: int | str) -> None:
        """Old ones go as far as enough are ready without them; first those that are not ready."""
        fewest = self.replicas - share(unavailable, self.replicas, up=False)
        for pod in sorted(old, key=lambda pod: pod.ready):
            if len(self.ready) - pod.ready < fewest:
                return
            pod.delete()

    def _grow(self, by: int) -> None:
        for _ in range(by):
            self._made += 1
            self._create(f"{self.name}-{self.revision}-{self._made:05x}")


class StatefulSet(Workload):
    """Pods with a number, a name and volumes of their own, all made at once."""

    def _reconcile(self) -> None:
        by_number = {int(pod.name.rpartition("-")[2]): pod for pod in self.pods}
        for number in range(self.replicas):
            if number not in by_number:
                self._create(f"{self.name}-{number}", **{_INDEX: str(number)})
        for number in sorted(by_number, reverse=True):
            if number >= self.replicas:
                by_number[number].delete()
        # The newest kind comes from the last to the first, one at a time.
        for number in sorted(by_number, reverse=True):
            pod = by_number[number]
            if pod.labels[_HASH] != self.revision:
                pod.delete()
            if not pod.ready:
                return

    def hosts(self) -> dict[str, str]:
        """Its pods' names in DNS, and the pods'."""
        names = [f"{self.name}-{number}" for number in range(self.replicas)]
        return {f"{name}.{self.spec['serviceName']}": name for name in names}


_WORKLOADS = {"Deployment": Deployment, "StatefulSet": StatefulSet}


class Cluster:
    """One namespace. A context manager: whatever runs in it ends with the block, at once."""

    def __init__(self, folder: Path, images: Mapping[str, Image]) -> None:
        self.objects = Manifests(())
        self.claims = folder / "claims"
        self._folder = folder / "pods"
        self._images = images
        self._forks = {
            name: Forks(image.zygote) for name, image in images.items() if image.zygote is not None
        }
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
        for forks in self._forks.values():
            forks.close()
        self._addresses.close()
        self._raise()

    async def apply(self, objects: Iterable[Manifest]) -> None:
        """As `kubectl apply`: what is there already is changed to what is given."""
        given = [deepcopy(one) for one in objects]
        for one in given:
            self.objects.put(one)
        for one in given:
            name = one["metadata"]["name"]
            if one["kind"] == "Service" and name not in self._services:
                service = Service(one, self._addresses.of(f"service {name}"))
                self._services[name] = await service.__aenter__()
        for one in given:
            if make := _WORKLOADS.get(one["kind"]):
                name = one["metadata"]["name"]
                if name in self._workloads:
                    self._workloads[name].set(one)
                else:
                    self._workloads[name] = make(one, self._create)
        self._something.set()

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
    def addresses(self) -> list[str]:
        """Of all pods and Services that there may ever be."""
        return self._addresses.every

    def here(self, text: str) -> str:
        """A text with addresses in place of the names of hosts, as pods get it."""
        services = {name: each.address for name, each in self._services.items()}
        hosts = {host: self._addresses.of(pod) for host, pod in self._hosts().items()}
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
            pods = [pod for each in self._workloads.values() for pod in each.pods]
            raise AssertionError("\n".join([str(error), *(pod.story for pod in pods)])) from None

    async def settled(self, *names: str) -> None:
        """Waits until workloads (all, if none is named) have the pods they want, ready."""
        each = [self[name] for name in names or self._workloads]
        what = f"{', '.join(names) or 'all'} as wanted"
        await self.until(lambda: all(one.settled for one in each), what=what)

    # doing

    def scale(self, name: str, replicas: int) -> None:
        """As `kubectl scale`."""
        self[name].replicas = replicas
        self._something.set()

    async def restart(self, name: str) -> None:
        """As `kubectl rollout restart`: the template changes by an annotation."""
        [changed] = [
            deepcopy(one) for one in self.objects.of(*_WORKLOADS) if one["metadata"]["name"] == name
        ]
        changed["spec"].pop("replicas", None)
        annotations = changed["spec"]["template"]["metadata"].setdefault("annotations", {})
        annotations["kubectl.kubernetes.io/restartedAt"] = str(next(self._numbers))
        await self.apply([changed])

    # in the background

    def _hosts(self) -> dict[str, str]:
        sets = [each for each in self._workloads.values() if isinstance(each, StatefulSet)]
        return {host: pod for each in sets for host, pod in each.hosts().items()}

    def _create(self, manifest: Manifest) -> Pod:
        name = manifest["metadata"]["name"]
        stable = name in self._hosts().values()
        address = self._addresses.of(name) if stable else self._addresses.new()
        folder = self._folder / f"{next(self._numbers)}-{name}"
        folder.mkdir(parents=True)
        place = Place(self.objects, self._images, self.claims, self.here, self._forks)
        pod = Pod(Inside(manifest, address, folder, place), self._something.set)
        self._every.append(pod)
        self._begin(pod.run())
        return pod

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
