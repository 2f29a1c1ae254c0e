"""A pod's inside: volumes, and for each container its environment, mounts and processes."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.cluster import sandbox
from tests.k8s.cluster.image import Image, name_of
from tests.k8s.cluster.manifests import Manifest, Manifests, Unsupported, check, texts

Spec = Mapping[str, Any]

# What is done here; what of the rest has nothing to do on one machine.
_POD = {
    "containers", "initContainers", "volumes", "restartPolicy", "terminationGracePeriodSeconds",
    "enableServiceLinks",
}  # fmt: skip
_POD_ELSEWHERE = {
    "securityContext", "serviceAccountName", "automountServiceAccountToken", "affinity",
    "topologySpreadConstraints", "nodeSelector", "tolerations", "priorityClassName",
    "runtimeClassName",
}  # fmt: skip
_CONTAINER = {
    "name", "image", "command", "args", "workingDir", "env", "envFrom", "ports", "resources",
    "volumeMounts", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle",
    "securityContext", "imagePullPolicy",
}  # fmt: skip
_MOUNT = {"name", "mountPath", "subPath", "readOnly"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TMP = "/tmp"  # noqa: S108  (in the container)
_TOLD = 40  # last lines of a log
_REFERENCE = re.compile(r"\$\$|\$\(([\w.-]+)\)")
_UNITS = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


class CannotStart(Exception):
    """A container's configuration is wrong, or not there (yet): what kubectl shows as waiting."""


@dataclass(frozen=True)
class Place:
    """What a pod needs of the cluster that it is in."""

    objects: Manifests
    images: Mapping[str, Image]
    links: Mapping[str, str]  # environment that tells of the Services
    claims: Path  # folder of the persistent volumes
    translate: Callable[[str], str]  # names of hosts into addresses


class Inside:
    """A pod as its containers see it. ``spec`` is the pod's."""

    def __init__(self, manifest: Manifest, address: str, folder: Path, place: Place) -> None:
        self.meta: Manifest = manifest["metadata"]
        self.spec: Spec = manifest["spec"]
        self.address = address
        self.folder = folder
        self.place = place
        self._volumes = {one["name"]: one for one in self.spec.get("volumes", ())}
        self.inits = [Container(self, one) for one in self.spec.get("initContainers", ())]
        self.containers = [Container(self, one) for one in self.spec["containers"]]
        check(f"pod {self.meta['name']}", self.spec, _POD | _POD_ELSEWHERE)

    @property
    def claims(self) -> list[str]:
        """The persistent volume claims that it mounts."""
        sources = [one.get("persistentVolumeClaim") for one in self._volumes.values()]
        return [source["claimName"] for source in sources if source]

    def volume(self, name: str) -> Path | dict[str, str]:
        """A volume's folder, or the files of one that is made of an object. Raises CannotStart."""
        folder: Path
        volume = self._volumes.get(name)
        match volume:
            case None:
                raise CannotStart(f"it mounts volume {name!r}, which the pod does not have")
            case {"emptyDir": _}:
                folder = self.folder / "volumes" / name
                folder.mkdir(parents=True, exist_ok=True)
                return folder
            case {"persistentVolumeClaim": {"claimName": claim}}:
                if self.place.objects.find("PersistentVolumeClaim", claim) is None:
                    raise CannotStart(f"persistentvolumeclaim {claim!r} not found")
                folder = self.place.claims / claim
                folder.mkdir(parents=True, exist_ok=True)
                return folder
            case {"projected": {"sources": sources}}:
                files: dict[str, str] = {}
                for source in sources:
                    files |= self._files(name, source)
                return files
            case _:
                return self._files(name, volume)

    def _files(self, volume: str, source: Spec) -> dict[str, str]:
        match source:
            case {"configMap": about}:
                kind, name = "ConfigMap", about["name"]
            case {"secret": about}:
                kind, name = "Secret", about.get("secretName") or about["name"]
            case _:
                raise Unsupported(f"volume {volume} of kind {sorted(source.keys() - {'name'})}")
        found = self.place.objects.find(kind, name)
        if found is None:
            if about.get("optional"):
                return {}
            raise CannotStart(f"{kind.lower()} {name!r} not found")
        files = texts(found)
        if "items" not in about:
            return files
        for item in about["items"]:
            if item["key"] not in files:
                raise CannotStart(f"{kind.lower()} {name!r} has no key {item['key']!r}")
        return {item["path"]: files[item["key"]] for item in about["items"]}

    def field(self, path: str) -> str:
        """What a fieldRef says."""
        known: dict[str, str] = {
            "metadata.name": self.meta["name"],
            "metadata.namespace": self.place.objects.namespace,
            "metadata.uid": self.folder.name,
            "spec.nodeName": "this-machine",
            "status.podIP": self.address,
            "status.hostIP": self.address,
        }
        if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return str((self.meta.get(keyed[1]) or {}).get(keyed[2], ""))
        if path not in known:
            raise Unsupported(f"fieldRef {path}")
        return known[path]


