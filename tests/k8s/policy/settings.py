"""The configuration that each pod would read, and that the manifest around it agrees with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from fedstream.broker.rights import user_of
from fedstream.coordinator.policies import Anarchic, InFlight
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL
from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from fedstream.settings.services import ROLES
from fedstream.sinks.service import DRAIN_S
from tests.k8s.manifests import Manifest, Manifests, texts
from tests.k8s.workloads import (
    Workload,
    environment,
    file_at,
    mount_of,
    secret_at,
    sources,
    workloads,
)

_CLOSE_S = 5.0  # a grace period must exceed drain_s by this: runtime/service.py
_LEARNS = ("updater", "trainer", "evaluator")  # those that load the user's task
_OTHERS = {"coordinator": "http", "gateway": "http", "helper": "https"}  # ports beside `health`


def settings(manifests: Manifests) -> Iterator[str]:
    """Every service's configuration loads, and grace, ports, mounts, users and Redis agree."""
    for workload in workloads(manifests):
        for container in workload.all_containers:
            if container.get("command") != ["fedstream"]:
                continue
            name = f"{workload.name}, container {container['name']}"
            try:
                found = read(manifests, workload, container)
            except ConfigError as error:
                yield from (f"{name}: {line}" for line in str(error).splitlines())
                continue
            role = container["args"][0]
            if role in ROLES:
                yield from (
                    f"{name}: {line}" for line in _service(manifests, workload, container, found)
                )
            elif role != "acl":
                yield f"{name}: {role!r} is no service"
    yield from _scaling(manifests)


def read(manifests: Manifests, workload: Workload, container: Manifest) -> Settings:
    """What the container's process would read. Raises ConfigError."""
    env = environment(manifests, container)
    if (path := env.get("FEDSTREAM_CONFIG")) is None:
        return load(Settings, path=None, environ=env)
    text = file_at(manifests, workload, container, path)
    if text is None:
        raise ConfigError(f"FEDSTREAM_CONFIG={path}: no ConfigMap is mounted there")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.toml"
        file.write_text(text)
        return load(Settings, path=file, environ=env)


def _service(
    manifests: Manifests, workload: Workload, container: Manifest, found: Settings
) -> Iterator[str]:
    role = container["args"][0]
    env = environment(manifests, container)
    if found.http.host != "0.0.0.0":  # noqa: S104  (a pod's own address is not known before)
        yield f"http.host = {found.http.host!r}: probes come from elsewhere"
    listens = {"health": ("http.health_port", found.http.health_port)}
    if role in _OTHERS:
        listens[_OTHERS[role]] = ("http.port", found.http.port)
    for port, (key, number) in listens.items():
        if workload.ports.get(port) != number:
            yield f"{key} = {number}, the port named {port} is {workload.ports.get(port)}"
    drain_s = DRAIN_S if role == "sinks" else getattr(found, role).drain_s
    stop_s = _sleeps_s(container) + drain_s + _CLOSE_S
    grace_s = workload.pod["terminationGracePeriodSeconds"]
    if grace_s < stop_s:
        yield (
            f"terminationGracePeriodSeconds {grace_s} is less than preStop, drain_s and 5 s to "
            f"close: {stop_s:g}"
        )
    if env.get("FEDSTREAM_NAME") != "pod-0":
        yield "FEDSTREAM_NAME is not the pod's name"
    if role == "helper":
        yield from _apart(workload, container, found, env)
        return
    yield from _user(workload, container, found)
    yield from _redis(manifests, found)
    yield from _private(workload, container, found)
    if role in _LEARNS:
        yield from _task(manifests, workload, container, found)
    if role == "updater":
        mount = mount_of(container, found.journal.dir)
        if mount is None or mount.get("readOnly") or found.journal.dir == mount["mountPath"]:
            yield f"journal.dir = {found.journal.dir!r} is no folder on a volume of its own"
        elif "emptyDir" in workload.volumes[mount["name"]] and not found.journal.adopt:
            yield "the journal goes with the pod, and journal.adopt is false: nobody would go on"
        elif "claimTemplate" in workload.volumes[mount["name"]] and found.journal.adopt:
            yield "journal.adopt = true with a volume that lasts: a lost journal would not be seen"


