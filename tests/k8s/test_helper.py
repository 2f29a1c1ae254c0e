"""The helper and the run that it serves: two trust domains, on Kubernetes and in Compose."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme
import yaml

from fedstream.private.sealing import EpochKey
from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from tests.broker.servers import redis_7
from tests.chaos.history import replayed
from tests.integration.command import TEST_GUARD_S, wait_until
from tests.k8s.conftest import Net, missing
from tests.k8s.manifests import (
    K8S,
    ROOT,
    Manifest,
    Manifests,
    kubectl,
    kustomized,
    on_base,
    rendered,
)
from tests.k8s.pods import Pod, started
from tests.k8s.test_image import default
from tests.k8s.workloads import environment, sources, workloads
from tests.private.enrolled import OWNER, hex_of

BATCH, VERSIONS = 3, 3
OVERLAY = f"""
namespace: fedstream
resources: [K8S/overlays/dev]
components: [K8S/private]
configMapGenerator:
  - name: fedstream-settings
    behavior: merge
    literals: [FEDSTREAM_STRATEGY__NAME=fedbuff, FEDSTREAM_STRATEGY__BUFFER_SIZE={BATCH}]
"""
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
PRIVATE = yaml.safe_load((ROOT / "compose.private.yaml").read_text())


@pytest.fixture(scope="module")
def helper() -> Manifests:
    """The helper's objects."""
    if kubectl() is None:
        missing("kubectl is not on PATH: it renders the manifests")
    return rendered(K8S / "helper")


def secrets(manifests: Manifests) -> set[str]:
    """The names of all Secrets that pods have."""
    return {
        about["name"]
        for workload in workloads(manifests)
        for volume in workload.volumes.values()
        for kind, about in sources(volume)
        if kind == "Secret"
    }


@pytest.mark.process
def test_domains_share_neither_namespace_nor_secret_nor_image(helper: Manifests) -> None:
    run = on_base("device-owners", "site", "gateway", "private")
    [pod] = workloads(helper)
    assert {one["metadata"]["namespace"] for one in helper} == {"fedstream-helper"}
    assert {one["metadata"]["namespace"] for one in run} == {"fedstream"}
    assert secrets(helper) == {"fedstream-helper", "fedstream-helper-tls"}
    assert not secrets(helper) & secrets(run)
    images = {one["image"] for workload in workloads(run) for one in workload.all_containers}
    assert pod.containers[0]["image"] not in images
    assert not any("redis" in json.dumps(one).lower() for one in helper)


@pytest.mark.process
def test_only_the_updater_has_the_way_to_the_helper_and_trainers_have_keys(
    helper: Manifests,
) -> None:
    run = on_base("site", "gateway", "private")
    reaches, keys = set(), {}
    for workload in workloads(run):
        env = environment(run, workload.containers[0])
        if "FEDSTREAM_PRIVATE__HELPER" in env:
            reaches.add(workload.name)
            url = env["FEDSTREAM_PRIVATE__HELPER"]
        if "FEDSTREAM_PRIVATE__KEYS" in env:
            keys[workload.name] = env["FEDSTREAM_PRIVATE__KEYS"]
    assert reaches == {"StatefulSet updater"}
    [port] = helper.get("Service", "helper")["spec"]["ports"]
    assert url == f"https://helper.fedstream-helper.svc:{port['port']}"
    assert keys == {
        "Deployment trainer": "/etc/fedstream/device-keys",
        "StatefulSet site-a": "/data/keys",  # on the device's own volume
    }
    holders = {
        workload.name
        for workload in workloads(run)
        for volume in workload.volumes.values()
        if ("Secret", "fedstream-device-keys") in [(k, one["name"]) for k, one in sources(volume)]
    }
    assert holders == {"Deployment trainer"}


