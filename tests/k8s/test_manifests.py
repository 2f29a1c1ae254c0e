"""The manifests, and that faults in them would be found.

``make k8s-check`` runs all checks on every rendering. Here renderings are broken in one place after
the other, and the check concerned says so.
"""

from __future__ import annotations

import json
import os
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
    overlays,
    rendered,
    renderings,
)
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
PRIVATE, HELPER = "production with private", "helper"
SETTINGS = "ConfigMap fedstream-settings"

# For each check a rendering, an object (of a generated ConfigMap the name without its hash), a
# pattern of its JSON that is replaced once, the replacement, and a pattern of what must be said.
BREAKS = [
    (AOF, "Deployment trainer", '"args"', '"argz": "x", "args"', "schemas: .*1.30: .*argz"),
    (AOF, "Service redis", '"selector": {', '"selector": {"a": "b", ', "references: .*selects no"),
    (AOF, "Deployment trainer", '"key": "trainer"', '"key": "x"', "references: .*has no 'x'"),
    (AOF, "ConfigMap fedstream-config", "seed = 0", "seeds = 0", r"settings: .*run\.seeds"),
    (AOF, "Deployment coordinator", '"seconds": 5', '"seconds": 11', "settings: .*is less than"),
    (AOF, "Deployment trainer", '"sizeLimit": "[^"]*"', "", "storage: .*without sizeLimit"),
    (AOF, "Deployment trainer", '("livenessProbe": .*?)/livez', r"\1/readyz", "probes: .*/readyz"),
    (AOF, "PodDisruptionBudget trainer", '"50%"', '"0%"', "spread: .*lets no node drain"),
    (AOF, "ConfigMap redis-config", "noeviction", "allkeys-lru", "redis: .*maxmemory-policy"),
    (AOF, SETTINGS, "rediss:", "redis:", "exposure: .*without TLS"),
    (GATEWAY, "HTTPRoute gateway", "devices.example", "new.example", "exposure: .*differ in 'new"),
    (
        SITE,
        "ConfigMap fedstream-run",
        '"FEDSTREAM_COORDINATOR__SITES__SITE_A"',
        '"OTHER"',
        "sites: .*does not name 'site-a'",
    ),
    (AOF, "Deployment trainer", '"image": "fed', '"image": "x', "images: .*'xstream:"),
    (HELPER, "StatefulSet helper", '"key": "owner"', '"key": "x"', "references: .*has no 'x'"),
    (
        HELPER,
        "StatefulSet helper",
        r'"env": \[',
        '"env": [{"name": "FEDSTREAM_REDIS__URL", "value": "redis://redis"}, ',
        "settings: .*knows of Redis",
    ),
    (
        HELPER,
        "ConfigMap fedstream-helper-config",
        "/var/lib/fedstream/",
        "/elsewhere/",
        r"settings: .*helper\.store = .* is on no volume that lasts",
    ),
    (HELPER, "ConfigMap fedstream-helper-config", "8443", "8444", r"settings: .*http\.port = 8444"),
    (PRIVATE, "StatefulSet updater", "login/ca.crt", "x/ca.crt", r"settings: .*private\.ca = "),
    (PRIVATE, "StatefulSet updater", "https://helper", "http://helper", "settings: .*with TLS"),
    (PRIVATE, "Deployment trainer", "device-keys", "x", r"settings: .*private\.keys = "),
    # What the documentation says that is refused.
    (AOF, "Ingress coordinator", r', "tls": \[.*?\}\]', "", "exposure: .*is let in without TLS"),
    (
        AOF,
        "Deployment coordinator",
        '"FEDSTREAM_HTTP__TOKEN_FILE"',
        '"X"',
        "exposure: .*asks for no",
    ),
    (AOF, SETTINGS, 'SCHEDULER__POLICY__N"', 'RUN__SEED"', r"settings: .*policy\.n is not set"),
    (SITE, "StatefulSet site-a", "fedstream-site-a", "fedstream-redis", "sites: .*has the Secret"),
    (
        SITE,
        "StatefulSet redis",
        "fedstream-site-a",
        "fedstream-tls",
        "sites: .*without the password",
    ),
]


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
    assert list(differences([names, names[::-1]])) == []


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
    assert tags["fedstream-helper"] == f"{__version__}-helper"


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


@pytest.mark.parametrize(
    ("name", "host"),
    [("redis", "Redis"), ("*.sentinels", "a.sentinels"), ("*.A.b", "x.a.B"), ("*.a.b", "x.y.a.b")],
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
