"""Faults on the cluster, drawn from a seed, while the run goes on; and attempts to reach each pod.

``python -m tests.cluster --only faults --seed N`` plays the run of a seed and adds its faults to
benchmarks/results/cluster-faults.csv. What some kinds need is in the environment: for `roll`
CLUSTER_OTHER_IMAGE, another release; for `clock` CLUSTER_CLOCK=NODE:FILE, where the offset of a
node's clock is written, in seconds. For `api` a node must have a process `kube-apiserver`.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from tests.cluster.checks import Run
from tests.cluster.cluster import Cluster, Failed, until
from tests.cluster.policies import OUTSIDE, Place, documented, expected
from tests.cluster.stage import Stage, scenario
from tests.docs.pages import ROOT
from tests.k8s.manifests import Manifest

RESULTS = ROOT / "benchmarks" / "results" / "cluster-faults.csv"
COLUMNS = (
    "seed", "components", "number", "kind", "target", "lasts_s", "without_version_s",
    "until_versions_s", "policies", "held",
)  # fmt: skip
VARIANTS: Sequence[tuple[str, ...]] = ((), ("redis-aof",), ("redis-sentinel",))
_VERSIONS = 3  # that have to come after a fault before the next one
_JOURNAL = "/var/lib/fedstream-cluster-test/{}/journal-updater-0"  # the volume, on every node
_UPDATER = "app.kubernetes.io/component=updater"
_SIZE_MB = 200  # of the volume
_CUT = "ip fedstream-cut"


class Kind(StrEnum):
    """What can go wrong."""

    KILL = "kill"  # a container's process, by SIGKILL
    DELETE = "delete"  # a pod
    PAIR = "pair"  # two pods at once
    EVICT = "evict"  # a pod, by the Eviction API
    DRAIN = "drain"  # a node is cordoned and loses all pods of the namespace, by the Eviction API
    CUT = "cut"  # the network between Redis and all services, or one
    FULL = "full"  # the journal's volume
    OOM = "oom"  # the memory of a container's cgroup is taken until the kernel kills its process
    ROLL = "roll"  # some workloads to another release and back
    LOST = "lost"  # Redis together with the updater
    API = "api"  # the API server stops for a minute
    CLOCK = "clock"  # of a node, an hour off


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. The target is drawn among what there is when its turn comes."""

    kind: Kind
    lasts_s: float
    share: tuple[float, float]  # in [0, 1): which targets


def plan(seed: int, kinds: Sequence[Kind]) -> list[Fault]:
    """Each kind once, in an order, for a time and at targets that the seed draws."""
    rng = random.Random(seed)
    return [
        Fault(kind, round(rng.uniform(2, 15), 1), (rng.random(), rng.random()))
        for kind in rng.sample(kinds, len(kinds))
    ]


class Node:
    """A node, as root: by a privileged pod that shares its processes and network."""

    def __init__(self, name: str, image: str) -> None:
        self.name = name
        self._cluster = Cluster("default", image)
        self._pod = f"fault-agent-{name}"

    def __enter__(self) -> Node:
        container = {
            "name": "agent", "image": self._cluster.image, "command": ["sleep", "infinity"],
            "securityContext": {"privileged": True, "runAsUser": 0},
            # Of the class Guaranteed: what takes memory is not what the kernel kills first.
            "resources": {"limits": {"cpu": "200m", "memory": "512Mi"}},
        }  # fmt: skip
        spec = {
            "nodeName": self.name, "hostPID": True, "hostNetwork": True, "containers": [container],
            "terminationGracePeriodSeconds": 1, "tolerations": [{"operator": "Exists"}],
        }  # fmt: skip
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self._pod}, "spec": spec}
        self._cluster.kubectl("apply", "--filename", "-", said=json.dumps(pod))
        self._cluster.kubectl("wait", "--for=condition=Ready", "--timeout=2m", f"pod/{self._pod}")
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.kubectl("delete", "pod", self._pod, "--wait=false")

    def run(self, script: str, *arguments: str) -> str:
        """What a shell printed that sees the node's files. Raises Failed."""
        return self._cluster.kubectl(
            "exec", self._pod, "--", "sh", "-ec", _ON_NODE, "sh", script, *arguments
        )


