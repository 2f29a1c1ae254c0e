"""Compose's profile `monitoring`: what Prometheus scrapes is what the dashboard asks for.

And what it says of gateways.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fedstream.doctor.gateway import RESTART_S
from fedstream.runtime.config import load
from fedstream.settings.config import Settings
from fedstream.settings.services import ROLES
from tests.k8s.manifests import K8S, ROOT

COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
WATCHING = {
    name: one
    for name, one in COMPOSE["services"].items()
    if one.get("profiles", ["gateway"]) != ["gateway"]
}
CONFIG = ROOT / "compose" / "prometheus.yaml"
ALERTS = K8S / "components" / "monitoring" / "alerts.yaml"
[COMMAND] = WATCHING["prometheus"]["command"]
[JOB] = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
DASHBOARD = K8S / "components" / "monitoring" / "dashboard.json"


def mounts(service: str) -> dict[str, str]:
    """Paths in the container, by what they are here."""
    pairs = [volume.split(":")[:2] for volume in WATCHING[service]["volumes"]]
    return {here: there for here, there in pairs if here.startswith("./")}


def test_monitoring_is_opt_in() -> None:
    assert set(WATCHING) == {"prometheus", "grafana"}
    for service in WATCHING.values():
        assert service["profiles"] == ["monitoring"]
        assert re.fullmatch(r"[a-z]+/[a-z]+:v?\d+\.\d+\.\d+", service["image"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_every_container_of_every_service_is_scraped() -> None:
    found = load(Settings, path=K8S / "base" / "run.toml", environ={})
    [names] = JOB["dns_sd_configs"]
    # Sinks are an option (k8s/components/sinks); no network leads from Prometheus to the helper.
    assert set(names["names"]) == set(ROLES) - {"sinks", "helper"}
    assert set(names["names"]) < set(COMPOSE["services"])
    assert names["port"] == found.http.health_port


def test_series_have_the_dashboards_labels() -> None:
    """As Kubernetes' ServiceMonitor gives them; the metrics' names: test_monitoring.py."""
    given = {"job", "instance"} | {one["target_label"] for one in JOB["relabel_configs"]}
    expressions = [
        target["expr"]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for target in panel["targets"]
        if "kubelet" not in target["expr"]  # what only a cluster has
    ]
    about = {"namespace", "component", "pod", "container", "job", "instance"}
    asked = {word for text in expressions for word in re.findall(r"\w+", text)} & about
    assert "namespace" in asked
    assert asked <= given
    assert JOB["job_name"] == "fedstream", "as the alerts say"


def test_grafana_is_given_the_source_and_the_dashboard() -> None:
    inside = mounts("grafana")
    for here in (*inside, *mounts("prometheus")):
        assert (ROOT / here).is_file(), here
    [source] = yaml.safe_load((ROOT / "compose/grafana/datasources.yaml").read_text())[
        "datasources"
    ]
    [provider] = yaml.safe_load((ROOT / "compose/grafana/dashboards.yaml").read_text())["providers"]
    assert source["type"] == "prometheus"
    assert source["isDefault"], "the dashboard asks for whichever is the default"
    assert source["url"] == "http://prometheus:9090"
    dashboard = inside[f"./{DASHBOARD.relative_to(ROOT)}"]
    assert Path(dashboard).parent == Path(provider["options"]["path"])
    for kind in ("datasources", "dashboards"):
        assert inside[f"./compose/grafana/{kind}.yaml"].startswith(
            f"/etc/grafana/provisioning/{kind}/"
        )
    config = mounts("prometheus")["./compose/prometheus.yaml"]
    assert f"exec prometheus --config.file={config} " in COMMAND


@pytest.mark.process
def test_prometheus_accepts_its_configuration_and_has_the_clusters_alerts(tmp_path: Path) -> None:
    there = mounts("prometheus")[f"./{ALERTS.relative_to(ROOT)}"]
    here = COMMAND.replace(there, str(ALERTS)).replace(" /prometheus/", f" {tmp_path}/")
    subprocess.run(["sh", "-c", here.replace("exec prometheus", "true")], check=True)
    theirs = yaml.safe_load(ALERTS.read_text())["spec"]
    assert yaml.safe_load((tmp_path / "alerts.yaml").read_text()) == theirs
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    config = CONFIG.read_text().replace("[/prometheus/", "[")
    for text, code in ((config, 0), (config + "scrape: {}\n", 1)):
        (tmp_path / "prometheus.yaml").write_text(text)
        command = [promtool, "check", "config", "prometheus.yaml"]
        said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert said.returncode == code, said.stdout + said.stderr


def test_gateways_may_start_again_without_losing_their_tasks() -> None:
    """As in the cluster."""
    key = "FEDSTREAM_COORDINATOR__TRAINER_SILENCE_S"
    component = yaml.safe_load((K8S / "components" / "gateway" / "kustomization.yaml").read_text())
    [made] = component["configMapGenerator"]
    in_the_cluster = dict(one.split("=", 1) for one in made["literals"])
    here = COMPOSE["services"]["coordinator"]["environment"]
    assert float(here[key]) == float(in_the_cluster[key]) >= RESTART_S
