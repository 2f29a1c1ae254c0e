"""Overlay dev with a gateway and a site: its containers run here as the manifests say.

Arguments, environment, mounted files, probes and grace periods are the manifests'. In place of the
cluster's network each pod has an address of its own in 127.0.0.0/8. The behaviour of Kubernetes
itself is for `make cluster-test`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.broker.servers import redis_7
from tests.chaos.history import replayed
from tests.integration.command import TEST_GUARD_S, wait_until
from tests.k8s.conftest import Net, missing
from tests.k8s.manifests import kubectl, kustomized
from tests.k8s.pods import started

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


@pytest.mark.skipif(sys.platform != "linux", reason="addresses in 127.0.0.0/8 are Linux's alone")
def test_manifests_start_services_that_train(
    tmp_path: Path, quick_programs: Path, net: Net
) -> None:
    if kubectl() is None or redis_7() is None:
        missing("this needs kubectl, and a redis-server of 7.0 or later with its redis-cli")
    with started(tmp_path, net, quick_programs, kustomized(OVERLAY)) as pods:
        coordinator = pods["coordinator-0"]
        wait_until(lambda: coordinator.run()["version"] >= VERSIONS, f"version {VERSIONS}")
        register = coordinator.run()["register"]
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
