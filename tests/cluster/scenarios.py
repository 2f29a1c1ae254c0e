"""What the docs tell an operator to do, on the cluster: overlays, components, scaling, moving."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import yaml

from tests.cluster.checks import NAME, Run
from tests.cluster.cluster import Cluster, Failed, until
from tests.cluster.stage import (
    KUBERNETES,
    OPERATE,
    PRODUCTION,
    SLOW,
    Row,
    Stage,
    answers,
    scenario,
    secret,
)
from tests.k8s.manifests import K8S, Manifest, combinations, differences, largest, overlays
from tests.k8s.manifests import together as components_together
from tests.support import free_port

INSPECT = "docs/how-to/inspect.md"
_PHASE_S = 20.0  # how long a number of trainers is measured
_ELSEWHERE = """\
port 0
tls-port 6380
tls-cert-file /etc/redis/tls.crt
tls-key-file /etc/redis/tls.key
tls-ca-cert-file /etc/redis/ca.crt
tls-auth-clients no
aclfile /etc/redis/users.acl
save ""
"""


@scenario
def dev(stage: Stage) -> None:
    """The overlay `dev` and what can be done with it, as the pages say."""
    cluster, docs = stage.cluster, stage.docs
    cluster.begin()
    docs.type(KUBERNETES, "docker build", "kubectl apply -k k8s/namespace")
    docs.type(KUBERNETES, "kubectl apply -k k8s/overlays/dev")
    cluster.ready()
    with stage.run() as run:
        run.more(20)
        docs.inline(OPERATE, "kubectl --namespace fedstream scale deployment trainer")
        cluster.ready("deployment/trainer")
        run.more(20)
        docs.begin(KUBERNETES, "kubectl --namespace fedstream port-forward service/coordinator")
        answers(docs.web)
        docs.begin(KUBERNETES, "kubectl --namespace fedstream port-forward service/redis")
        answers(docs.redis)
        docs.type(KUBERNETES, "export FEDSTREAM_REDIS__U", "export FEDSTREAM_REDIS__P")
        said = docs.type(KUBERNETES, "fedstream status --redis", "fedstream status --url")
        assert said.count(f" {NAME}, ") == 2, said
        for pod in ("deploy/coordinator", "statefulset/updater", "deploy/trainer"):
            docs.type(INSPECT, f"kubectl -n fedstream exec {pod}")
        (docs.clone / "task.py").write_text((K8S / "base" / "task" / "task.py").read_text())
        docs.type(
            OPERATE, "kubectl --namespace fedstream cp updater-0:/var/lib/fedstream/journal bad"
        )
        try:
            docs.type(OPERATE, "fedstream journal bisect")
        except Failed as error:  # its exit code says that no update broke this run's model
            if "never went below 0.5 after a better value" not in str(error):
                raise
        docs.type(OPERATE, "fedstream replay")
        docs.inline(OPERATE, "kubectl --namespace fedstream rollout status deployment/coordinator")
        outcome = run.finish()
    stage.add("`dev`, `status`, `doctor`, `scale`, `bisect`, `replay`", outcome, outcome.pause())


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
    """`redis-tls` with `redis-sentinel`: the master is deleted, and killed."""
    with stage.deployed("no-data", "redis-tls", "redis-sentinel") as run:
        moments = []
        for how, grace in (("is deleted", "60"), ("is killed", "1")):
            master, at = run.master(), time.time()
            stage.cluster.kubectl("delete", "pod", master, f"--grace-period={grace}")
            until(lambda: run.master() != master, "another master")  # noqa: B023
            run.more(5)
            stage.cluster.ready()
            moments.append((how, at, time.time()))
        outcome = run.finish()
    for how, at, to in moments:
        stage.add(f"`redis-sentinel` over TLS: the master {how}", outcome, outcome.pause(at, to))


@scenario
def aof(stage: Stage) -> None:
    """`redis-aof`: Redis is deleted and killed, and no task is lost."""
    with stage.deployed("no-data", "redis-aof", "redis-tls") as run:
        at = time.time()
        for grace in ("30", "1"):
            stage.cluster.kubectl("delete", "pod", "redis-0", f"--grace-period={grace}")
            run.more(5)
        stage.cluster.ready()
        outcome = run.finish()
    assert not outcome.tasks["given_up"], outcome.tasks
    stage.add("`redis-aof` over TLS: deleted, killed", outcome, outcome.pause(at))


@scenario
def lifecycle(stage: Stage) -> None:
    """Extended, backed up, restored, deleted and applied again: the same run goes on."""
    cluster, docs = stage.cluster, stage.docs
    backups = docs.text(PRODUCTION, "yaml", "apiVersion: v1\nkind: PersistentVolumeClaim")
    cluster.begin()
    cluster.apply([*stage.secrets(), *cluster.adapted([yaml.safe_load(backups)])])
    with stage.run() as run:
        for versions in ("15", "1000000"):
            docs.overlay("no-data", "backup", RUN__VERSIONS=versions)
            docs.type(OPERATE, "kubectl apply -k YOUR_OVERLAY")
            cluster.ready()
            if versions == "15":
                until(lambda: run.get()["state"] == "finished", "the run ends")
        run.more(10)
        created = run.get()["created"]
        docs.type(OPERATE, "kubectl --namespace fedstream cp updater-0", "fedstream journal verify")
        docs.type(
            PRODUCTION,
            "kubectl --namespace fedstream create job backup-now",
            "kubectl --namespace fedstream wait --for=condition=Complete",
        )
        run.more(10)
        # What came after the copy is discarded.
        docs.type(
            OPERATE,
            "kubectl --namespace fedstream scale statefulset updater --replicas=0",
            "kubectl --namespace fedstream wait --for=delete --timeout=5m pod/updater-0",
            "kubectl --namespace fedstream create job restore",
            "kubectl --namespace fedstream wait --for=condition=Complete --timeout=10m job/restore",
        )
        operator(stage, run, "purge", "--run", NAME, "--force", "--yes")
        docs.type(OPERATE, "kubectl --namespace fedstream scale statefulset updater --replicas=1")
        cluster.ready()
        run.more(10)
        outcome = run.finish(may_restart="^(updater|coordinator|scheduler|evaluator|trainer)-")
        stage.add("extended, backed up, restored", outcome)
        docs.given("kubectl delete -k ../YOUR_OVERLAY")
        until(lambda: not cluster.pods(), "all pods end")
        docs.type(OPERATE, "kubectl apply -k YOUR_OVERLAY")
        cluster.ready()
        run.more(10)
        about = run.get()
        assert (about["created"], about["version"] > len(outcome.versions)) == (created, True), (
            about
        )
        stage.add("`kubectl delete -k`, applied again: the same run", run.finish())


@scenario
def moving(stage: Stage) -> None:
    """From one Redis to another and back, in the middle of a run."""
    cluster, docs = stage.cluster, stage.docs
    cluster.begin()
    cluster.apply(stage.secrets())
    docs.overlay("no-data", RUN__VERSIONS="1000000")
    docs.type(OPERATE, "kubectl apply -k YOUR_OVERLAY")
    cluster.ready()
    with stage.run() as run:
        run.more(5)
        for component in ("redis-aof", "redis-sentinel", ""):
            at = time.time()
            docs.overlay("no-data", *filter(None, [component]), RUN__VERSIONS="1000000")
            docs.type(OPERATE, "kubectl --namespace fedstream scale deployment scheduler")
            run.rest()
            docs.type(OPERATE, "kubectl --namespace fedstream delete statefulset,service redis")
            docs.type(OPERATE, "kubectl apply -k YOUR_OVERLAY")
            if not component:
                docs.type(
                    OPERATE,
                    "kubectl --namespace fedstream delete statefulset/sentinel",
                    "kubectl --namespace fedstream delete networkpolicy/sentinel",
                )
            cluster.ready()
            run.more(5)
            took = f"{time.time() - at:.0f} s until the 5th version after"
            stage.add(f"moved to {component or 'a Redis without a volume'}", note=took)
        stage.add("moved three times", run.finish(may_restart="."))


@scenario
def owners_and_sites(stage: Stage) -> None:
    """`device-owners`, `site` and a second site made of its folder: each trains its own devices."""
    other = stage.docs.clone / "k8s" / "components" / "site-b"
    shutil.copytree(other.with_name("site"), other)
    for path in other.iterdir():  # as the page says: another name, and other devices
        text = path.read_text().replace("SITE_A", "SITE_B").replace("site-a:0-1", "site-b:2-3")
        text = text.replace("  replicas: 2", "  ordinals: {start: 2}\n  replicas: 2")
        path.write_text(text.replace("site-a", "site-b"))

    def change(one: Manifest) -> None:
        """An owner with a device that no site has."""
        if (one["kind"], one["metadata"]["name"]) == ("StatefulSet", "owner"):
            one["spec"] |= {"replicas": 1, "ordinals": {"start": 4}}

    with stage.deployed("no-data", "device-owners", "site", str(other), change=change) as run:
        until(lambda: len(run.get()["register"]) == 5, "all trainers register")
        run.more(30)
        outcome = run.finish()
    assert outcome.used.keys() == {"pool", "site-a", "site-b"}, outcome.used
    stage.add("`device-owners` and two sites", outcome, note=counted(outcome.used))


@scenario
def page(stage: Stage) -> None:
    """`page`: who has the token sees it, nobody else does."""
    with stage.deployed("no-data", "page") as run:
        stage.docs.begin("docs/how-to/browser.md", "kubectl --namespace fedstream port-forward")
        answers(stage.docs.web)
        url = f"http://127.0.0.1:{stage.docs.web}/"
        token = stage.cluster.secret("fedstream-http", "token")
        found = [status(url, {}), status(url, {"Authorization": f"Bearer {token}"})]
        assert found == [401, 200], found
        stage.add("`page`, without the token 401, with it 200", run.finish())


@scenario
def sinks(stage: Stage) -> None:
    """`sinks`: every version is in MLflow's file store."""
    with stage.deployed("no-data", "sinks", change=tracked) as run:
        run.more(10)
        last = run.rest()["version"]

        def written() -> int:
            command = "cat /tmp/tracked/*/*/metrics/staleness/max | wc -l"
            return int(stage.cluster.kubectl("exec", "deploy/sinks", "--", "sh", "-c", command))

        until(lambda: written() >= last, "MLflow has every version")
        stage.add("`sinks` into MLflow's file store", run.finish(), note=f"{written()} versions")


