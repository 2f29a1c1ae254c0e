"""Faults on the cluster, drawn from a seed, while the run goes on; and attempts to reach each pod.

``python -m tests.cluster --only faults --seed N`` plays the 100 faults of a seed that
benchmarks/results/cluster-faults.csv lacks, in batches: after each, the run is brought to rest and
checked. Kinds that other tests on the cluster would notice, or that want a second image, need a
variable of the environment: CLUSTER_API=NODE, which has a process `kube-apiserver`;
CLUSTER_CLOCK=NODE:FILE, where the offset of a node's clock is written, in seconds;
CLUSTER_OTHER_IMAGE, another release.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tests.cluster.checks import Outcome, Run
from tests.cluster.cluster import Cluster, Failed, until
from tests.cluster.policies import OUTSIDE, documented, expected
from tests.cluster.stage import Row, Stage, scenario
from tests.docs.pages import ROOT
from tests.k8s.cluster.manifests import Manifest
from tests.k8s.policy.networks import Place

RESULTS = ROOT / "benchmarks" / "results" / "cluster-faults.csv"
COLUMNS = (
    "seed", "number", "kind", "target", "without_version_s", "whole_again_s", "recovered",
    "components", "policies", "tasks", "replay", "held",
)  # fmt: skip
VARIANTS: Sequence[tuple[str, ...]] = ((), ("redis-aof",), ("redis-sentinel",))
_BATCH = 20
_VERSIONS = 3  # that have to come after a fault before the next one
_JOURNAL = "/var/lib/fedstream-cluster-test/{}/journal-updater-0"  # the volume, on every node
_SIZE_MB = 200  # of the volume
_HOUR = 3600


class Node:
    """A node, as root: by a privileged pod that shares its processes and network."""

    def __init__(self, name: str, cluster: Cluster) -> None:
        self.name = name
        self._cluster = Cluster("default", cluster.image)
        self._pod = f"fault-agent-{cluster.namespace}-{name}"

    def __enter__(self) -> Node:
        container = {
            "name": "agent", "image": self._cluster.image, "command": ["sleep", "infinity"],
            "securityContext": {"privileged": True, "runAsUser": 0},
            # Of the class Guaranteed: what takes memory is not what the kernel kills first.
            "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}},
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
_OOM = """
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
_STOP_API = """
pids=$(pgrep -x kube-apiserver)
script="sleep 2; kill -STOP $pids; sleep 60; kill -CONT $pids"
setsid sh -c "$(echo $script)" >/dev/null 2>&1 </dev/null &
"""


