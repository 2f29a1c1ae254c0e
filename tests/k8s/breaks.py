"""Manifests broken in one place after the other, and what has to be said of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.k8s.cluster.manifests import Manifests


def pod(manifests: Manifests, name: str) -> dict[str, Any]:
    """The pod's spec of a workload."""
    found = manifests.find("Deployment", name) or manifests.get("StatefulSet", name)
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def container(manifests: Manifests, name: str) -> dict[str, Any]:
    """The first container of a workload's pods."""
    first: dict[str, Any] = pod(manifests, name)["containers"][0]
    return first


def entry(manifests: Manifests, workload: str, name: str) -> dict[str, Any]:
    """A variable of a workload's environment."""
    return next(one for one in container(manifests, workload)["env"] if one["name"] == name)


def volume(manifests: Manifests, workload: str, name: str) -> dict[str, Any]:
    """A volume of a workload's pods."""
    return next(one for one in pod(manifests, workload)["volumes"] if one["name"] == name)


def login(manifests: Manifests, workload: str) -> dict[str, Any]:
    """The Secret with a service's password for Redis."""
    source: dict[str, Any] = volume(manifests, workload, "redis-login")["projected"]["sources"][0]
    secret: dict[str, Any] = source["secret"]
    return secret


def config(manifests: Manifests, start: str) -> dict[str, str]:
    """What a generated ConfigMap holds."""
    found = next(
        one for one in manifests.of("ConfigMap") if one["metadata"]["name"].startswith(start)
    )
    data: dict[str, str] = found["data"]
    return data


def replace(data: dict[str, str], key: str, old: str, new: str) -> None:
    """Changes a text that is there."""
    assert old in data[key]
    data[key] = data[key].replace(old, new)


def rule(manifests: Manifests, name: str) -> dict[str, Any]:
    """A network policy's spec."""
    spec: dict[str, Any] = manifests.get("NetworkPolicy", name)["spec"]
    return spec