@scenario
def gateway(stage: Stage) -> None:
    """`gateway`: devices through a proxy that ends TLS, each at an address of its own."""
    if not shutil.which("haproxy"):
        stage.add("skipped: no haproxy on PATH")
        return
    port, folder = free_port(), stage.folder / "proxy"
    folder.mkdir()
    settings = {"GATEWAY__NAMES__PROXY": f"localhost:{port}", "GATEWAY__PROXIES": "1"}
    with (
        stage.deployed("no-data", "redis-tls", "gateway", settings=settings) as run,
        ExitStack() as opened,
    ):
        behind = opened.enter_context(stage.cluster.forward("service/gateway", 80))
        (folder / "all.pem").write_text(
            "".join(
                stage.cluster.secret("fedstream-redis-tls", name) for name in ("tls.crt", "tls.key")
            )
        )
        (folder / "haproxy.cfg").write_text(
            "defaults\n mode http\n timeout connect 5s\n timeout client 9m\n timeout server 9m\n"
            f"frontend front\n bind 127.0.0.1:{port} ssl crt {folder}/all.pem\n"
            f" option forwardfor\n use_backend back\nbackend back\n server one 127.0.0.1:{behind}\n"
        )
        opened.enter_context(
            program("haproxy", "-db", "-f", str(folder / "haproxy.cfg"), log=folder / "haproxy.log")
        )
        task = folder / "task.py"
        task.write_text(SLOW)
        said = operator(stage, run, "devices", "invite", "0", "1")
        invites = [line.split()[-1] for line in said.splitlines()]
        ca = folder / "ca.crt"
        ca.write_text(stage.cluster.secret("fedstream-redis-tls", "ca.crt"))
        for number, invite in enumerate(invites):
            opened.enter_context(
                program(
                    sys.executable,
                    "-m",
                    "fedstream",
                    "device",
                    "--url",
                    f"https://localhost:{port}",
                    "--ca",
                    str(ca),
                    "--task",
                    f"{task}:task",
                    "--key",
                    str(folder / f"{number}.pem"),
                    "--invite",
                    invite,
                    log=folder / f"{number}.log",
                )
            )
        until(lambda: answers_of_gateways(run) >= 10, "ten updates of devices")
        outcome = run.finish()
    assert outcome.used.get("gateway"), (outcome.used, (folder / "0.log").read_text()[-500:])
    stage.add("`gateway`, 2 devices through haproxy with TLS", outcome, note=counted(outcome.used))


