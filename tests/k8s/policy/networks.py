"""Who may talk to whom: what the network policies let through, against what is needed.

A small evaluator of NetworkPolicy: a connection passes if the sender's policies let it out and the
receiver's let it in; a pod that no policy selects for a direction is open there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from tests.k8s.cluster.manifests import Manifest, Manifests
from tests.k8s.policy.workloads import Workload, entered, environment, selected, with_jobs

_OURS = {"kubernetes.io/metadata.name": "fedstream"}


@dataclass(frozen=True)
class Place:
    """A pod, by its labels and its namespace's; or an address outside the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=lambda: _OURS)
    address: str | None = None


def _elsewhere(name: str, namespace: str, labels: dict[str, str]) -> Place:
    return Place(name, labels, {"kubernetes.io/metadata.name": namespace})


_DNS = _elsewhere("DNS", "kube-system", {"k8s-app": "kube-dns"})
_KEDA = _elsewhere("KEDA", "keda", {"app": "keda-operator"})
_PROMETHEUS = _elsewhere("Prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"})
_INGRESS = _elsewhere("the Ingress controller", "ingress", {})
_STRANGER = _elsewhere("a pod of namespace default", "default", {})
_INTERNET = Place("the internet", {}, {}, "203.0.113.7")
_METADATA = Place("the cloud's metadata service", {}, {}, "169.254.169.254")


def networks(manifests: Manifests) -> Iterator[str]:
    """By default nothing passes; what is needed does, what is not does not."""
    policies = manifests.of("NetworkPolicy")
    closed = {
        direction
        for policy in policies
        if policy["spec"]["podSelector"] == {}
        for direction in policy["spec"]["policyTypes"]
        if direction.lower() not in policy["spec"]
    }
    for direction in sorted({"Ingress", "Egress"} - closed):
        yield f"no NetworkPolicy denies {direction} by default"
    places = [Place(one.name, one.labels) for one in with_jobs(manifests)]
    ours = [place for place in places if _name(place) == "fedstream"]
    servers = [place for place in places if _name(place) == "redis"]
    sentinels = [place for place in places if _name(place) == "sentinel"]
    needed: list[tuple[Place, Place, int, str]] = []
    barred: list[tuple[Place, Place, int, str]] = []
    for place in places:
        needed += [(place, _DNS, 53, "UDP"), (place, _DNS, 53, "TCP")]
        barred += [(place, there, 443, "TCP") for there in (_INTERNET, _METADATA)]
        barred += [(_STRANGER, place, port, "TCP") for port in (6379, 8080, 8081, 26379)]
    for place in ours:
        needed += [(place, server, 6379, "TCP") for server in servers]
        needed += [(place, sentinel, 26379, "TCP") for sentinel in sentinels]
        needed.append((_PROMETHEUS, place, 8081, "TCP"))
        barred += [(who, place, 8081, "TCP") for who in (_KEDA, _INGRESS, *ours)]
        barred += [(place, other, 8080, "TCP") for other in ours]
        part = place.labels["app.kubernetes.io/component"]
        scales = part == "coordinator" and manifests.of("ScaledObject")
        for who, asks in ((_KEDA, scales), (_INGRESS, part in entered(manifests))):
            (needed if asks else barred).append((who, place, 8080, "TCP"))
    watched = [*servers, *sentinels] if sentinels else []
    for place in watched:
        needed += [(place, server, 6379, "TCP") for server in servers]
        needed += [(place, sentinel, 26379, "TCP") for sentinel in sentinels]
    if not servers:  # component external-redis: somewhere at the port of its address
        port = _port(manifests)
        outside = [Place("a Redis elsewhere", {}, {}, one) for one in _blocks(policies)]
        for place in ours:
            if not any(passes(policies, place, there, port, "TCP") for there in outside):
                yield f"network policies stop {place.name} to a Redis elsewhere, port {port}/TCP"
    if not sentinels:
        barred += [(s, p, port, "TCP") for s in servers for p in ours for port in (8080, 8081)]
    for flow in needed:
        if not passes(policies, *flow):
            yield f"network policies stop {_text(flow)}"
    for flow in barred:
        if passes(policies, *flow):
            yield f"network policies let {_text(flow)} through"


def _port(manifests: Manifests) -> int:
    """Of the Redis that the services are told of by environment."""
    scheduler = Workload(manifests.get("Deployment", "scheduler"))
    url = environment(manifests, scheduler.containers[0])["FEDSTREAM_REDIS__URL"]
    return urlsplit(url).port or 6379


def _blocks(policies: list[Manifest]) -> list[str]:
    """An address of every block that something may reach."""
    return [
        str(ip_network(peer["ipBlock"]["cidr"]).network_address)
        for policy in policies
        for rule in policy["spec"].get("egress", ())
        for peer in rule.get("to", ())
        if "ipBlock" in peer
    ]


def _name(place: Place) -> str:
    return place.labels.get("app.kubernetes.io/name", "")


def _text(flow: tuple[Place, Place, int, str]) -> str:
    return f"{flow[0].name} to {flow[1].name}, port {flow[2]}/{flow[3]}"


def passes(
    policies: list[Manifest], sender: Place, receiver: Place, port: int, protocol: str
) -> bool:
    """Whether a connection is let out and let in."""
    out = _lets(policies, sender, receiver, "egress", port, protocol)
    return out and _lets(policies, receiver, sender, "ingress", port, protocol)


def _lets(
    policies: list[Manifest], at: Place, peer: Place, direction: str, port: int, protocol: str
) -> bool:
    if at.namespace != _OURS:
        return True  # not ours to say
    mine = [
        policy["spec"]
        for policy in policies
        if selected(policy["spec"]["podSelector"], at.labels)
        and direction.title() in policy["spec"]["policyTypes"]
    ]
    return not mine or any(
        _opens(rule, peer, "from" if direction == "ingress" else "to", port, protocol)
        for spec in mine
        for rule in spec.get(direction, ())
    )


def _opens(rule: Manifest, peer: Place, key: str, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    if ports is not None and {"protocol": protocol, "port": port} not in ports:
        return False
    return key not in rule or any(_is(one, peer) for one in rule[key])


def _is(selector: Manifest, peer: Place) -> bool:
    if "ipBlock" in selector:
        block = selector["ipBlock"]
        return peer.address is not None and ip_address(peer.address) in ip_network(block["cidr"])
    if peer.address is not None:
        return False
    if "namespaceSelector" in selector:
        there = selected(selector["namespaceSelector"], peer.namespace)
    else:
        there = peer.namespace == _OURS
    return there and selected(selector.get("podSelector", {}), peer.labels)
