"""The monitoring component: its alerts fire when they should, and it asks for metrics there are."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml

ROOT = Path(__file__).parents[2]
COMPONENT = ROOT / "k8s" / "components" / "monitoring"
RUNBOOK = "docs/how-to/alerts.md"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(fedstream_\w+)` \| (\w+) \|([\w, ]+)\|", re.MULTILINE)
DOCUMENTED = {
    name: (kind, {label for label in labels.strip().split(", ") if label})
    for name, kind, labels in ROW.findall(METRICS)
}
# What Prometheus adds to every series of ours, by the ServiceMonitor.
TARGET_LABELS = {"namespace", "job", "component", "pod", "container"}
# Not ours: Prometheus's own, our process's as its client library has it, the kubelet's, and
# kube-state-metrics'. With the labels that a selector may name.
FOREIGN = {
    "up": TARGET_LABELS,
    "ALERTS": {"alertname", "alertstate", "namespace"},
    "process_start_time_seconds": TARGET_LABELS,
    "process_cpu_seconds_total": TARGET_LABELS,
    "process_resident_memory_bytes": TARGET_LABELS,
    "kubelet_volume_stats_available_bytes": {"namespace", "persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"namespace", "persistentvolumeclaim"},
    "kube_deployment_spec_replicas": {"namespace", "deployment"},
    "kube_deployment_status_replicas_ready": {"namespace", "deployment"},
    "kube_statefulset_replicas": {"namespace", "statefulset"},
    "kube_statefulset_status_replicas_ready": {"namespace", "statefulset"},
    "kube_pod_container_status_restarts_total": {"namespace", "pod", "container"},
    "kube_cronjob_created": {"namespace", "cronjob"},
    "kube_cronjob_status_last_successful_time": {"namespace", "cronjob"},
}


def loaded(name: str) -> Any:
    return yaml.safe_load((COMPONENT / name).read_text())


def tool(name: str, *, always_in_ci: bool) -> str:
    """A program's path; without it the test is skipped, or fails in CI, where it has to be."""
    path = shutil.which(name)
    if path is None:
        assert not (always_in_ci and os.environ.get("FEDSTREAM_CI") == "1"), f"{name} is missing"
        pytest.skip(f"{name} is not installed")
    return path


GROUPS = loaded("alerts.yaml")["spec"]["groups"]
ALERTS = [rule for group in GROUPS for rule in group["rules"]]
DASHBOARD = json.loads((COMPONENT / "dashboard.json").read_text())
PANELS = DASHBOARD["panels"]


def queries() -> Iterator[str]:
    """Every expression of the dashboard, as Grafana would send it."""
    annotations = DASHBOARD["annotations"]["list"]
    for about in (*annotations, *(target for panel in PANELS for target in panel["targets"])):
        yield about["expr"].replace("$namespace", "fl").replace("$__rate_interval", "5m")


EXPRESSIONS = [*(rule["expr"] for rule in ALERTS), *queries()]


# names


@dataclass(frozen=True)
class Asked:
    """A metric in an expression."""

    name: str
    labels: frozenset[str]  # in its braces
    gathered: str | None  # by which aggregation, the innermost; None: it is not


def series(expression: str) -> list[Asked]:
    """The metrics in an expression. Raises ValueError if it is no PromQL."""
    return list(_series(promql.parse(expression), None))


def _series(node: Any, gathered: str | None) -> Iterator[Asked]:
    match node:
        case promql.VectorSelector():
            labels = frozenset(matcher.name for matcher in node.matchers.matchers)
            yield Asked(node.name or "", labels, gathered)
        case promql.MatrixSelector():
            yield from _series(node.vector_selector, gathered)
        case promql.AggregateExpr():
            yield from _series(node.expr, str(node.op))
        case promql.BinaryExpr():
            yield from _series(node.lhs, gathered)
            yield from _series(node.rhs, gathered)
        case promql.Call():
            for argument in node.args:
                yield from _series(argument, gathered)
        case promql.ParenExpr() | promql.SubqueryExpr() | promql.UnaryExpr():
            yield from _series(node.expr, gathered)
        case promql.NumberLiteral() | promql.StringLiteral():
            return
        case _:
            raise AssertionError(f"unknown: {type(node).__name__}")