@scenario
def keda(stage: Stage) -> None:
    """`keda`: a stand-in asks the coordinator what KEDA would, and scales the trainers so."""
    cluster = stage.cluster
    with stage.deployed(
        "no-data", "keda", versions=0, settings={"SCHEDULER__POLICY__N": "3"}
    ) as run:
        seen = [0]
        [scaled] = cluster.objects("scaledobject")
        until(lambda: follow(run, scaled, seen) and run.version() >= 30, "version 30")
        cluster.scale("deployment/scheduler", 0)
        until(lambda: follow(run, scaled, seen) and seen[-1] == 0, "no trainer is needed")
        outcome = run.finish()
    assert max(seen) == 3, seen
    stage.add("`keda`, by a stand-in", outcome, note=f"trainers {', '.join(map(str, seen))}")


def follow(run: Run, scaled: Manifest, seen: list[int]) -> bool:
    """One look of KEDA's: as many trainers as its trigger's value wants."""
    spec = scaled["spec"]
    about = spec["triggers"][0]["metadata"]
    value = run.get(about["url"].partition(f"/runs/{NAME}")[2])[about["valueLocation"]]
    wanted = min(math.ceil(value / float(about["targetValue"])), spec["maxReplicaCount"])
    if wanted != seen[-1]:
        run.cluster.scale(f"deployment/{spec['scaleTargetRef']['name']}", wanted)
        seen.append(wanted)
    return True


