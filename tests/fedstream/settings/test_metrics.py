"""Metrics have stable names: docs/reference/metrics.md lists what running services expose."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.messages import GiveUp
from fedstream.history.live.service import live_page
from fedstream.runtime.service import Context
from fedstream.settings.config import read
from fedstream.settings.services import _BUILDERS, ROLES
from tests.private.enrolled import files
from tests.support import Hand, context, running, wait_until

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(
    r"^\| `(fedstream_\w+)` \| (\w+) \|([\w, ]+)\| ([\w, ]+) \| (.+) \|$", re.MULTILINE
)
TASK = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Points(Task):
    devices = 4
    def model(self):
        return torch.nn.Linear(2, 2)
    def device_data(self, device):
        return TensorDataset(torch.ones(8, 2), torch.arange(8) % 2)
    def test_data(self):
        return self.device_data(0)
    def device_test_data(self, device):
        return self.device_data(device)
task = Points()
"""


@dataclass(frozen=True)
class Metric:
    """A metric as it is documented, or as it is exposed."""

    type: str
    labels: frozenset[str]
    services: frozenset[str]


def documented() -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for name, kind, labels, of, _ in ROW.findall(DOCS.read_text()):
        services = ROLES if of == "all" else of.split(", ")
        names = frozenset(filter(None, labels.strip().split(", ")))
        assert name not in found, f"{name} is listed twice"
        found[name] = Metric(kind, names, frozenset(services))
    return found


def scraped(registry: Context) -> dict[str, tuple[str, frozenset[str]]]:
    """What a service exposes: names with their types and labels."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry.registry).decode()):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {
            "le",
            "quantile",
        }
        assert family.samples or family.type == "gauge", f"{name} can't be seen before it happens"
        assert family.documentation.endswith(".")
        found[name] = (family.type, frozenset(labels))
    return found


@pytest.fixture
async def pipeline(
    redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path
) -> AsyncIterator[dict[str, Context]]:
    """Every service, in this process, after a short run in which something went wrong, too."""
    program = tmp_path / f"{keys.name.replace('-', '_')}.py"  # a module has one name
    program.write_text(TASK)
    settings = read(
        None,
        [
            f"redis.url={redis.url}",
            f"run.name={keys.name}",
            "run.versions=12",
            f"task.name={program}:task",
            "evaluator.every=1",
            "evaluator.on_devices.count=1",
            f"journal.dir={tmp_path / 'journal'}",
            "journal.sync=always",
            f'sinks=[{{kind="tensorboard",dir="{tmp_path}/tensorboard"}}]',
            *(f"helper.{key}={value}" for key, value in files(tmp_path).items()),
        ],
    )
    contexts = {role: context() for role in ROLES}
    async with AsyncExitStack() as stack:
        for role, one in contexts.items():
            one.certificates.append(lambda: {"of a proxy": 1.0})
            more = {"page": live_page(settings)} if role == "coordinator" else {}
            service, _ = _BUILDERS[role](settings, keys, f"{role}-0", **more)
            await stack.enter_async_context(running(service, one))
        await hand.reaches(12)
        unknown = hand.trigger().task
        stray = GiveUp(task=unknown, attempt="1", device=1, trainer="t", reason="tired")
        await hand.client.call("XADD", keys.inbox("pool"), "*", "m", stray.encode())
        await hand.client.call("XADD", keys.triggers, "*", "m", hand.trigger().encode())

        def settled() -> bool:
            seen = contexts["coordinator"].registry.get_sample_value
            measured = contexts["evaluator"].registry.get_sample_value
            return (
                seen("fedstream_run_version") == 12
                and seen("fedstream_run_strays_total", {"reason": "unknown task"}) == 1
                and seen("fedstream_tasks_dispatched_total", {"verdict": "ended"}) == 1
                and measured("fedstream_measured_version") == 12
                and bool(seen("fedstream_run_device_evaluations_total", {"outcome": "measured"}))
            )

        await wait_until(settled)
        yield contexts


async def test_documented_metrics_are_the_exposed_ones(pipeline: dict[str, Context]) -> None:
    exposed: dict[str, Metric] = {}
    for role, one in pipeline.items():
        for name, (kind, labels) in scraped(one).items():
            before = exposed.get(name, Metric(kind, labels, frozenset()))
            assert before.type == kind
            exposed[name] = Metric(kind, before.labels | labels, before.services | {role})
    assert exposed == documented()
    adds_up(pipeline["coordinator"])


def adds_up(coordinator: Context) -> None:
    """What it says of the run is the run."""

    def total(name: str) -> float:
        families = coordinator.registry.collect()
        return sum(s.value for f in families for s in f.samples if s.name == name)

    assert total("fedstream_run_issued_total") == (
        total("fedstream_run_tasks_total") + total("fedstream_run_open")
    )
    value = coordinator.registry.get_sample_value
    assert value("fedstream_run_tasks_total", {"outcome": "applied", "reason": ""}) == 12
    assert value("fedstream_run_running") == 0  # it is finished
    assert value("fedstream_run_dead_letters") == 0
    assert value("fedstream_redis_memory_used_bytes")