Change = Callable[[Manifests], object]
BREAKS: dict[str, tuple[Change, str]] = {
    "a field that no Kubernetes knows": (
        lambda m: container(m, "trainer").update(imagePullPolicies="Always"),
        r"schemas: Deployment trainer: Kubernetes 1\.30: .*imagePullPolicies",
    ),
    "a value of another type": (
        lambda m: m.get("Deployment", "scheduler")["spec"].update(replicas="one"),
        r"schemas: Deployment scheduler: Kubernetes 1\.37: spec\.replicas",
    ),
    "a number in KEDA's texts": (
        lambda m: m.get("ScaledObject", "trainer")["spec"]["triggers"][0]["metadata"].update(
            targetValue=1
        ),
        r"schemas: ScaledObject trainer: .*targetValue: 1 is not of type 'string'",
    ),
    "a key that KEDA does not know": (
        lambda m: m.get("ScaledObject", "trainer")["spec"].update(minReplicas=0),
        r"schemas: ScaledObject trainer: .*minReplicas",
    ),
    "an object without a schema": (
        lambda m: m.put({"kind": "Rollout", "apiVersion": "x/v1", "metadata": {"name": "a"}}),
        r"schemas: Rollout a: Couldn't find schema",
    ),
    "a Service for nobody": (
        lambda m: m.get("Service", "redis")["spec"]["selector"].update(tier="cache"),
        r"references: Service redis: selects no pods",
    ),
    "a Service's port that no pod has": (
        lambda m: m.get("Service", "coordinator")["spec"]["ports"][0].update(targetPort="web"),
        r"references: Service coordinator: Deployment coordinator has no port 'web'",
    ),
    "an Ingress to no Service": (
        lambda m: m.get("Ingress", "coordinator")["spec"]["rules"][0]["http"]["paths"][0][
            "backend"
        ]["service"].update(name="coordinators"),
        r"references: Ingress coordinator: there is no port .* of Service 'coordinators'",
    ),
    "a ConfigMap that is not there": (
        lambda m: pod(m, "trainer")["volumes"][0]["configMap"].update(name="config"),
        r"references: Deployment trainer: there is no ConfigMap 'config'",
    ),
    "a key that its ConfigMap has not": (
        lambda m: container(m, "trainer")["volumeMounts"][0].update(subPath="run.tml"),
        r"references: Deployment trainer, .*: ConfigMap .* has no 'run\.tml'",
    ),
    "a password that the Secret has not": (
        lambda m: login(m, "trainer")["items"][0].update(key="trainers"),
        r"references: Deployment trainer: Secret 'fedstream-redis' has no 'trainers'",
    ),
    "a mount without a volume": (
        lambda m: container(m, "evaluator")["volumeMounts"][0].update(name="conf"),
        r"references: Deployment evaluator, .*: there is no volume 'conf'",
    ),
    "a volume that nobody mounts": (
        lambda m: pod(m, "scheduler")["volumes"].append({"name": "x", "emptyDir": {}}),
        r"references: Deployment scheduler: volume 'x' is mounted nowhere",
    ),
    "a claim that is not there": (
        lambda m: next(
            volume for volume in pod(m, "trainer")["volumes"] if volume["name"] == "data"
        )["persistentVolumeClaim"].update(claimName="data"),
        r"references: Deployment trainer: there is no PersistentVolumeClaim 'data'",
    ),
    "claims that are deleted with the overlay": (
        lambda m: m.get("StatefulSet", "redis")["spec"].update(
            persistentVolumeClaimRetentionPolicy={"whenDeleted": "Delete"}
        ),
        r"references: StatefulSet redis: its claims are deleted with it",
    ),
    "a namespace that is deleted with the overlay": (
        lambda m: m.put(
            {
                "apiVersion": "v1",
                "kind": "Namespace",
                "metadata": {
                    "name": "fedstream",
                    "labels": {
                        f"pod-security.kubernetes.io/{mode}": "restricted"
                        for mode in ("enforce", "audit", "warn")
                    },
                },
            }
        ),
        r"references: Namespace fedstream: is deleted with the overlay",
    ),
    "a budget for no pods": (
        lambda m: m.get("PodDisruptionBudget", "trainer")["spec"]["selector"]["matchLabels"].update(
            role="trainer"
        ),
        r"references: PodDisruptionBudget trainer: selects no pods",
    ),
    "a network policy for no pods": (
        lambda m: rule(m, "redis")["podSelector"]["matchLabels"].update(role="redis"),
        r"references: NetworkPolicy redis: selects no pods",
    ),
    "a network policy for a port where nobody listens": (
        lambda m: rule(m, "metrics")["ingress"][0]["ports"][0].update(port=9090),
        r"references: NetworkPolicy metrics: ingress port 9090, where nobody listens",
    ),
    "an object in another namespace": (
        lambda m: m.get("Service", "redis")["metadata"].update(namespace="default"),
        r"references: Service redis: in namespace 'default'",
    ),
    "a configuration that does not load": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "seed = 0", "seeds = 0"),
        r"settings: Deployment trainer, .*: run\.seeds",
    ),
    "a variable that is no key": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_TRAINER__THREAD="2"),
        r"settings: .*trainer\.thread",
    ),
    "a drain that the grace period cuts": (
        lambda m: replace(
            config(m, "fedstream-config"),
            "run.toml",
            "[updater]\ndrain_s = 20.0",
            "[updater]\ndrain_s = 26.0",
        ),
        r"settings: StatefulSet updater, .*: terminationGracePeriodSeconds 30 is less than .* 31$",
    ),
    "a preStop that the grace period cuts": (
        lambda m: container(m, "coordinator")["lifecycle"]["preStop"]["sleep"].update(seconds=11),
        r"settings: Deployment coordinator, .*: terminationGracePeriodSeconds 30 .* 31$",
    ),
    "a port where the service does not listen": (
        lambda m: container(m, "scheduler")["ports"][0].update(containerPort=8000),
        r"settings: Deployment scheduler, .*: http\.health_port = 8081, the port .* is 8000$",
    ),
    "probes at the port that everybody may fill": (
        lambda m: container(m, "coordinator")["livenessProbe"]["httpGet"].update(port="http"),
        r"probes: Deployment coordinator, .*: livenessProbe does not ask the port of probes alone",
    ),
    "one port for probes and everybody": (
        lambda m: container(m, "coordinator")["ports"][1].update(containerPort=8080),
        r"settings: Deployment coordinator, .*: two ports are one",
    ),
    "probes that the Ingress controller may ask": (
        lambda m: rule(m, "ingress-to-coordinator")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 8081}
        ),
        r"networks: .* let the Ingress controller to Deployment coordinator, port 8081",
    ),
    "another service's user": (
        lambda m: entry(m, "trainer", "FEDSTREAM_REDIS__USERNAME").update(value="updater"),
        r"settings: Deployment trainer, .*: is not Redis's user 'trainer'",
    ),
    "a Redis that is nowhere": (
        lambda m: replace(
            config(m, "fedstream-settings"), "FEDSTREAM_REDIS__URL", "//redis:", "//cache:"
        ),
        r"settings: .*: redis\.url = 'rediss://cache:6379/0' is no Service here",
    ),
    "a task that is mounted nowhere": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "task.py:task", "my.py:task"),
        r"settings: Deployment trainer, .*: task\.name = .*my\.py:task': no ConfigMap is mounted",
    ),
    "a journal beside its volume": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "/var/lib", "/var/log"),
        r"settings: StatefulSet updater, .*: journal\.dir = '/var/log/fedstream/journal'",
    ),
    "adopting where the journal lasts": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_JOURNAL__ADOPT="true"),
        r"settings: StatefulSet updater, .*: journal\.adopt = true with a volume that lasts",
    ),
    "KEDA, and tasks that follow the trainers": (
        lambda m: config(m, "fedstream-settings").pop("FEDSTREAM_SCHEDULER__POLICY__N"),
        r"settings: ScaledObject trainer: scheduler\.policy\.n is not set",
    ),
    "more in flight than trainers": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_SCHEDULER__POLICY__N="17"),
        r"settings: ScaledObject trainer: scheduler\.policy\.n = 17 is above maxReplicaCount 16",
    ),
    "KEDA, and tasks that only trainers open": (
        lambda m: (
            config(m, "fedstream-settings").pop("FEDSTREAM_SCHEDULER__POLICY__N"),
            config(m, "fedstream-settings").update(
                FEDSTREAM_SCHEDULER__POLICY__KIND="none", FEDSTREAM_TRAINER__ANARCHIC__RATE="1.0"
            ),
        ),
        r"settings: ScaledObject trainer: scheduler\.policy\.kind = 'none'",
    ),
    "KEDA and a number of replicas": (
        lambda m: m.get("Deployment", "trainer")["spec"].update(replicas=2),
        r"settings: ScaledObject trainer: its Deployment says replicas",
    ),
    "KEDA asks about another run": (
        lambda m: config(m, "fedstream-run").update(FEDSTREAM_RUN__NAME="prod"),
        r"settings: ScaledObject trainer: asks /v1/runs/demo/scaling, and run\.name is 'prod'",
    ),
    "a root file system that is written to": (
        lambda m: container(m, "redis")["securityContext"].update(readOnlyRootFilesystem=False),
        r"restricted: StatefulSet redis, container redis: readOnlyRootFilesystem is not true",
    ),
    "a capability": (
        lambda m: container(m, "trainer")["securityContext"]["capabilities"].update(
            add=["NET_BIND_SERVICE"]
        ),
        r"restricted: Deployment trainer, container trainer: capabilities",
    ),
    "root": (
        lambda m: pod(m, "updater")["securityContext"].update(runAsUser=0),
        r"restricted: StatefulSet updater: runAsUser 0",
    ),
    "no seccomp": (
        lambda m: pod(m, "updater")["securityContext"].pop("seccompProfile"),
        r"restricted: StatefulSet updater: seccompProfile",
    ),
    "a token of the Kubernetes API": (
        lambda m: pod(m, "coordinator").update(automountServiceAccountToken=True),
        r"restricted: Deployment coordinator: automountServiceAccountToken",
    ),
    "a folder of the node": (
        lambda m: pod(m, "trainer")["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        r"restricted: Deployment trainer: volume 'x' is of kind hostPath",
    ),
    "no limit": (
        lambda m: container(m, "trainer")["resources"]["limits"].pop("memory"),
        r"restricted: Deployment trainer, container trainer: no limits\.memory",
    ),
    "no limit to what is written": (
        lambda m: container(m, "trainer")["resources"]["limits"].pop("ephemeral-storage"),
        r"restricted: Deployment trainer, container trainer: no limits\.ephemeral-storage",
    ),
    "volumes that the pod is evicted for": (
        lambda m: container(m, "trainer")["resources"]["limits"].update(
            {"ephemeral-storage": "256Mi"}
        ),
        r"restricted: Deployment trainer: limits\.ephemeral-storage are 256 MiB, its .* 306 MiB",
    ),
    "a Redis that is alive for as long as it takes connections": (
        lambda m: container(m, "redis").update(livenessProbe={"tcpSocket": {"port": "redis"}}),
        r"probes: StatefulSet redis, .*: livenessProbe is no command",
    ),
    "liveness that depends on Redis": (
        lambda m: container(m, "trainer")["livenessProbe"]["httpGet"].update(path="/readyz"),
        r"probes: Deployment trainer, .*: livenessProbe asks /readyz",
    ),
    "a probe of a port that is not there": (
        lambda m: container(m, "trainer")["readinessProbe"]["httpGet"].update(port="web"),
        r"probes: Deployment trainer, .*: readinessProbe asks port 'web'",
    ),
    "a startup that recovery does not fit in": (
        lambda m: container(m, "updater")["startupProbe"].update(failureThreshold=10),
        r"probes: StatefulSet updater, .*: startup may take 50 s, less than 600 s",
    ),
    "several, and no budget": (
        lambda m: m.get("Deployment", "evaluator")["spec"].update(replicas=2),
        r"spread: Deployment evaluator: 2 replicas and no PodDisruptionBudget",
    ),
    "a budget that holds up every drain": (
        lambda m: m.get("PodDisruptionBudget", "coordinator")["spec"].update(minAvailable=3),
        r"spread: Deployment coordinator: minAvailable 3 of 3",
    ),
    "a budget that needs all of them": (
        lambda m: m.get("PodDisruptionBudget", "trainer")["spec"].update(maxUnavailable="0%"),
        r"spread: Deployment trainer: maxUnavailable 0: no node could drain",
    ),
    "nodes that take no pods, counted as empty": (
        lambda m: pod(m, "coordinator")["topologySpreadConstraints"][0].pop("nodeTaintsPolicy"),
        r"spread: Deployment coordinator: tainted nodes count as empty ones",
    ),
    "a StatefulSet that waits for a broken pod": (
        lambda m: m.get("StatefulSet", "updater")["spec"].pop("podManagementPolicy"),
        r"repairable: StatefulSet updater: podManagementPolicy is not Parallel",
    ),
    "a Redis that evicts": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "noeviction", "allkeys-lru"),
        r"redis: StatefulSet redis: maxmemory-policy",
    ),
    "a Redis that keeps every connection": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "timeout 300", "timeout 0"),
        r"redis: StatefulSet redis: no timeout: connections of nobody stay for ever",
    ),
    "a Redis that the kernel kills first": (
        lambda m: container(m, "redis")["resources"]["limits"].update(memory="1536Mi"),
        r"redis: StatefulSet redis: maxmemory 1572864000 B is not at most 0\.5",
    ),
    "users that nobody writes": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "users.acl", "user.acl"),
        r"redis: StatefulSet redis: no init container writes aclfile /run/redis/user\.acl",
    ),
    "services that may not ask Redis": (
        lambda m: rule(m, "services-to-redis")["egress"].clear(),
        r"networks: network policies stop Deployment trainer to StatefulSet redis, port 6379/TCP",
    ),
    "no names": (
        lambda m: rule(m, "dns")["egress"][0]["ports"].pop(0),
        r"networks: network policies stop StatefulSet updater to DNS, port 53/UDP",
    ),
    "no default deny": (
        lambda m: rule(m, "default-deny")["policyTypes"].remove("Ingress"),
        r"networks: no NetworkPolicy denies Ingress by default",
    ),
    "a default deny that lets all out": (
        lambda m: rule(m, "default-deny").update(egress=[{}]),
        r"networks: no NetworkPolicy denies Egress by default",
    ),
    "an Ingress controller that may ask where there is no Ingress": (
        lambda m: m.drop("Ingress", "coordinator"),
        r"networks: .* let the Ingress controller to Deployment coordinator, port 8080/TCP through",
    ),
    "KEDA may not ask": (
        lambda m: rule(m, "keda-to-coordinator")["ingress"].clear(),
        r"networks: network policies stop KEDA to Deployment coordinator, port 8080/TCP",
    ),
    "services that may go anywhere": (
        lambda m: rule(m, "services-to-redis")["egress"].append({}),
        r"networks: network policies let Deployment trainer to the internet, port 443/TCP through",
    ),
    "a Redis that all may ask": (
        lambda m: rule(m, "redis")["ingress"][0]["from"].append({"namespaceSelector": {}}),
        r"networks: .* let a pod of namespace default to StatefulSet redis, port 6379/TCP through",
    ),
    "an Ingress without TLS": (
        lambda m: m.get("Ingress", "coordinator")["spec"].pop("tls"),
        r"exposure: Ingress coordinator: fedstream\.example\.org is let in without TLS",
    ),
    "an Ingress with TLS for another host": (
        lambda m: m.get("Ingress", "coordinator")["spec"]["rules"].append(
            {**m.get("Ingress", "coordinator")["spec"]["rules"][0], "host": "other.example.org"}
        ),
        r"exposure: Ingress coordinator: other\.example\.org is let in without TLS",
    ),
    "an Ingress to a coordinator that asks nobody who they are": (
        lambda m: container(m, "coordinator")["env"].remove(
            entry(m, "coordinator", "FEDSTREAM_HTTP__TOKEN_FILE")
        ),
        r"exposure: Deployment coordinator: Ingress coordinator leads to it, and it asks for no",
    ),
    "an Ingress to a coordinator whose token may be missing": (
        lambda m: volume(m, "coordinator", "http")["secret"].update(optional=True),
        r"exposure: Deployment coordinator: .* it asks for no token of a Secret",
    ),
    "a Redis in the clear behind an Ingress": (
        lambda m: config(m, "fedstream-settings").pop("FEDSTREAM_REDIS__URL"),
        r"exposure: StatefulSet updater: talks to Redis without TLS",
    ),
    "services by TLS, and a Redis without": (
        lambda m: config(m, "redis-config").pop("tls.inc"),
        r"settings: .*: redis\.url = 'rediss://redis:6379/0', and Redis speaks redis://",
    ),
    "a Secret for Redis's certificate that nobody makes": (
        lambda m: next(
            volume for volume in pod(m, "redis")["volumes"] if volume["name"] == "redis-tls"
        )["secret"].update(secretName="redis-tls"),
        r"references: StatefulSet redis: there is no Secret 'redis-tls'",
    ),
    "an image without a tag": (
        lambda m: container(m, "trainer").update(image="fedstream"),
        r"images: Deployment trainer, container trainer: image 'fedstream' has no tag",
    ),
}