@dataclass
class Injector:
    """Injects faults. Each method undoes its fault before it returns the target's name."""

    cluster: Cluster
    nodes: Mapping[str, Node]
    run: Run
    victims: set[str] = field(default_factory=set)  # workloads whose containers may have failed

    def pods(self, **labels: str) -> list[Manifest]:
        """Those that run, by name; at least one."""
        wanted = {f"app.kubernetes.io/{name}": value for name, value in labels.items()}

        def found() -> list[Manifest]:
            return sorted(
                (pod for pod in self.cluster.pods()
                 if wanted.items() <= pod["metadata"]["labels"].items()
                 and pod["status"].get("containerStatuses")
                 and all("running" in one["state"] for one in pod["status"]["containerStatuses"])),
                key=_name,
            )  # fmt: skip

        those: list[Manifest] = until(found, f"a pod runs: {labels}")
        return those

    def drawn(self, rng: random.Random, **labels: str) -> Manifest:
        """A pod: each workload is as likely as the others."""
        found = self.pods(**labels)
        part = rng.choice(sorted({_part(pod) for pod in found}))
        return rng.choice([pod for pod in found if _part(pod) == part])

    def ended(self, pods: Iterable[Manifest]) -> None:
        """Waits until these pods are gone, or their containers have ended."""
        lives = {_life(pod) for pod in pods}
        until(lambda: lives.isdisjoint(map(_life, self.cluster.objects("pod"))), "pods end")

    def hit(self, rng: random.Random, script: str) -> str:
        """Runs a script on the node of a container, which it ends."""
        pod = self.drawn(rng)
        self.victims.add(_part(pod))
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        self.nodes[pod["spec"]["nodeName"]].run(_MAIN + script, container)
        self.ended([pod])
        return _name(pod)

    def kill(self, rng: random.Random) -> str:
        """SIGKILL for a container's first process."""
        return self.hit(rng, "kill -9 $main")

    def oom(self, rng: random.Random) -> str:
        """Memory of a container's cgroup is taken until the kernel kills its first process."""
        return self.hit(rng, _OOM)

    def deleted(self, rng: random.Random, pods: Sequence[Manifest]) -> str:
        """Pods, at once or with their grace period: every other time."""
        how = rng.choice([["--grace-period=0", "--force"], []])
        names = [_name(pod) for pod in pods]
        self.cluster.kubectl("delete", "pod", *names, *how, "--wait=false")
        self.ended(pods)
        return " ".join([*names, *how[:1]])

    def delete(self, rng: random.Random) -> str:
        """A pod."""
        return self.deleted(rng, [self.drawn(rng)])

    def pair(self, rng: random.Random) -> str:
        """Two pods at once."""
        return self.deleted(rng, rng.sample(self.pods(), 2))

    def lost(self, rng: random.Random) -> str:
        """Redis, or its master, together with the updater."""
        servers = self.pods(name="redis")
        if len(servers) > 1:
            servers = [pod for pod in servers if _name(pod) == self.run.master()]
        return self.deleted(rng, [*servers, *self.pods(component="updater")])

    def evicted(self, pods: Iterable[Manifest]) -> None:
        """By the Eviction API, as soon as budgets allow it."""
        for pod in pods:
            until(lambda: self._takes_eviction(_name(pod)), f"{_name(pod)} may be evicted")  # noqa: B023
            self.ended([pod])

    def _takes_eviction(self, name: str) -> bool:
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

    def evict(self, rng: random.Random) -> str:
        """A pod, by the Eviction API."""
        pod = self.drawn(rng)
        self.evicted([pod])
        return _name(pod)

    def drain(self, rng: random.Random) -> str:
        """A node is cordoned and loses all pods of the namespace."""
        node: str = self.drawn(rng)["spec"]["nodeName"]
        with self.cordoned([node]):
            self.evicted(self.on(node))
        return node

    def on(self, node: str) -> list[Manifest]:
        """The pods of a node."""
        return [pod for pod in self.pods() if pod["spec"]["nodeName"] == node]

    @contextmanager
    def cordoned(self, nodes: Sequence[str]) -> Iterator[None]:
        """Pods are scheduled to other nodes alone."""
        self.cluster.kubectl("cordon", *nodes)
        try:
            yield
        finally:
            self.cluster.kubectl("uncordon", *nodes)

    def cut(self, rng: random.Random) -> str:
        """The network between Redis and all services, or one."""
        servers = self.cluster.pods()
        servers = [pod for pod in servers if _part(pod) in ("redis", "sentinel")]
        services = rng.choice([[self.drawn(rng, name="fedstream")], self.pods(name="fedstream")])
        ends = [", ".join(pod["status"]["podIP"] for pod in those) for those in (servers, services)]
        table = f"ip {self.cluster.namespace}-cut"
        rules = [
            f"add table {table}",
            f"add chain {table} cut {{ type filter hook forward priority 0; }}",
            *(f"add rule {table} cut ip saddr {{ {a} }} ip daddr {{ {b} }} drop"
              for a, b in (ends, ends[::-1])),
        ]  # fmt: skip
        for node in self.nodes.values():
            node.run(f"nft '{'; '.join(rules)}'")
        time.sleep(rng.uniform(2, 12))
        for node in self.nodes.values():
            node.run(f"nft delete table {table}")
        return _name(services[0]) if len(services) == 1 else "all services"

    def full(self, rng: random.Random) -> str:
        """The journal's volume, until the updater waits for room and some seconds more."""
        [updater] = self.pods(component="updater")
        at, node = _JOURNAL.format(self.cluster.namespace), self.nodes[updater["spec"]["nodeName"]]
        log = ("logs", _name(updater), f"--since-time={time.strftime('%FT%TZ', time.gmtime())}")
        node.run(f"dd if=/dev/zero of={at}/filled bs=4k 2>/dev/null || true")
        try:
            until(lambda: "No space left" in self.cluster.kubectl(*log), "the updater waits")
            time.sleep(rng.uniform(1, 10))
        finally:
            node.run(f"rm {at}/filled")
        return _name(updater)

    def roll(self, rng: random.Random) -> str:
        """Some workloads work with others of another release, and come back."""
        every = self.cluster.objects("deployment,statefulset", "app.kubernetes.io/name=fedstream")
        chosen = [one for one in every if rng.random() < 0.5] or every
        for image in (os.environ["CLUSTER_OTHER_IMAGE"], self.cluster.image):
            for one in chosen:
                name = _name(one)
                self.cluster.kubectl("set", "image", f"{one['kind']}/{name}", f"{name}={image}")
            whole(self.cluster, self.run)
        return " ".join(map(_name, chosen))

    def api(self, rng: random.Random) -> str:
        """The API server stops for a minute."""
        self.nodes[os.environ["CLUSTER_API"]].run(_STOP_API)
        until(lambda: not self._answers(), "the API server stops", 30)
        until(self._answers, "the API server answers")
        return "kube-apiserver"

    def _answers(self) -> bool:
        with suppress(Failed):
            return bool(self.cluster.kubectl("get", "--raw", "/readyz", within_s=5))
        return False

    def clock(self, rng: random.Random) -> str:
        """A node's clock is an hour off."""
        name, _, path = os.environ["CLUSTER_CLOCK"].partition(":")
        offset = rng.choice([_HOUR, -_HOUR])
        if not self.on(name):
            with self.cordoned([other for other in self.nodes if other != name]):
                self.evicted([self.drawn(rng)])
                until(lambda: self.on(name), f"a pod on {name}")
        try:
            self.nodes[name].run(f"echo {offset:+d} >{path}")
            time.sleep(rng.uniform(2, 12))
            whole(self.cluster, self.run)
            return " ".join([name, f"{offset:+d}", *map(_name, self.on(name))])
        finally:
            self.nodes[name].run(f"echo +0 >{path}")


