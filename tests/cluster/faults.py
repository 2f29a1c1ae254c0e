"""Faults on the cluster, drawn from a seed, while the run goes on; and attempts to reach each pod.

``python -m tests.cluster --only faults --seed N`` plays the 100 faults of a seed in batches; after
each, the run is brought to rest and checked. Faults that benchmarks/results/cluster-faults.csv has
are not played again: remove the file for that. Some kinds need a variable of the environment:
CLUSTER_API=NODE, whose API server may stop; CLUSTER_CLOCK=NODE:FILE, where the offset of a node's
clock is written, in seconds; CLUSTER_OTHER_IMAGE, another release.
"""

from __future__ import annotations

import csv
import json
import os
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.checks import Outcome, Run
from tests.cluster.cluster import Cluster, Failed, until
from tests.cluster.policies import OUTSIDE, Place, documented, expected
from tests.cluster.stage import Row, Stage, scenario
from tests.docs.pages import ROOT
from tests.k8s.manifests import Manifest

RESULTS = ROOT / "benchmarks" / "results" / "cluster-faults.csv"
COLUMNS = (
    "seed",
    "number",
    "kind",
    "target",
    "without_version_s",
    "whole_again_s",
    "recovered",
    "components",
    "policies",
    "tasks",
    "replay",
    "held",
)
VARIANTS: Sequence[tuple[str, ...]] = (("gateway", "site"), ("redis-aof",), ("redis-sentinel",))
_BATCH = 20
_VERSIONS = 3  # that have to come after a fault before the next one
_JOURNAL = "/var/lib/fedstream-cluster-test/{}/journal-updater-0"  # the volume, on every node
_SERVERS = {"redis", "sentinel"}


# As root, with a node's files. Not by way of process 1, which may have more rights than any other.
_ON_NODE = """
runtime=$(grep -lsxE 'containerd|crio' /proc/[0-9]*/comm | head -n 1 | cut -d / -f 3)
exec nsenter --target "$runtime" --mount sh -ec "$@"
"""
_MAIN = """  # the first process of a container
for found in $(grep -ls "$0" /proc/[0-9]*/cgroup); do
  pid=${found#/proc/}; pid=${pid%/cgroup}
  if grep -qE '^NSpid:.*[[:space:]]1$' "/proc/$pid/status"; then main=$pid; fi
done
"""
_TAKE_MEMORY = """
echo 1000 >/proc/$main/oom_score_adj
group=$(sed -n 's/^[0-9]*:memory:/memory/p; s/^0:://p' /proc/$main/cgroup | head -n 1)
sh -c "echo \\$\\$ >/sys/fs/cgroup/$group/cgroup.procs; exec tail /dev/zero" || true
"""
_STOP_API = """
stop="pkill -STOP -x kube-apiserver; sleep 60; pkill -CONT -x kube-apiserver"
setsid sh -c "sleep 2; $stop" >/dev/null 2>&1 </dev/null &
"""


