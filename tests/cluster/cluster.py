"""A namespace of a real cluster, as its operator works with it: by kubectl."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedstream.local.supervisor import is_answering
from tests.k8s.manifests import K8S, Manifest, Manifests, kubectl, rendered
from tests.support import free_port

WORKLOADS = ("Deployment", "StatefulSet")
IMAGE = "fedstream:0.2.0"  # as k8s/images names it
_SMALL = {"coordinator": 1, "trainer": 1, "gateway": 1, "owner": 2}  # replicas on a small machine
# Groups of what is not in every cluster: without it, definitions are made that take anything, as
# make k8s-check compares objects with the real ones (tests/k8s/schemas).
_DEFINED = ("keda.sh", "monitoring.coreos.com", "gateway.networking.k8s.io")
_WITHIN_S = 300.0  # for what takes seconds on an idle machine
_ON_NODE = "/var/lib/fedstream-cluster-test"  # where volumes made by hand are


class Failed(Exception):
    """The cluster did not do what the manifests or the docs say, in one line or more."""


def until(condition: Callable[[], Any], what: str, within_s: float = _WITHIN_S) -> Any:
    """Waits for a condition: what it gave. Raises Failed."""
    end, pause = time.monotonic() + within_s, 0.1
    while not (found := condition()):
        if time.monotonic() > end:
            raise Failed(f"not within {within_s:.0f} s: {what}")
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)
    return found


@dataclass
class Cluster:
    """One namespace. ``small``: lower all requests, so that a small machine has room."""

    namespace: str
    image: str = IMAGE
    small: bool = False
    node: str = ""  # the only one to use, while others are tested

    def kubectl(self, *arguments: str, said: str = "", within_s: float = _WITHIN_S) -> str:
        """What kubectl printed. Raises Failed. ``said``: its standard input."""
        command = [str(kubectl()), "--namespace", self.namespace, *arguments]
        end = time.monotonic() + within_s
        while True:
            try:
                done = subprocess.run(
                    command,
                    check=False,
                    input=said,
                    capture_output=True,
                    text=True,
                    timeout=within_s,
                )
            except subprocess.TimeoutExpired:
                raise Failed(f"kubectl {' '.join(arguments)}: no end in {within_s:.0f} s") from None
            if not done.returncode:
                return done.stdout
            # No connection: the API server has not seen the command, so it is safe to repeat.
            if "Unable to connect to the server" not in done.stderr or time.monotonic() > end:
                raise Failed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
            time.sleep(1)

    # rendering

    def rendered(
        self, *components: str, resource: str = "base", task: str = "", **settings: str
    ) -> Manifests:
        """The base or an overlay with components (names, or paths), settings, and a task's text."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            up = os.path.relpath(K8S, folder / "chosen")  # kustomize takes no absolute paths
            parts = [
                os.path.relpath(
                    Path(one).resolve() if "/" in one else K8S / "components" / one,
                    folder / "chosen",
                )
                for one in components
            ]
            chosen = {
                "kind": "Kustomization",
                "resources": [f"{up}/{resource}"],
                "components": [*parts, f"{up}/images"],
            }
            literals = [f"FEDSTREAM_{key}={value}" for key, value in settings.items()]
            generated = [{"name": "fedstream-settings", "behavior": "merge", "literals": literals}]
            if task:
                generated.append(
                    {"name": "fedstream-task", "behavior": "replace", "files": ["task.py"]}
                )
            # A layer of its own: settings are merged after those of the components.
            own = {
                "kind": "Kustomization",
                "namespace": "fedstream",
                "resources": ["../chosen"],
                "configMapGenerator": generated,
            }
            for layer, content in (("chosen", chosen), ("own", own)):
                (folder / layer).mkdir()
                (folder / layer / "kustomization.yaml").write_text(yaml.safe_dump(content))
            (folder / "own" / "task.py").write_text(task)
            return self.adapted(rendered(folder / "own"))

    def adapted(self, objects: Iterable[Manifest]) -> Manifests:
        """Objects as they are applied here: namespace, image, and requests if it is small."""
        text = yaml.safe_dump_all(list(objects))
        text = re.sub(rf"\b{re.escape(IMAGE)}(?![\w.-])", self.image, text)
        if self.namespace != "fedstream":
            text = re.sub(
                r"namespace: fedstream$", f"namespace: {self.namespace}", text, flags=re.MULTILINE
            )
            text = text.replace("coordinator.fedstream.svc", f"coordinator.{self.namespace}.svc")
        found = list(yaml.safe_load_all(text))
        for one in found:
            if one["kind"] == "Namespace" and one["metadata"]["name"] == "fedstream":
                one["metadata"]["name"] = self.namespace
            if one["kind"] in WORKLOADS and self.node:
                selector = {"kubernetes.io/hostname": self.node}
                one["spec"]["template"]["spec"]["nodeSelector"] = selector
            if one["kind"] in WORKLOADS and self.small:
                replicas = _SMALL.get(one["metadata"]["name"], one["spec"].get("replicas"))
                if "replicas" in one["spec"]:
                    one["spec"]["replicas"] = replicas
                pod = one["spec"]["template"]["spec"]
                for container in (*pod["containers"], *pod.get("initContainers", ())):
                    requests = container.setdefault("resources", {}).setdefault("requests", {})
                    requests.update(cpu="10m", memory="64Mi")
            for claim in (one, *one.get("spec", {}).get("volumeClaimTemplates", ())):
                if claim.get("kind", "PersistentVolumeClaim") == "PersistentVolumeClaim":
                    claim["spec"]["storageClassName"] = ""  # a volume that is made by hand
        return Manifests(found)

    # doing

    def begin(self) -> None:
        """An empty namespace that enforces what k8s/namespace says."""
        self.end()
        self.apply(self.adapted(rendered(K8S / "namespace")))

    def end(self) -> None:
        """Deletes the namespace and its volumes, and waits until they are gone."""
        volumes = self.objects("persistentvolume", f"made-for={self.namespace}")
        gone = ("delete", "namespace", self.namespace, "--ignore-not-found")
        self.kubectl(*gone, "--wait=false")  # from now on nothing is made in it
        self.kubectl("delete", "pod", "--all", "--grace-period=1", "--wait=false")
        self.kubectl(*gone)
        if volumes:
            self.kubectl(
                "delete", "persistentvolume", *(one["metadata"]["name"] for one in volumes)
            )
            self._on_node(f"rm -rf {_ON_NODE}/{self.namespace}")

    def apply(self, objects: Iterable[Manifest]) -> None:
        """As ``kubectl apply``, with volumes for the claims."""
        given = list(objects)
        self.define(given)
        self.volumes(given)
        self.kubectl("apply", "--filename", "-", said=yaml.safe_dump_all(given))

    def define(self, objects: Iterable[Manifest]) -> None:
        """Definitions for the kinds of these objects that this cluster lacks."""
        for one in objects:
            group, _, version = one["apiVersion"].partition("/")
            if group not in _DEFINED:
                continue
            kind, plural = one["kind"], f"{one['kind'].lower()}s"
            schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
            with suppress(Failed):
                self.kubectl("get", "customresourcedefinition", f"{plural}.{group}")
                continue
            definition = {
                "apiVersion": "apiextensions.k8s.io/v1",
                "kind": "CustomResourceDefinition",
                "metadata": {
                    "name": f"{plural}.{group}",
                    "annotations": {
                        "api-approved.kubernetes.io": "unapproved, for a test",
                    },
                },
                "spec": {
                    "group": group,
                    "scope": "Namespaced",
                    "names": {"kind": kind, "plural": plural},
                    "versions": [
                        {
                            "name": version,
                            "served": True,
                            "storage": True,
                            "schema": {"openAPIV3Schema": schema},
                        }
                    ],
                },
            }
            self.kubectl("apply", "--filename", "-", said=yaml.safe_dump(definition))
            self.kubectl("wait", "--for=condition=Established", f"crd/{plural}.{group}")

    def volumes(self, objects: Iterable[Manifest]) -> None:
        """Volumes on the node for the claims of these objects that have none."""
        claims: dict[str, Manifest] = {}
        for one in objects:
            spec, name = one.get("spec", {}), one["metadata"]["name"]
            if one["kind"] == "PersistentVolumeClaim" and not spec.get("volumeName"):
                claims[name] = spec
            for template in spec.get("volumeClaimTemplates", ()):
                first = spec.get("ordinals", {}).get("start", 0)
                for number in range(first, first + max(spec.get("replicas", 1), 3)):
                    claims[f"{template['metadata']['name']}-{name}-{number}"] = template["spec"]
        there = {one["metadata"]["name"] for one in self.objects("persistentvolume")}
        wanted = {n: spec for n, spec in claims.items() if f"{self.namespace}-{n}" not in there}
        if not wanted:
            return
        folder = f"{_ON_NODE}/{self.namespace}"
        self._on_node("".join(f"mkdir -p -m 777 {folder}/{name};" for name in wanted))
        made = [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {
                    "name": f"{self.namespace}-{name}",
                    "labels": {"made-for": self.namespace},
                },
                "spec": {
                    "capacity": spec["resources"]["requests"],
                    "accessModes": spec["accessModes"],
                    "storageClassName": "",
                    "persistentVolumeReclaimPolicy": "Retain",
                    "claimRef": {"namespace": self.namespace, "name": name},
                    "hostPath": {"path": f"{folder}/{name}"},
                },
            }
            for name, spec in wanted.items()
        ]
        self.kubectl("apply", "--filename", "-", said=yaml.safe_dump_all(made))

    def _on_node(self, script: str) -> None:
        """Runs a script as root, with the node's folder for volumes."""
        name = f"volumes-{time.monotonic_ns()}"
        spec = {
            "containers": [
                {
                    "name": name,
                    "image": self.image,
                    "command": ["sh", "-ec", script],
                    "securityContext": {"runAsUser": 0},
                    "volumeMounts": [{"name": "node", "mountPath": _ON_NODE}],
                }
            ],
            "volumes": [
                {"name": "node", "hostPath": {"path": _ON_NODE, "type": "DirectoryOrCreate"}}
            ],
        }
        self.kubectl(
            "--namespace",
            "default",
            "run",
            name,
            "--image",
            self.image,
            "--restart",
            "Never",
            "--rm",
            "--attach",
            "--quiet",
            "--pod-running-timeout=3m",
            "--overrides",
            json.dumps({"spec": spec}),
        )

    def ready(self, *names: str, within_s: float = _WITHIN_S) -> None:
        """Waits until workloads ('deployment/trainer'; all, if none is named) are rolled out."""
        for name in names or self._workloads():
            try:
                self.kubectl(
                    "rollout", "status", name, f"--timeout={within_s:.0f}s", within_s=within_s + 30
                )
            except Failed as error:
                raise Failed(f"{error}\n{self.story()}") from None

    def _workloads(self) -> list[str]:
        return self.kubectl("get", "deployment,statefulset", "--output", "name").split()

    def scale(self, name: str, replicas: int) -> None:
        """As ``kubectl scale``; ``name`` as 'deployment/trainer'."""
        self.kubectl("scale", name, f"--replicas={replicas}")

    # looking

    def objects(self, kind: str, labels: str = "") -> list[Manifest]:
        """All of a kind."""
        said = self.kubectl("get", kind, "--selector", labels, "--output", "json")
        found: list[Manifest] = json.loads(said)["items"]
        return found

    def pods(self, component: str = "") -> list[Manifest]:
        """fedstream's, or of one component; without those that are ending."""
        labels = f"app.kubernetes.io/component={component}" if component else ""
        return [
            pod for pod in self.objects("pod", labels) if "deletionTimestamp" not in pod["metadata"]
        ]

    def secret(self, name: str, key: str) -> str:
        """A Secret's value."""
        template = f"{{{{index .data {json.dumps(key)} | base64decode}}}}"
        return self.kubectl("get", "secret", name, "--output", f"go-template={template}")

    def restarts(self) -> dict[str, tuple[int, str]]:
        """Containers that ended by themselves: how often, and how the last time."""
        found = {}
        for pod in self.pods():
            for one in _containers(pod):
                if one["restartCount"]:
                    last = one.get("lastState", {}).get("terminated", {})
                    how = f"exit code {last.get('exitCode')}, {last.get('reason')}"
                    found[f"{pod['metadata']['name']}/{one['name']}"] = (one["restartCount"], how)
        return found

    def story(self) -> str:
        """What pods that can't work say."""
        lines = []
        for pod in self.pods():
            name, states = pod["metadata"]["name"], _containers(pod)
            if all(one["ready"] for one in states) and states:
                continue
            waiting = [one["state"] for one in states]
            lines.append(f"{name}: {pod['status']['phase']} {json.dumps(waiting)[:300]}")
            with suppress(Failed):
                said = self.kubectl("logs", name, "--all-containers", "--tail", "3")
                lines += [f"  {line[:300]}" for line in said.splitlines()]
        return "\n".join(lines)

    @contextmanager
    def forward(self, target: str, port: int) -> Iterator[int]:
        """``kubectl port-forward``: the local port, as long as the block lasts."""
        local = free_port()
        command = [str(kubectl()), "--namespace", self.namespace, "port-forward", target]
        process = subprocess.Popen(
            [*command, f"{local}:{port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

        def forwards() -> bool:
            if process.poll() is not None:
                said = process.stderr.read().strip() if process.stderr else ""
                raise Failed(f"kubectl port-forward {target}: {said}")
            return is_answering("127.0.0.1", local)

        try:
            until(forwards, f"port-forward {target}", 30)
            yield local
        finally:
            process.terminate()
            process.wait()


def _containers(pod: Manifest) -> list[Manifest]:
    """The states of a pod's containers, those that only begin it first."""
    status = pod["status"]
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def reached() -> str:
    """Why there is no cluster to test on; '' if there is one."""
    if not os.environ.get("KUBECONFIG"):
        return "KUBECONFIG is not set: it says which cluster to use"
    if kubectl() is None:
        return "kubectl is not on PATH"
    if not Path(os.environ["KUBECONFIG"].split(os.pathsep)[0]).exists():
        return f"KUBECONFIG={os.environ['KUBECONFIG']}: there is no such file"
    try:
        Cluster("default").kubectl("get", "namespace", "default", within_s=30)
    except Failed as error:
        raise SystemExit(f"cluster-test: {error}") from None
    return ""


def main() -> None:
    """Adapts what is rendered: the docs' ``kubectl apply -k`` goes through it here."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--node", default="")
    cluster = Cluster(**vars(parser.parse_args()))
    objects = cluster.adapted(yaml.safe_load_all(sys.stdin))
    cluster.define(objects)
    cluster.volumes(objects)
    yaml.safe_dump_all(list(objects), sys.stdout)


if __name__ == "__main__":
    main()