def _user(workload: Workload, container: Manifest, found: Settings) -> Iterator[str]:
    role = container["args"][0]
    own = role == "trainer" and found.trainer.site != POOL
    user = user_of(found.trainer.site) if own else role
    if role == "gateway":
        user = user_of(found.gateway.site, role)
    file = found.redis.password_file or ""
    _, key = secret_at(workload, container, file) or ("", "")
    if found.redis.username != user or key != ("password" if own else role):
        yield f"is not Redis's user {user!r} with that user's password"
    if (asked := found.redis.sentinel) is not None:
        _, key = secret_at(workload, container, asked.password_file or "") or ("", "")
        if key != asked.username:
            yield f"is not the Sentinels' user {asked.username!r} with that user's password"


def _apart(
    workload: Workload, container: Manifest, found: Settings, env: Mapping[str, str]
) -> Iterator[str]:
    """The helper knows nothing of Redis; its files are there, and its store lasts."""
    if names := [name for name in env if "REDIS" in name]:
        yield f"knows of Redis: {', '.join(names)}"
    helper = found.helper
    store = mount_of(container, helper.store or "")
    if store is None or "claimTemplate" not in workload.volumes[store["name"]]:
        yield f"helper.store = {helper.store!r} is on no volume that lasts"
    for key in ("policy", "roster", "key", "tls_cert", "tls_key", "client_ca"):
        if not _is_mounted(workload, container, getattr(helper, key)):
            yield f"helper.{key} = {getattr(helper, key)!r} is in no ConfigMap or Secret"


def _private(workload: Workload, container: Manifest, found: Settings) -> Iterator[str]:
    """The services of a private run have its policy, its updater the helper, its trainers keys."""
    private = found.private
    if private.policy is None:
        return
    needs = ["policy"]
    match container["args"][0]:
        case "updater":
            needs += ["ca", "tls_cert", "tls_key"]
            if urlsplit(private.helper or "").scheme != "https":
                yield f"private.helper = {private.helper!r} is no address with TLS"
        case "trainer" if mount_of(container, private.keys or "") is None:
            yield f"private.keys = {private.keys!r} is no volume"
    for key in needs:
        if not _is_mounted(workload, container, getattr(private, key)):
            yield f"private.{key} = {getattr(private, key)!r} is in no ConfigMap or Secret"


def _is_mounted(workload: Workload, container: Manifest, path: str | None) -> bool:
    """Whether a volume has this item of a ConfigMap or a Secret at ``path``."""
    mount = mount_of(container, path or "")
    return mount is not None and any(
        f"{mount['mountPath']}/{item['path']}" == path
        for _, about in sources(workload.volumes[mount["name"]])
        for item in about.get("items", ())
    )


def _sleeps_s(container: Manifest) -> float:
    hook = container.get("lifecycle", {}).get("preStop", {})
    return float(hook.get("sleep", {}).get("seconds", 0))


def _task(
    manifests: Manifests, workload: Workload, container: Manifest, found: Settings
) -> Iterator[str]:
    file, colon, _ = found.task.name.rpartition(":")
    if colon and file.endswith(".py"):
        text = file_at(manifests, workload, container, file)
        if text is None:
            yield f"task.name = {found.task.name!r}: no ConfigMap is mounted there"
        else:
            compile(text, file, "exec")
    data = found.task.data_root
    mount = mount_of(container, data) if data is not None else None
    if mount is None or not mount.get("readOnly"):
        yield f"task.data_root = {data!r} is no volume that is mounted to be read only"


def _redis(manifests: Manifests, found: Settings) -> Iterator[str]:
    url = urlsplit(found.redis.url)
    for one in manifests.of("ConfigMap"):
        if one["metadata"]["name"].startswith("redis-config"):
            speaks = "rediss" if "tls.inc" in texts(one) else "redis"
            if url.scheme != speaks:
                yield f"redis.url = {found.redis.url!r}, and Redis speaks {speaks}://"
    if found.redis.sentinel is not None:
        for node in found.redis.sentinel.nodes:
            host, _, port = node.partition(":")
            if not _leads_to_pod(manifests, host, int(port)):
                yield f"redis.sentinel.nodes: {node} is no pod of a headless Service here"
        return
    service = manifests.find("Service", url.hostname or "")
    if manifests.find("StatefulSet", "redis") is None:
        return  # component external-redis: elsewhere
    ports = [port["port"] for port in service["spec"]["ports"]] if service else []
    if url.port not in ports:
        yield f"redis.url = {found.redis.url!r} is no Service here"


