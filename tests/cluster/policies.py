"""NetworkPolicies as nftables rules, and the documented table of who may reach whom.

``python -m tests.cluster.policies --dns ADDRESS [--netns NAME ...]`` stands in for a network plugin
that enforces: it runs as root on the nodes' machine and follows the cluster until it is ended.
"""

from __future__ import annotations

import argparse
import json
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from itertools import permutations
from pathlib import Path
from typing import TypeAlias

from tests.k8s.manifests import Manifest
from tests.k8s.workloads import selected

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"
TABLE = "ip fedstream-policies"
_FLOW = "ipv4_addr . ipv4_addr . inet_proto . inet_service"
_COALESCE_S = 0.2  # changes of the cluster that come together are one
_AGAIN_S = 1.0  # after the API server was not reached

Flow: TypeAlias = tuple[str, str, str, int]  # sender, receiver, protocol, port


NAME = "kubernetes.io/metadata.name"
_OURS = {NAME: "fedstream"}
HELPERS = "fedstream-helper"  # the other trust domain's namespace


@dataclass(frozen=True)
class Place:
    """A pod, by its labels and its namespace's; or an address outside the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)
    namespace: dict[str, str] = field(default_factory=lambda: _OURS)
    address: str | None = None

    def has(self, policy: Manifest) -> bool:
        """Whether a policy is of this place's namespace."""
        namespace: str = policy["metadata"]["namespace"]
        return self.namespace.get(NAME) == namespace


def component(name: str) -> dict[str, str]:
    """The labels of a service's pods."""
    return {"app.kubernetes.io/name": "fedstream", "app.kubernetes.io/component": name}


# Those that the documented table names, and some that it must not let in.
OUTSIDE = [
    Place(name, labels, {NAME: namespace})
    for name, namespace, labels in (
        ("the cluster's DNS", "kube-system", {"k8s-app": "kube-dns"}),
        ("Prometheus", "monitoring", {"app.kubernetes.io/name": "prometheus"}),
        ("the Ingress controller", "ingress", {}),
        ("KEDA", "keda", {"app": "keda-operator"}),
        (
            "an OpenTelemetry collector",
            "observability",
            {"app.kubernetes.io/name": "opentelemetry-collector"},
        ),
        ("MLflow", "mlflow", {"app.kubernetes.io/name": "mlflow"}),
        ("the helper", HELPERS, component("helper")),
        ("a stranger", "default", component("updater")),
        ("a neighbour of KEDA", "keda", {}),
    )
] + [
    Place("the Redis elsewhere", {}, {}, "10.1.2.3"),
    Place("the internet", {}, {}, "203.0.113.7"),
]


def flows(policies: list[Manifest], places: Mapping[str, Place]) -> set[Flow]:
    """The connections between places, by their keys, that the policies let through.

    Only those with an end in a namespace that has policies. Raises ValueError for a rule without
    ports, or with ports that have names or ranges.
    """
    ports = set()
    for policy in policies:
        for rule in (*policy["spec"].get("ingress", ()), *policy["spec"].get("egress", ())):
            numbers = [one.get("port") for one in rule.get("ports", ()) if "endPort" not in one]
            if not numbers or not all(isinstance(number, int) for number in numbers):
                name = policy["metadata"]["name"]
                raise ValueError(f"NetworkPolicy {name}: a rule without ports by number")
            ports |= {(one["protocol"], one["port"]) for one in rule["ports"]}
    return {
        (sender, receiver, protocol, port)
        for sender, receiver in permutations(places, 2)
        if any(places[end].has(policy) for end in (sender, receiver) for policy in policies)
        for protocol, port in ports
        if passes(policies, places[sender], places[receiver], port, protocol)
    }


def passes(
    policies: list[Manifest], sender: Place, receiver: Place, port: int, protocol: str
) -> bool:
    """Whether a connection is let out and let in."""
    out = _lets(policies, sender, receiver, "egress", port, protocol)
    return out and _lets(policies, receiver, sender, "ingress", port, protocol)


