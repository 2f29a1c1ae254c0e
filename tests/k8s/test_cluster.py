"""The harness itself, on manifests of a few lines: it does what Kubernetes says it does."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import yaml
from aiohttp import web

from tests.k8s.cluster import Cluster, Manifest, Manners, Pod, Refused, Unsupported, read, sandbox
from tests.k8s.cluster.image import Image, Program, name_of
from tests.k8s.cluster.keda import Autoscaler, Scaler
from tests.k8s.cluster.manifests import share
from tests.k8s.cluster.network import client, translator
from tests.k8s.cluster.pod import expanded, quantity
from tests.k8s.conftest import missing

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="addresses in 127.0.0.0/8"),
]

# Answers /NAME with 200 where a file NAME is in its folder and 503 where none is; every line that
# it says is in the story. SIGTERM ends it, unless there is a file `stubborn`.
SERVER = """
import http.server, json, os, pathlib, signal, sys
state = pathlib.Path("/state")
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = (state / self.path[1:]).exists()
        self.send_response(200 if found else 503)
        self.end_headers()
        self.wfile.write(os.environ["NAME"].encode())
    def log_message(self, *about): pass
def stop(*_):
    with open(state / "story", "a") as story: story.write("SIGTERM\\n")
    if not (state / "stubborn").exists(): os._exit(0)
signal.signal(signal.SIGTERM, stop)
for name in sys.argv[1:]: (state / name).touch()
server = http.server.ThreadingHTTPServer((os.environ["IP"], 8080), Answer)
with open(state / "story", "a") as story: story.write("started\\n")
server.serve_forever()
"""

COMMON = f"""
apiVersion: v1
kind: ConfigMap
metadata: {{name: server}}
data: {{server.py: {json.dumps(SERVER)}}}
---
apiVersion: v1
kind: Service
metadata: {{name: web}}
spec:
  selector: {{app: web}}
  ports: [{{port: 80, targetPort: http}}]
"""

WEB = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  template:
    metadata: {labels: {app: web}}
    spec:
      terminationGracePeriodSeconds: 60
      containers:
        - name: web
          image: registry.example/sample:1
          args: [/srv/server.py, live, ready]
          env:
            - {name: NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
          ports: [{name: http, containerPort: 8080}]
          readinessProbe:
            httpGet: {path: /ready, port: http}
            periodSeconds: 0.05
            timeoutSeconds: 30
          volumeMounts:
            - {name: server, mountPath: /srv}
            - {name: state, mountPath: /state}
      volumes:
        - {name: server, configMap: {name: server}}
        - {name: state, emptyDir: {}}
"""

PYTHON = Image({"python": Program(Path(sys.executable), ["-I", "-S", "-u"])}, entrypoint=["python"])
QUICK = Manners(backoff_s=0.1, most_backoff_s=0.2, again_s=0.02, lag_s=0.1, peek_s=0.02)


@pytest.fixture
def a_cluster(tmp_path: Path) -> Callable[..., Cluster]:
    """A cluster with a kubelet that is in a hurry."""
    return lambda manners=QUICK: Cluster(tmp_path, {"sample": PYTHON}, manners)


def web_like(**changes: Any) -> Manifest:
    """The Deployment, with another pod spec, or `container` with another container."""
    one: Manifest = yaml.safe_load(WEB)
    spec = one["spec"]["template"]["spec"]
    for name in ("replicas", "strategy", "paused"):
        if name in changes:
            one["spec"][name] = changes.pop(name)
    spec["containers"][0] |= changes.pop("container", {})
    spec |= changes
    return one


def pod_of(cluster: Cluster, name: str = "web") -> Pod:
    """The only pod of a workload."""
    [pod] = cluster[name].pods
    return pod


def state(pod: Pod) -> Path:
    """A pod's folder /state."""
    return pod.inside.folder / "volumes" / "state"


def story(pod: Pod) -> list[str]:
    """What its server said."""
    with suppress(FileNotFoundError):
        return (state(pod) / "story").read_text().split()
    return []


# what a container gets

