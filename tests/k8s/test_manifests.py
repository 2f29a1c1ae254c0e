"""The manifests, and that faults in them would be found.

``make k8s-check`` runs all checks on every rendering. Here renderings are broken in one place after
the other, and the check concerned says so.
"""

from __future__ import annotations

import json
import os
import random
import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest
import trustme
import yaml

from fedstream import __version__
from tests.broker.certificates import is_accepted
from tests.k8s.conftest import missing
from tests.k8s.manifests import (
    K8S,
    ROOT,
    Manifests,
    differences,
    kubectl,
    largest,
    on_base,
    overlays,
    rendered,
    renderings,
)
from tests.k8s.policy import linters
from tests.k8s.policy.__main__ import covers, lacking, main, redis_hosts
from tests.k8s.policy.checks import CHECKS, durable, findings
from tests.k8s.policy.settings import read
from tests.k8s.workloads import BY_THE_OPERATOR, Workload, workloads

HOW_TO = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "how-to").glob("*.md")))
_YAML = [
    one
    for block in re.findall(r"```yaml\n(.*?)```", HOW_TO, re.DOTALL)
    for one in yaml.safe_load_all(textwrap.dedent(block))
]
OBJECTS = [one for one in _YAML if "kind" in one]
PARTS = [one for one in _YAML if "kind" not in one]  # of an overlay; tests/docs builds it

Rendering: TypeAlias = Callable[[str], Manifests]
AOF, DEV, SENTINEL = "overlay production-aof", "overlay dev", "overlay production-sentinel"
SITE, GATEWAY = "production with site", "base with gateway-route"