# Not by way of process 1: it may have more rights than anything on the node.
_ON_NODE = """
runtime=$(grep -lsxE 'containerd|crio' /proc/[0-9]*/comm | head -n 1 | cut -d / -f 3)
script=$1; shift
exec nsenter --target "$runtime" --mount sh -ec "$script" sh "$@"
"""
_MAIN = """  # the first process of a container
for found in $(grep -ls "$1" /proc/[0-9]*/cgroup); do
  pid=${found#/proc/}; pid=${pid%/cgroup}
  if grep -qE '^NSpid:.*[[:space:]]1$' "/proc/$pid/status"; then main=$pid; fi
done
"""
_OOM = (
    _MAIN
    + """
group=$(sed -n 's/^[0-9]*:memory:/memory/p; s/^0::/unified/p' "/proc/$main/cgroup" | head -n 1)
for at in "/sys/fs/cgroup/$group" "/sys/fs/cgroup/${group#unified}"; do
  if [ -f "$at/cgroup.procs" ]; then procs=$at/cgroup.procs; fi
done
echo 1000 >"/proc/$main/oom_score_adj"
sh -c 'echo $$ >"$1"; exec tail /dev/zero' sh "$procs" & taker=$!
while [ -d "/proc/$main" ] && [ -d "/proc/$taker" ]; do sleep 0.1; done
kill -9 $taker 2>/dev/null || true
[ ! -d "/proc/$main" ]
"""
)
_STOP_API = """
pids=$(pgrep -x kube-apiserver)
script="sleep 2; kill -STOP $pids; sleep 60; kill -CONT $pids"
setsid sh -c "$(echo $script)" >/dev/null 2>&1 </dev/null &
"""