TELLER = """
apiVersion: v1
kind: Secret
metadata: {name: passwords}
data: {updater: c2VjcmV0}
stringData: {trainer: plain}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: stream}
data: {COLOUR: red, where: "see /etc/told/file and redis://store:6379/0, [store] stays"}
---
apiVersion: v1
kind: Service
metadata: {name: store, namespace: stream}
spec: {selector: {app: nobody}, ports: [{port: 6379}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: teller, namespace: stream}
spec:
  selector: {matchLabels: {app: teller}}
  template:
    metadata:
      labels: {app: teller}
      annotations: {note: dear}
    spec:
      containers:
        - name: teller
          image: sample
          command: [python, -c]
          args:
            - |
              import json, os, signal, sys
              told = {"env": dict(os.environ), "args": sys.argv[1:], "cwd": os.getcwd()}
              told["file"] = open("/etc/told/file").read()
              told["single"] = open("/etc/single.txt").read()
              told["both"] = sorted(os.listdir("/etc/both"))
              open("/out/told.part", "w").write(json.dumps(told))
              os.rename("/out/told.part", "/out/told")
              signal.pause()
            - --to=/out/there
            - $(WHOLE) $$(WHOLE) $(MISSING)
          envFrom:
            - configMapRef: {name: settings}
            - {prefix: P_, secretRef: {name: passwords}}
            - configMapRef: {name: not-there, optional: true}
          env:
            - {name: PLAIN, value: "1"}
            - {name: WHOLE, value: $(PLAIN)-$(POD)-$(SECRET)-$(LATER)}
            - {name: POD, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
            - {name: NOTE, valueFrom: {fieldRef: {fieldPath: "metadata.annotations['note']"}}}
            - {name: NAMESPACE, valueFrom: {fieldRef: {fieldPath: metadata.namespace}}}
            - {name: SECRET, valueFrom: {secretKeyRef: {name: passwords, key: updater}}}
            - {name: AGAIN, value: $(SECRET)-$(COLOUR)}
            - {name: FROM_MAP, valueFrom: {configMapKeyRef: {name: settings, key: COLOUR}}}
            - {name: NONE, valueFrom: {configMapKeyRef: {name: settings, key: x, optional: true}}}
            - {name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
            - {name: URL, value: http://store.stream.svc:6379/out}
          resources: {limits: {cpu: 1500m}}
          volumeMounts:
            - {name: settings, mountPath: /etc/told, readOnly: true}
            - {name: settings, mountPath: /etc/single.txt, subPath: file, readOnly: true}
            - {name: both, mountPath: /etc/both}
            - {name: out, mountPath: /out}
      volumes:
        - name: settings
          configMap: {name: settings, items: [{key: where, path: file}]}
        - name: both
          projected:
            sources:
              - configMap: {name: settings, items: [{key: COLOUR, path: colour}]}
              - secret: {name: passwords}
        - {name: out, emptyDir: {}}
"""