def metric_of(name: str) -> str:
    """A series' metric: a histogram has buckets, sum and count."""
    if name in DOCUMENTED:
        return name
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    kind = DOCUMENTED.get(base, ("", set()))[0]
    suits = kind == "histogram" or (kind == "summary" and not name.endswith("_bucket"))
    return base if suits else name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_queried_metric_is_documented(expression: str) -> None:
    # and what is documented is what services expose: tests/fedstream/settings/test_metrics.py
    asked = series(expression)
    assert asked
    for one in asked:
        if one.name in FOREIGN:
            assert one.labels <= FOREIGN[one.name]
        else:
            metric = metric_of(one.name)
            assert metric in DOCUMENTED, one.name
            assert one.labels <= TARGET_LABELS | DOCUMENTED[metric][1] | {"le"}, one.name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_coordinators_metrics_are_not_summed(expression: str) -> None:
    for one in series(expression):
        if one.name.startswith(("fedstream_run_", "fedstream_redis_memory_")):
            assert one.gathered == "max", one.name


# alerts


def test_alerts_say_what_they_mean_and_what_to_do() -> None:
    headings = re.findall(r"^## (Fedstream\w+)$", (ROOT / RUNBOOK).read_text(), re.MULTILINE)
    anchors = {name.lower(): name for name in headings}
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("critical", "warning")
        about = rule["annotations"]
        assert about["summary"]
        assert about["description"].endswith(".")
        document, _, anchor = about["runbook_url"].partition("#")
        assert document == RUNBOOK
        assert anchors[anchor] == rule["alert"]
    assert set(anchors.values()) == {rule["alert"] for rule in ALERTS}