def _leads_to_pod(manifests: Manifests, host: str, port: int) -> bool:
    pod, _, name = host.partition(".")
    service = manifests.find("Service", name)
    if service is None or service["spec"].get("clusterIP") != "None":
        return False
    if port not in [one["port"] for one in service["spec"]["ports"]]:
        return False
    sets = [
        one
        for one in manifests.of("StatefulSet")
        if one["spec"]["serviceName"] == name and pod.startswith(one["metadata"]["name"] + "-")
    ]
    number = pod.rpartition("-")[2]
    return any(int(number) < one["spec"]["replicas"] for one in sets)


def _scaling(manifests: Manifests) -> Iterator[str]:
    """The trainers follow the open tasks, or the open tasks follow the trainers; never both."""
    scaled = manifests.of("ScaledObject")
    if manifests.find("Deployment", "scheduler") is None:
        return  # the helper's
    scheduler = Workload(manifests.get("Deployment", "scheduler"))
    try:
        found = read(manifests, scheduler, scheduler.containers[0])
    except ConfigError:
        return  # said above
    policy = found.policy
    if isinstance(policy, InFlight) and policy.n is not None and not scaled:
        yield f"scheduler.policy.n = {policy.n}, and nothing scales the trainers: leave it out"
    for one in manifests.of("HorizontalPodAutoscaler"):
        yield from _followed(manifests, one)
    for one in scaled:
        yield from (
            f"ScaledObject {one['metadata']['name']}: {line}"
            for line in _scaled(manifests, one, found)
        )


def _followed(manifests: Manifests, scaler: Manifest) -> Iterator[str]:
    name, target = scaler["metadata"]["name"], scaler["spec"]["scaleTargetRef"]
    found = manifests.find(target["kind"], target["name"])
    if found is None:
        yield f"HorizontalPodAutoscaler {name}: there is no {target['kind']} {target['name']!r}"
    elif "replicas" in found["spec"]:
        yield f"HorizontalPodAutoscaler {name}: every apply would set back what it has set"


def _scaled(manifests: Manifests, scaled: Manifest, found: Settings) -> Iterator[str]:
    spec = scaled["spec"]
    target = manifests.find("Deployment", spec["scaleTargetRef"]["name"])
    if target is None:
        yield f"there is no Deployment {spec['scaleTargetRef']['name']!r}"
    elif "replicas" in target["spec"]:
        yield "its Deployment says replicas: every apply would set back what KEDA has set"
    match found.policy:
        case InFlight(n=None):
            yield "scheduler.policy.n is not set: trainers and tasks would follow each other"
        case InFlight(n=int(n)) if n > spec["maxReplicaCount"]:
            yield f"scheduler.policy.n = {n} is above maxReplicaCount {spec['maxReplicaCount']}"
        case Anarchic():
            yield "scheduler.policy.kind = 'none': without a trainer nobody would open a task"
    for trigger in spec["triggers"]:
        yield from _asked(manifests, trigger["metadata"], found)


def _asked(manifests: Manifests, asks: Mapping[str, str], found: Settings) -> Iterator[str]:
    url = urlsplit(asks["url"])
    name, _, rest = (url.hostname or "").partition(".")
    service = manifests.find("Service", name)
    if service is None or rest != "fedstream.svc":
        yield f"asks {url.hostname}, which is no Service here"
    elif (url.port or 80) not in [port["port"] for port in service["spec"]["ports"]]:
        yield f"asks port {url.port or 80}, which Service {name!r} does not have"
    if url.path != f"/v1/runs/{found.run.name}/scaling":
        yield f"asks {url.path}, and run.name is {found.run.name!r}"
    if asks["valueLocation"] != "open":
        yield f"reads {asks['valueLocation']!r}, not the open tasks"