@dataclass
class Injector:
    """Does what a fault says, and undoes it. Each method returns the target's name."""

    cluster: Cluster
    nodes: Mapping[str, Node]
    victims: set[str] = field(default_factory=set)  # containers that may have ended by themselves

    def kinds(self) -> list[Kind]:
        """Those that this cluster has the means for."""
        lacking = set()
        if "CLUSTER_OTHER_IMAGE" not in os.environ:
            lacking.add(Kind.ROLL)
        if "CLUSTER_CLOCK" not in os.environ:
            lacking.add(Kind.CLOCK)
        if not self._with_api():
            lacking.add(Kind.API)
        return [kind for kind in Kind if kind not in lacking]

    def play(self, fault: Fault, run: Run) -> str:
        """Injects a fault; it is over when this returns."""
        doing: Callable[[Fault, Run], str] = getattr(self, f"_{fault.kind}")
        return doing(fault, run)

    def _pods(self, **labels: str) -> list[Manifest]:
        found = [
            pod for pod in self.cluster.pods()
            if all(pod["metadata"]["labels"].get(f"app.kubernetes.io/{name}") == value
                   for name, value in labels.items())
            and all("running" in one["state"] for one in _statuses(pod)) and _statuses(pod)
        ]  # fmt: skip
        return sorted(found, key=_name)

    def _drawn(self, share: float, **labels: str) -> Manifest:
        """A pod: each workload is as likely as the others."""
        found: list[Manifest] = until(lambda: self._pods(**labels), "a pod that runs")
        parts = sorted({_part(pod) for pod in found})
        at = share * len(parts)
        those = [pod for pod in found if _part(pod) == parts[int(at)]]
        return those[int(at % 1 * len(those))]

    def _container(self, share: float) -> tuple[Node, str, Manifest]:
        pod = self._drawn(share)
        [status] = _statuses(pod)
        self.victims.add(_part(pod))
        return self._node(pod), status["containerID"].rpartition("/")[2], pod

    def _node(self, pod: Manifest) -> Node:
        return self.nodes[pod["spec"]["nodeName"]]

    def _kill(self, fault: Fault, run: Run) -> str:
        node, container, pod = self._container(fault.share[0])
        node.run(_MAIN + "kill -9 $main", container)
        return _name(pod)

    def _oom(self, fault: Fault, run: Run) -> str:
        node, container, pod = self._container(fault.share[0])
        node.run(_OOM, container)
        return _name(pod)

    def _delete(self, fault: Fault, run: Run) -> str:
        return self._deleted(fault, [self._drawn(fault.share[0])])

    def _pair(self, fault: Fault, run: Run) -> str:
        return self._deleted(fault, random.Random(fault.share[0]).sample(self._pods(), 2))

    def _lost(self, fault: Fault, run: Run) -> str:
        servers = self._pods(name="redis")
        if len(servers) > 1:
            servers = [pod for pod in servers if _name(pod) == run.master()]
        return self._deleted(fault, [*servers, *self._pods(component="updater")])

    def _deleted(self, fault: Fault, pods: Sequence[Manifest]) -> str:
        """At once, or with their grace period: every other time."""
        names = sorted({_name(pod) for pod in pods})
        how = ["--grace-period=0", "--force"] if fault.share[1] < 0.5 else []
        self.cluster.kubectl("delete", "pod", *names, *how, "--wait=false")
        self._gone(pods)
        return " ".join([*names, *how[:1]])

    def _evict(self, fault: Fault, run: Run) -> str:
        pod = self._drawn(fault.share[0])
        until(lambda: self._evicted(_name(pod)), f"{_name(pod)} may be evicted")
        self._gone([pod])
        return _name(pod)

    def _gone(self, pods: Sequence[Manifest]) -> None:
        """Waits until pods have ended, so that what they cost comes within the fault's time."""
        those = {pod["metadata"]["uid"] for pod in pods}

        def ended() -> bool:
            return those.isdisjoint(one["metadata"]["uid"] for one in self.cluster.objects("pod"))

        until(ended, "pods end")

    def _evicted(self, name: str) -> bool:
        """Whether the API took the eviction; a budget may refuse it for now."""
        space = self.cluster.namespace
        said = {"apiVersion": "policy/v1", "kind": "Eviction",
                "metadata": {"name": name, "namespace": space}}  # fmt: skip
        path = f"/api/v1/namespaces/{space}/pods/{name}/eviction"
        try:
            self.cluster.kubectl("create", "--raw", path, "--filename", "-", said=json.dumps(said))
        except Failed as error:
            if "disruption budget" in str(error) or "TooManyRequests" in str(error):
                return False
            if "not found" not in str(error).lower():
                raise
        return True

    def _drain(self, fault: Fault, run: Run) -> str:
        node = self._node(self._drawn(fault.share[0])).name
        self.cluster.kubectl("cordon", node)
        try:
            there = [pod for pod in self._pods() if pod["spec"]["nodeName"] == node]
            for pod in there:
                until(lambda: self._evicted(_name(pod)), f"{_name(pod)} may be evicted")  # noqa: B023
            self._gone(there)
        finally:
            self.cluster.kubectl("uncordon", node)
        return node

    def _cut(self, fault: Fault, run: Run) -> str:
        servers = self._pods(name="redis") + self._pods(name="sentinel")
        services = self._pods(name="fedstream")
        if fault.share[1] < 0.5:
            services = [self._drawn(fault.share[0], name="fedstream")]
        ends = [", ".join(pod["status"]["podIP"] for pod in those) for those in (servers, services)]
        ways = [f"ip saddr {{ {a} }} ip daddr {{ {b} }} drop" for a, b in (ends, ends[::-1])]
        chain = "{ type filter hook forward priority 0; }"
        for node in self.nodes.values():
            node.run(
                f"nft 'add table {_CUT}; add chain {_CUT} forward {chain}; "
                + "; ".join(f"add rule {_CUT} forward {way}" for way in ways) + "'"
            )  # fmt: skip
        time.sleep(fault.lasts_s)
        for node in self.nodes.values():
            node.run(f"nft delete table {_CUT}")
        return _name(services[0]) if len(services) == 1 else "all services"

    def _full(self, fault: Fault, run: Run) -> str:
        [updater] = until(lambda: self._pods(component="updater"), "the updater runs")
        self.victims.add(_part(updater))
        at = _JOURNAL.format(self.cluster.namespace)
        node = self._node(updater)
        node.run(f"dd if=/dev/zero of={at}/filled bs=1M 2>/dev/null || true")
        time.sleep(fault.lasts_s)
        node.run(f"rm {at}/filled")
        return _name(updater)

    def _roll(self, fault: Fault, run: Run) -> str:
        """Some workloads work with others of another release."""
        parts = sorted({_part(pod) for pod in self._pods(name="fedstream")})
        rng = random.Random(fault.share[0])
        chosen = [part for part in parts if rng.random() < 0.5] or parts
        for image in (os.environ["CLUSTER_OTHER_IMAGE"], self.cluster.image):
            for part in chosen:
                kind = "statefulset" if part in ("updater", "gateway") else "deployment"
                self.cluster.kubectl("set", "image", f"{kind}/{part}", f"{part}={image}")
            self.cluster.ready()
            run.more(_VERSIONS)
        return " ".join(chosen)

    def _with_api(self) -> list[Node]:
        return [node for node in self.nodes.values()
                if node.run("pgrep -x kube-apiserver || true").strip()]  # fmt: skip

    def _api(self, fault: Fault, run: Run) -> str:
        [node, *_] = self._with_api()
        node.run(_STOP_API)
        until(lambda: not self._answers(), "the API server stops", 30)
        until(self._answers, "the API server answers")
        return "kube-apiserver"

    def _answers(self) -> bool:
        with suppress(Failed):
            return bool(self.cluster.kubectl("get", "--raw", "/readyz", within_s=5))
        return False

    def _clock(self, fault: Fault, run: Run) -> str:
        name, _, path = os.environ["CLUSTER_CLOCK"].partition(":")
        offset = "+3600" if fault.share[0] < 0.5 else "-3600"
        try:
            self.nodes[name].run(f"echo {offset} >{path}")
            time.sleep(fault.lasts_s)
            run.more(_VERSIONS)
        finally:
            self.nodes[name].run(f"echo +0 >{path}")
        return f"{name} {offset}"