@scenario
def together(stage: Stage) -> None:
    """All components that go together, in a drawn order: every pair of them is on the cluster."""
    for names in largest():
        chosen = [name for name in names if name != "gpu"]  # there is none
        stage.rng.shuffle(chosen)
        play_components(stage, chosen, f"together: {', '.join(chosen)}")


@scenario
def alone(stage: Stage) -> None:
    """Each component on the base, with what it is refused without."""
    for name, parts in combinations().items():
        if name == "gpu":
            stage.add("`gpu`: no GPU here")
        else:
            play_components(stage, [*{*parts, "no-data"}], f"`{name}` alone")


def play_components(stage: Stage, names: Sequence[str], what: str, resource: str = "base") -> None:
    """A run on these components; a failure is a row."""
    elsewhere: Cluster | None = None
    before: list[Manifest] = []
    settings: dict[str, str] = {}
    try:
        if "external-redis" in names or resource.endswith("external"):
            elsewhere, authority = redis_elsewhere(stage)
            before.append(authority)
            settings["REDIS__URL"] = f"rediss://redis.{elsewhere.namespace}:6380/0"
        with stage.deployed(
            *names,
            resource=resource,
            versions=0,
            redis=elsewhere,
            change=tracked,
            before=before,
            settings=settings,
        ) as run:
            if stage.cluster.objects("deployment", "app.kubernetes.io/component=trainer"):
                stage.cluster.scale("deployment/trainer", 1)
            run.more(5)
            outcome = run.finish()
        stage.add(what, outcome)
    except (Failed, AssertionError) as error:
        stage.rows.append(Row(stage.scenario, what, failed=str(error)))
    finally:
        if elsewhere:
            elsewhere.end()


@scenario
def production(stage: Stage) -> None:
    """The page on production, every command of it, with a stand-in for KEDA; then each overlay."""
    cluster, docs = stage.cluster, stage.docs
    cluster.end()
    began = time.monotonic()
    files = {"Kustomization": "kustomization.yaml", "PersistentVolumeClaim": "backup.yaml"}
    docs.follow(PRODUCTION, files)
    minutes = (time.monotonic() - began) / 60
    with stage.run() as run:
        [scaled] = cluster.objects("scaledobject")
        seen = [1]
        until(lambda: follow(run, scaled, seen) and run.version() >= 30, "version 30")
        outcome = run.finish()
        stage.add("the page's commands", outcome, note=f"{minutes:.0f} minutes to the backup")
        about = run.get()
        docs.inline(PRODUCTION, "kubectl delete -k .")
        until(lambda: not cluster.pods("updater"), "the updater ends")
        docs.given("kubectl apply -k .")
        cluster.ready()
        until(lambda: run.version() >= about["version"], "the newest version is back")
        assert run.get()["created"] == about["created"]
        stage.add("deleted, applied again: the same run", run.finish())
    for name in overlays():
        if name != "dev":
            play_components(stage, ["no-data"], f"overlay `{name}`", f"overlays/{name}")