SITES: dict[str, tuple[Change, str]] = {
    "a site with the pool's password": (
        lambda m: login(m, "site-a").update(
            name="fedstream-redis", items=[{"key": "trainer", "path": "password"}]
        ),
        r"sites: StatefulSet site-a: Deployment trainer has the Secret of its site",
    ),
    "a site that is the pool's user": (
        lambda m: entry(m, "site-a", "FEDSTREAM_REDIS__USERNAME").update(value="trainer"),
        r"settings: StatefulSet site-a, .*: is not Redis's user 'trainer-site-a'",
    ),
    "a site that nobody serves": (
        lambda m: config(m, "fedstream-run").pop("FEDSTREAM_COORDINATOR__SITES__SITE_A"),
        r"sites: StatefulSet site-a: coordinator\.sites does not name 'site-a'",
    ),
    "a site without a user": (
        lambda m: volume(m, "redis", "site-a")["secret"].update(secretName="fedstream-http"),
        r"sites: StatefulSet site-a: Redis's users are made without the password of 'fedstream-s",
    ),
}

GATEWAYS: dict[str, tuple[Change, str]] = {
    "a gateway whose site nobody serves": (
        lambda m: config(m, "fedstream-run").pop("FEDSTREAM_COORDINATOR__SITES__GATEWAY"),
        r"sites: StatefulSet gateway: coordinator\.sites does not name 'gateway'",
    ),
    "a gateway that is a trainer's user": (
        lambda m: entry(m, "gateway", "FEDSTREAM_REDIS__USERNAME").update(value="trainer"),
        r"settings: StatefulSet gateway, .*: is not Redis's user 'gateway'",
    ),
    "a gateway that listens elsewhere": (
        lambda m: container(m, "gateway")["ports"][0].update(containerPort=8443),
        r"settings: StatefulSet gateway, .*: http\.port = 8080, the port named http is 8443",
    ),
    "an autoscaler that every apply undoes": (
        lambda m: m.get("StatefulSet", "gateway")["spec"].update(replicas=2),
        r"settings: HorizontalPodAutoscaler gateway: every apply would set back what it has set",
    ),
    "an autoscaler of nothing": (
        lambda m: m.get("HorizontalPodAutoscaler", "gateway")["spec"]["scaleTargetRef"].update(
            name="gateways"
        ),
        r"settings: HorizontalPodAutoscaler gateway: there is no StatefulSet 'gateways'",
    ),
    "a route without TLS": (
        lambda m: m.get("HTTPRoute", "gateway")["spec"]["parentRefs"][0].pop("sectionName"),
        r"exposure: HTTPRoute gateway: lets in without TLS",
    ),
    "a gateway whose devices sign for another host": (
        lambda m: m.get("HTTPRoute", "gateway")["spec"].update(hostnames=["new.example.org"]),
        r"exposure: StatefulSet gateway: gateway\.names .* differ in 'new\.example\.org'",
    ),
    "a gateway that takes signatures for any host": (
        lambda m: config(m, "fedstream-run").pop("FEDSTREAM_GATEWAY__NAMES__ROUTE"),
        r"exposure: StatefulSet gateway: gateway\.names .* differ in 'devices\.example\.org'",
    ),
    "a route to no port": (
        lambda m: m.get("HTTPRoute", "gateway")["spec"]["rules"][0]["backendRefs"][0].update(
            port=8080
        ),
        r"references: HTTPRoute gateway: there is no port 8080 of 'gateway'",
    ),
    "a route to all paths": (
        lambda m: m.get("HTTPRoute", "gateway")["spec"]["rules"][0]["matches"][0]["path"].update(
            value="/"
        ),
        r"references: HTTPRoute gateway: / lets out more than the API",
    ),
    "a route that is let in nowhere": (
        lambda m: rule(m, "route-to-gateway").update(ingress=[]),
        r"networks: network policies stop the Ingress controller to StatefulSet gateway, port 8080",
    ),
}

# With the rendering that is broken.
OTHERS: dict[str, tuple[str, Change, str]] = {
    "a service that the Sentinels would not answer": (
        "base with redis-sentinel",
        lambda m: volume(m, "trainer", "redis-login")["projected"]["sources"].pop(),
        r"settings: Deployment trainer, container trainer: is not the Sentinels' user 'watch'",
    ),
    "a route to a coordinator that asks for no token": (
        "base with route",
        lambda m: container(m, "coordinator")["env"].remove(
            entry(m, "coordinator", "FEDSTREAM_HTTP__TOKEN_FILE")
        ),
        r"exposure: Deployment coordinator: HTTPRoute coordinator leads to it, and it asks for no",
    ),
    "a collector that no service may reach": (
        "base with tracing",
        lambda m: rule(m, "services-to-collector").update(egress=[]),
        r"networks: network policies stop Deployment trainer to the collector, port 4318/TCP",
    ),
    "a way to a collector that nobody uses": (
        "base with tracing",
        lambda m: config(m, "fedstream-settings").pop("FEDSTREAM_TRACING__ENDPOINT"),
        r"networks: network policies let Deployment trainer to the collector, port 4318/TCP",
    ),
}