def _statuses(pod: Manifest) -> list[Manifest]:
    found: list[Manifest] = pod["status"].get("containerStatuses", [])
    return found


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])


def _part(pod: Manifest) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("app.kubernetes.io/component") or labels["app.kubernetes.io/name"])


@contextmanager
def _agents(cluster: Cluster) -> Iterator[dict[str, Node]]:
    with ExitStack() as opened:
        names = [_name(node) for node in cluster.objects("node")]
        yield {name: opened.enter_context(Node(name, cluster.image)) for name in names}


@contextmanager
def _small_volume(cluster: Cluster, nodes: Mapping[str, Node]) -> Iterator[None]:
    """The journal's volume with so little room that it can be filled."""
    at, [node, *_] = _JOURNAL.format(cluster.namespace), nodes.values()
    cluster.scale("statefulset/updater", 0)
    until(lambda: not cluster.objects("pod", _UPDATER), "the updater ends")
    node.run(
        f"cp -a {at} {at}.whole; mount -t tmpfs -o size={_SIZE_MB}m,mode=777 none {at}; "
        f"cp -a {at}.whole/. {at}"
    )
    try:
        cluster.scale("statefulset/updater", 1)
        yield
    finally:
        node.run(f"umount --lazy {at}")


@scenario
def faults(stage: Stage) -> None:
    """A run with a fault of every kind, in an order and at targets drawn from the seed."""
    seed = stage.seed
    components = VARIANTS[seed % len(VARIANTS)]
    played: list[tuple[Fault, str, float, float]] = []
    with (
        _agents(stage.cluster) as nodes,
        stage.deployed("no-data", *components) as run,
        _small_volume(stage.cluster, nodes),
    ):
        injector = Injector(stage.cluster, nodes)
        guarded = "enforced" if enforced(stage.cluster) else "not enforced"
        stopped: tuple[str, ...] = ()
        for fault in plan(seed, injector.kinds()):
            since, target = time.time(), ""
            try:
                run.more(_VERSIONS)
                since = time.time()
                target = injector.play(fault, run)
                run.more(_VERSIONS)
                stage.cluster.ready()
            except Failed as error:
                stopped = (f"{fault.kind}: {error}",)
            played.append((fault, target, since, time.time()))
            sys.stdout.write(f"{fault.kind}: {target}: {time.time() - since:.0f} s\n")
            sys.stdout.flush()
            if stopped:
                break
        outcome = run.finish(may_restart=f"^({'|'.join(sorted(injector.victims))})-")
        outcome = replace(outcome, wrong=(*outcome.wrong, *stopped))
    rows = []
    for number, (fault, target, since, to) in enumerate(played):
        pause = outcome.pause(since, to)
        stage.add(f"{fault.kind}: {target}", outcome, pause, f"{', '.join(components)} seed {seed}")
        rows.append([
            seed, " ".join(components), number, fault.kind, target, fault.lasts_s, round(pause, 1),
            round(to - since, 1), guarded, "no" if outcome.wrong else "yes",
        ])  # fmt: skip
    record(rows)


