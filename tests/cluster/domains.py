"""A private run on the cluster: the helper in a namespace of its own, as the docs say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.checks import Outcome, recorded
from tests.cluster.cluster import Cluster, until
from tests.cluster.faults import connected, enforced
from tests.cluster.policies import HELPERS
from tests.cluster.stage import KUBERNETES, SLOW, Stage, scenario
from tests.k8s.manifests import K8S, PRIVATE, rendered

_OPENED = """
import sqlite3
store = "file:/var/lib/fedstream/helper.sqlite?mode=ro&immutable=1"
opened = sqlite3.connect(store, uri=True)
print(*opened.execute("SELECT count(*), count(DISTINCT intent) FROM opened").fetchone())
"""


@contextmanager
def _helper(stage: Stage) -> Iterator[Cluster]:
    """The helper's namespace, by the commands of its owner."""
    one = stage.cluster
    helper, docs = Cluster(HELPERS, one.image, one.small, one.node), stage.docs
    helper.end()
    try:
        docs.type(KUBERNETES, "docker build -t fedstream:0.2.0-helper", "fedstream agree")
        docs.type(KUBERNETES, "cd parties", "owner=", "printf", "for party in")
        docs.type(
            KUBERNETES,
            "kubectl apply -k ../k8s/helper/namespace",
            "kubectl --namespace fedstream-helper create configmap fedstream-policy",
            "kubectl --namespace fedstream-helper create secret generic fedstream-helper ",
            "kubectl --namespace fedstream-helper create secret generic fedstream-helper-tls",
        )
        helper.volumes(helper.adapted(rendered(K8S / "helper")))
        docs.given("kubectl apply -k ../k8s/helper")
        helper.ready("statefulset/helper")
        yield helper
    finally:
        helper.end()


@scenario
def two_domains(stage: Stage) -> None:
    """`k8s/private` with `k8s/helper`: who reaches whom; helper, updater and Redis are deleted."""
    cluster = stage.cluster
    if cluster.namespace != "fedstream":
        stage.add("skipped: the helper's network policies are for the namespace fedstream")
        return
    cluster.begin()
    with _helper(stage) as helper, stage.run() as run:
        stage.docs.type(
            KUBERNETES,
            "kubectl --namespace fedstream create configmap fedstream-policy",
            "kubectl --namespace fedstream create secret generic fedstream-updater-tls",
            "kubectl --namespace fedstream create secret generic fedstream-device-keys",
        )
        cluster.apply(stage.secrets())
        settings = {"RUN__VERSIONS": "1000000", "STRATEGY__NAME": "fedbuff"}
        parts = ("no-data", str(K8S / PRIVATE))
        cluster.apply(cluster.rendered(*parts, task=SLOW, **settings))
        cluster.ready()
        run.more(3)
        wrong = [*_reached(cluster, helper)]
        for space, pod in ((helper, "helper-0"), (cluster, "updater-0"), (cluster, "redis-0")):
            space.kubectl("delete", "pod", pod, "--grace-period=1")
            run.more(3)
        cluster.ready()
        about = run.rest()
        journal = run.copied_journal()
        said = helper.kubectl("exec", "helper-0", "--", "python3", "-c", _OPENED)
    opened, sums = map(int, said.split())
    versions = recorded(journal)
    if sums not in (len(versions) - 1, len(versions)):  # the last may not have been journalled
        wrong.append(f"the helper opened {sums} sums, the journal has {len(versions) - 1} versions")
    replayed = subprocess.run(
        [sys.executable, "-m", "fedstream", "replay", str(journal)],
        capture_output=True,
        text=True,
        check=False,
    )
    first = (replayed.stdout.splitlines() or [""])[0]
    if replayed.returncode:
        wrong.append(f"fedstream replay: {first} {replayed.stderr.strip()[-500:]}")
    tasks = about["tasks"]
    if tasks["issued"] != sum(n for name, n in tasks.items() if name != "issued"):
        wrong.append(f"tasks don't add up: {tasks}")
    outcome = Outcome(tasks, versions, wrong=tuple(wrong), replayed=first)
    note = f"{sums} sums of {opened} updates, each task in one of them"
    stage.add("a private run; helper, updater and Redis deleted", outcome, outcome.pause(), note)


def _reached(cluster: Cluster, helper: Cluster) -> Iterator[str]:
    """What does not hold of who reaches whom."""
    [found] = helper.pods()
    port = found["spec"]["containers"][0]["ports"][0]["containerPort"]
    at = f"{found['status']['podIP']}:{port}"
    until(lambda: connected(cluster, "updater-0", [at]), "the updater reaches the helper")
    if not enforced(cluster):
        yield "nothing enforces network policies"
        return
    for pod in cluster.pods():
        name = pod["metadata"]["name"]
        if name != "updater-0" and connected(cluster, name, [at]):
            yield f"{name} reaches the helper"
        ports = [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]]
        targets = [f"{pod['status']['podIP']}:{port}" for port in ports]
        for target in connected(helper, "helper-0", targets):
            yield f"the helper reaches {name}, {target}"
