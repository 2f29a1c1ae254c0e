"""The stand-in for a network plugin, and the documented table of who may reach whom."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cluster.policies import (
    HELPERS,
    NAME,
    OUTSIDE,
    Place,
    component,
    documented,
    expected,
    flows,
    of_group,
    places,
    rules,
)
from tests.k8s.conftest import missing
from tests.k8s.manifests import K8S, PRIVATE, Manifest, kubectl, largest, on_base, rendered
from tests.k8s.workloads import workloads


@pytest.mark.process
@pytest.mark.parametrize("components", [(), *largest(), ("gateway", PRIVATE)], ids=" ".join)
def test_policies_let_through_what_is_documented(components: tuple[str, ...]) -> None:
    if kubectl() is None:
        missing("kubectl is not on PATH: it renders the manifests")
    manifests = on_base(*components)
    there = {one.name: Place(one.name, one.labels) for one in workloads(manifests)}
    there |= {place.name: place for place in OUTSIDE}
    rows = list(documented())
    assert flows(manifests.of("NetworkPolicy"), there) == expected(rows, components, there)


@pytest.mark.process
def test_only_the_updater_and_prometheus_reach_the_helper_and_it_reaches_nothing() -> None:
    if kubectl() is None:
        missing("kubectl is not on PATH: it renders the manifests")
    run, helper = on_base("gateway", PRIVATE), rendered(K8S / "helper")
    [pod] = workloads(helper)
    there = {one.name: Place(one.name, one.labels) for one in workloads(run)}
    there |= {place.name: place for place in OUTSIDE}
    there["the helper"] = Place("the helper", pod.labels, {NAME: HELPERS})
    policies = [*run.of("NetworkPolicy"), *helper.of("NetworkPolicy")]
    assert {flow for flow in flows(policies, there) if "the helper" in flow} == {
        ("StatefulSet updater", "the helper", "TCP", 8443),
        ("Prometheus", "the helper", "TCP", 8081),
    }


def test_documented_groups_are_ones_that_places_belong_to() -> None:
    """A misspelt one would mean nobody."""
    ours = [Place(one, component(one)) for one in ("coordinator", "gateway", "sinks", "updater")]
    ours += [Place(one, {"app.kubernetes.io/name": one}) for one in ("redis", "sentinel")]
    groups = {group for row in documented() for group in row.senders + row.receivers}
    assert [one for one in groups if not any(of_group(one, at) for at in ours + OUTSIDE)] == []


def pod(address: str, name: str, namespace: str = "fedstream", **more: Any) -> Manifest:
    status = {"podIP": address, "phase": more.get("phase", "Running")}
    metadata = {"name": name, "namespace": namespace, "labels": {"app": name}}
    spec = {"hostNetwork": more.get("host", False)}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def policy(name: str, namespace: str = "fedstream", **spec: Any) -> Manifest:
    metadata = {"name": name, "namespace": namespace}
    return {"kind": "NetworkPolicy", "metadata": metadata, "spec": {"podSelector": {}, **spec}}


NAMESPACES = [
    {"kind": "Namespace", "metadata": {"name": one, "labels": {"kubernetes.io/metadata.name": one}}}
    for one in ("fedstream", "other", "kube-system")
]
CLOSED = policy("closed", policyTypes=["Ingress", "Egress"])
A_TO_B = policy(
    "a-to-b",
    podSelector={"matchLabels": {"app": "a"}},
    policyTypes=["Egress"],
    egress=[
        {
            "to": [
                {"podSelector": {"matchLabels": {"app": "b"}}},
                {"ipBlock": {"cidr": "192.0.2.0/24"}},
            ],
            "ports": [{"protocol": "TCP", "port": 6379}],
        }
    ],
)
TO_B = policy(
    "to-b",
    podSelector={"matchLabels": {"app": "b"}},
    policyTypes=["Ingress"],
    ingress=[
        {
            "from": [{"podSelector": {"matchLabels": {"app": "a"}}}],
            "ports": [{"protocol": "TCP", "port": 6379}],
        }
    ],
)


def elements(text: str, name: str) -> set[str]:
    [found] = re.findall(rf"^add element \S+ \S+ {name} {{ (.*) }}$", text, re.MULTILINE)
    return set(found.split(", "))


def test_rules_are_for_the_addresses_of_running_pods() -> None:
    objects = [
        *NAMESPACES,
        CLOSED,
        A_TO_B,
        TO_B,
        policy("elsewhere", "other", policyTypes=["Ingress"]),
        pod("10.0.0.1", "a"),
        pod("10.0.0.2", "b"),
        pod("10.0.0.3", "b", "other"),
        pod("10.0.0.4", "b", phase="Succeeded"),
        pod("10.0.0.5", "a", phase="Failed"),
        pod("10.0.0.6", "a", host=True),
        {**pod("", "a"), "status": {"phase": "Pending"}},
    ]
    text = rules(objects, ["10.96.0.10"], "fedstream")
    assert elements(text, "ours") == {"10.0.0.1", "10.0.0.2"}
    allowed = {"10.0.0.1 . 10.0.0.2 . tcp . 6379", "10.0.0.1 . 192.0.2.0/24 . tcp . 6379"}
    assert elements(text, "allowed") == allowed


def test_policies_of_another_namespace_close_nothing_of_ours() -> None:
    objects = [
        *NAMESPACES,
        TO_B,
        policy("closed", "other", policyTypes=["Egress"]),
        pod("10.0.0.1", "a"),
        pod("10.0.0.2", "b"),
    ]
    assert "10.0.0.1 . 10.0.0.2 . tcp . 6379" in elements(
        rules(objects, ["10.96.0.10"], "fedstream"), "allowed"
    )


@pytest.mark.parametrize(
    "ports", [{}, {"ports": [{"port": "http"}]}, {"ports": [{"port": 1, "endPort": 9}]}]
)
def test_ports_that_sets_cannot_hold_are_refused(ports: dict[str, Any]) -> None:
    rule = policy("open", policyTypes=["Ingress"], ingress=[{"from": [], **ports}])
    with pytest.raises(ValueError, match="NetworkPolicy open: a rule without ports by number"):
        flows([rule], places([*NAMESPACES, pod("10.0.0.1", "a")], ["10.96.0.10"], "fedstream"))
