"""What the docs tell an operator to do, on the cluster: overlays, components, scaling, moving."""

from __future__ import annotations

import time

from tests.cluster.cluster import until
from tests.cluster.stage import KUBERNETES, OPERATE, Stage, scenario
from tests.k8s.policy.targets import K8S

INSPECT = "docs/how-to/inspect.md"
_PHASE_S = 20.0  # how long a number of trainers is measured


@scenario
def dev(stage: Stage) -> None:
    """The overlay `dev` and what can be done with it, as the pages say."""
    cluster, docs = stage.cluster, stage.docs
    cluster.begin()
    docs.type(KUBERNETES, "docker build", "kubectl apply -k k8s/overlays/dev")
    cluster.ready()
    with stage.run() as run:
        run.more(20)
        docs.begin(KUBERNETES, "kubectl --namespace fedstream port-forward service/coordinator")
        stage.answers(docs.web)
        docs.begin(KUBERNETES, "kubectl --namespace fedstream port-forward service/redis")
        stage.answers(docs.redis)
        docs.type(KUBERNETES, "export FEDSTREAM_REDIS__U", "export FEDSTREAM_REDIS__P")
        said = docs.type(KUBERNETES, "fedstream status --redis", "fedstream status --url")
        assert said.count("running") == 2, said
        for pod in ("deploy/coordinator", "statefulset/updater", "deploy/trainer"):
            docs.type(INSPECT, f"kubectl -n fedstream exec {pod}")
        docs.inline(OPERATE, "kubectl --namespace fedstream scale deployment trainer")
        cluster.ready("deployment/trainer")
        run.more(20)
        (docs.clone / "task.py").write_text((K8S / "base" / "task" / "task.py").read_text())
        docs.type(OPERATE, "kubectl --namespace fedstream cp updater-0", number=1)
        docs.type(OPERATE, "fedstream journal bisect", "fedstream replay")
        docs.inline(OPERATE, "kubectl --namespace fedstream rollout status deployment/coordinator")
        outcome = run.finish()
    stage.add("`dev`, `status`, `doctor`, `scale`, `bisect`, `replay`", outcome, outcome.pause())
    cluster.end()


@scenario
def scaling(stage: Stage) -> None:
    """Trainers 1, 4, 0, 8, 2 under load."""
    with stage.deployed("no-data") as run:
        phases = []
        for replicas in (1, 4, 0, 8, 2):
            stage.cluster.scale("deployment/trainer", replicas)
            stage.cluster.ready("deployment/trainer")
            until(lambda: len(stage.cluster.pods("trainer")) == replicas, "trainers end")  # noqa: B023
            since = time.time()
            time.sleep(_PHASE_S)
            phases.append((replicas, since, time.time()))
        outcome = run.finish()
    rates = [f"{n}: {outcome.rate(since, to):.1f}" for n, since, to in phases]
    none = outcome.rate(*phases[2][1:])
    assert none < min(outcome.rate(*one[1:]) for one in phases if one[0]), rates
    stage.add("trainers 1, 4, 0, 8, 2", outcome, note=f"versions/s by trainers: {', '.join(rates)}")


@scenario
def tls_and_sentinel(stage: Stage) -> None:
    """`redis-tls` with `redis-sentinel`: the master crashes, and is deleted."""
    with stage.deployed("no-data", "redis-tls", "redis-sentinel") as run:
        moments = []
        for how in ("crashes", "is deleted"):
            master, at = run.master(), time.time()
            if how == "crashes":
                stage.cluster.kubectl("exec", master, "--", "sh", "-c", "kill -SEGV 1")
            else:
                stage.cluster.kubectl("delete", "pod", master, "--wait=false")
            until(lambda: run.master() != master, "another master")  # noqa: B023
            run.more(5)
            stage.cluster.ready()
            moments.append((how, at, time.time()))
        outcome = run.finish(may_restart="^redis-")
    for how, at, to in moments:
        stage.add(f"the master {how}", outcome, outcome.pause(at, to))
