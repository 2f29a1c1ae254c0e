"""Overlay dev with a gateway and a site: its containers run here as the manifests say.

Arguments, environment, mounted files, probes and grace periods are the manifests'. In place of the
cluster's network each pod has an address of its own in 127.0.0.0/8. The behaviour of Kubernetes
itself is for `make cluster-test`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tests.broker.servers import redis_7
from tests.chaos.history import replayed
from tests.integration.command import TEST_GUARD_S, wait_until
from tests.k8s.conftest import Net, missing
from tests.k8s.manifests import kubectl, kustomized
from tests.k8s.pods import Pod
from tests.k8s.workloads import workloads

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

OVERLAY = """
namespace: fedstream
resources: [K8S/overlays/dev]
components: [K8S/components/gateway, K8S/components/site]
secretGenerator:
  - {name: fedstream-redis, behavior: merge, literals: [gateway=of-the-gateways]}
  - {name: fedstream-site-a, literals: [password=of-a-site], options: {disableNameSuffixHash: true}}
"""
VERSIONS = 5


@contextmanager
def started(folder: Path, net: Net, programs: Path) -> Iterator[Mapping[str, Pod]]:
    """All pods by name, once they are ready."""
    manifests = kustomized(OVERLAY)
    pods = [
        Pod(manifests, workload, number, folder, net)
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


@pytest.mark.skipif(sys.platform != "linux", reason="addresses in 127.0.0.0/8 are Linux's alone")
def test_manifests_start_services_that_train(
    tmp_path: Path, quick_programs: Path, net: Net
) -> None:
    if kubectl() is None or redis_7() is None:
        missing("this needs kubectl, and a redis-server of 7.0 or later with its redis-cli")
    with started(tmp_path, net, quick_programs) as pods:
        url = f"http://{pods['coordinator-0'].address}:8080/v1/runs/demo"

        def about() -> dict[str, Any]:
            with urlopen(url) as answer:
                found: dict[str, Any] = json.load(answer)
                return found

        wait_until(lambda: about()["version"] >= VERSIONS, f"version {VERSIONS}")
        register = about()["register"]
        for those in (pods.keys() - {"redis-0"}, {"redis-0"}):
            for name in those:
                pods[name].process.terminate()
            assert {name: pods[name].ended() for name in those} == dict.fromkeys(those, 0)
    owners = {name: one["owns"] for name, one in register.items() if one["owns"]}
    assert owners == {"site-a/site-a-0": [0], "site-a/site-a-1": [1]}
    journal = pods["updater-0"].folder / "var" / "lib" / "fedstream" / "journal"
    found = replayed(journal)
    assert found.diverged == ""
    assert found.replayed[0] >= VERSIONS