@dataclass
class Injector:
    """Draws pods, and does to them what a kind of fault does; that is undone in the end."""

    cluster: Cluster
    run: Run
    victims: set[str] = field(default_factory=set)  # workloads whose containers may have failed

    def pods(self, *parts: str) -> list[Manifest]:
        """Those that run, of some workloads or of all; at least one."""

        def running() -> list[Manifest]:
            return [
                pod
                for pod in self.cluster.pods()
                if not parts or _part(pod) in parts
                if (started := pod["status"].get("containerStatuses"))
                and all("running" in one["state"] for one in started)
            ]

        found: list[Manifest] = until(running, f"a pod runs: {' '.join(parts)}")
        return found

    def on(self, node: str, script: str, *arguments: str) -> None:
        """Runs a shell's script on a node. Raises Failed."""
        shell = ("sh", "-ec", _ON_NODE, "sh", script, *arguments)
        Cluster("default").kubectl("exec", agent(self.cluster, node), "--", *shell)

    def recovered(self) -> None:
        """Waits until versions come and all workloads are ready. Raises Failed."""
        self.run.more(_VERSIONS)
        self.cluster.ready()

    # which pods

    def one(self, rng: random.Random) -> list[Manifest]:
        """Each workload is as likely as the others."""
        pods = self.pods()
        # Preferably one that was not killed before: it would come back later each time.
        fresh = [pod for pod in pods if not _life(pod)[1]] or pods
        part = rng.choice(sorted({_part(pod) for pod in fresh}))
        return [rng.choice([pod for pod in fresh if _part(pod) == part])]

    def redis_and_updater(self, _: random.Random) -> list[Manifest]:
        """Of several Redis, the master."""
        servers = self.pods("redis")
        if len(servers) > 1:
            servers = [pod for pod in servers if _name(pod) == self.run.master()]
        return [*servers, *self.pods("updater")]

    def of_a_node(self, rng: random.Random) -> list[Manifest]:
        """All of the namespace."""
        return self.on_node(self.one(rng)[0]["spec"]["nodeName"])

    def of_the_clock(self, _: random.Random) -> list[Manifest]:
        """All whose clock can be set."""
        return self.on_node(_clock()[0])

    def on_node(self, node: str) -> list[Manifest]:
        """All of the namespace on a node."""
        return [pod for pod in self.pods() if pod["spec"]["nodeName"] == node]

    def services(self, rng: random.Random) -> list[Manifest]:
        """Of some workloads, or of all but Redis and the Sentinels."""
        parts = sorted({_part(pod) for pod in self.pods()} - _SERVERS)
        return self.pods(*([part for part in parts if rng.random() < 0.5] or parts))

    # what happens to them

    def ended(self, pods: Iterable[Manifest]) -> None:
        """Waits until these pods are gone, or their containers have ended."""
        lives = {_life(pod) for pod in pods}
        until(lambda: lives.isdisjoint(map(_life, self.cluster.objects("pod"))), "pods end")

    def kill(
        self, pods: Sequence[Manifest], _: random.Random, script: str = "kill -9 $main"
    ) -> None:
        """SIGKILL for a container's first process."""
        for pod in pods:
            self.victims.add(_part(pod))
            container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
            self.on(pod["spec"]["nodeName"], _MAIN + script, container)
        self.ended(pods)

    def oom(self, pods: Sequence[Manifest], rng: random.Random) -> None:
        """Memory of a container is taken until the kernel kills its first process."""
        self.kill(pods, rng, _TAKE_MEMORY)

    def delete(self, pods: Sequence[Manifest], rng: random.Random) -> None:
        """At once, or with their grace period."""
        how = rng.choice([["--grace-period=0", "--force"], []])
        self.cluster.kubectl("delete", "pod", *map(_name, pods), *how, "--wait=false")
        self.ended(pods)

    def evict(self, pods: Sequence[Manifest], _: random.Random) -> None:
        """By the Eviction API, as budgets allow it; their node takes no others meanwhile."""
        node, mark = pods[0]["spec"]["nodeName"], f"evicted={self.cluster.namespace}"
        self.cluster.kubectl("label", "pod", *map(_name, pods), mark)
        try:
            how = ("--delete-emptydir-data", "--pod-selector", mark)
            self.cluster.kubectl("drain", node, *how)
        finally:
            self.cluster.kubectl("uncordon", node)

    def roll(self, pods: Sequence[Manifest], _: random.Random) -> None:
        """Their workloads work with others of another release, and come back."""
        which = f"app.kubernetes.io/component in ({', '.join({_part(pod) for pod in pods})})"
        for image in (os.environ["CLUSTER_OTHER_IMAGE"], self.cluster.image):
            kinds = ("deployment,statefulset", "--selector", which)
            self.cluster.kubectl("set", "image", *kinds, f"*={image}")
            self.recovered()

    def lasts(self, nodes: Iterable[str], begin: str, end: str, rng: random.Random) -> None:
        """Runs a script on nodes, and some seconds later one that undoes it."""
        try:
            for node in nodes:
                self.on(node, begin)
            time.sleep(rng.uniform(2, 12))
        finally:
            for node in nodes:
                self.on(node, end)

    def cut(self, pods: Sequence[Manifest], rng: random.Random) -> None:
        """The network between them and Redis with the Sentinels."""
        servers = (pod for pod in self.cluster.pods() if _part(pod) in _SERVERS)
        ends = [", ".join(pod["status"]["podIP"] for pod in those) for those in (servers, pods)]
        table = f"ip {self.cluster.namespace}-cut"
        chain = f"{table} cut {{ type filter hook forward priority 0; }}"
        rules = "; ".join(
            f"add rule {table} cut ip saddr {{ {a} }} ip daddr {{ {b} }} drop"
            for a, b in (ends, ends[::-1])
        )
        begin = f"nft 'add table {table}; add chain {chain}; {rules}'"
        self.lasts(nodes(self.cluster), begin, f"nft delete table {table}", rng)

    def fill(self, pods: Sequence[Manifest], rng: random.Random) -> None:
        """The journal's volume."""
        filled = f"{_JOURNAL.format(self.cluster.namespace)}/filled"
        begin = f"dd if=/dev/zero of={filled} bs=4k || true"
        self.lasts([pods[0]["spec"]["nodeName"]], begin, f"rm {filled}", rng)

    def off(self, _: Sequence[Manifest], rng: random.Random) -> None:
        """The clock of their node is an hour off."""
        node, path = _clock()
        begin = f"echo {rng.choice(['+3600', '-3600'])} >{path}"
        self.lasts([node], begin, f"echo +0 >{path}", rng)

    def stop_api(self, *_: object) -> None:
        """The API server, for a minute."""
        self.on(os.environ["CLUSTER_API"], _STOP_API)
        until(lambda: not self._answers(), "the API server stops", 30)
        until(self._answers, "the API server answers")

    def _answers(self) -> bool:
        with suppress(Failed):
            return bool(self.cluster.kubectl("get", "--raw", "/readyz", within_s=5))
        return False