MINUTES = 45
_TRAINER = 'namespace="fl", pod="t-0", container="trainer"'
_ENDS = "fedstream_certificate_ends_timestamp_seconds"
_VOLUME = 'namespace="fl", persistentvolumeclaim="journal-updater-0"'
HEALTHY = {
    'up{job="fedstream", component="coordinator", namespace="fl", pod="c-0"}': "1x45",
    'up{job="fedstream", component="coordinator", namespace="fl", pod="c-1"}': "1x45",
    'up{job="fedstream", component="trainer", namespace="fl", pod="t-0"}': "1x45",
    **{
        f'kube_{kind}_{name}{{namespace="fl", {kind}="{workload}"}}': f"{replicas}x45"
        for kind, desired, workload, replicas in (
            ("deployment", "spec_replicas", "coordinator", 2),
            ("deployment", "spec_replicas", "trainer", 2),
            ("statefulset", "replicas", "redis", 1),
            ("statefulset", "replicas", "updater", 1),
        )
        for name in (desired, "status_replicas_ready")
    },
    f"kube_pod_container_status_restarts_total{{{_TRAINER}}}": "3x45",
    # Seconds from now: ten days ago, a day ago.
    'kube_cronjob_created{namespace="fl", cronjob="backup"}': "-864000x45",
    'kube_cronjob_status_last_successful_time{namespace="fl", cronjob="backup"}': "-86400x45",
    **{
        f'{name}{{namespace="fl", pod="{pod}"{labels}}}': values
        for pod in ("c-0", "c-1")  # both say the same
        for name, labels, values in (
            ("fedstream_run_running", "", "1x45"),
            # Two hours ahead of Prometheus's clock.
            ("fedstream_run_clock_timestamp_seconds", "", "7200+60x45"),
            ("fedstream_run_looked_timestamp_seconds", "", "7200+60x45"),
            ("fedstream_run_published_timestamp_seconds", "", "7200+60x45"),
            ("fedstream_run_open", ', state="waiting"', "2x45"),
            ("fedstream_run_open", ', state="training"', "2x45"),
            ("fedstream_run_open", ', state="answered"', "1x45"),
            ("fedstream_run_trainers", "", "2x45"),
            ("fedstream_run_tasks_total", ', outcome="applied", reason=""', "0+60x45"),
            ("fedstream_run_tasks_total", ', outcome="refused", reason="too stale"', "0+1x45"),
            ("fedstream_run_tasks_total", ', outcome="given_up", reason="raised X"', "0x45"),
            ("fedstream_run_devices", "", "50x45"),
            ("fedstream_run_failing_devices", "", "5x45"),
            ("fedstream_run_dead_letters", "", "0x45"),
            ("fedstream_run_queue", "", "3x45"),
            ("fedstream_redis_memory_used_bytes", "", "50x45"),
            ("fedstream_redis_memory_max_bytes", "", "100x45"),
        )
    },
    'fedstream_metric_relapses{namespace="fl", pod="e-0", metric="accuracy"}': "1x45",
    'fedstream_leading{namespace="fl", pod="s-0", role="scheduler"}': "1x45",
    'fedstream_leading{namespace="fl", pod="s-1", role="scheduler"}': "0x45",  # stands by
    'fedstream_leading{namespace="fl", pod="u-0", role="updater"}': "1x45",
    'fedstream_queue_limit{namespace="fl", pod="s-0"}': "64x45",
    'fedstream_journal_unsynced_bytes{namespace="fl", pod="u-0"}': "67108864x45",
    'fedstream_sums_total{namespace="fl", pod="u-0", outcome="opened"}': "0+5x45",
    'fedstream_sums_total{namespace="fl", pod="u-0", outcome="sum out of range"}': "0x45",
    'fedstream_models_repaired_total{namespace="fl", pod="u-0"}': "0x45",
    'fedstream_updater_seconds_sum{namespace="fl", pod="u-0", part="journal"}': "0+3x45",
    'fedstream_updater_seconds_count{namespace="fl", pod="u-0", part="journal"}': "0+60x45",
    f"kubelet_volume_stats_available_bytes{{{_VOLUME}}}": "50x45",
    f"kubelet_volume_stats_capacity_bytes{{{_VOLUME}}}": "100x45",
    f'process_start_time_seconds{{job="fedstream", {_TRAINER}}}': "7x45",
    # Seconds from now: six days, eleven days.
    f'{_ENDS}{{namespace="fl", pod="c-0", certificate="redis"}}': "1000000x45",
    f'{_ENDS}{{namespace="fl", pod="g-0", certificate="https"}}': "1000000x45",
    **{
        f'fedstream_gateway_{name}{{namespace="fl", pod="{pod}"{labels}}}': values
        for pod in ("g-0", "g-1")
        for name, labels, values in (
            ("devices", "", "200x45"),
            ("devices_limit", "", "1000x45"),
            ("polls", "", "150x45"),
            ("offered_total", "", "0+30x45"),
            # a token is good for 10 minutes
            ("refused_total", ', reason="token"', "0+20x45"),
            ("refused_total", ', reason="superseded"', "0+500x45"),
            ("refused_total", ', reason="signature"', "0+1x45"),
            ("refused_total", ', reason="internal"', "0x45"),
        )
    },
}
# What is different (in series with this in their name), and which alerts fire at the end.
FINISHED = {"fedstream_run_running": "1x9 0x35"}
STORIES: dict[str, tuple[dict[str, str], set[str]]] = {
    "all is well": ({}, set()),
    "no version is made any more": ({"run_published": "7200+60x15 8100x30"}, {"FedstreamStalled"}),
    "the newest model was lost": ({"models_repaired": "0x30 1x15"}, {"FedstreamModelRepaired"}),
    "it was lost an hour ago": ({"models_repaired": "0x5 1x40"}, set()),
    "that is so because the run is finished": (
        FINISHED | {"run_published": "7200+60x9 7800x35"},
        set(),
    ),
    "Redis is gone": (
        {"run_published": "7200+60x15 8100x30", "run_looked": "7200+60x15 8100x30"},
        {"FedstreamStalled", "FedstreamRedisAway"},
    ),
    "one coordinator alone has lost Redis": (
        {'run_looked_timestamp_seconds{namespace="fl", pod="c-1"': "7200+60x15 8100x30"},
        set(),
    ),
    "Redis never answered": (
        {"run_running": "_x45", "run_clock": "_x45", "run_looked": "0x45", "run_published": "_x45"},
        {"FedstreamRedisAway"},
    ),
    "the coordinators are gone": (
        {'component="coordinator"': "1x15 _x30", "fedstream_run_": "_x45"},
        {"FedstreamNoCoordinator"},
    ),
    "Prometheus reaches no coordinator": (
        {'component="coordinator"': "1x15 0x30"},
        {"FedstreamNoCoordinator"},
    ),
    "one of two coordinators is away": (
        {'component="coordinator", namespace="fl", pod="c-1"': "1x15 0x30"},
        set(),
    ),
    "the deployment was deleted": (
        {"up{": "1x15 _x30", "fedstream_": "_x45", "kube_": "1x15 _x30"},
        set(),
    ),
    "nothing is scraped any more": (
        {"up{": "1x15 _x30", "fedstream_": "_x45"},
        {"FedstreamNoCoordinator"},
    ),
    "everything was scaled to none": (
        {
            "up{": "1x15 _x30",
            "fedstream_": "_x45",
            "kube_deployment_": "2x15 0x30",
            "kube_statefulset_": "1x15 0x30",
        },
        set(),
    ),
    "another program has a coordinator": (
        {"up{": "_x45", "fedstream_": "_x45", 'statefulset="updater"': "_x45"},
        set(),
    ),
    "the last backup was two days ago": ({"last_successful": "-172800x45"}, {"FedstreamNoBackup"}),
    "no backup ever succeeded": ({"last_successful": "_x45"}, {"FedstreamNoBackup"}),
    "no backup was due yet": ({"last_successful": "_x45", "cronjob_created": "-86400x45"}, set()),
    "the trainers' image can't be pulled": (
        {'status_replicas_ready{namespace="fl", deployment="trainer"': "2x15 0x30"},
        {"FedstreamNoReadyPod trainer"},
    ),
    "the updater's node is lost": (
        {'status_replicas_ready{namespace="fl", statefulset="updater"': "1x15 0x30"},
        {"FedstreamNoReadyPod updater"},
    ),
    "one of two trainers is not ready": (
        {'status_replicas_ready{namespace="fl", deployment="trainer"': "2x15 1x30"},
        set(),
    ),
    "the trainers were scaled to none": ({'deployment="trainer"': "2x15 0x30"}, set()),
    "pods of something else are not ready": (
        {
            'statefulset="updater"': "_x45",
            "status_replicas_ready": "0x45",
            "kube_pod_container": "0+1x45",
            "last_successful": "-864000x45",
        },
        set(),
    ),
    "without Redis no pod is ready": (
        {
            "run_published": "7200+60x15 8100x30",
            "run_looked": "7200+60x15 8100x30",
            "status_replicas_ready": "1x15 0x30",
        },
        {"FedstreamStalled", "FedstreamRedisAway"},
    ),
    "the updater's pod is gone": ({'pod="u-0", role': "1x15 _x30"}, {"FedstreamNoLeader updater"}),
    "both schedulers stand by": ({'pod="s-0", role': "1x15 0x30"}, {"FedstreamNoLeader scheduler"}),
    "the other scheduler takes over": (
        {'pod="s-0", role': "1x15 0x30", 'pod="s-1", role': "0x15 1x30"},
        set(),
    ),
    "a finished run needs no leader": (FINISHED | {"fedstream_leading": "1x9 _x35"}, set()),
    "no trainer comes": ({"run_trainers": "2x15 0x30"}, {"FedstreamNoTrainers"}),
    "no trainer is needed": ({"run_trainers": "2x15 0x30", "run_open": "0x45"}, set()),
    "what is open is in the queue": (
        {"run_trainers": "0x45", 'state="waiting"': "0x45", 'state="training"': "0x45"},
        set(),
    ),
    "refusals rise": ({'outcome="refused"': "0x15 0+10x30"}, {"FedstreamRefusals"}),
    "private sums are dropped": (
        {'outcome="sum out of range"': "0x15 0+1x30"},
        {"FedstreamSumsDropped"},
    ),
    "the task raises": ({'outcome="given_up"': "0x15 0+10x30"}, {"FedstreamTaskRaises"}),
    "six of fifty devices fail": ({"failing_devices": "5x15 6x30"}, {"FedstreamDevicesFail"}),
    "for a moment": ({"failing_devices": "5x30 6x10 5x5"}, set()),
    "101 of very many fail": (
        {"failing_devices": "5x15 101x30", "run_devices": "100000x45"},
        {"FedstreamDevicesFail"},
    ),
    "they did when the run ended": (FINISHED | {"failing_devices": "6x45"}, set()),
    "the accuracy swings": ({"metric_relapses": "1x15 2x30"}, {"FedstreamMetricSwings"}),
    "it swung before the run was over": (FINISHED | {"metric_relapses": "2x45"}, set()),
    "the disk does not sync": (
        {"journal_unsynced": "0x15 134217728x30"},
        {"FedstreamJournalBehind"},
    ),
    "a record takes a second": ({"seconds_sum": "0+3x15 45+60x30"}, {"FedstreamJournalBehind"}),
    "an updater with nothing to do": ({"seconds_sum": "5x45", "seconds_count": "5x45"}, set()),
    "the journal's volume fills up": (
        {"stats_available": "50x15 9x30"},
        {"FedstreamJournalDiskFull"},
    ),
    "an eighth of the volume is free": ({"stats_available": "50x15 12x30"}, set()),
    "an entry can't be processed": ({"dead_letters": "0x15 1x30"}, {"FedstreamDeadLetters"}),
    "it was looked after": ({"dead_letters": "1x15 0x30"}, set()),
    "Redis fills up": ({"memory_used": "50x15 91x30"}, {"FedstreamRedisNearlyFull"}),
    "Redis has no limit": ({"memory_used": "50x15 91x30", "memory_max": "0x45"}, set()),
    "the updater does not keep up": ({"run_queue": "3x15 64x30"}, {"FedstreamQueueFull"}),
    "it nearly does": ({"run_queue": "3x15 63x30"}, set()),
    "a container ends before it is ever scraped": (
        {"restarts_total": "3x15 4+1x4 8x25", "process_start": "_x45"},
        {"FedstreamRestarts"},
    ),
    "it did so an hour ago": ({"restarts_total": "3 4+1x8 12x35"}, set()),
    "it was restarted three times": ({"restarts_total": "3x20 4 5 6x22"}, set()),
    "a process is restarted where nobody counts containers": (
        {"kube_": "_x45", "process_start": "7x15 8+1x30"},
        {"FedstreamRestarts"},
    ),
    "it was restarted three times there": (
        {"kube_": "_x45", "process_start": "7x20 8 9 10x22"},
        set(),
    ),
    "somebody forges signatures": (
        {'reason="signature"': "0x15 0+60x30"},
        {"FedstreamGatewayRefusals"},
    ),
    "he did so half an hour ago": ({'reason="signature"': "0+60x15 900x30"}, set()),
    "as many refusals as that for ten times the devices": (
        {
            'reason="signature"': "0x15 0+60x30",
            "gateway_devices{": "2000x45",
            "devices_limit": "10000x45",
        },
        set(),
    ),
    "one gateway makes a mistake": (
        {'pod="g-1", reason="internal"': "0x36 1x9"},
        {"FedstreamGatewayRefusals"},
    ),
    "no offers although tasks and devices wait": (
        {"offered": "450x45"},
        {"FedstreamGatewayNoOffers"},
    ),
    "one of two gateways offers": ({'offered_total{namespace="fl", pod="g-1"': "9x45"}, set()),
    "no device waits": ({"offered": "450x45", "polls": "0x45"}, set()),
    "no task waits": ({"offered": "450x45", 'state="waiting"': "0x45"}, set()),
    "a run that is over offers nothing": (
        FINISHED | {"run_published": "0+60x9 600x35", "offered": "0+30x9 300x35"},
        set(),
    ),
    "a gateway fills up": (
        {'gateway_devices{namespace="fl", pod="g-1"': "200x15 950x30"},
        {"FedstreamGatewayNearlyFull"},
    ),
    "a certificate ends in six days": (
        {'certificate="https"': "520000x45"},
        {"FedstreamCertificate https"},
    ),
    "it was renewed": ({'certificate="https"': "520000x15 7000000x30"}, set()),
    "Redis's certificate has ended": (
        {'certificate="redis"': "60x45"},
        {"FedstreamCertificate redis"},
    ),
}