async def test_a_container_gets_its_environment_arguments_and_files(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        await cluster.apply(read(TELLER))
        await cluster.settled("teller")
        pod = pod_of(cluster, "teller")
        out, root = pod.inside.folder / "volumes" / "out", pod.inside.folder / "teller"
        await cluster.until((out / "told").exists, what="it told")
        told = json.loads((out / "told").read_text())
        store = cluster.service("store").address
    env = told["env"]
    assert {name: env.get(name) for name in ("PLAIN", "COLOUR", "P_updater", "P_trainer")} == {
        "PLAIN": "1", "COLOUR": "red", "P_updater": "secret", "P_trainer": "plain",
    }  # fmt: skip
    assert env["WHOLE"] == "1-$(POD)-$(SECRET)-$(LATER)", "only what stands before it is known"
    assert env["AGAIN"] == "secret-red"
    assert env["POD"] == pod.name
    assert (env["NOTE"], env["NAMESPACE"], env["CPUS"]) == ("dear", "stream", "2")
    assert env["FROM_MAP"] == "red"
    assert "NONE" not in env
    assert env["URL"] == f"http://{store}:6379/out", "a path of a URL is no mount"
    assert env["STORE_SERVICE_HOST"] == store
    assert told["args"] == [f"--to={root}/out/there", f"{env['WHOLE']} $(WHOLE) $(MISSING)"]
    assert told["file"] == f"see {root}/etc/told/file and redis://{store}:6379/0, [store] stays"
    assert told["single"] == told["file"]
    assert told["both"] == ["colour", "trainer", "updater"]
    assert "VIRTUAL_ENV" not in env, "nothing of ours comes along"


@pytest.mark.parametrize(
    ("text", "here"),
    [
        ("redis://redis:6379/0", "redis://127.9.9.1:6379/0"),
        ("redis://user:word@redis:6379", "redis://user:word@127.9.9.1:6379"),
        ("redis-0.nodes:26379", "127.9.9.2:26379"),
        ('["redis-0.nodes:26379", "redis:6380"]', '["127.9.9.2:26379", "127.9.9.1:6380"]'),
        ("monitor redis-0.nodes 6379", "monitor 127.9.9.2 6379"),
        ("http://coordinator.ns.svc/v1", "http://127.9.9.3:8080/v1"),
        ("http://coordinator.ns.svc.cluster.local:80/v1", "http://127.9.9.3:8080/v1"),
        ("http://coordinator", "http://127.9.9.3:8080"),
        ("[redis]", "[redis]"),
        ("/etc/redis/redis.conf", "/etc/redis/redis.conf"),
        ("user redis on", "user redis on"),
        ("redis-server:6379", "redis-server:6379"),
        ("http://redis.example.org/", "http://redis.example.org/"),
        ("my-redis:6379", "my-redis:6379"),
    ],
)
def test_addresses_take_the_place_of_names_where_a_host_is_meant(text: str, here: str) -> None:
    names = {"redis": "127.9.9.1", "redis-0.nodes": "127.9.9.2", "coordinator": "127.9.9.3"}
    assert translator(names, "ns")(text) == here


def test_small_things_as_kubernetes_reads_them() -> None:
    assert expanded("$(A) $$(A) $(B) $A", {"A": "1"}) == "1 $(A) $(B) $A"
    assert [quantity(text) for text in ("500m", 2, "2Gi", "0.5")] == [0.5, 2, 2**31, 0.5]
    assert share("25%", 2, up=True) == 1
    assert share("25%", 2, up=False) == 0
    assert name_of("registry.example:5000/team/fedstream:1.2@sha256:ab") == "fedstream"


@pytest.mark.parametrize("ci", [True, False])
def test_what_is_missing_on_this_machine_fails_only_in_ci(
    monkeypatch: pytest.MonkeyPatch, *, ci: bool
) -> None:
    monkeypatch.setenv("FEDSTREAM_CI", "1" if ci else "")
    with pytest.raises(pytest.fail.Exception if ci else pytest.skip.Exception, match="no kubectl"):
        missing("no kubectl")


async def test_a_secret_without_the_key_is_told_and_waited_for(
    a_cluster: Callable[..., Cluster],
) -> None:
    reference = {"secretKeyRef": {"name": "passwords", "key": "trainer"}}
    waits = web_like(replicas=1)
    container = waits["spec"]["template"]["spec"]["containers"][0]
    container["env"].append({"name": "PASSWORD", "valueFrom": reference})
    secret = {"kind": "Secret", "metadata": {"name": "passwords"}, "stringData": {"updater": "x"}}
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), waits])
        pod = await cluster.until(lambda: cluster["web"].pods, what="a pod")
        missing = "web: CreateContainerConfigError: secret 'passwords' not found"
        await cluster.until(lambda: pod[0].state == missing, what=missing)
        await cluster.apply([secret])
        missing = "web: CreateContainerConfigError: secret 'passwords' has no key 'trainer'"
        await cluster.until(lambda: pod[0].state == missing, what=missing)
        assert missing in cluster.story
        await cluster.apply([{**secret, "stringData": {"trainer": "x"}}])
        await cluster.settled("web")
        assert pod[0].restarts == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"hostNetwork": True},
        {"container": {"lifecycle": {"postStart": {"sleep": {"seconds": 1}}}}},
        {"strategy": {}, "paused": True},
        {"restartPolicy": "Never"},
        {"container": {"image": "unheard-of"}},
        {"container": {"livenessProbe": {"grpc": {"port": 1}}}},
    ],
    ids=str,
)
async def test_what_is_not_built_is_refused(
    a_cluster: Callable[..., Cluster], changes: dict[str, Any]
) -> None:
    async def run() -> None:
        async with a_cluster() as cluster:
            await cluster.apply([web_like(**changes)])
            await cluster.settled("web")

    with pytest.raises(Unsupported):
        await run()