class Kind(NamedTuple):
    """What can go wrong."""

    times: int  # in the faults of a seed
    draw: Callable[[Injector, random.Random], list[Manifest]]
    play: Callable[[Injector, Sequence[Manifest], random.Random], None]
    needs: str = ""  # a variable of the environment


KINDS: Mapping[str, Kind] = {
    "kill": Kind(24, Injector.one, Injector.kill),
    "delete": Kind(18, Injector.one, Injector.delete),
    "pair": Kind(14, lambda on, rng: rng.sample(on.pods(), 2), Injector.delete),
    "evict": Kind(10, Injector.one, Injector.evict),
    "cut": Kind(10, Injector.services, Injector.cut),
    "lost": Kind(6, Injector.redis_and_updater, Injector.delete),
    "oom": Kind(5, Injector.one, Injector.oom),
    "full": Kind(4, lambda on, _: on.pods("updater"), Injector.fill),
    "roll": Kind(3, Injector.services, Injector.roll, "CLUSTER_OTHER_IMAGE"),
    "drain": Kind(2, Injector.of_a_node, Injector.evict),
    "clock": Kind(2, Injector.of_the_clock, Injector.off, "CLUSTER_CLOCK"),
    "api": Kind(2, lambda *_: [], Injector.stop_api, "CLUSTER_API"),
}


def plan(seed: int) -> list[tuple[int, str, int]]:
    """Faults: number, kind and seed of what is drawn, among what there is when its turn comes."""
    rng = random.Random(seed)
    kinds = [name for name, kind in KINDS.items() for _ in range(kind.times)]
    rng.shuffle(kinds)
    return [(number, kind, rng.getrandbits(32)) for number, kind in enumerate(kinds)]


def steady(versions: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Versions' times in seconds, without the hours that a clock was off."""
    found: list[tuple[int, float]] = []
    for number, at in versions:
        off = round((at - found[-1][1]) / 3600) if found else 0
        found.append((number, at - off * 3600))
    return tuple(found)


def _name(one: Manifest) -> str:
    return str(one["metadata"]["name"])


def _part(pod: Manifest) -> str:
    labels = pod["metadata"]["labels"]
    name = labels["app.kubernetes.io/name"]
    return str(labels.get("app.kubernetes.io/component", name))


def _life(pod: Manifest) -> tuple[str, int]:
    """Another one after a pod was replaced, or its containers began again."""
    started = pod["status"].get("containerStatuses", ())
    return pod["metadata"]["uid"], sum(one["restartCount"] for one in started)


def _clock() -> tuple[str, str]:
    node, _, path = os.environ["CLUSTER_CLOCK"].partition(":")
    return node, path


def nodes(cluster: Cluster) -> list[str]:
    """The cluster's."""
    return [_name(node) for node in cluster.objects("node")]


def agent(cluster: Cluster, node: str) -> str:
    """The pod, in the namespace `default`, by which scripts run on a node."""
    return f"fault-agent-{cluster.namespace}-{node}"


@contextmanager
def agents(cluster: Cluster) -> Iterator[None]:
    """A privileged pod on each node, which shares its processes and network."""
    container = {
        "name": "agent",
        "image": cluster.image,
        "command": ["sleep", "infinity"],
        "securityContext": {"privileged": True, "runAsUser": 0},
        # Of the class Guaranteed: the kernel kills any other process before what takes memory.
        "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}},
    }
    spec = {
        "hostPID": True,
        "hostNetwork": True,
        "terminationGracePeriodSeconds": 1,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": agent(cluster, node)},
            "spec": {**spec, "nodeName": node},
        }
        for node in nodes(cluster)
    ]
    names, there = [f"pod/{_name(pod)}" for pod in pods], Cluster("default")
    for pod in pods:
        there.kubectl("apply", "--filename", "-", said=json.dumps(pod))
    try:
        there.kubectl("wait", "--for=condition=Ready", "--timeout=2m", *names)
        yield
    finally:
        there.kubectl("delete", *names, "--wait=false")


