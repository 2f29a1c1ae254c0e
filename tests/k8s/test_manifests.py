"""The manifests, and that whatever could be wrong with them would be seen.

``make k8s-check`` runs all checks on every rendering. Here the production overlay is broken in one
place after the other, and the check whose business it is says so.
"""

from __future__ import annotations

import copy
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
from tests.k8s.breaks import BREAKS, GATEWAYS, OTHERS, SITES, config, container, pod, replace
from tests.k8s.cluster.manifests import Manifests, kubectl, rendered
from tests.k8s.policy import checkov
from tests.k8s.policy.__main__ import main
from tests.k8s.policy.certificate import covers, missing, redis_hosts
from tests.k8s.policy.checks import CHECKS, findings
from tests.k8s.policy.pods import durable
from tests.k8s.policy.settings import read
from tests.k8s.policy.sources import sources
from tests.k8s.policy.targets import (
    K8S,
    ROOT,
    differences,
    largest,
    on_base,
    overlays,
    renderings,
)
from tests.k8s.policy.workloads import BY_THE_OPERATOR, workloads

HOW_TO = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "how-to").glob("*.md")))
_YAML = [
    one
    for block in re.findall(r"```yaml\n(.*?)```", HOW_TO, re.DOTALL)
    for one in yaml.safe_load_all(textwrap.dedent(block))
]
OBJECTS = [one for one in _YAML if "kind" in one]
PARTS = [one for one in _YAML if "kind" not in one]  # of an overlay; tests/docs builds it

Rendering: TypeAlias = Callable[[str], Manifests]


@pytest.fixture(scope="session", autouse=True)
def _kubectl_is_there() -> None:
    if kubectl() is None:
        assert os.environ.get("FEDSTREAM_CI") != "1", "kubectl is not on PATH; in CI it has to be"
        pytest.skip("kubectl is not on PATH: it renders the manifests")


@pytest.fixture(scope="session")
def rendering() -> Rendering:
    """Renders each when it is first asked for."""
    return cache(lambda name: renderings()[name]())


def broken(manifests: Manifests, change: Callable[[Manifests], object]) -> list[str]:
    """What is said of a copy after a change."""
    those = Manifests(copy.deepcopy(list(manifests)))
    change(those)
    return list(findings(Manifests(list(those))))  # anew: a change may rename


@pytest.mark.process
@pytest.mark.parametrize("names", largest(), ids=" ".join)
def test_the_order_of_components_does_not_matter(names: tuple[str, ...]) -> None:
    """The reverse of an order has every pair the other way round."""
    shuffled = [*names]
    random.Random(0).shuffle(shuffled)
    assert list(differences([names, names[::-1], shuffled])) == []


def test_images_are_named_in_one_place() -> None:
    assert list(sources()) == []