# A rendering, an object (of a generated ConfigMap the name without its hash), a pattern of its JSON
# that is replaced once, the replacement, and a pattern of the line that must be said of it.
BREAKS = [
    (AOF, "Deployment trainer", '"args"', '"argz": "x", "args"', "schemas: .*1.30: .*argz"),
    (AOF, "ScaledObject trainer", '"spec": {', '"spec": {"least": 0, ', "schemas: .*least"),
    (AOF, "Service redis", '"selector": {', '"selector": {"a": "b", ', "references: .*selects no"),
    (AOF, "Service coordinator", '"targetPort": "http"', '"targetPort": "web"',
     "references: .*Deployment coordinator has no port 'web'"),
    (AOF, "Ingress coordinator", '"service": {"name": "coord', '"service": {"name": "x',
     "references: .*no port .* of Service 'xinator'"),
    (AOF, "Ingress coordinator", '"secretName": "fed', '"secretName": "x',
     "references: .*no Secret 'xstream-tls'"),
    (AOF, "Deployment trainer", '"configMap": {"name": "', '"configMap": {"name": "x',
     "references: .*no ConfigMap 'xfedstream-config"),
    (AOF, "Deployment trainer", '"configMapRef": {"name": "', '"configMapRef": {"name": "x',
     "references: .*no ConfigMap 'xfedstream-run"),
    (AOF, "Deployment trainer", '"subPath": "run.toml"', '"subPath": "run.tml"',
     r"references: .*ConfigMap .* has no 'run\.tml'"),
    (AOF, "Deployment trainer", '"key": "trainer"', '"key": "trainers"',
     "references: .*Secret 'fedstream-redis' has no 'trainers'"),
    (AOF, "Deployment evaluator", '/run.toml", "name": "config"', '/run.toml", "name": "conf"',
     "references: .*no volume 'conf'"),
    (AOF, "Deployment trainer", '"claimName": "fed', '"claimName": "x',
     "references: .*no PersistentVolumeClaim 'xstream-data'"),
    (AOF, "Deployment trainer", '"serviceAccountName": "', '"serviceAccountName": "x',
     "references: .*no ServiceAccount 'xfedstream'"),
    (AOF, "Deployment scheduler", '("matchLabels": .*?component": )"scheduler"', r'\1"updater"',
     "references: Deployment scheduler: its selector is for ..StatefulSet updater"),
    (AOF, "StatefulSet updater", '"serviceName": "metrics"', '"serviceName": "coordinator"',
     "references: .*no Service 'coordinator' for its pods"),
    (AOF, "StatefulSet updater", '"whenDeleted": "Retain"', '"whenDeleted": "Delete"',
     "references: StatefulSet updater: its claims are deleted with it"),
    (AOF, "ConfigMap fedstream-config", "seed = 0", "seeds = 0", r"settings: .*run\.seeds"),
    (AOF, "ConfigMap fedstream-config", r"(updater\]\\ndrain_s = )20", r"\g<1>26",
     "settings: StatefulSet updater, .*GracePeriodSeconds 30 is less than .* 31$"),
    (AOF, "Deployment coordinator", '"seconds": 5', '"seconds": 11',
     "settings: Deployment coordinator, .*GracePeriodSeconds 30 .* 31$"),
    (AOF, "Deployment scheduler", '"containerPort": 8081', '"containerPort": 8000',
     r"settings: .*http\.health_port = 8081, the port .* is 8000$"),
    (AOF, "Deployment trainer", 'USERNAME", "value": "trainer"', 'USERNAME", "value": "updater"',
     "settings: .*is not Redis's user 'trainer'"),
    (AOF, "ConfigMap fedstream-settings", "//redis:", "//cache:",
     r"settings: .*redis\.url = 'rediss://cache:6379/0' is no Service here"),
    (AOF, "ConfigMap redis-config", r'"tls\.inc"', '"tls.in"',
     "settings: .*'rediss://redis:6379/0', and Redis speaks redis://"),
    (SENTINEL, "Deployment trainer", '"key": "watch"', '"key": "trainer"',
     "settings: .*is not the Sentinels' user 'watch'"),
    (SENTINEL, "ConfigMap fedstream-settings", "sentinel-0", "sentinel-9",
     r"settings: .*sentinel-9\.sentinels:26379 is no pod"),
    (AOF, "ConfigMap fedstream-config", "task.py:task", "my.py:task",
     "settings: Deployment trainer, .*no ConfigMap is mounted"),
    (AOF, "ConfigMap fedstream-config", "/data", "/none", "settings: .*task.data_root = '/none'"),
    (AOF, "ConfigMap fedstream-config", "/var/lib", "/var/log",
     r"settings: StatefulSet updater, .*: journal\.dir = '/var/log/fedstream/journal'"),
    (AOF, "ConfigMap fedstream-settings", '"data": {',
     '"data": {"FEDSTREAM_JOURNAL__ADOPT": "true", ',
     r"settings: .*journal\.adopt = true with a volume that lasts"),
    (DEV, "ConfigMap fedstream-settings", 'ADOPT": "true"', 'ADOPT": "false"',
     r"settings: .*journal\.adopt is false: nobody would go on"),
    (DEV, "ConfigMap fedstream-settings", '"data": {',
     '"data": {"FEDSTREAM_SCHEDULER__POLICY": "{kind = \\\\"in_flight\\\\", n = 4}", ',
     "settings: .*nothing scales the trainers"),
    (AOF, "ConfigMap fedstream-settings", r'POLICY__N": "\d+"', 'POLICY__N": "17"',
     r"settings: .*n = 17 is above maxReplicaCount 16"),
    (AOF, "ConfigMap fedstream-settings", r'SCHEDULER__POLICY__N": "\d+"', 'RUN__SEED": "0"',
     r"settings: .*policy\.n is not set"),
    (AOF, "ConfigMap fedstream-settings", r'SCHEDULER__POLICY__N": "\d+"',
     'SCHEDULER__POLICY__KIND": "none", "FEDSTREAM_TRAINER__ANARCHIC__RATE": "1.0"',
     "settings: .*policy.kind = 'none'"),
    (AOF, "Deployment trainer", '"spec": {', '"spec": {"replicas": 2, ',
     "settings: ScaledObject trainer: its Deployment says replicas"),
    (AOF, "ConfigMap fedstream-run", '"demo"', '"prod"',
     r"settings: .*asks /v1/runs/demo/scaling, and run\.name is 'prod'"),
    (AOF, "Deployment trainer", '("limits": {[^}]*"ephemeral-storage": )"[^"]*"', r'\1"256Mi"',
     "storage: .*ephemeral-storage are 256 MiB, its .* 306 MiB"),
    (AOF, "Deployment trainer", '"sizeLimit": "[^"]*"', "", "storage: .*without sizeLimit"),
    (AOF, "StatefulSet redis", r'("livenessProbe": {)"exec": {[^}]*}',
     r'\1"tcpSocket": {"port": "redis"}', "probes: .*livenessProbe is no command"),
    (AOF, "Deployment trainer", '("livenessProbe": .*?)/livez', r"\1/readyz",
     "probes: Deployment trainer, .*: livenessProbe asks .*/readyz"),
    (AOF, "Deployment coordinator", '("livenessProbe": .*?)"health"', r'\1"http"',
     "probes: Deployment coordinator, .*: livenessProbe asks .*'http'"),
    (AOF, "StatefulSet updater", '"failureThreshold": 120', '"failureThreshold": 10',
     "probes: .*startup may take 50 s, less than 600 s"),
    (AOF, "PodDisruptionBudget trainer", '"matchLabels": {', '"matchLabels": {"a": "b", ',
     "spread: Deployment trainer: several replicas and 0 PodDisruptionBudgets"),
    (AOF, "PodDisruptionBudget coordinator", '"maxUnavailable": 1', '"minAvailable": 3',
     "spread: Deployment coordinator: its PodDisruptionBudget lets no node drain"),
    (AOF, "PodDisruptionBudget trainer", '"maxUnavailable": "50%"', '"maxUnavailable": "0%"',
     "spread: Deployment trainer: its PodDisruptionBudget lets no node drain"),
    (AOF, "Deployment coordinator", '"nodeTaintsPolicy": "Honor", ', "",
     "spread: .*tainted nodes count as empty ones"),
    (AOF, "Deployment coordinator", '("topologySpread.*?component": )"coordinator"', r'\1"x"',
     "spread: .*topologySpreadConstraint selects other pods"),
    (AOF, "StatefulSet updater", '"podManagementPolicy": "Parallel", ', "",
     "spread: StatefulSet updater: podManagementPolicy is not Parallel"),
    (AOF, "ConfigMap redis-config", "noeviction", "allkeys-lru", "redis: .*maxmemory-policy"),
    (AOF, "ConfigMap redis-config", "timeout 300", "timeout 0", "redis: .*no timeout"),
    (AOF, "StatefulSet redis", '("limits": {[^}]*"memory": )"3Gi"', r'\1"1536Mi"',
     r"redis: .*maxmemory 1572864000 B is not at most 0\.5"),
    (AOF, "ConfigMap redis-config", "users.acl", "user.acl",
     r"redis: .*no init container writes aclfile /run/redis/user\.acl"),
    (AOF, "Ingress coordinator", r', "tls": \[.*?\}\]', "",
     r"exposure: .*fedstream\.example\.org is let in without TLS"),
    (AOF, "Deployment coordinator", '"FEDSTREAM_HTTP__TOKEN_FILE"', '"OTHER"',
     "exposure: .*Ingress coordinator leads to it, and it asks for no"),
    (AOF, "Deployment coordinator", '("secretName": "fedstream-http")', r'"optional": true, \1',
     "exposure: .*it asks for no token of a Secret"),
    (AOF, "ConfigMap fedstream-settings", "rediss:", "redis:",
     "exposure: StatefulSet updater: talks to Redis without TLS"),
    ("base with route", "Deployment coordinator", '"FEDSTREAM_HTTP__TOKEN_FILE"', '"OTHER"',
     "exposure: .*HTTPRoute coordinator leads to it, and it asks for no"),
    (AOF, "Deployment trainer", '"image": "fed', '"image": "x', "images: .*'xstream:"),
    (SITE, "StatefulSet site-a", '("key": )"password"(.*?)"name": "fedstream-site-a"',
     r'\1"trainer"\2"name": "fedstream-redis"',
     "sites: .*Deployment trainer has the Secret of its site"),
    (SITE, "StatefulSet site-a", 'USERNAME", "value": "trainer-', 'USERNAME", "value": "',
     "settings: .*is not Redis's user 'trainer-site-a'"),
    (SITE, "ConfigMap fedstream-run", '"FEDSTREAM_COORDINATOR__SITES__SITE_A"', '"OTHER"',
     r"sites: StatefulSet site-a: coordinator\.sites does not name 'site-a'"),
    (SITE, "StatefulSet redis", '"secretName": "fedstream-site-a"', '"secretName": "fedstream-tls"',
     "sites: .*users are made without the password of 'fedstream-site-a'"),
    (GATEWAY, "ConfigMap fedstream-run", '"FEDSTREAM_COORDINATOR__SITES__GATEWAY"', '"OTHER"',
     r"sites: StatefulSet gateway: coordinator\.sites does not name 'gateway'"),
    (GATEWAY, "StatefulSet gateway", '"containerPort": 8080', '"containerPort": 8443',
     r"settings: .*http\.port = 8080, the port named http is 8443"),
    (GATEWAY, "StatefulSet gateway", '"spec": {', '"spec": {"replicas": 2, ',
     "settings: HorizontalPodAutoscaler gateway: every apply would set back"),
    (GATEWAY, "HorizontalPodAutoscaler gateway", '"name": "gateway"}', '"name": "gateways"}',
     "settings: .*there is no StatefulSet 'gateways'"),
    (GATEWAY, "HTTPRoute gateway", ', "sectionName": "https"', "",
     "exposure: .*lets in without TLS"),
    (GATEWAY, "HTTPRoute gateway", "devices.example", "new.example",
     r"exposure: .*gateway\.names .* differ in 'new\.example\.org'"),
    (GATEWAY, "ConfigMap fedstream-run", '"FEDSTREAM_GATEWAY__NAMES__ROUTE"', '"OTHER"',
     r"exposure: .*gateway\.names .* differ in 'devices\.example\.org'"),
    (GATEWAY, "HTTPRoute gateway", '"port": 80', '"port": 8080',
     "references: .*no port .*8080.* of Service 'gateway'"),
    (GATEWAY, "HTTPRoute gateway", '"value": "/v1"', '"value": "/"',
     "references: .*/ lets out more than the API"),
    ("production with backup", "CronJob backup", "journal-updater-0", "journal-updater-1",
     "references: .*no PersistentVolumeClaim 'journal-updater-1'"),
]  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _kubectl_is_there() -> None:
    if kubectl() is None:
        missing("kubectl is not on PATH: it renders the manifests")


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    """Renders each when it is first asked for."""
    return cache(lambda name: renderings()[name]())