def _lets(
    policies: list[Manifest], at: Place, peer: Place, direction: str, port: int, protocol: str
) -> bool:
    mine = [
        policy
        for policy in policies
        if at.has(policy)
        and selected(policy["spec"]["podSelector"], at.labels)
        and direction.title() in policy["spec"]["policyTypes"]
    ]
    key = "from" if direction == "ingress" else "to"
    return not mine or any(
        _opens(rule, policy, peer, key, port, protocol)
        for policy in mine
        for rule in policy["spec"].get(direction, ())
    )


def _opens(
    rule: Manifest, policy: Manifest, peer: Place, key: str, port: int, protocol: str
) -> bool:
    ports = rule.get("ports")
    if ports is not None and {"protocol": protocol, "port": port} not in ports:
        return False
    return key not in rule or any(_is(one, policy, peer) for one in rule[key])


def _is(selector: Manifest, policy: Manifest, peer: Place) -> bool:
    if "ipBlock" in selector:
        block = selector["ipBlock"]
        return peer.address is not None and ip_address(peer.address) in ip_network(block["cidr"])
    if peer.address is not None:
        return False
    if "namespaceSelector" in selector:
        there = selected(selector["namespaceSelector"], peer.namespace)
    else:
        there = peer.has(policy)
    return there and selected(selector.get("podSelector", {}), peer.labels)


def places(objects: Iterable[Manifest], dns: Sequence[str], namespace: str) -> dict[str, Place]:
    """Running pods by their addresses, and the blocks of policies; of pods, namespaces, policies.

    ``dns``: addresses of the cluster's DNS, which need not be a pod's. ``namespace``: fedstream's.
    """
    namespaces = {
        one["metadata"]["name"]: one["metadata"]["labels"]
        for one in objects
        if one["kind"] == "Namespace"
    } | {namespace: _OURS}
    system = {NAME: "kube-system"}
    found = {address: Place("DNS", {"k8s-app": "kube-dns"}, system) for address in dns}
    for one in objects:
        about, address = one["metadata"], one.get("status", {}).get("podIP")
        if one["kind"] == "NetworkPolicy":
            for block in re.findall(r'"cidr": "([^"]*)"', json.dumps(one)):
                found[block] = Place(block, {}, {}, str(ip_network(block).network_address))
        elif address and not one["spec"].get("hostNetwork") and not _is_over(one):
            labels = about.get("labels", {})
            found[address] = Place(about["name"], labels, namespaces[about["namespace"]])
    return found


def _is_over(pod: Manifest) -> bool:
    """Whether its address may be another pod's by now."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def rules(objects: list[Manifest], dns: Sequence[str], namespace: str) -> str:
    """The input of ``nft --file``; what is dropped is put into the set `dropped`, which stays."""
    known = {namespace: _OURS[NAME], HELPERS: HELPERS}
    policies = [
        {**one, "metadata": {**one["metadata"], "namespace": known[one["metadata"]["namespace"]]}}
        for one in objects
        if one["kind"] == "NetworkPolicy" and one["metadata"]["namespace"] in known
    ]
    there = places(objects, dns, namespace)
    elements = {
        "ours": sorted(at for at, one in there.items() if any(map(one.has, policies))),
        "allowed": sorted(
            f"{sender} . {receiver} . {protocol.lower()} . {port}"
            for sender, receiver, protocol, port in flows(policies, there)
        ),
    }
    drop = "update @dropped { ip saddr . ip daddr . meta l4proto . th dport } counter drop"
    return "\n".join(
        [
            f"add table {TABLE}",
            f"add set {TABLE} ours {{ type ipv4_addr; }}",
            f"add set {TABLE} allowed {{ type {_FLOW}; flags interval; }}",
            f"add set {TABLE} dropped {{ type {_FLOW}; flags dynamic; size 65535; }}",
            f"add chain {TABLE} policies",
            *(
                f"add chain {TABLE} {hook} {{ type filter hook {hook} priority 10; }}"
                for hook in ("forward", "input")
            ),  # input: the node's own addresses, with the DNS
            f"flush table {TABLE}",
            f"flush set {TABLE} ours",
            f"flush set {TABLE} allowed",
            *(
                f"add element {TABLE} {name} {{ {', '.join(those)} }}"
                for name, those in elements.items()
                if those
            ),
            f"add rule {TABLE} policies ct state established,related accept",
            (
                f"add rule {TABLE} policies "
                "ip saddr . ip daddr . meta l4proto . th dport @allowed accept"
            ),
            f"add rule {TABLE} policies ip saddr @ours {drop}",
            f"add rule {TABLE} policies ip daddr @ours {drop}",
            f"add rule {TABLE} forward jump policies",
            f"add rule {TABLE} input jump policies",
            "",
        ]
    )


@dataclass(frozen=True)
class Row:
    """A line of the documented table: groups of places, and the component that brings it."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    protocols: tuple[str, ...]
    port: int
    components: frozenset[str]  # empty: the base


