"""A pod's inside: volumes, and for each container its environment, mounts and processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.k8s.cluster import sandbox
from tests.k8s.cluster.forks import Forks, Process
from tests.k8s.cluster.image import Image, name_of
from tests.k8s.cluster.manifests import Manifest, Manifests, Unsupported, texts
from tests.k8s.cluster.network import client

Spec = Mapping[str, Any]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_TMP = "/tmp"  # noqa: S108  (in the container)
_TOLD = 40  # last lines of a log
_REFERENCE = re.compile(r"\$\((\w+)\)")
_UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class Place:
    """What a pod needs of the cluster that it is in."""

    objects: Manifests
    images: Mapping[str, Image]
    claims: Path  # folder of the persistent volumes
    translate: Callable[[str], str]  # names of hosts into addresses
    forks: Mapping[str, Forks]  # of images that have a zygote


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

    def volume(self, name: str) -> Path | dict[str, str]:
        """A volume's folder, or the files of one that is made of an object. Raises KeyError."""
        volume = self._volumes[name]
        match volume:
            case {"emptyDir": _}:
                return self.folder / "volumes" / name
            case {"persistentVolumeClaim": {"claimName": claim}}:
                return self.place.claims / str(claim)
            case {"projected": {"sources": sources}}:
                return {path: text for one in sources for path, text in self._files(one).items()}
            case _:
                return self._files(volume)

    def _files(self, source: Spec) -> dict[str, str]:
        """The files of a ConfigMap or Secret; none if it is optional and not there."""
        match source:
            case {"configMap": {"name": name} as about}:
                kind = "ConfigMap"
            case {"secret": {"secretName": name} as about} | {"secret": {"name": name} as about}:
                kind = "Secret"
            case _:
                raise Unsupported(f"volume of kind {sorted(source)}")
        if about.get("optional") and self.place.objects.find(kind, name) is None:
            return {}
        files = texts(self.place.objects.get(kind, name))
        if "items" not in about:
            return files
        return {
            item["path"]: files[item["key"]] for item in about["items"]
            if item["key"] in files or not about.get("optional")
        }  # fmt: skip

    def field(self, path: str) -> str:
        """What a fieldRef says."""
        if labelled := re.fullmatch(r"metadata\.labels\['(.+)'\]", path):
            return str(self.meta["labels"][labelled[1]])
        return {"metadata.name": str(self.meta["name"]), "status.podIP": self.address}[path]


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
        self._image = pod.place.images[image]
        self._forks = pod.place.forks.get(image)
        self._path = self._paths()
        self._writable: list[Path] = []  # once it is mounted

    @property
    def memory_limit(self) -> float:
        """Bytes."""
        found = re.fullmatch(r"(\d+)(\w*)", self.spec["resources"]["limits"]["memory"])
        assert found
        return int(found[1]) * _UNITS[found[2]]

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
        mounts = {one["mountPath"].rstrip("/") for one in self.spec.get("volumeMounts", ())}
        if not mounts:
            return str
        mounts |= {"/etc/redis-passwords"}  # which has mounts in it
        longest_first = sorted(map(re.escape, mounts), key=len, reverse=True)
        mounted = re.compile(rf"(?<![\w./-])(?:{'|'.join(longest_first)})(?!\.?[\w-])")
        return lambda text: mounted.sub(lambda found: f"{self.root}{found[0]}", text)

    def here(self, text: str) -> str:
        """A text of the manifest in terms of this machine: paths and names of hosts."""
        return self._path(self._pod.place.translate(text))

    def _mount(self) -> None:
        """Lays out the container's folder."""
        self._image.install(self.root / "bin", self._pod.address)
        self._writable = []
        for mount in sorted(self.spec.get("volumeMounts", ()), key=lambda one: one["mountPath"]):
            there = self.root / mount["mountPath"].strip("/")
            there.parent.mkdir(parents=True, exist_ok=True)
            volume = self._pod.volume(mount["name"])
            if isinstance(volume, Path):
                volume.mkdir(parents=True, exist_ok=True)
                if not there.is_symlink():
                    there.symlink_to(volume)
                if not mount.get("readOnly"):
                    self._writable.append(volume)
            elif sub := mount.get("subPath"):
                there.write_text(self.here(volume[sub]))
            else:
                there.mkdir(exist_ok=True)
                for name, text in volume.items():
                    (there / name).write_text(self.here(text))

    # environment

    def environment(self) -> dict[str, str]:
        """What the container gets. Raises KeyError for what is not there."""
        objects, raw = self._pod.place.objects, dict[str, str]()
        for source in self.spec.get("envFrom", ()):
            raw |= texts(objects.get("ConfigMap", source["configMapRef"]["name"]))
        for one in self.spec.get("env", ()):
            match one.get("valueFrom"):
                case None:
                    raw[one["name"]] = _REFERENCE.sub(lambda name: raw[name[1]], one["value"])
                case {"fieldRef": {"fieldPath": path}}:
                    raw[one["name"]] = self._pod.field(path)
                case {"secretKeyRef": {"name": secret, "key": key} as about}:
                    keys = texts(objects.get("Secret", secret))
                    if key in keys or not about.get("optional"):
                        raw[one["name"]] = keys[key]
                case other:
                    raise Unsupported(f"container {self.name}: valueFrom {other}")
        home = {"PATH": f"{self.root / 'bin'}:{os.defpath}", "HOME": "/", "LANG": "C.UTF-8"}
        if (temporary := self._path(_TMP)) != _TMP:  # it is mounted
            home["TMPDIR"] = temporary
        given = {name: self.here(value) for name, value in raw.items()}
        return home | given | self._image.environment_at(self._pod.address)

    # processes

    async def start(self) -> Running:
        """Its process."""
        self._mount()
        words = [*(self.spec.get("command") or self._image.entrypoint), *self.spec.get("args", ())]
        if self._forks is None or not self._forks.takes(words):
            return await self.execute(words, self.log)
        environment = self.environment()
        assert _found(words[0], environment["PATH"])
        return Running(
            await self._forks.start(
                [self.here(word) for word in words], environment,
                log=self.log, folder=self.root, writable=self._restriction,
            )
        )  # fmt: skip

    @property
    def _restriction(self) -> Sequence[Path] | None:
        """The only folders that its processes may write in; None: all."""
        read_only = self.spec.get("securityContext", {}).get("readOnlyRootFilesystem")
        return [*self._writable, Path("/dev")] if read_only and sandbox.available() else None

    async def execute(self, words: Sequence[str], log: Path | None = None) -> Running:
        """Another process in it, as `kubectl exec` has it: a probe, a hook."""
        command, environment = [self.here(word) for word in words], self.environment()
        with ExitStack() as stack:
            first = [_dies_with_us()]
            if (folders := self._restriction) is not None:
                first.append(stack.enter_context(sandbox.read_only_but(folders)))
            out = stack.enter_context((log or self.log.with_suffix(".exec.log")).open("ab"))
            process = await asyncio.create_subprocess_exec(
                _found(command[0], environment["PATH"]), *command[1:],
                stdin=DEVNULL, stdout=out, stderr=STDOUT, env=environment,
                cwd=self.root, start_new_session=True,
                preexec_fn=lambda: [step() for step in first],
            )  # fmt: skip
        return Running(process)

    async def ask(self, how: Spec) -> bool:
        """One probe or hook: whether it is answered well. Raises what goes wrong on the way."""
        if "exec" in how:
            starting = asyncio.ensure_future(self.execute(how["exec"]["command"]))
            try:
                running = await asyncio.shield(starting)
                return await running.process.wait() == 0
            finally:  # nothing stays behind, also where nobody waits for the answer any more
                await _to_its_end(_killed(starting))
        port = self.port(how["httpGet"]["port"])
        url = f"http://{self._pod.address}:{port}{how['httpGet']['path']}"
        async with client() as session, session.get(url, allow_redirects=False) as answer:
            return 200 <= answer.status < 400


async def _killed(starting: Awaitable[Running]) -> None:
    running = await starting
    running.signal(signal.SIGKILL)
    await running.process.wait()


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Waits for it however often that is cancelled: by a probe's time limit, then by the end."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _found(name: str, path: str) -> str:
    for folder in path.split(os.pathsep):
        if os.access(there := f"{folder}/{name}", os.X_OK):
            return there
    raise FileNotFoundError(f"{name}: executable file not found in $PATH")


def _dies_with_us() -> Callable[[], None]:
    if sys.platform != "linux":
        raise RuntimeError("addresses of the whole of 127.0.0.0/8, and this, are Linux's alone")
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec it would not be safe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