def broken(manifests: Manifests, *changes: tuple[str, str, str]) -> Manifests:
    """A copy. A change: an object, a pattern in its JSON, and the replacement."""
    objects = list(manifests)
    for name, pattern, replacement in changes:
        kind, _, start = name.partition(" ")
        [number] = (
            number
            for number, one in enumerate(objects)
            if one["kind"] == kind
            and re.fullmatch(rf"{start}(-[a-z0-9]{{10}})?", one["metadata"]["name"])
        )
        text, times = re.subn(pattern, replacement, json.dumps(objects[number]), count=1)
        assert times, f"{pattern} is not in {text}"
        objects[number] = json.loads(text)
    return Manifests(objects)


@pytest.mark.process
@pytest.mark.parametrize("names", largest(), ids=" ".join)
def test_the_order_of_components_does_not_matter(names: tuple[str, ...]) -> None:
    """The reverse of an order has every pair the other way round."""
    shuffled = [*names]
    random.Random(0).shuffle(shuffled)
    assert list(differences([names, names[::-1], shuffled])) == []


@pytest.mark.parametrize("row", BREAKS, ids=lambda row: f"{row[1]} {row[2]}"[:60])
def test_mistakes_are_detected(row: tuple[str, ...], rendering: Rendering) -> None:
    name, kind, pattern, replacement, expected = row
    lines = list(findings(broken(rendering(name), (kind, pattern, replacement))))
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