@pytest.mark.skipif(not sandbox.available(), reason="the kernel has no Landlock")
async def test_what_is_read_only_can_only_be_read(a_cluster: Callable[..., Cluster]) -> None:
    tries = """
import os, sys
for path in ("/state/file", "/fixed/file", "/srv/file", "here", os.environ["TMPDIR"] + "/file"):
    try: open(path, "w").close(); says = "written"
    except OSError as error: says = error.strerror
    print(os.path.basename(os.path.dirname(path)) or "here", says)
open("/state/done", "w").close()
import signal; signal.pause()
"""
    one = web_like(replicas=1, container={
        "command": ["python", "-c", tries], "args": [], "readinessProbe": None,
        "securityContext": {"readOnlyRootFilesystem": True},
    })  # fmt: skip
    spec = one["spec"]["template"]["spec"]
    spec["containers"][0].pop("readinessProbe")
    spec["containers"][0]["volumeMounts"] += [
        {"name": "fixed", "mountPath": "/fixed", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  (in the container)
    ]
    spec["volumes"] += [{"name": "fixed", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), one])
        await cluster.settled("web")
        await cluster.until((state(pod_of(cluster)) / "done").exists, what="it tried")
        said = pod_of(cluster).containers[0].container.last_words.splitlines()
    no = "Permission denied"
    assert said == ["state written", f"fixed {no}", f"srv {no}", f"here {no}", "tmp written"]


# its life


async def test_init_containers_come_first_in_order_until_each_has_succeeded(
    a_cluster: Callable[..., Cluster],
) -> None:
    def init(name: str, code: str) -> Manifest:
        tell = f"open('/state/story', 'a').write('{name}\\n')"
        mounts = [{"name": "state", "mountPath": "/state"}]
        command = ["python", "-c", f"import os; {tell}; {code}"]
        return {"name": name, "image": "sample", "command": command, "volumeMounts": mounts}

    once = "os.path.exists('/state/tried') or (open('/state/tried', 'w'), os._exit(3))"
    inits = [init("first", once), init("second", "pass")]
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, initContainers=inits)])
        await cluster.settled("web")
        pod = pod_of(cluster)
        assert story(pod) == ["first", "first", "second", "started"]
        assert "first ended with exit code 3" in cluster.story


async def test_startup_gates_liveness_and_readiness(a_cluster: Callable[..., Cluster]) -> None:
    probe = {"periodSeconds": 0.05, "timeoutSeconds": 30}
    container = {
        "args": ["/srv/server.py", "ready"],
        "startupProbe": {
            **probe, "httpGet": {"path": "/begun", "port": "http"}, "failureThreshold": 1000,
        },
        "livenessProbe": {
            **probe, "httpGet": {"path": "/live", "port": 8080}, "failureThreshold": 1,
        },
    }  # fmt: skip
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        await cluster.until(lambda: cluster["web"].pods, what="a pod")
        pod = pod_of(cluster)
        await cluster.until(lambda: story(pod) == ["started"], what="it started")
        await answers(f"http://{pod.address}:8080/ready", 200)
        assert (pod.ready, pod.restarts) == (False, 0)
        (state(pod) / "live").touch()
        (state(pod) / "begun").touch()
        await cluster.settled("web")
        (state(pod) / "live").unlink()
        await cluster.until(lambda: pod.restarts == 1, what="it was started again")
        (state(pod) / "live").touch()
        await cluster.settled("web")
        assert story(pod)[:3] == ["started", "SIGTERM", "started"]
        assert pod.findings[0] == f"{pod.name}, container web, failed its liveness probe"


async def test_readiness_decides_who_is_asked(a_cluster: Callable[..., Cluster]) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like()])
        await cluster.settled()
        one, other = cluster["web"].pods
        service = cluster.service("web")
        asked = [await answers(f"{service.url()}/live", 200) for _ in range(4)]
        assert asked in ([one.name, other.name] * 2, [other.name, one.name] * 2)
        (state(one) / "ready").unlink()
        await cluster.until(lambda: not one.ready, what="one is not ready")
        await cluster.until(lambda: service.asked == [other], what="one endpoint")
        assert {await answers(f"{service.url()}/live", 200) for _ in range(3)} == {other.name}
        (state(other) / "ready").unlink()
        await cluster.until(lambda: service.asked == [], what="no endpoint")
        with pytest.raises(aiohttp.ClientError):
            await answers(f"{service.url()}/live", 200)
        assert [pod.restarts for pod in (one, other)] == [0, 0]