@scenario
def renderings(stage: Stage) -> None:
    """Every pair and every triple of components, in every order: the same objects."""
    for number in (2, 3):
        sets = components_together(number)
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda names: list(differences(permutations(names))), sets))
        wrong = [line for lines in found for line in lines]
        assert not wrong, wrong[:5]
        orders = len(sets) * math.factorial(number)
        stage.add(f"{len(sets)} sets of {number} components in {orders} orders: the same objects")


# what scenarios share


def redis_elsewhere(stage: Stage) -> tuple[Cluster, Manifest]:
    """A Redis in another namespace, over TLS, with our users; and the ConfigMap with its CA."""
    there = replace(stage.cluster, namespace=f"{stage.cluster.namespace}-redis")
    there.begin()
    clone = stage.docs.clone
    passwords = {f"FEDSTREAM_PASSWORD_{role.upper()}": one for role, one in stage.passwords.items()}
    passwords["FEDSTREAM_PASSWORD_SITE_SITE_A"] = stage.passwords["site-a"]
    run_fedstream(
        "acl",
        "--run",
        NAME,
        "--site",
        "gateway",
        "--site",
        "site-a",
        "--out",
        str(clone / "users.acl"),
        **passwords,
    )
    users = (clone / "users.acl").read_text()
    files = stage.certificate | {"users.acl": users, "redis.conf": _ELSEWHERE}
    labels = {"app": "redis"}
    container = {
        "name": "redis",
        "image": "redis:7.2.11-bookworm",
        "command": ["redis-server", "/etc/redis/redis.conf"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "files", "mountPath": "/etc/redis"}],
    }
    pod = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 10002,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": "files", "secret": {"secretName": "fedstream-redis-tls"}}],
    }
    ports = [{"name": f"port-{port}", "port": port, "targetPort": 6380} for port in (6379, 6380)]
    there.apply(
        [
            secret("fedstream-redis-tls", there.namespace, files),
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": {"name": "redis", "namespace": there.namespace},
                "spec": {
                    "selector": {"matchLabels": labels},
                    "template": {"metadata": {"labels": labels}, "spec": pod},
                },
            },
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": "redis", "namespace": there.namespace},
                "spec": {"selector": labels, "ports": ports},
            },
        ]
    )
    there.ready()
    return there, {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "data": {"ca.crt": files["ca.crt"]},
        "metadata": {"name": "fedstream-redis-ca", "namespace": stage.cluster.namespace},
    }


def tracked(one: Manifest) -> None:
    """MLflow's file store in the place of a server."""
    if (one["kind"], one["metadata"]["name"]) == ("Deployment", "sinks"):
        [container] = one["spec"]["template"]["spec"]["containers"]
        text = container["args"][-1].replace("http://mlflow.mlflow:5000", "file:///tmp/tracked")
        container["args"][-1] = text


def operator(stage: Stage, run: Run, *command: str) -> str:
    """A command of fedstream's for the operator: what it printed."""
    file = stage.folder / "operator.toml"
    with run.redis() as redis:
        tls = f'tls.ca = "{redis.tls.ca}"\n' if redis.tls else ""
        file.write_text(f'[run]\nname = "{NAME}"\n[redis]\nurl = "{redis.url}"\n{tls}')
        return run_fedstream(
            *command,
            "--config",
            str(file),
            FEDSTREAM_REDIS__USERNAME="operator",
            FEDSTREAM_REDIS__PASSWORD=stage.passwords["operator"],
        )


def answers_of_gateways(run: Run) -> int:
    """How many updates gateways say that they passed on."""
    register = run.get()["register"].items()
    return sum(one["answers"] for name, one in register if name.startswith("gateway/"))


def counted(used: Mapping[str, int]) -> str:
    """Updates by who made them."""
    return "updates: " + ", ".join(f"{name} {n}" for name, n in sorted(used.items()))


def status(url: str, headers: Mapping[str, str]) -> int:
    """How a request is answered."""
    try:
        with urlopen(Request(url, headers=dict(headers)), timeout=30) as answer:  # noqa: S310
            found: int = answer.status
    except HTTPError as error:
        found = error.code
    return found


def run_fedstream(*arguments: str, **environ: str) -> str:
    """The command here: what it printed. Raises Failed."""
    command = [sys.executable, "-m", "fedstream", *arguments]
    done = subprocess.run(
        command, env=os.environ | environ, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed(f"fedstream {' '.join(arguments)}: {done.stderr.strip()[-500:]}")
    return done.stdout


@contextmanager
def program(*command: str, log: Path) -> Iterator[None]:
    """A process as long as the block lasts."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)