class Kind(NamedTuple):
    """What can go wrong: how often in the faults of a seed."""

    times: int
    play: Callable[[Injector, random.Random], str]
    needs: str = ""  # a variable of the environment


KINDS: Mapping[str, Kind] = {
    "kill": Kind(24, Injector.kill),
    "delete": Kind(18, Injector.delete),
    "pair": Kind(14, Injector.pair),
    "evict": Kind(10, Injector.evict),
    "cut": Kind(10, Injector.cut),
    "lost": Kind(6, Injector.lost),
    "oom": Kind(5, Injector.oom),
    "full": Kind(4, Injector.full),
    "roll": Kind(3, Injector.roll, "CLUSTER_OTHER_IMAGE"),
    "drain": Kind(2, Injector.drain),
    "clock": Kind(2, Injector.clock, "CLUSTER_CLOCK"),
    "api": Kind(2, Injector.api, "CLUSTER_API"),
}


class Fault(NamedTuple):
    """One thing that goes wrong. Its target is drawn among what there is when its turn comes."""

    number: int
    kind: str
    draw: int  # seed of what is drawn


def plan(seed: int) -> list[Fault]:
    """Every kind as often as KINDS says, in an order of the seed."""
    rng = random.Random(seed)
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.times)]
    rng.shuffle(kinds)
    return [Fault(number, kind, rng.getrandbits(32)) for number, kind in enumerate(kinds)]


def whole(cluster: Cluster, run: Run) -> None:
    """Waits until versions come and all workloads are rolled out and ready. Raises Failed."""

    def ready() -> bool:
        return all(
            one["status"].get("observedGeneration") == one["metadata"]["generation"]
            and {one["status"].get(f"{which}eplicas", 0) for which in ("r", "readyR", "updatedR")}
            == {one["spec"]["replicas"]}
            for one in cluster.objects("deployment,statefulset")
        )  # fmt: skip

    run.more(_VERSIONS)
    try:
        until(ready, "workloads are ready")
    except Failed as error:
        raise Failed(f"{error}\n{cluster.story()}") from None