async def test_good_news_is_not_waited_for_and_bad_news_counts_at_its_time(
    a_cluster: Callable[..., Cluster],
) -> None:
    probe = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 300}
    liveness = {**probe, "httpGet": {"path": "/live", "port": "http"}, "failureThreshold": 2}
    container = {
        "args": ["/srv/server.py"], "readinessProbe": probe, "livenessProbe": liveness,
    }  # fmt: skip
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        await cluster.until(lambda: cluster["web"].pods, what="a pod")
        pod = pod_of(cluster)
        await cluster.until(lambda: story(pod) == ["started"], what="it started")
        (state(pod) / "ready").touch()
        await cluster.settled("web")
        assert pod.restarts == 0, "alive it never was, but that was asked for only once"


@pytest.mark.parametrize("how", ["exec", "tcpSocket"])
async def test_other_ways_to_probe(a_cluster: Callable[..., Cluster], how: str) -> None:
    script = ["sh", "-c", '[ -e "/state/ready" ] && [ "$NAME" ]']
    handler = {"exec": {"command": script}, "tcpSocket": {"port": "http"}}[how]
    probe = {how: handler, "periodSeconds": 0.05, "timeoutSeconds": 30, "failureThreshold": 1}
    async with a_cluster() as cluster:
        one = web_like(replicas=1, container={"readinessProbe": probe})
        await cluster.apply([*read(COMMON), one])
        await cluster.settled()
        pod = pod_of(cluster)
        if how == "exec":
            (state(pod) / "ready").unlink()
            await cluster.until(lambda: not pod.ready, what="not ready")


async def test_an_end_is_hook_then_sigterm_then_within_the_grace(
    a_cluster: Callable[..., Cluster],
) -> None:
    hook = {"exec": {"command": ["sh", "-c", "echo hook >> /state/story"]}}
    async with a_cluster() as cluster:
        container = {"lifecycle": {"preStop": hook}}
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        await cluster.settled()
        pod = pod_of(cluster)
        cluster.scale("web", 0)
        await cluster.settled()
        assert pod.gone.is_set()
        assert story(pod) == ["started", "hook", "SIGTERM"]
        assert cluster.findings == []


async def test_who_does_not_go_within_the_grace_is_killed(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        one = web_like(replicas=1, terminationGracePeriodSeconds=3)  # to say a word
        await cluster.apply([*read(COMMON), one])
        await cluster.settled()
        pod = pod_of(cluster)
        (state(pod) / "stubborn").touch()
        cluster.scale("web", 0)
        await cluster.settled()
        assert story(pod) == ["started", "SIGTERM"]
        assert cluster.findings == [f"{pod.name}, web was still there when its grace was over"]


async def test_who_takes_more_memory_than_its_limit_is_found(
    a_cluster: Callable[..., Cluster],
) -> None:
    container = {"resources": {"limits": {"memory": "1Mi"}}}
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        await cluster.settled()
        pod = pod_of(cluster)
        cluster.scale("web", 0)
        await cluster.settled()
        assert cluster.findings == [f"{pod.name}, web took more than its limit"]


async def test_who_crashes_is_started_again_after_longer_and_longer_waits(
    a_cluster: Callable[..., Cluster],
) -> None:
    container = {
        "command": ["python", "-c", "open('/state/story', 'a').write('x '); raise SystemExit(4)"]
    }
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        pods = await cluster.until(lambda: cluster["web"].pods, what="a pod")
        await cluster.until(lambda: pods[0].restarts == 4, what="4 restarts")
        assert "CrashLoopBackOff" not in pods[0].findings[0]
        ends = pods[0].containers[0].ends
        assert all(re.fullmatch(r"ended with exit code 4 after [\d.]+ s", end) for end in ends)
        await cluster.until(lambda: "CrashLoopBackOff" in pods[0].state, what="it waits")
        assert "0.2 s to wait" in pods[0].state, "not longer than the longest"


async def test_who_is_killed_is_started_again_in_the_same_pod(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1)])
        await cluster.settled()
        pod = pod_of(cluster)
        pod.kill()
        await cluster.until(lambda: story(pod) == ["started", "started"], what="it came back")
        await cluster.settled()
        assert pod_of(cluster) is pod
        assert pod.restarts == 1
        assert cluster.findings == [], "it was asked for"