def test_every_check_can_fail() -> None:
    assert {expected.partition(":")[0] for *_, expected in BREAKS} == set(CHECKS)


@pytest.mark.process
def test_the_namespace_is_restricted_and_is_not_deleted_with_an_overlay() -> None:
    namespace = rendered(K8S / "namespace")
    labels = namespace.get("Namespace", "fedstream")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    lines = list(CHECKS["references"](namespace))
    assert lines == ["Namespace fedstream: is deleted with the overlay"]


@pytest.mark.parametrize("name", overlays())
def test_production_keeps_what_redis_holds(name: str, rendering: Rendering) -> None:
    lines = list(durable(rendering(f"overlay {name}")))
    assert len(lines) == (0 if name.startswith("production") else 1), lines


def test_keda_works_with_rounds(rendering: Rendering) -> None:
    """Their number of open tasks is their own: as the documentation says to write it."""
    entries = [one for part in PARTS for one in part.get("configMapGenerator", ())]
    [entry] = [one for one in entries if one["behavior"] == "replace"]
    data = json.dumps(dict(one.split("=") for one in entry["literals"]))
    changed = broken(
        rendering(AOF),
        (f"ConfigMap {entry['name']}", '"data": {.*?}', f'"data": {data}'),
        ("ConfigMap fedstream-config", "fedasync", "fedavg"),
    )
    assert list(findings(changed)) == []