def record(rows: Sequence[Sequence[object]], path: Path = RESULTS) -> None:
    """Adds faults to the results, and writes the table of all beside them."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([*([COLUMNS] if new else []), *rows])
    with path.open(newline="") as file:
        path.with_suffix(".md").write_text(table(list(csv.DictReader(file))))


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """What faults of each kind cost, for people."""
    failed = sorted({int(row["seed"]) for row in rows if row["held"] != "yes"})
    seeds = {row["seed"] for row in rows}
    lines = [
        "# Faults on Kubernetes", "",
        "`python -m tests.cluster --only faults --seed N`: a run for each seed, with network",
        "policies enforced. After its faults every run was brought to rest and checked: the tasks",
        "issued are the sum of all outcomes, none is lost or counted twice, no container restarted",
        "but those that a fault ended, and the journal replays identically to Redis's model.", "",
        f"{len(rows)} faults in {len(seeds)} runs: "
        + (f"NOT held: seeds {', '.join(map(str, failed))}" if failed else "all checks held"), "",
        "| kind | number | s without a version: median | worst | checks held |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for kind in Kind:
        those = [row for row in rows if row["kind"] == kind]
        if those:
            pauses = [float(row["without_version_s"]) for row in those]
            held = sum(row["held"] == "yes" for row in those)
            lines.append(f"| {kind} | {len(those)} | {statistics.median(pauses):.1f} "
                         f"| {max(pauses):.1f} | {held} |")  # fmt: skip
    return "\n".join(lines) + "\n"


_TRY = """
for at in "$@"; do
  (timeout 10 bash -c "exec 3<>/dev/tcp/${at%:*}/${at#*:}" 2>/dev/null && echo "$at") &