async def test_nothing_is_left_when_the_cluster_ends(a_cluster: Callable[..., Cluster]) -> None:
    child = "import os, subprocess; subprocess.Popen(['sleep', '100']); "
    code = child + "open('/state/ready', 'w'); __import__('signal').pause()"
    container = {
        "command": ["python", "-c", code], "args": [],
        "readinessProbe": {
            "exec": {"command": ["test", "-e", "/state/ready"]},
            "periodSeconds": 1, "timeoutSeconds": 30,
        },
    }  # fmt: skip
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=1, container=container)])
        await cluster.settled()
        running = pod_of(cluster).containers[0].running
        assert running
        parent = psutil.Process(running.process.pid)
        processes = [parent, *parent.children()]
        assert len(processes) == 2
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


# Deployments


@asynccontextmanager
async def serving(cluster: Cluster) -> AsyncIterator[list[str]]:
    """Asks the Service all the time: who answered. Whatever else comes of it is an error."""
    answered: list[str] = []

    async def ask() -> None:
        while True:
            answered.append(await answers(f"{cluster.service('web').url()}/live", 200))

    asking = asyncio.create_task(ask())
    try:
        yield answered
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


async def answers(url: str, status: int) -> str:
    """A GET without a connection kept: its text."""
    async with client() as session, session.get(url) as answer:
        assert answer.status == status
        return await answer.text()


async def test_replicas_come_and_go(a_cluster: Callable[..., Cluster]) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=0)])
        await cluster.settled()
        assert cluster["web"].pods == []
        cluster.scale("web", 3)
        await cluster.settled()
        first, *_ = cluster["web"].pods
        assert len({pod.address for pod in cluster["web"].pods}) == 3
        cluster.scale("web", 1)
        await cluster.settled()
        assert cluster["web"].pods == [first], "the youngest go"
        await cluster.apply([web_like(replicas=2)])
        await cluster.settled()
        manifest = web_like()
        del manifest["spec"]["replicas"]
        await cluster.apply([manifest])
        assert cluster["web"].replicas == 2, "who scales it says how many"


async def test_a_rolling_update_keeps_enough_of_them_ready(
    a_cluster: Callable[..., Cluster],
) -> None:
    hook = {"preStop": {"sleep": {"seconds": 2}}}  # until nobody is sent here any more, or waits
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(container={"lifecycle": hook})])
        await cluster.settled()
        before = {pod.name for pod in cluster["web"].pods}
        service = cluster.service("web")
        del service.ready[:]
        async with serving(cluster) as answered:
            await cluster.until(lambda: before == {*answered}, what="the old ones are asked")
            await cluster.restart("web")
            await cluster.settled("web")
            after = {pod.name for pod in cluster["web"].pods}
            await cluster.until(lambda: after <= {*answered}, what="the new ones are asked")
        assert not before & after
        assert set(answered) == before | after
        assert set(service.ready) == {2}, "an old one goes when a new one can take its place"


async def test_a_rolling_update_that_never_gets_ready_takes_nobody_away(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like()])
        await cluster.settled()
        before = cluster["web"].pods
        await cluster.apply([web_like(container={"args": ["/srv/server.py", "live"]})])
        await cluster.until(lambda: len(cluster["web"].pods) == 3, what="one more")
        new = cluster["web"].pods[-1]
        await cluster.until(lambda: story(new) == ["started"], what="it started")
        await answers(f"http://{new.address}:8080/ready", 503)
        assert [pod.ready for pod in cluster["web"].pods] == [True, True, False]
        await cluster.apply([web_like()])  # rolled back
        await cluster.settled()
        assert cluster["web"].pods == before


async def test_recreate_ends_the_old_before_it_begins_the_new(
    a_cluster: Callable[..., Cluster],
) -> None:
    recreate = web_like(strategy={"type": "Recreate"})
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), recreate])
        await cluster.settled()
        service = cluster.service("web")
        del service.ready[:]
        await cluster.restart("web")
        await cluster.settled()
        assert 0 in service.ready
        assert max(service.ready) <= 2