def test_sentinels_elsewhere_may_ask_for_no_password(rendering: Rendering) -> None:
    """Then services read no file with it, which the Secret need not have."""
    nodes = '"FEDSTREAM_REDIS__SENTINEL__NODES": "[\\"sentinel.example.org:26379\\"]", '
    change = ("ConfigMap fedstream-settings", '("data": {)', rf"\1{nodes}")
    manifests = broken(rendering("base with external-redis"), change)
    for workload in workloads(manifests):
        sentinel = read(manifests, workload, workload.pod["containers"][0]).redis.sentinel
        assert sentinel is not None
        assert sentinel.password_file is None, workload.name


def test_tags_match_the_packages_version() -> None:
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    tags = {entry["name"]: entry["newTag"] for entry in table}
    assert tags["fedstream"] == __version__
    assert tags["fedstream-cuda"] == f"{__version__}-cuda"


def test_operators_objects_are_documented() -> None:
    assert [name for _, name in BY_THE_OPERATOR if name not in HOW_TO] == []


def test_documented_objects_are_valid() -> None:
    """What is to be copied from there would be taken by a cluster."""
    cluster = Manifests(one for one in OBJECTS if one["kind"] != "Kustomization")
    assert list(CHECKS["schemas"](cluster)) == []
    claims = {(kind, name) for kind, name in BY_THE_OPERATOR if kind == "PersistentVolumeClaim"}
    assert {(one["kind"], one["metadata"]["name"]) for one in cluster} == {
        *claims,
        ("PersistentVolume", "fedstream-data"),
    }


def test_documented_commands_name_existing_objects(rendering: Rendering) -> None:
    """A Secret that an overlay makes has the name of the one that the operator makes."""
    commands = "\n".join(re.findall(r"kubectl (?:-n|--namespace) fedstream ([^`\n]*)", HOW_TO))
    named = set(re.findall(r"get secret ([a-z-]+)", commands))
    assert named <= {name for kind, name in BY_THE_OPERATOR if kind == "Secret"}
    assert {one["metadata"]["name"] for one in rendering("overlay dev").of("Secret")} <= named
    kinds = {
        "deploy": "Deployment",
        "deployment": "Deployment",
        "statefulset": "StatefulSet",
        "cronjob": "CronJob",
    }
    objects = set(
        re.findall(r"\b(cronjob|deploy|deployment|statefulset|service)[/ ]([\w-]+)", commands)
    )
    deployed = (
        "overlay dev",
        "overlay production-sentinel",
        "production with gateway",
        "production with backup",
    )
    every = [one for name in deployed for one in rendering(name)]
    there = {(one["kind"], one["metadata"]["name"]) for one in every}
    wanted = {(kinds.get(kind, "Service"), name) for kind, name in objects}
    assert wanted - there == set()


def test_documented_certificate_has_the_names_that_pods_connect_to(rendering: Rendering) -> None:
    [text] = re.findall(r"^subjectAltName=(.*)$", HOW_TO, re.MULTILINE)
    names = text.replace("DNS:", "").split(",")
    alone = rendering("overlay production-aof")
    sentinels = rendering("overlay production-sentinel")
    hosts = ["redis", "localhost", *redis_hosts(sentinels)]  # the second by port-forward
    assert sorted(names) == sorted(hosts)
    assert redis_hosts(alone) == ["redis"]
    assert redis_hosts(rendering("base with redis-sentinel")) == []  # without TLS
    assert list(lacking(sentinels, names)) == list(lacking(alone, names)) == []
    stars = ["redis", "*.redis-nodes", "*.sentinels"]
    assert list(lacking(alone, stars)) == []
    lines = list(lacking(sentinels, stars))
    assert len(lines) == 6
    assert "is not for redis-0.redis-nodes, to which services connect (it names redis" in lines[3]
    assert "*.sentinels matches no name" in lines[0]


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("redis", "Redis"),
        ("redis", "redis2"),
        ("*.sentinels", "a.sentinels"),
        ("*.a.b", "x.a.b"),
        ("*.a.b", "x.y.a.b"),
        ("*.a.b", "a.b"),
        ("*.A.b", "x.a.B"),
    ],
)
def test_names_are_compared_as_openssl_does(name: str, host: str) -> None:
    assert covers(name, host) == is_accepted(name, host)


