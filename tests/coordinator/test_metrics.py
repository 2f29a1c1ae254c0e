"""A coordinator's metrics of the run as a whole."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.settings import TlsSettings
from fedstream.coordinator.metrics import RunMetrics, Seen, open_by_state
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.core.messages import Encoded, Trigger
from fedstream.core.records import Failing, Head, Run, View
from fedstream.runtime.task_settings import LeaseSettings
from tests.broker.certificates import authority, signed
from tests.broker.servers import redis as redis_server
from tests.broker.servers import redis_7
from tests.support import Hand, Proxy, context, counted, layout_of, running, wait_until

LEASE_MS = 15_000
INT8 = Encoded("int8", 5, "d")


def view_of(**changes: Any) -> View:
    about: dict[str, Any] = {
        "run": Run(layout_of(4), "fedasync", "digits", 10, 100, 0, 1.5),
        "head": Head(version=7, digest="d", blob="7.1", time=99.5, epoch=1),
        "counts": {"issued": 5},
        "open": (),
        "admitted": 0,
        "queue": 0,
        "triggers": 0,
        "inbox": 0,
        "trainers": 2,
        "workers": 2,
        "kept": 3,
        "dead": 1,
        "owned": (),
        "pool": False,
        "now": 100.0,
    }
    about |= changes
    return View(**about, tasks=len(about["open"]), owners=len(about["owned"]))


def tasks(n: int) -> tuple[Trigger, ...]:
    return tuple(Trigger(task=f"t{i}", device=i, seed=1, steps=1) for i in range(n))


@pytest.mark.parametrize(
    ("opened", "answered", "training", "expected"),
    [
        (0, 0, 0, (0, 0, 0)),
        (5, 0, 0, (5, 0, 0)),
        (5, 1, 2, (2, 2, 1)),
        (2, 0, 3, (0, 2, 0)),  # an entry whose task was given up meanwhile
        (1, 2, 0, (0, 0, 1)),
    ],
)
def test_states_add_up_to_the_open_tasks(
    opened: int, answered: int, training: int, expected: tuple[int, int, int]
) -> None:
    states = open_by_state(view_of(open=tasks(opened), admitted=answered), training)
    assert tuple(states.values()) == expected
    assert sum(states.values()) == opened


def test_blobs_are_counted_by_number_and_size() -> None:
    registry = CollectorRegistry()
    metrics = RunMetrics(registry, lambda: 101.0)
    head = Head(version=7, digest="d", blob="7.1", time=99.5, epoch=1, retained=4)
    view = view_of(head=head, inbox=2, admitted=3)
    metrics.saw(Seen(100.0, 5000, 0, view))
    value = registry.get_sample_value
    assert value("fedstream_run_blob_bytes", {"kind": "models"}) == 3 * 16
    assert value("fedstream_run_blob_bytes", {"kind": "updates"}) == (3 + 4) * 16
    metrics.saw(Seen(100.0, 5000, 0, replace(view, head=replace(head, encoded=INT8))))
    assert value("fedstream_run_blob_bytes", {"kind": "models"}) == 3 * 5
    assert value("fedstream_run_published_timestamp_seconds") == 99.5
    assert value("fedstream_run_clock_timestamp_seconds") == 101.0
    assert value("fedstream_redis_memory_max_bytes") == 0
    assert value("fedstream_run_devices") == 10
    assert value("fedstream_run_failing_devices") == 0
    fails = {3: Failing(2, 200.0, "raised OSError")}
    metrics.saw(Seen(100.0, 5000, 0, replace(view, failing=fails)))
    assert value("fedstream_run_failing_devices") == 1


def test_metrics_say_if_redis_has_not_answered_yet() -> None:
    registry = CollectorRegistry()
    RunMetrics(registry, lambda: 101.0)
    assert registry.get_sample_value("fedstream_run_looked_timestamp_seconds") == 0
    assert registry.get_sample_value("fedstream_run_running") is None
    # It would be this machine's own clock.
    assert registry.get_sample_value("fedstream_run_clock_timestamp_seconds") is None


def test_every_outcome_is_exported_from_the_start() -> None:
    registry = CollectorRegistry()
    counts = {"issued": 9, "applied": 4, "refused": 3, "refused:digest": 2, "refused:size": 1}
    RunMetrics(registry, lambda: 101.0).saw(Seen(100.0, 0, 0, view_of(counts=counts)))

    def ended(outcome: str, reason: str = "") -> float | None:
        labels = {"outcome": outcome, "reason": reason}
        return registry.get_sample_value("fedstream_run_tasks_total", labels)

    assert (ended("applied"), ended("dead"), ended("refused")) == (4, 0, 0)
    assert (ended("refused", "digest"), ended("refused", "size")) == (2, 1)


async def training(hand: Hand, lease_ms: int = LEASE_MS) -> int:
    """Tasks under a lease that holds. Of the streams some are named where one has run out."""
    leased, lapsed = await hand.ledger.leases(lease_ms, ["ann", "nobody"])
    assert set(lapsed) <= {hand.keys.tasks, hand.keys.tasks_of("ann")}
    return leased


async def test_task_is_training_while_its_lease_holds(hand: Hand) -> None:
    await hand.create()
    assert await training(hand) == 0  # not even a stream
    await hand.request(3)
    await hand.dispatch()
    taken = await hand.take()
    assert await training(hand) == 3
    entry, _ = taken[0]
    assert await hand.tasks.release(entry)  # whoever had it goes: it waits again
    assert await training(hand) == 2
    assert await training(hand, 0) == 0  # all leases are over


async def test_last_values_are_kept_while_redis_is_away(
    make: Any, redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    await hand.request(2)
    watched = context()
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), watched):
        await wait_until(lambda: counted(watched, "fedstream_run_open", state="waiting") == 2)
        assert counted(watched, "fedstream_redis_reconnects_total") == 0
        looked = "fedstream_run_looked_timestamp_seconds"
        before = counted(watched, looked)
        proxy.cut()
        await wait_until(lambda: counted(watched, looked) > before)
        await wait_until(lambda: counted(watched, "fedstream_redis_reconnects_total") > 0)
        assert counted(watched, "fedstream_run_running") == 1


@pytest.mark.process
@pytest.mark.skipif(redis_7() is None or shutil.which("openssl") is None, reason="for TLS")
async def test_coordinator_says_when_rediss_certificate_ends(tmp_path: Path) -> None:
    authority(tmp_path, "ca")
    signed(tmp_path, "server", "ca", "127.0.0.1", days=1)
    cert, key, ca = (str(tmp_path / name) for name in ("server.crt", "server.key", "ca.crt"))
    options = (
        "--tls-cert-file",
        cert,
        "--tls-key-file",
        key,
        "--tls-ca-cert-file",
        ca,
        "--tls-auth-clients",
        "no",
    )
    with redis_server(tmp_path / "redis", *options, tls=True) as server:
        settings = RedisSettings(url=f"rediss://127.0.0.1:{server.port}", tls=TlsSettings(ca=ca))
        coordinator = Coordinator(
            CoordinatorSettings(),
            LeaseSettings(),
            keys=Keys("tls"),
            redis=settings,
            name="coordinator-0",
        )
        watched = context()
        labels = {"certificate": f"127.0.0.1:{server.port}"}

        def ends() -> float | None:
            name = "fedstream_certificate_ends_timestamp_seconds"
            return watched.registry.get_sample_value(name, labels)

        async with running(coordinator, watched):
            await wait_until(lambda: ends() is not None)
            assert ends() == pytest.approx(time.time() + 86400, abs=3600)