@dataclass(eq=False)
class Running:
    """One process of a container, the leader of a group of its own."""

    process: Process
    killed: bool = field(default=False)  # by whoever tests, or after its grace

    @property
    def ended(self) -> bool:
        """Whether it is gone."""
        return self.process.returncode is not None

    @property
    def most_memory(self) -> int:
        """What it ever had in memory, in bytes; 0 if it is gone."""
        with suppress(FileNotFoundError, ProcessLookupError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            if found := re.search(r"VmHWM:\s*(\d+) kB", status):
                return int(found[1]) << 10
        return 0

    def signal(self, number: signal.Signals) -> None:
        """To the process alone, as to a container's first; SIGKILL takes all with it."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                self.killed |= not self.ended
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)


class Container:
    """One container: what it is started with, and its log."""

    def __init__(self, pod: Inside, spec: Spec) -> None:
        self._pod = pod
        self.spec = spec
        self.name: str = spec["name"]
        self.root = pod.folder / self.name
        self.log = pod.folder / f"{self.name}.log"
        image = name_of(spec["image"])
        if image not in pod.place.images:
            raise Unsupported(f"container {self.name} of image {image!r}: no such image here")
        self._image = pod.place.images[image]
        check(f"container {self.name}", spec, _CONTAINER)
        check(f"container {self.name}: lifecycle", spec.get("lifecycle", {}), ["preStop"])
        for mount in spec.get("volumeMounts", ()):
            check(f"container {self.name}: a mount", mount, _MOUNT)
        self._path = self._paths()
        self._writable: list[Path] = []  # once it is mounted

    @property
    def memory_limit(self) -> float:
        """Bytes."""
        limits = self.spec.get("resources", {}).get("limits", {})
        return quantity(limits["memory"]) if "memory" in limits else math.inf

    @property
    def last_words(self) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TOLD:])

    def port(self, name: int | str) -> int | None:
        """The number of a port; of one by name if the container names it so."""
        if isinstance(name, int):
            return name
        for port in self.spec.get("ports", ()):
            if port.get("name") == name:
                return int(port["containerPort"])
        return None

    # mounts

    def _paths(self) -> Callable[[str], str]:
        """What puts the folders of this machine in place of the mount paths."""
        mounts = [one["mountPath"].rstrip("/") for one in self.spec.get("volumeMounts", ())]
        if not mounts:
            return str
        longest_first = sorted(map(re.escape, mounts), key=len, reverse=True)
        mounted = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first)})(?!\.?[\w-])")
        return lambda text: mounted.sub(lambda found: f"{self.root}{found[0]}", text)

    def here(self, text: str) -> str:
        """A text of the manifest in terms of this machine: paths and names of hosts."""
        return self._path(self._pod.place.translate(text))

    def _mount(self) -> None:
        """Lays out the container's folder. Raises CannotStart."""
        self._image.install(self.root / "bin", self._pod.address)
        self._writable = []
        for mount in sorted(self.spec.get("volumeMounts", ()), key=lambda one: one["mountPath"]):
            there = self.root / mount["mountPath"].strip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            volume = self._pod.volume(mount["name"])
            sub = mount.get("subPath", "")
            if isinstance(volume, Path):
                folder = volume / sub
                folder.mkdir(parents=True, exist_ok=True)
                if not there.is_symlink():
                    there.symlink_to(folder)
                if not mount.get("readOnly"):
                    self._writable.append(folder)
            elif sub:
                if sub not in volume:
                    raise CannotStart(f"volume {mount['name']!r} has no file {sub!r}")
                self._write(there, volume[sub])
            else:
                there.mkdir(exist_ok=True)
                for name, text in volume.items():
                    self._write(there / name, text)

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.here(text))

    # environment

    def environment(self) -> dict[str, str]:
        """What the container gets. Raises CannotStart for what is not there."""
        raw = dict(self._pod.place.links) if self._pod.spec.get("enableServiceLinks", True) else {}
        for source in self.spec.get("envFrom", ()):
            raw |= self._all_of(source)
        for one in self.spec.get("env", ()):
            if "valueFrom" not in one:
                raw[one["name"]] = expanded(one.get("value", ""), raw)
            elif (value := self._value_from(one["valueFrom"])) is not None:
                raw[one["name"]] = value
        home = {"PATH": f"{self.root / 'bin'}:{os.defpath}", "HOME": "/", "LANG": "C.UTF-8"}
        if (temporary := self._path(_TMP)) != _TMP:  # it is mounted
            home["TMPDIR"] = temporary
        given = {name: self.here(value) for name, value in raw.items()}
        return home | given | self._image.environment_at(self._pod.address)

    def _all_of(self, source: Spec) -> dict[str, str]:
        kind, about = (
            ("ConfigMap", source["configMapRef"])
            if "configMapRef" in source
            else ("Secret", source["secretRef"])
        )
        found = self._pod.place.objects.find(kind, about["name"])
        if found is None:
            if about.get("optional"):
                return {}
            raise CannotStart(f"{kind.lower()} {about['name']!r} not found")
        prefix = source.get("prefix", "")
        return {prefix + name: value for name, value in texts(found).items()}

    def _value_from(self, source: Spec) -> str | None:
        match source:
            case {"fieldRef": {"fieldPath": path}}:
                return self._pod.field(path)
            case {"resourceFieldRef": about}:
                return self._resource(about)
            case {"configMapKeyRef": about}:
                kind = "ConfigMap"
            case {"secretKeyRef": about}:
                kind = "Secret"
            case _:
                raise Unsupported(f"container {self.name}: valueFrom {sorted(source)}")
        found = self._pod.place.objects.find(kind, about["name"])
        value = None if found is None else texts(found).get(about["key"])
        if value is None and not about.get("optional"):
            what = f"{kind.lower()} {about['name']!r}"
            raise CannotStart(
                f"{what} not found" if found is None else f"{what} has no key {about['key']!r}"
            )
        return value

    def _resource(self, about: Spec) -> str:
        which, _, name = about["resource"].partition(".")
        amount = self.spec.get("resources", {}).get(which, {}).get(name)
        if amount is None:
            raise Unsupported(f"container {self.name}: {about['resource']} is not given")
        return str(math.ceil(quantity(amount) / (quantity(about.get("divisor", 0)) or 1)))

    # processes

    def command(self) -> list[str]:
        """What it runs: the manifest's command, or the image's, and the arguments."""
        environment = self.environment()
        words = [*(self.spec.get("command") or self._image.entrypoint), *self.spec.get("args", ())]
        if not words:
            raise Unsupported(f"container {self.name}: neither a command nor an entry point")
        return [self.here(expanded(word, environment)) for word in words]

    async def start(self) -> Running:
        """Its process. Raises CannotStart."""
        self._mount()
        return await self._spawned(self.command(), self.log)

    async def execute(self, words: Sequence[str]) -> Running:
        """Another process in it, as `kubectl exec` has it: a probe, a hook. Raises CannotStart."""
        command = [self.here(word) for word in words]
        return await self._spawned(command, self.log.with_suffix(".exec.log"))

    async def _spawned(self, command: Sequence[str], log: Path) -> Running:
        environment = self.environment()
        program = _found(command[0], environment["PATH"])
        if program is None:
            raise CannotStart(f"exec: {command[0]!r}: executable file not found in $PATH")
        working = self.spec.get("workingDir")
        with ExitStack() as stack:
            first = [_dies_with_us()]
            if self.read_only:
                folders = [*self._writable, Path("/dev")]
                first.append(stack.enter_context(sandbox.read_only_but(folders)))
            process = await asyncio.create_subprocess_exec(
                program, *command[1:], stdin=DEVNULL, stderr=STDOUT, env=environment,
                stdout=stack.enter_context(log.open("ab")),
                cwd=self.here(working) if working else self.root, start_new_session=True,
                preexec_fn=lambda: [step() for step in first],
            )  # fmt: skip
        return Running(process)

    @property
    def read_only(self) -> bool:
        """Whether all but its mounts is read-only, as far as the kernel can hold it to that."""
        wanted = self.spec.get("securityContext", {}).get("readOnlyRootFilesystem", False)
        return bool(wanted) and sandbox.available() > 0


def expanded(text: str, environment: Mapping[str, str]) -> str:
    """``$(NAME)`` of what is known; ``$$`` is a dollar; what is not known stays."""
    return _REFERENCE.sub(
        lambda found: environment.get(found[1], found[0]) if found[1] else "$", text
    )


def quantity(text: str | int) -> float:
    """Kubernetes' numbers: 500m, 1.5, 2Gi."""
    found = re.fullmatch(r"([\d.]+)(\w*)", str(text))
    if found is None or found[2] not in _UNITS:
        raise Unsupported(f"the quantity {text}")
    return float(found[1]) * _UNITS[found[2]]


def _found(name: str, path: str) -> str | None:
    if "/" in name:
        return name
    for folder in path.split(os.pathsep):
        if os.access(there := f"{folder}/{name}", os.X_OK):
            return there
    return None


def _dies_with_us() -> Callable[[], None]:
    if sys.platform != "linux":
        raise RuntimeError("addresses of the whole of 127.0.0.0/8, and this, are Linux's alone")
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec it would not be safe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