async def test_an_eviction_asks_the_budget(a_cluster: Callable[..., Cluster]) -> None:
    budget = yaml.safe_load("""
        kind: PodDisruptionBudget
        metadata: {name: web}
        spec: {minAvailable: 2, selector: {matchLabels: {app: web}}}
    """)
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=2), budget])
        await cluster.settled()
        with pytest.raises(Refused, match="budget web wants 2 of 2"):
            cluster.evict(cluster["web"].pods[0])
        cluster.scale("web", 3)
        await cluster.settled()
        pod = cluster["web"].pods[0]
        cluster.evict(pod)
        await cluster.until(pod.gone.is_set, what="it went")
        await cluster.settled()
        assert len(cluster["web"].pods) == 3


# StatefulSets


def web_set(**changes: Any) -> Manifest:
    """The same as a StatefulSet, with a claim in the place of its empty folder."""
    one = web_like(**changes)
    one["kind"] = "StatefulSet"
    one["spec"].pop("strategy")
    one["spec"]["template"]["spec"]["volumes"].pop()
    claim = {"metadata": {"name": "state"}, "spec": {"accessModes": ["ReadWriteOncePod"]}}
    return {**one, "spec": {**one["spec"], "serviceName": "web", "volumeClaimTemplates": [claim]}}


async def test_a_stateful_set_keeps_names_addresses_and_volumes(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_set()])
        await cluster.settled()
        zero, one = cluster["web"].pods
        assert (zero.name, one.name) == ("web-0", "web-1")
        assert cluster.here("http://web-1.web:8080") == f"http://{one.address}:8080"
        volume = cluster.claims / "state-web-1"
        assert (volume / "story").read_text().split() == ["started"]
        one.delete()
        await cluster.until(one.gone.is_set, what="it went")
        await cluster.settled()
        again = cluster["web"].pods[-1]
        assert (again.name, again.address) == ("web-1", one.address)
        assert again is not one
        assert (volume / "story").read_text().split() == ["started", "SIGTERM", "started"]
        again.delete(grace_s=0)
        await cluster.until(again.gone.is_set, what="it went")
        await cluster.settled()
        assert (volume / "story").read_text().split()[-2:] == ["started", "started"]
        assert cluster.findings == []
        cluster.scale("web", 0)
        await cluster.settled()
        assert volume.is_dir(), "a claim outlives its pods"


async def test_a_stateful_set_goes_up_in_order_and_is_updated_from_its_end(
    a_cluster: Callable[..., Cluster],
) -> None:
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), web_set(replicas=3)])
        await cluster.settled()
        first = cluster["web"].pods
        assert [a.became_ready <= b.became_ready for a, b in pairwise(first)] == [True, True]
        service = cluster.service("web")
        del service.ready[:]
        await cluster.restart("web")
        await cluster.settled()
        assert min(service.ready) == 2, "one at a time"
        became = sorted(cluster["web"].pods, key=lambda pod: pod.became_ready)
        assert [pod.name for pod in became] == ["web-2", "web-1", "web-0"]


async def test_a_claim_is_for_one_pod_at_a_time(a_cluster: Callable[..., Cluster]) -> None:
    claim = {
        "kind": "PersistentVolumeClaim", "metadata": {"name": "one"},
        "spec": {"accessModes": ["ReadWriteOncePod"]},
    }  # fmt: skip
    one = web_like()
    volume = {"name": "state", "persistentVolumeClaim": {"claimName": "one"}}
    one["spec"]["template"]["spec"]["volumes"][1] = volume
    async with a_cluster() as cluster:
        await cluster.apply([*read(COMMON), one])
        pods = await cluster.until(lambda: cluster["web"].pods, what="pods")
        absent = "Pending: persistentvolumeclaim 'one' not found"
        await cluster.until(lambda: {pod.state for pod in pods} == {absent}, what=absent)
        await cluster.apply([claim])
        await cluster.until(lambda: any(pod.ready for pod in pods), what="one has it")
        [has] = [pod for pod in pods if pod.ready]
        [waits] = [pod for pod in pods if pod is not has]
        taken = f"Pending: claim 'one' is still {has.name}'s"
        await cluster.until(lambda: waits.state == taken, what=taken)
        has.delete()
        await cluster.until(
            lambda: any(pod.ready for pod in cluster["web"].pods if pod is not has),
            what="another has it",
        )
        assert has.gone.is_set()