@scenario
def faults(stage: Stage) -> None:
    """The faults of a seed that are not in the results yet, in batches: a run for each."""
    done = {(row["seed"], row["number"]) for row in recorded()}
    todo = [
        (number, kind, draw)
        for number, kind, draw in plan(stage.seed)
        if (str(stage.seed), str(number)) not in done and KINDS[kind].needs in ("", *os.environ)
    ]
    with agents(stage.cluster):
        while todo:
            record(_played(stage, todo[:_BATCH]))
            del todo[:_BATCH]
    stage.rows += summary(recorded())


def _played(stage: Stage, batch: Sequence[tuple[int, str, int]]) -> list[dict[str, Any]]:
    """Rows of faults that were played in one run; after one that stopped it there is no other."""
    cluster, components = stage.cluster, VARIANTS[batch[0][0] // _BATCH % len(VARIANTS)]
    rows: list[dict[str, Any]] = []
    stopped, spans = "", []
    injector = Injector(cluster, stage.run())
    at, [node, *_] = _JOURNAL.format(cluster.namespace), nodes(cluster)
    cluster.end()
    with ExitStack() as opened:
        # The journal's volume is a file system of its own, which can be filled.
        injector.on(node, f"mkdir -p {at}; mount -t tmpfs -o size=200m,mode=777 none {at}")
        opened.callback(injector.on, node, f"umount --lazy {at}")
        run = injector.run = opened.enter_context(stage.deployed("no-data", *components))
        about = {
            "seed": stage.seed,
            "components": " ".join(components),
            "policies": "enforced" if enforced(cluster) else "not enforced",
        }
        for number, kind, draw in batch:
            lives, since, rng = set(map(_life, cluster.pods())), time.time(), random.Random(draw)
            pods = KINDS[kind].draw(injector, rng)
            try:
                KINDS[kind].play(injector, pods, rng)
                injector.recovered()
            except Failed as error:
                stopped = f"{kind}: {error}"
            spans.append((since, time.time()))
            new = sorted(_name(pod) for pod in cluster.pods() if _life(pod) not in lives)
            rows.append(
                {
                    **about,
                    "number": number,
                    "kind": kind,
                    "target": " ".join(map(_name, pods)),
                    "whole_again_s": round(time.time() - since, 1),
                    "recovered": " ".join(new),
                }
            )
            print(*rows[-1].values(), stopped, sep=" | ", flush=True)  # noqa: T201
            if stopped:
                break
        try:
            outcome = run.finish(may_restart=f"^({'|'.join(sorted(injector.victims))})-")
        except Failed as error:
            outcome = Outcome({}, wrong=(str(error),))
    wrong = " ".join("; ".join([stopped, *outcome.wrong]).strip("; ").split())
    tasks = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in outcome.tasks.items() if n)
    outcome = replace(outcome, versions=steady(outcome.versions))
    for row, span in zip(rows, spans, strict=True):
        pause = round(outcome.pause(*span), 1)
        row |= {"without_version_s": pause, "tasks": tasks, "replay": outcome.replayed}
        row["held"] = wrong or "yes"
    return rows


def record(rows: Iterable[Mapping[str, Any]], path: Path = RESULTS) -> None:
    """Adds faults to the results."""
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        writer.writerows(rows)


def recorded(path: Path = RESULTS) -> list[dict[str, str]]:
    """The faults that were played, by COLUMNS."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def summary(rows: Iterable[Mapping[str, str]]) -> Iterator[Row]:
    """What faults of each kind cost, for the table."""
    by_kind: dict[str, list[Mapping[str, str]]] = {kind: [] for kind in KINDS}
    for row in rows:
        by_kind[row["kind"]].append(row)
    for kind, those in by_kind.items():
        if those:
            pauses = [float(row["without_version_s"]) for row in those]
            failed = "; ".join(
                f"seed {row['seed']}, {row['number']}: {row['held']}"
                for row in those
                if row["held"] != "yes"
            )
            note = f"median {statistics.median(pauses):.1f} s"
            note += "" if failed else "; counts and replays hold"
            yield Row("faults", f"{kind}: {len(those)}", None, max(pauses), note, failed)


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
        "no-data",
        "redis-sentinel",
        "redis-tls",
        "gateway",
        "gateway-ingress",
        "ingress",
        "site",
    )
    with stage.deployed(*components) as run, _strangers(stage.cluster.image) as strangers:
        ours = [
            Peer(
                stage.cluster,
                _name(pod),
                pod["status"]["podIP"],
                frozenset(
                    port["containerPort"]
                    for container in pod["spec"]["containers"]
                    for port in container.get("ports", ())
                ),
                Place(_part(pod), pod["metadata"]["labels"]),
            )
            for pod in stage.cluster.pods()
        ]
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
            for pod in stage.cluster.pods()
            if "serviceAccountToken" in json.dumps(pod["spec"])
        ]
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