# The label besides its namespace by which an alert says where.
PLACE = {
    "FedstreamNoLeader": "role",
    "FedstreamNoReadyPod": "workload",
    "FedstreamCertificate": "certificate",
}


def hit(part: str) -> list[str]:
    """The series with this in their name."""
    found = [name for name in HEALTHY if part in name]
    assert found, part
    return found


def told(story: str) -> Iterator[dict[str, str]]:
    """The healthy deployment with what is different, in a namespace of the story's name.

    ``_``: no such series any more.
    """
    found = dict(HEALTHY)
    for part, values in STORIES[story][0].items():
        found |= dict.fromkeys(hit(part), values)
    for name, values in found.items():
        series = name.replace('namespace="fl"', f'namespace="{story}"')
        yield {"series": series, "values": values}


@pytest.mark.process
def test_alerts_fire_exactly_when_they_should(tmp_path: Path) -> None:
    """All stories at once: what happens in one namespace changes nothing in the others."""
    promtool = tool("promtool", always_in_ci=False)
    fire = {alert.partition(" ")[0] for _, alerts in STORIES.values() for alert in alerts}
    assert fire == {rule["alert"] for rule in ALERTS}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": GROUPS}))
    firing = []
    for story, (_, alerts) in STORIES.items():
        for alert in sorted(alerts):
            name, _, place = alert.partition(" ")
            where = f', {PLACE[name]}="{place}"' if place else ""
            labels = f'{{alertname="{name}", namespace="{story}"{where}}}'
            firing.append({"labels": labels, "value": 1})
    by = ", ".join(("alertname", "namespace", *PLACE.values()))
    asked = f'count by ({by}) (ALERTS{{alertstate="firing"}})'
    then = {"expr": asked, "eval_time": f"{MINUTES}m", "exp_samples": firing}
    everything = [one for story in STORIES for one in told(story)]
    test = {"interval": "60s", "input_series": everything, "promql_expr_test": [then]}
    suite = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(suite))
    for command in (["check", "rules", "rules.yaml"], ["test", "rules", "tests.yaml"]):
        said = subprocess.run(
            [promtool, *command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert said.returncode == 0, said.stdout + said.stderr


# the dashboard


def test_dashboard_is_valid_for_grafana() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    query = variables["namespace"]["query"].removeprefix("label_values(")
    assert query.partition(",")[0] in DOCUMENTED
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        assert panel["title"]
        assert panel["type"] in ("stat", "gauge", "timeseries", "heatmap")
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names)
        assert all('namespace="$namespace"' in target["expr"] for target in panel["targets"])
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells
    assert max(x for x, _ in taken) < 24


# the objects


def test_service_monitor_selects_the_service_of_all_pods() -> None:
    monitor = loaded("servicemonitor.yaml")["spec"]
    service = yaml.safe_load((ROOT / "k8s" / "base" / "metrics.yaml").read_text())
    labels = monitor["selector"]["matchLabels"]
    assert labels.items() <= service["metadata"]["labels"].items()
    assert monitor["jobLabel"] in service["metadata"]["labels"]
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "fedstream"  # as alerts say: job
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert {one["targetLabel"] for one in endpoint["relabelings"]} <= TARGET_LABELS


@pytest.mark.process
def test_component_renders_into_any_overlay(tmp_path: Path) -> None:
    kubectl = tool("kubectl", always_in_ci=True)
    shutil.copytree(COMPONENT, tmp_path / "monitoring")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("namespace: mine\ncomponents: [../monitoring]\n")
    command = [kubectl, "kustomize", str(overlay)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    found = {one["kind"]: one for one in yaml.safe_load_all(said.stdout)}
    assert set(found) == {"ServiceMonitor", "PrometheusRule", "ConfigMap"}
    assert {one["metadata"]["namespace"] for one in found.values()} == {"mine"}
    assert found["ConfigMap"]["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["ConfigMap"]["data"]["dashboard.json"]) == DASHBOARD
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    [group] = found["PrometheusRule"]["spec"]["groups"]
    for rendered, rule in zip(group["rules"], ALERTS, strict=True):
        ours = rule["annotations"]["runbook_url"].replace(RUNBOOK, "")
        url = f"https://docs.example.org/how-to/alerts/{ours}"
        assert rendered["annotations"]["runbook_url"] == url