@pytest.mark.process
def test_certificate_that_lacks_names_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tls.crt"
    trustme.CA().issue_cert("localhost").cert_chain_pems[0].write_to_path(file)

    def code(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["k8s-check", "--certificate", *arguments])
        return main()

    assert code(str(file)) == 1  # of the overlay production-aof
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{file}: is not for redis, to which services connect (it names local")
    assert code(str(file), str(K8S / "overlays" / "dev")) == 0
    assert code(str(tmp_path / "none")) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(": No such file or directory")


@pytest.mark.process
def test_own_overlay_builds_on_production(tmp_path: Path) -> None:
    """The one in the documentation; another run.toml and task roll their pods, and not Redis."""
    [block] = re.findall(r"```yaml\n( *apiVersion: kustomize.*?)```", HOW_TO, re.DOTALL)
    up = os.path.relpath(K8S, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(block.replace("../fedstream/k8s", up))
    made = []
    for name in ("mine", "another"):
        (tmp_path / "run.toml").write_text(f"[log]\nname = '{name}'\n")
        (tmp_path / "task.py").write_text(f"task = '{name}'\n")
        made.append(rendered(tmp_path))
        tasks = [one["data"] for one in made[-1].of("ConfigMap") if "task.py" in one["data"]]
        assert tasks == [{"task.py": f"task = '{name}'\n"}]
        assert list(durable(made[-1])) == []
        assert made[-1].of("CronJob")
    mine, another = (
        [Workload(one.get("Deployment", "trainer")).volumes, one.get("StatefulSet", "redis")]
        for one in made
    )
    assert mine[0] != another[0]
    assert mine[1] == another[1]


# Parts of a trainer's JSON that are replaced, and checkov's checks that must fail.
UNSAFE = [
    ('"allowPrivilegeEscalation": false', '"privileged": true', {"CKV_K8S_16", "CKV_K8S_20"}),
    ('"readOnlyRootFilesystem": true', '"readOnlyRootFilesystem": false', {"CKV_K8S_22"}),
    ('"drop": ..ALL..', '"drop": []', {"CKV_K8S_28", "CKV_K8S_37"}),
    ('"runAsNonRoot": true, "runAsUser": 10001', '"runAsUser": 0', {"CKV_K8S_23", "CKV_K8S_40"}),
    ('"RuntimeDefault"', '"Unconfined"', {"CKV_K8S_31"}),
    (
        '"automountServiceAccountToken": false',
        '"automountServiceAccountToken": true',
        {"CKV_K8S_38"},
    ),
    (
        '"limits": {"cpu": "[^"]*", ("ephemeral-storage": "[^"]*"), "memory": "[^"]*"}',
        r'"limits": {\1}',
        {"CKV_K8S_11", "CKV_K8S_13"},
    ),
    ('("image": "[^"]*:)[^:"]*"', r'\1latest"', {"CKV_K8S_14"}),
]


@pytest.mark.process
@pytest.mark.skipif(
    not linters.PROGRAM.is_file(), reason="checkov is not installed: make .venv-checkov/installed"
)
def test_checkov_finds_mistakes_and_unneeded_exceptions() -> None:
    changes = [("Deployment trainer", before, after) for before, after, _ in UNSAFE]
    manifests = broken(on_base("keda"), *changes)
    allowed = {**linters.exceptions(), "CKV_K8S_1": "an exception for something that nobody does"}
    wrong = linters.checkov({"broken": manifests}, allowed).wrong
    found = {line.split()[1] for line in wrong if "Deployment.fedstream.trainer" in line}
    assert found == set().union(*(checks for _, _, checks in UNSAFE))
    others = [line for line in wrong if "Deployment.fedstream.trainer" not in line]
    assert len(others) == 1
    assert "nothing needs the exception CKV_K8S_1 " in others[0]
