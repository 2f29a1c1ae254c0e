"""The cluster tells what it must not miss of a pod: test_pipeline.py relies on it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.k8s.cluster import Cluster, Manifest, sandbox
from tests.k8s.cluster.image import Image, Program

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="addresses in 127.0.0.0/8"),
]

PYTHON = Image({"python": Program(Path(sys.executable), ["-I", "-S"])}, entrypoint=["python"])
BEGIN = "import os, signal, sys; os.mkdir('/state/ready'); "
PROBE = {"exec": {"command": ["test", "-d", "/state/ready"]}, "periodSeconds": 0.1}
FAILS = {"exec": {"command": ["false"]}, "periodSeconds": 0.1, "failureThreshold": 2}


def deployment(code: str, memory: str, **container: object) -> Manifest:
    """One pod that runs Python."""
    labels = {"app": "one"}
    spec = {
        "name": "one", "image": "registry.example/python:1", "args": ["-c", BEGIN + code],
        "readinessProbe": {**PROBE, "timeoutSeconds": 30},
        "resources": {"limits": {"memory": memory}},
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "state", "mountPath": "/state"}], **container,
    }  # fmt: skip
    pod = {
        "terminationGracePeriodSeconds": 2, "containers": [spec],
        "volumes": [{"name": "state", "emptyDir": {}}],
    }  # fmt: skip
    return {
        "kind": "Deployment", "metadata": {"name": "one"},
        "spec": {
            "replicas": 1, "selector": {"matchLabels": labels}, "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }  # fmt: skip


WRITES = """
try:
    open('here', 'w')
except PermissionError:
    sys.exit(7)
"""


@pytest.mark.parametrize(
    ("one", "finding"),
    [
        (deployment("sys.exit(4)", "1Gi"), "ended with exit code 4"),
        (deployment(f"exec({json.dumps(WRITES)})", "1Gi"), "ended with exit code 7"),
        (deployment("signal.pause()", "1Gi", livenessProbe=FAILS), "failed its liveness probe"),
        (deployment("signal.pause()", "1Mi"), "took more than its limit"),
        (
            deployment("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile 1: signal.pause()",
                       "1Gi"),
            "was still there when its grace was over",
        ),
        (
            deployment("signal.pause()", "1Gi", lifecycle={"preStop": FAILS}),
            "its preStop hook failed",
        ),
    ],
    ids=["ends", "writes", "hangs", "takes memory", "stays", "hook"],
)  # fmt: skip
async def test_unexpected_failures_are_found(tmp_path: Path, one: Manifest, finding: str) -> None:
    if "code 7" in finding and not sandbox.available():
        pytest.skip("the kernel has no Landlock")
    async with Cluster(tmp_path, {"python": PYTHON}) as cluster:
        await cluster.apply([one])
        pods = await cluster.until(lambda: cluster["one"].pods, what="a pod")
        if "code" in finding or "probe" in finding:
            await cluster.until(lambda: pods[0].findings, what=finding)
        else:
            await cluster.settled()
        cluster.scale("one", 0)
        await cluster.settled()
    assert finding in cluster.findings[0]


async def test_killed_process_is_restarted_without_a_finding(tmp_path: Path) -> None:
    code = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nwhile 1: signal.pause()"
    one = deployment(code, "1Gi")
    async with Cluster(tmp_path, {"python": PYTHON}) as cluster:
        await cluster.apply([one])
        await cluster.settled()
        [pod] = cluster["one"].pods
        (pod.inside.folder / "volumes" / "state" / "ready").rmdir()
        pod.kill()
        await cluster.until(lambda: pod.restarts == 1, what="it was started again")
        await cluster.settled()
        assert cluster["one"].pods == [pod]
        cluster.scale("one", 0)
        await cluster.settled()
    assert cluster.findings == []