@pytest.mark.process
def test_the_store_outlives_pods_and_stays_out_of_backups(helper: Manifests) -> None:
    one = helper.get("StatefulSet", "helper")
    [claim] = one["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["labels"]["velero.io/exclude-from-backup"] == "true"
    assert "Never restore it" in claim["metadata"]["annotations"]["kubernetes.io/description"]
    pod = one["spec"]["template"]["metadata"]["annotations"]
    assert pod["backup.velero.io/backup-volumes-excludes"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert one["spec"]["replicas"] == 1
    kept = one["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert set(kept.values()) == {"Retain"}
    namespace = rendered(K8S / "helper" / "namespace").get("Namespace", "fedstream-helper")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def made(kind: str, name: str, files: dict[str, bytes]) -> Manifest:
    """A ConfigMap or Secret that the operator makes."""
    texts = {key: data.decode() for key, data in files.items()}
    key = "data" if kind == "ConfigMap" else "stringData"
    return {"kind": kind, "metadata": {"name": name}, key: texts}


@dataclass(frozen=True)
class Parties:
    """What the parties made before, and the authorities of the two certificates."""

    helper: Manifests
    run: Manifests
    of_helper: trustme.CA
    of_updater: trustme.CA


@pytest.fixture
def parties(helper: Manifests, tmp_path: Path, net: Net, quick_programs: Path) -> Parties:
    """By `fedstream agree`, for the task that comes with the manifests."""
    if sys.platform != "linux":
        pytest.skip("addresses in 127.0.0.0/8 are Linux's alone")
    config, folder = K8S / "base" / "run.toml", tmp_path / "parties"
    command = [str(quick_programs / "fedstream"), "agree", str(folder), "--config", str(config)]
    command += ["--task", f"{K8S}/base/task/task.py:task", "--strategy", "fedbuff"]
    subprocess.run(
        [*command, "--set", f"strategy.buffer_size={BATCH}"], check=True, capture_output=True
    )
    owner = tomllib.loads((folder / "helper.toml").read_text())["helper"]["owner"]
    policy = {name: (folder / name).read_bytes() for name in ("policy.json", "roster.txt")}
    policy["owner"] = owner.encode()
    keys = {path.name: path.read_bytes() for path in (folder / "keys").iterdir()}
    of_helper, of_updater = trustme.CA(), trustme.CA()
    shown, login = of_helper.issue_cert(net("helper-0")), of_updater.issue_cert("updater")
    return Parties(
        Manifests(
            [
                *helper,
                made("ConfigMap", "fedstream-policy", policy),
                made(
                    "Secret",
                    "fedstream-helper",
                    {"helper.pem": (folder / "helper.pem").read_bytes()},
                ),
                made("Secret", "fedstream-helper-tls", tls(shown, of_updater)),
            ]
        ),
        Manifests(
            [
                *kustomized(OVERLAY),
                made("ConfigMap", "fedstream-policy", policy),
                made("Secret", "fedstream-updater-tls", tls(login, of_helper)),
                made("Secret", "fedstream-device-keys", keys),
            ]
        ),
        of_helper,
        of_updater,
    )


def tls(cert: trustme.LeafCert, other: trustme.CA) -> dict[str, bytes]:
    """A certificate, and the authority of the other side's."""
    return {
        "tls.crt": cert.cert_chain_pems[0].bytes(),
        "tls.key": cert.private_key_pem.bytes(),
        "ca.crt": other.cert_pem.bytes(),
    }


@pytest.mark.process
@pytest.mark.timeout(TEST_GUARD_S)
def test_helper_answers_those_with_a_certificate_and_keeps_its_store(
    parties: Parties, tmp_path: Path, net: Net, quick_programs: Path
) -> None:
    with started(tmp_path, net, quick_programs, parties.helper) as pods:
        pod = pods["helper-0"]
        stranger, updater = ssl.create_default_context(), ssl.create_default_context()
        for context in (stranger, updater):
            parties.of_helper.configure_trust(context)
        parties.of_updater.issue_cert("updater").configure_cert(updater)
        url = f"https://{pod.address}:8443/v1/key"
        with pytest.raises(OSError, match=r"(?i)certificate required|reset|EOF"):
            urlopen(url, context=stranger).read()
        key = EpochKey.decode(urlopen(url, context=updater).read())
        killed(pod, quick_programs)
        assert EpochKey.decode(urlopen(url, context=updater).read()).epoch == key.epoch
        pod.process.terminate()
        assert pod.ended() == 0


def killed(pod: Pod, programs: Path) -> None:
    """A pod's container is killed, and started again."""
    pod.process.kill()
    pod.process.wait()
    pod.start(programs)
    wait_until(lambda: pod.passes("readinessProbe"), f"{pod.name} is ready again")


@pytest.mark.process
@pytest.mark.timeout(TEST_GUARD_S)
def test_the_domains_train_together_and_the_journal_replays_without_the_helper(
    parties: Parties, tmp_path: Path, net: Net, quick_programs: Path
) -> None:
    if redis_7() is None:
        missing("this needs a redis-server of 7.0 or later with its redis-cli")
    with started(tmp_path, net, quick_programs, parties.helper, parties.run) as pods:
        coordinator = pods["coordinator-0"]
        wait_until(lambda: coordinator.run()["version"] >= VERSIONS, f"version {VERSIONS}")
        killed(pods["helper-0"], quick_programs)
        least = coordinator.run()["version"] + VERSIONS
        wait_until(lambda: coordinator.run()["version"] >= least, f"version {least}")
        for those in (pods.keys() - {"redis-0"}, {"redis-0"}):
            for name in those:
                pods[name].process.terminate()
            assert {name: pods[name].ended() for name in those} == dict.fromkeys(those, 0)
    journal = pods["updater-0"].folder / "var" / "lib" / "fedstream" / "journal"
    found = replayed(journal)
    assert found.diverged == ""
    assert found.replayed[0] >= least


def networks(service: str) -> set[str]:
    """The networks of a service in Compose, with both files."""
    one = PRIVATE["services"].get(service, {})
    return set(one.get("networks", ["default"]))


def test_the_helper_of_compose_has_a_network_without_redis() -> None:
    meet = {name for name in COMPOSE["services"] if "helper" in networks(name)}
    assert networks("helper") == {"helper"}
    assert meet == {"updater"}
    assert PRIVATE["networks"]["helper"]["internal"], "no way out"
    about = PRIVATE["services"]["helper"]
    assert about["read_only"]
    assert about["cap_drop"] == ["ALL"]
    assert "REDIS" not in json.dumps(about).upper()
    sources_of = {
        name: {volume.split(":")[0] for volume in one.get("volumes", ())}
        for name, one in (COMPOSE["services"] | PRIVATE["services"]).items()
    }
    alone = sources_of.pop("helper") - {"./private/policy.json"}
    assert alone == {"./private/roster.txt", "./private/helper.pem", "helper-store"}
    assert not alone & set().union(*sources_of.values())
    assert {name for name, those in sources_of.items() if "./private/keys" in those} == {"trainer"}


def test_the_helper_of_compose_is_started_as_it_is_configured() -> None:
    about = PRIVATE["services"]["helper"]
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    images = {entry["name"]: f"{entry['newName']}:{entry['newTag']}" for entry in table}
    assert about["image"] == images["fedstream-helper"]
    assert about["build"]["args"] == {"TORCH": "none"}
    owner = hex_of(OWNER)
    given = {
        name: owner if name.endswith("OWNER") else default(text)
        for name, text in about["environment"].items()
    }
    found = load(Settings, path=None, environ=given)
    there = {volume.split(":")[1] for volume in about["volumes"]}
    assert {found.helper.policy, found.helper.roster, found.helper.key} <= there
    assert str(Path(str(found.helper.store)).parent) in there
    assert f"127.0.0.1:{found.http.health_port}/readyz" in about["healthcheck"]["test"][-1]
    grace_s = float(about["stop_grace_period"].removesuffix("s"))
    assert grace_s >= found.helper.drain_s + 5
    updater = PRIVATE["services"]["updater"]["environment"]
    assert updater["FEDSTREAM_PRIVATE__HELPER"] == f"http://helper:{found.http.port}"
    assert updater["FEDSTREAM_PRIVATE__TOKEN"] == about["environment"]["FEDSTREAM_HTTP__TOKEN"]
    assert len(given["FEDSTREAM_HTTP__TOKEN"]) >= 16
