"""Pods of the manifests, run here: arguments, environment and files are the manifests'."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from fedstream.runtime.process import death_with_parent
from tests.broker.servers import redis_7
from tests.integration.command import TEST_GUARD_S, wait_until
from tests.k8s.conftest import Net
from tests.k8s.manifests import Manifest, Manifests, texts
from tests.k8s.workloads import Workload, environment, sources, workloads

# Services that pods reach by name, and the pods behind them.
_BEHIND = {"redis": "redis-0", "helper.fedstream-helper.svc": "helper-0"}


class Pod:
    """A pod's only container as a process; ``folder`` stands for its file system."""

    def __init__(
        self, manifests: Manifests, workload: Workload, number: int, folder: Path, net: Net
    ) -> None:
        self.name = f"{workload.manifest['metadata']['name']}-{number}"
        self.address, self.folder = net(self.name), folder / self.name
        self.workload, [self.container] = workload, workload.containers
        self._manifests = manifests
        self._services = {name: net(behind) for name, behind in _BEHIND.items()}
        self._fields = {
            "metadata.name": self.name,
            "status.podIP": self.address,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(number),
        }
        mounts = [mount for one in workload.all_containers for mount in one["volumeMounts"]]
        roots = {mount["mountPath"].split("/")[1] for mount in mounts}  # such as etc
        self._paths = re.compile(rf"(?<![\w/])(/({'|'.join(roots)}))(?![\w-])")
        for mount in mounts:
            self._mount(mount)

    def _mount(self, mount: Manifest) -> None:
        there = Path(self._here(mount["mountPath"]))
        files: dict[str, str] = {}
        for kind, about in sources(self.workload.volumes[mount["name"]]):
            found = self._manifests.find(kind, about["name"])
            assert found or about.get("optional"), f"{self.name}: no {kind} {about['name']}"
            held = texts(found) if found else {}
            every = [{"key": key, "path": key} for key in held]
            for item in about.get("items", every):
                if item["key"] in held or not about.get("optional"):
                    files[item["path"]] = self._here(held[item["key"]])
        if "subPath" in mount:
            there.parent.mkdir(parents=True, exist_ok=True)
            there.write_text(files[mount["subPath"]])
            return
        there.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (there / name).write_text(text)

    def _here(self, text: str) -> str:
        """A text with the paths of mounts, and Services' names, replaced by this machine's."""
        text = self._paths.sub(rf"{self.folder}\1", text)
        for name, address in self._services.items():
            text = text.replace(f"//{name}:", f"//{address}:")
        return text

    def _begin(
        self, container: Manifest, words: Sequence[str], programs: Path
    ) -> subprocess.Popen[bytes]:
        given = environment(self._manifests, container, self._fields)
        environ = {name: self._here(value) for name, value in given.items()}
        path = {"PATH": f"{programs}:{os.environ['PATH']}", "FEDSTREAM_HTTP__HOST": self.address}
        program, *arguments = map(self._here, words)
        if program == "redis-server":
            program, arguments = str(redis_7()), [*arguments, "--bind", self.address]
        elif program == "fedstream":
            program = str(programs / program)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [program, *arguments],
                env=path | environ,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )

    def start(self, programs: Path) -> None:
        """Runs the init containers to their end, then starts the container."""
        self._programs = programs
        for init in self.workload.pod.get("initContainers", ()):
            words = [*init["command"], *init["args"]]
            assert self._begin(init, words, programs).wait(TEST_GUARD_S) == 0, self.log
        words = [*self.container["command"], *self.container.get("args", ())]
        self.process = self._begin(self.container, words, programs)

    @property
    def log(self) -> str:
        """Output of all its containers."""
        return f"{self.name}: " + (self.folder / "log").read_text()

    def passes(self, name: str) -> bool:
        """Whether a probe succeeds. AssertionError once the process has ended."""
        assert self.process.poll() is None, self.log
        probe = self.container[name]
        if "exec" in probe:
            return self._begin(self.container, probe["exec"]["command"], self._programs).wait() == 0
        port = self.workload.ports[probe["httpGet"]["port"]]
        with suppress(OSError), urlopen(f"http://{self.address}:{port}{probe['httpGet']['path']}"):
            return True
        return False

    def ended(self) -> int:
        """Exit code of the container. TimeoutExpired after the grace period."""
        return self.process.wait(self.workload.pod["terminationGracePeriodSeconds"])

    def run(self) -> dict[str, Any]:
        """What a coordinator says of the run."""
        with urlopen(f"http://{self.address}:8080/v1/runs/demo") as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@contextmanager
def started(
    folder: Path, net: Net, programs: Path, *renderings: Manifests
) -> Iterator[Mapping[str, Pod]]:
    """All pods by name, once they are ready."""
    pods = [
        Pod(manifests, workload, number, folder, net)
        for manifests in renderings
        for workload in workloads(manifests)
        for number in range(workload.spec.get("replicas", 1))
    ]
    try:
        for pod in pods:
            pod.start(programs)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for pod in pods:
                wait_until(lambda: pod.passes(probe), f"{probe} of {pod.name}")  # noqa: B023
        yield {pod.name: pod for pod in pods}
    finally:
        for pod in pods:
            if hasattr(pod, "process"):
                pod.process.kill()