@pytest.mark.parametrize("what", SITES)
def test_mistakes_in_a_site_are_detected(what: str, rendering: Rendering) -> None:
    change, expected = SITES[what]
    lines = broken(rendering("production with site"), change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("what", GATEWAYS)
def test_mistakes_in_a_gateway_are_detected(what: str, rendering: Rendering) -> None:
    change, expected = GATEWAYS[what]
    lines = broken(rendering("base with gateway-route"), change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("what", OTHERS)
def test_mistakes_in_other_components_are_detected(what: str, rendering: Rendering) -> None:
    name, change, expected = OTHERS[what]
    lines = broken(rendering(name), change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("what", BREAKS)
def test_mistakes_are_detected(what: str, rendering: Rendering) -> None:
    change, expected = BREAKS[what]
    lines = broken(rendering("overlay production-aof"), change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


@pytest.mark.process
def test_the_namespace_enforces_the_restricted_level() -> None:
    namespace = rendered(K8S / "namespace")
    assert list(CHECKS["restricted"](namespace)) == []
    namespace.get("Namespace", "fedstream")["metadata"]["labels"].clear()
    lines = list(CHECKS["restricted"](namespace))
    assert lines == ["Namespace fedstream: does not enforce 'restricted'"]


@pytest.mark.parametrize("name", overlays())
def test_production_keeps_what_redis_holds(name: str, rendering: Rendering) -> None:
    lines = list(durable(rendering(f"overlay {name}")))
    assert len(lines) == (0 if name.startswith("production") else 1), lines


def test_mistakes_in_a_job_are_detected(rendering: Rendering) -> None:
    def changed(manifests: Manifests) -> None:
        spec = manifests.get("CronJob", "backup")["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] = False
        spec["volumes"][1]["persistentVolumeClaim"]["claimName"] = "journal-updater-1"

    assert broken(rendering("production with backup"), changed) == [
        "references: CronJob backup: there is no PersistentVolumeClaim 'journal-updater-1'",
        "restricted: CronJob backup, container backup: readOnlyRootFilesystem is not true",
    ]


def test_keda_works_with_rounds(rendering: Rendering) -> None:
    """Their number of open tasks is their own: as the documentation says to write it."""

    def fedavg(manifests: Manifests) -> None:
        settings = config(manifests, "fedstream-settings")
        entries = [one for part in PARTS for one in part.get("configMapGenerator", ())]
        [entry] = [one for one in entries if one["behavior"] == "replace"]
        assert entry["name"] == "fedstream-settings"
        settings.clear()
        settings |= dict(one.split("=") for one in entry["literals"])
        replace(config(manifests, "fedstream-config"), "run.toml", "fedasync", "fedavg")

    assert broken(rendering("overlay production-aof"), fedavg) == []


def test_sentinels_elsewhere_may_ask_for_no_password(rendering: Rendering) -> None:
    """Then services read no file with it, which the Secret need not have."""
    manifests = Manifests(copy.deepcopy(list(rendering("base with external-redis"))))
    nodes = {"FEDSTREAM_REDIS__SENTINEL__NODES": '["sentinel.example.org:26379"]'}
    config(manifests, "fedstream-settings").update(nodes)
    for workload in workloads(manifests):
        sentinel = read(manifests, workload, workload.pod["containers"][0]).redis.sentinel
        assert sentinel is not None
        assert sentinel.password_file is None, workload.name


def test_every_check_can_fail() -> None:
    seen = (*BREAKS.values(), *SITES.values())
    assert {pattern.partition(":")[0] for _, pattern in seen} == set(CHECKS)


def test_unlisted_image_is_detected(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    text = (K8S / "images" / "kustomization.yaml").read_text()
    (tmp_path / "images" / "kustomization.yaml").write_text(text)
    (tmp_path / "a.yaml").write_text("containers:\n  - image: fedstream:0.9\n")
    assert any("a.yaml:2: image 'fedstream:0.9'" in line for line in sources(tmp_path))


def test_tags_match_the_packages_version() -> None:
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    tags = {entry["name"]: entry["newTag"] for entry in table}
    assert tags["fedstream"] == __version__
    assert tags["fedstream-cuda"] == f"{__version__}-cuda"


def test_operators_objects_are_documented() -> None:
    missing = [name for _, name in BY_THE_OPERATOR if name not in HOW_TO]
    assert missing == []


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
        "deploy": "Deployment", "deployment": "Deployment", "statefulset": "StatefulSet",
        "cronjob": "CronJob",
    }  # fmt: skip
    objects = set(
        re.findall(r"\b(cronjob|deploy|deployment|statefulset|service)[/ ]([\w-]+)", commands)
    )
    deployed = (
        "overlay dev", "overlay production-sentinel", "production with gateway",
        "production with backup",
    )  # fmt: skip
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
    assert list(missing(sentinels, names)) == list(missing(alone, names)) == []
    stars = ["redis", "*.redis-nodes", "*.sentinels"]
    assert list(missing(alone, stars)) == []
    lines = list(missing(sentinels, stars))
    assert len(lines) == 6
    assert "is not for redis-0.redis-nodes, to which services connect (it names redis" in lines[3]
    assert "*.sentinels matches no name" in lines[0]


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("redis", "Redis"), ("redis", "redis2"), ("*.sentinels", "a.sentinels"), ("*.a.b", "x.a.b"),
        ("*.a.b", "x.y.a.b"), ("*.a.b", "a.b"), ("*.A.b", "x.a.B"),
    ],
)  # fmt: skip
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
        assert config(made[-1], "fedstream-task") == {"task.py": f"task = '{name}'\n"}
        assert list(durable(made[-1])) == []
        assert made[-1].of("CronJob")
    mine, another = (
        [pod(one, "trainer")["volumes"], one.get("StatefulSet", "redis")] for one in made
    )
    assert mine[0] != another[0]
    assert mine[1] == another[1]


@pytest.mark.process
@pytest.mark.skipif(
    not checkov.PROGRAM.is_file(), reason="checkov is not installed: make .venv-checkov/installed"
)
def test_checkov_finds_mistakes_and_unneeded_exceptions() -> None:
    manifests = on_base("keda")
    container(manifests, "trainer")["securityContext"].update(privileged=True)
    allowed = {**checkov.exceptions(), "CKV_K8S_1": "an exception for something that nobody does"}
    wrong = checkov.checkov({"broken": manifests}, allowed).wrong
    assert any("CKV_K8S_16" in line and "trainer" in line for line in wrong), wrong
    assert any("nothing needs the exception CKV_K8S_1 " in line for line in wrong), wrong
    assert len(wrong) == 2