done; wait
"""


def connected(cluster: Cluster, pod: str, targets: Sequence[str]) -> set[str]:
    """The targets, as address:port, that a pod can open a TCP connection to."""
    return set(cluster.kubectl("exec", pod, "--", "bash", "-c", _TRY, "bash", *targets).split())


def enforced(cluster: Cluster) -> bool:
    """Whether anything enforces network policies: no service may connect to another one."""
    [trainer, *_], [coordinator, *_] = cluster.pods("trainer"), cluster.pods("coordinator")
    return not connected(cluster, _name(trainer), [f"{coordinator['status']['podIP']}:8080"])


@dataclass(frozen=True)
class Peer:
    """A pod that tries to reach others, and is tried."""

    cluster: Cluster  # its namespace
    pod: str
    address: str
    ports: frozenset[int]
    place: Place


@contextmanager
def _strangers(image: str) -> Iterator[list[Peer]]:
    """A pod, with something at port 5000, for each documented place in another namespace."""
    found = []
    with ExitStack() as opened:
        for place in OUTSIDE:
            namespace = place.namespace.get("kubernetes.io/metadata.name", "kube-system")
            if namespace == "kube-system":
                continue
            space, name = Cluster(namespace, image), re.sub(r"\W+", "-", place.name.lower())
            with suppress(Failed):  # it may be there
                space.kubectl("create", "namespace", namespace)
            labels = ",".join(f"{key}={value}" for key, value in place.labels.items()) or "a=b"
            serve = ("--command", "--", "python3", "-m", "http.server", "5000")
            space.kubectl("run", name, "--image", image, "--labels", labels, *serve)
            opened.callback(space.kubectl, "delete", "pod", name, "--wait=false", "--now")
            space.kubectl("wait", "--for=condition=Ready", "--timeout=1m", f"pod/{name}")
            address = space.kubectl("get", "pod", name, "--output", "jsonpath={.status.podIP}")
            found.append(Peer(space, name, address, frozenset([5000]), place))
        yield found


@scenario
def policies(stage: Stage) -> None:
    """From every pod to every port of every other: what connects is what the docs' table says."""
    components = (
        "no-data", "redis-sentinel", "redis-tls", "gateway", "gateway-ingress", "ingress", "site",
    )  # fmt: skip
    with stage.deployed(*components) as run, _strangers(stage.cluster.image) as strangers:
        ours = [
            Peer(
                stage.cluster, _name(pod), pod["status"]["podIP"],
                frozenset(port["containerPort"] for container in pod["spec"]["containers"]
                          for port in container.get("ports", ())),
                Place(_part(pod), pod["metadata"]["labels"]),
            )
            for pod in stage.cluster.pods()
        ]  # fmt: skip
        peers = {peer.address: peer for peer in (*ours, *strangers)}
        found = set()
        for peer in peers.values():
            others = [one for one in (peers.values() if peer in ours else ours) if one != peer]
            targets = [f"{one.address}:{port}" for one in others for port in one.ports]
            for target in connected(peer.cluster, peer.pod, targets):
                address, _, port = target.partition(":")
                found.add((peer.address, address, "TCP", int(port)))
        wanted = expected(documented(), components, {at: one.place for at, one in peers.items()})
        wanted = {flow for flow in wanted if flow[2] == "TCP" and flow[3] in peers[flow[1]].ports}
        tokens = [
            f"{_name(pod)} has a token of its service account"
            for pod in stage.cluster.pods() if "serviceAccountToken" in json.dumps(pod["spec"])
        ]  # fmt: skip
        outcome = run.finish()
    wrong = [
        f"{peers[sender].pod} {verb} {peers[receiver].pod}, port {port}"
        for verb, those in (("reaches", found - wanted), ("does not reach", wanted - found))
        for sender, receiver, _, port in sorted(those)
    ]
    pairs = Counter((peers[a].place.name, peers[b].place.name, port) for a, b, _, port in found)
    stage.add(
        f"{len(peers)} pods, each tries every port of the others",
        replace(outcome, wrong=(*outcome.wrong, *tokens, *wrong)),
        note="; ".join(f"{a} to {b}, {port}" for a, b, port in sorted(pairs)),
    )