def steady(versions: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Versions' times, without the hours that a clock was off."""
    found: list[tuple[int, float]] = []
    for number, at in versions:
        off = round((at - found[-1][1]) / _HOUR) if found else 0
        found.append((number, at - off * _HOUR))
    return tuple(found)


def _name(one: Manifest) -> str:
    return str(one["metadata"]["name"])


def _part(pod: Manifest) -> str:
    labels = pod["metadata"]["labels"]
    return str(labels.get("app.kubernetes.io/component") or labels["app.kubernetes.io/name"])


def _life(pod: Manifest) -> tuple[str, int]:
    """Another one after a pod was replaced, or its containers began again."""
    started = pod["status"].get("containerStatuses", ())
    return pod["metadata"]["uid"], sum(one["restartCount"] for one in started)


@contextmanager
def _small_volume(cluster: Cluster, node: Node) -> Iterator[None]:
    """The journal's volume is a file system of its own, which can be filled."""
    at = _JOURNAL.format(cluster.namespace)
    cluster.end()
    node.run(f"mkdir -p {at}; mount -t tmpfs -o size={_SIZE_MB}m,mode=777 none {at}")
    try:
        yield
    finally:
        node.run(f"umount --lazy {at}")


@scenario
def faults(stage: Stage) -> None:
    """The faults of a seed that are not in the results yet, in batches: a run for each."""
    done = {(row["seed"], row["number"]) for row in recorded()}
    todo = [
        fault for fault in plan(stage.seed)
        if (str(stage.seed), str(fault.number)) not in done
        and (not KINDS[fault.kind].needs or KINDS[fault.kind].needs in os.environ)
    ]  # fmt: skip
    with ExitStack() as opened:
        names = [_name(node) for node in stage.cluster.objects("node")]
        nodes = {name: opened.enter_context(Node(name, stage.cluster)) for name in names}
        while todo:
            record(_played(stage, nodes, todo[:_BATCH]))
            del todo[:_BATCH]
    stage.rows += summary(recorded())


def _played(stage: Stage, nodes: Mapping[str, Node], batch: Sequence[Fault]) -> list[list[object]]:
    """Rows of faults that were played in one run; after one that stopped it there is no other."""
    components = VARIANTS[batch[0].number // _BATCH % len(VARIANTS)]
    rows: list[list[object]] = []
    spans, stopped = [], ""
    with (
        _small_volume(stage.cluster, next(iter(nodes.values()))),
        stage.deployed("no-data", *components) as run,
    ):
        injector = Injector(stage.cluster, nodes, run)
        guarded = "enforced" if enforced(stage.cluster) else "not enforced"
        for fault in batch:
            before, since, target = stage.cluster.pods(), time.time(), ""
            try:
                target = KINDS[fault.kind].play(injector, random.Random(fault.draw))
                whole(stage.cluster, run)
            except Failed as error:
                stopped = f"{fault.kind}: {error}"
            spans.append((since, time.time()))
            lives = set(map(_life, before))
            new = sorted(_name(pod) for pod in stage.cluster.pods() if _life(pod) not in lives)
            rows.append([
                stage.seed, fault.number, fault.kind, target, 0.0,
                round(time.time() - since, 1), " ".join(new), " ".join(components), guarded,
            ])  # fmt: skip
            sys.stdout.write(f"{' | '.join(map(str, rows[-1]))} {stopped}\n")
            sys.stdout.flush()
            if stopped:
                break
        try:
            outcome = run.finish(may_restart=f"^({'|'.join(sorted(injector.victims))})-")
        except Failed as error:
            outcome = Outcome({}, wrong=(str(error),))
    wrong = " ".join("; ".join([stopped, *outcome.wrong]).strip("; ").split())
    outcome = replace(outcome, versions=steady(outcome.versions))
    tasks = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in outcome.tasks.items() if n)
    for row, span in zip(rows, spans, strict=True):
        row[4] = round(outcome.pause(*span), 1)
        row += [tasks, outcome.replayed, wrong or "yes"]
    sys.stdout.write(f"batch of seed {stage.seed}: {outcome.tasks} {outcome.replayed} {wrong}\n")
    return rows


def record(rows: Iterable[Sequence[object]], path: Path = RESULTS) -> None:
    """Adds faults to the results."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([*([COLUMNS] if new else []), *rows])


def recorded(path: Path = RESULTS) -> list[dict[str, str]]:
    """The faults that were played, by COLUMNS."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(rows: Sequence[Mapping[str, str]]) -> list[Row]:
    """What faults of each kind cost, for the table."""
    found = []
    for kind in KINDS:
        those = [row for row in rows if row["kind"] == kind]
        if those:
            pauses = [float(row["without_version_s"]) for row in those]
            median = f"median {statistics.median(pauses):.1f} s"
            failed = [f"seed {row['seed']}, {row['number']}: {row['held']}"
                      for row in those if row["held"] != "yes"]  # fmt: skip
            found.append(
                Row("faults", f"{kind}: {len(those)}", None, max(pauses), median, "; ".join(failed))
            )
    return found


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