# KEDA

SCALED = """
kind: ScaledObject
metadata: {name: web}
spec:
  scaleTargetRef: {name: web}
  minReplicaCount: 0
  maxReplicaCount: 4
  pollingInterval: 1
  cooldownPeriod: 20
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {scaleDown: {stabilizationWindowSeconds: 15}}
  triggers:
    - type: metrics-api
      metadata: {url: URL, valueLocation: tasks.open, targetValue: "2", activationTargetValue: "0"}
"""


def test_the_autoscaler_follows_the_number_and_takes_its_time_down() -> None:
    scaler = Autoscaler(target=1, least=0, most=16)
    assert scaler.replicas(0, value=16, current=1) == 5, "4 more in 15 s"
    assert scaler.replicas(16, value=16, current=5) == 10, "or twice as many"
    assert scaler.replicas(32, value=16, current=10) == 16
    assert scaler.replicas(48, value=17, current=16) == 16, "within the tolerance, and the most"
    assert scaler.replicas(64, value=3, current=16) == 16, "300 s ago more were wanted"
    assert scaler.replicas(340, value=3, current=16) == 16
    assert scaler.replicas(365, value=3, current=16) == 3
    assert scaler.replicas(700, value=0, current=3) == 1, "it never goes to 0: that is KEDA's"


def test_the_autoscaler_keeps_to_its_policies() -> None:
    one_a_minute = {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}]}
    behavior = {"scaleUp": one_a_minute, "scaleDown": {"selectPolicy": "Disabled"}}
    scaler = Autoscaler(target=1, least=0, most=16, behavior=behavior)
    assert scaler.replicas(0, value=9, current=2) == 3
    assert scaler.replicas(30, value=9, current=3) == 3
    assert scaler.replicas(61, value=9, current=3) == 4
    assert scaler.replicas(500, value=1, current=4) == 4


@asynccontextmanager
async def told(number: list[Any]) -> AsyncIterator[str]:
    """An endpoint that tells the number; None: 503. Its address."""

    async def answer(_request: web.Request) -> web.Response:
        if number[0] is None:
            return web.json_response({"error": "Redis does not answer"}, status=503)
        return web.json_response({"tasks": {"open": number[0]}})

    app = web.Application()
    app.router.add_get("/scaling", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/scaling"
    finally:
        await runner.cleanup()


async def test_keda_scales_from_zero_to_many_and_back(a_cluster: Callable[..., Cluster]) -> None:
    number: list[Any] = [0]
    async with a_cluster() as cluster, told(number) as url:
        await cluster.apply([*read(COMMON), web_like(replicas=0)])
        [scaled] = read(SCALED.replace("URL", url))
        scaler = Scaler(scaled, cluster, faster=50)
        running = asyncio.create_task(scaler.run())
        replicas = cluster["web"]
        await cluster.until(lambda: scaler.asked[3:], what="it was asked")
        assert replicas.replicas == 0
        number[0] = 7
        await cluster.until(lambda: replicas.replicas == 4, what="one for two, 4 at most")
        await cluster.settled()
        number[0] = None
        asked = len(scaler.asked)
        await cluster.until(lambda: len(scaler.asked) > asked + 40, what="it was asked")
        assert replicas.replicas == 4, "no answer changes nothing, however long"
        number[0] = 3
        await cluster.until(lambda: replicas.replicas == 2, what="fewer, after a while")
        number[0] = 0
        await cluster.until(lambda: replicas.replicas == 0, what="none, after the cooldown")
        await cluster.settled()
        running.cancel()
        await asyncio.wait({running})


def test_every_process_dies_with_whoever_runs_the_cluster(tmp_path: Path) -> None:
    """Also when that is killed, and can't clean up."""
    code = f"""
import asyncio, os, pathlib, signal
from tests.k8s.test_cluster import *
async def main():
    async with Cluster(pathlib.Path({str(tmp_path)!r}), {{"sample": PYTHON}}, QUICK) as cluster:
        await cluster.apply([*read(COMMON), web_like(replicas=2)])
        await cluster.settled()
        pids = [each.running.process.pid for pod in cluster["web"].pods for each in pod.containers]
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True,
        text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(60)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
