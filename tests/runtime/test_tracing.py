"""A task's spans: ids that need no message, and one trace from four services."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError
from fedstream.core.messages import task_id
from fedstream.runtime.tracing import (
    Spans,
    SpanTimes,
    TracingSettings,
    is_sampled,
    span_id,
    span_times,
    trace_id,
)
from fedstream.settings.config import read
from fedstream.settings.services import _BUILDERS
from tests.support import Hand, context, running, wait_until

ROLES = ("coordinator", "scheduler", "updater", "trainer")
SPANS = {
    "fedstream-scheduler": {"trigger"},
    "fedstream-coordinator": {"admit"},
    "fedstream-trainer": {"fetch", "train", "upload"},
    "fedstream-updater": {"mix", "publish", "task"},
}


class Receiver:
    """An OTLP receiver: keeps spans by trace, each with its service."""

    def __init__(self) -> None:
        self.traces: dict[bytes, dict[str, tuple[str, Any]]] = defaultdict(dict)

    async def take(self, request: web.Request) -> web.Response:
        for batch in ExportTraceServiceRequest.FromString(await request.read()).resource_spans:
            about = {one.key: one.value.string_value for one in batch.resource.attributes}
            for scope in batch.scope_spans:
                for span in scope.spans:
                    assert span.name not in self.traces[span.trace_id], "reported twice"
                    self.traces[span.trace_id][span.name] = about["service.name"], span
        return web.Response()


@pytest.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    """A receiver and its endpoint."""
    took, app = Receiver(), web.Application()
    app.router.add_post("/v1/traces", took.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield took, f"http://127.0.0.1:{port}/v1/traces"
    await runner.cleanup()


async def test_four_services_report_one_trace_for_each_task(
    receiver: tuple[Receiver, str], redis: RedisSettings, keys: Keys, hand: Hand, tmp_path: Path
) -> None:
    took, endpoint = receiver
    settings = read(
        None,
        [
            f"redis.url={redis.url}",
            f"run.name={keys.name}",
            "run.versions=5",
            f"journal.dir={tmp_path / 'journal'}",
            "task.name=tests.broker.pipeline:lines",
        ],
    )
    from tests.broker.pipeline import lines

    lines.gate.set()
    began = time.time()
    async with AsyncExitStack() as stack:
        every = []
        for role in ROLES:
            service, _ = _BUILDERS[role](settings, keys, f"{role}-0")
            live = context()
            live.spans = Spans(
                TracingSettings(endpoint=endpoint), run=keys.name, role=role, name=f"{role}-0"
            )
            every.append(live.spans)
            await stack.enter_async_context(running(service, live))
        await hand.reaches(5)
        ends = [event for event in await hand.events() if event.outcome == "applied"]
        assert len(ends) == 5
        applied = [trace_id(keys.name, end.task or "").to_bytes(16, "big") for end in ends]
        names = {name for some in SPANS.values() for name in some}
        await wait_until(lambda: all(took.traces[trace].keys() == names for trace in applied))
        for spans in every:
            await asyncio.to_thread(spans.close)
    for trace in applied:
        found = took.traces[trace]
        by_service: dict[str, set[str]] = defaultdict(set)
        for name, (service_name, _) in found.items():
            by_service[service_name].add(name)
        assert by_service == SPANS
        root = found["task"][1]
        assert root.parent_span_id == b""
        times = {name: span.start_time_unix_nano / 1e9 for name, (_, span) in found.items()}
        until = {name: span.end_time_unix_nano / 1e9 for name, (_, span) in found.items()}
        for name, (_, span) in found.items():
            assert span.parent_span_id == (b"" if name == "task" else root.span_id)
            assert began - 0.01 < times["task"] <= times[name] <= until[name] < time.time()
            # What a service does with the reply may end after the next service has gone on.
            assert name in ("trigger", "upload", "admit") or until[name] <= until["task"]
        order = ("trigger", "fetch", "train", "upload", "admit", "publish")
        assert [times[name] for name in order] == sorted(times[name] for name in order)


def test_receiver_that_is_away_delays_nothing() -> None:
    with socket.socket() as busy:  # accepts, and never answers
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        endpoint = f"http://127.0.0.1:{busy.getsockname()[1]}/v1/traces"
        spans = Spans(TracingSettings(endpoint=endpoint), run="r", role="updater", name="u")
        began = time.monotonic()
        for n in range(2000):
            spans.step("applied", at=None, since=None, about={"task": task_id(n)})
        assert time.monotonic() - began < 5  # of 2,000 requests that never end
        assert len(spans._marks) == 2000
        before = time.monotonic()
        spans.close()
        assert time.monotonic() - before < 10  # of eight batches, each tried for seconds
    assert not [one for one in threading.enumerate() if "OtelBatchSpan" in one.name]


def test_missing_package_is_reported_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedstream\[otel\]'"):
        Spans(TracingSettings(endpoint="http://127.0.0.1:1"), run="r", role="u", name="u")


def test_ids_follow_from_run_task_and_attempt_alone() -> None:
    trace = trace_id("demo", "t1")
    assert trace == trace_id("demo", "t1")
    assert trace != trace_id("demo", "t2") != trace_id("other", "t2")
    assert span_id(trace, "train", "a") == span_id(trace, "train", "a")
    assert len({span_id(trace, name, n) for name in ("train", "fetch") for n in "ab"}) == 4


@given(st.integers(0, (1 << 128) - 1))
def test_ratio_samples_all_none_or_by_the_ids_lower_half(trace: int) -> None:
    assert is_sampled(trace, 1.0)
    assert not is_sampled(trace, 0.0)
    assert is_sampled(trace, 0.5) == ((trace & ((1 << 64) - 1)) < 1 << 63)


def test_steps_become_spans_with_their_times() -> None:
    assert span_times("uploaded", 0.0, 10.0, 11.0, 4.0, 5.0) == [
        SpanTimes("fetch", 4.0, 5.0),
        SpanTimes("train", 5.0, 10.0),
        SpanTimes("upload", 10.0, 11.0),
    ]
    assert span_times("published", 1.0, 9.0, 9.0, 8.0, 0.0) == [
        SpanTimes("publish", 8.0, 9.0),
        SpanTimes("task", 1.0, 9.0),
    ]
    assert span_times("given up", 1.0, 5.0, 5.5, None, 0.0)[-1] == SpanTimes("task", 1.0, 5.5)
    assert span_times("lease lost", 1.0, 5.0, 5.5, None, 0.0) == []