def documented() -> Iterator[Row]:
    """The table "Who may talk to whom" of docs/how-to/kubernetes.md."""
    section = PAGE.read_text().split("## Who may talk to whom")[1].split("\n## ")[0]
    for line in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
        senders, receivers, port, brought = line.split(" | ")
        protocols = ("TCP", "UDP") if "UDP" in port else ("TCP",)
        yield Row(
            tuple(re.sub(r" \(.*?\)", "", senders).split(", ")),
            tuple(re.sub(r" \(.*?\)", "", receivers).split(", ")),
            protocols,
            int(port.partition(",")[0]),
            frozenset(re.findall(r"`(.*?)`", brought)),
        )


def of_group(group: str, place: Place) -> bool:
    """Whether the documented name of a group means this place, too."""
    if place.namespace != _OURS:
        return group == place.name
    part = place.labels.get("app.kubernetes.io/component", "")
    return (
        group == "every pod"
        or group.rstrip("s") == part.rstrip("s")
        or group
        == {
            "fedstream": "services",
            "redis": "Redis",
            "sentinel": "Sentinels",
        }.get(place.labels.get("app.kubernetes.io/name", ""))
    )


def expected(
    rows: Iterable[Row], components: Sequence[str], places: Mapping[str, Place]
) -> set[Flow]:
    """The connections that the documented table has for these components."""
    return {
        (sender, receiver, protocol, row.port)
        for row in rows
        if not row.components or row.components & {*components}
        for sender, receiver in permutations(places, 2)
        if any(of_group(group, places[sender]) for group in row.senders)
        and any(of_group(group, places[receiver]) for group in row.receivers)
        for protocol in row.protocols
    }


def _follow(dns: Sequence[str], netns: Sequence[str], namespace: str) -> None:
    """Renders whenever a pod or policy changes, into this network namespace and the named ones."""
    get = ["kubectl", "get", "--all-namespaces", "--output"]
    nodes = [[], *(["ip", "netns", "exec", name] for name in netns)]
    while True:
        watches = [
            subprocess.Popen([*get, "name", "--watch", kind], stdout=subprocess.PIPE)
            for kind in ("pods", "networkpolicies")
        ]
        with selectors.DefaultSelector() as ready:
            for watch in watches:
                ready.register(watch.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
            while all(watch.poll() is None for watch in watches):
                for key, _ in ready.select():
                    key.fileobj.read1()  # type: ignore[union-attr]
                time.sleep(_COALESCE_S)
                objects = [*get, "json", "networkpolicies,pods,namespaces"]
                done = subprocess.run(objects, capture_output=True, check=False)
                if done.returncode:
                    break
                text = rules(json.loads(done.stdout)["items"], dns, namespace)
                for node in nodes:
                    subprocess.run([*node, "nft", "--file", "-"], input=text, text=True, check=True)
                sys.stdout.write(f"{time.strftime('%T')} {len(text)} bytes of rules\n")
                sys.stdout.flush()
        for watch in watches:
            watch.kill()
            watch.wait()
        time.sleep(_AGAIN_S)


def main() -> None:
    """Follows the cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dns", nargs="+", required=True, help="addresses of the cluster's DNS")
    parser.add_argument("--netns", nargs="*", default=[], help="network namespaces of other nodes")
    parser.add_argument("--namespace", default="fedstream", help="fedstream's")
    given = parser.parse_args()
    _follow(given.dns, given.netns, given.namespace)


if __name__ == "__main__":
    main()
