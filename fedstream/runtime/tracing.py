"""OpenTelemetry traces: a task's way through all services, as spans of one trace.

No message carries a trace. The ids of a trace and its spans are derived from the run and the task,
so the spans of separate processes join by themselves, and all processes sample the same tasks.
Spans are made from the steps that services log with ``log.tasks`` (:meth:`Context.trace`), and sent
by a thread with a bounded queue: a slow or absent receiver loses spans, and delays no task.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import structlog
from pydantic import Field

from fedstream.core.errors import ConfigError
from fedstream.core.messages import time_of
from fedstream.runtime.config import Section

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

ROOT = "task"
_CLOSE_S = 3.0  # for the last spans when the process ends
_SEND_S = 2  # time limit of one request
_EVERY_MS = 1000
_QUEUE = 4096  # spans that wait to be sent; more are dropped
_MARKS = 4096  # tasks whose last step is remembered


class TracingSettings(Section):
    """The table ``[tracing]``; traces are off unless ``endpoint`` is set."""

    endpoint: Annotated[str, Field(pattern="^https?://")] | None = None  # OTLP over HTTP
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0  # sampled share of the tasks


@dataclass(frozen=True)
class SpanTimes:
    """A span's name and times, in seconds since 1970."""

    name: str
    begin: float
    end: float


def trace_id(run: str, task: str) -> int:
    """The 128-bit id of a task's trace: the beginning of SHA-256 of ``run/task``."""
    return int.from_bytes(hashlib.sha256(f"{run}/{task}".encode()).digest()[:16], "big")


def span_id(trace: int, name: str, attempt: object = "") -> int:
    """The 64-bit id of a span in a trace; a task may be trained in several attempts."""
    text = trace.to_bytes(16, "big") + f"/{name}/{attempt}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") or 1


def is_sampled(trace: int, ratio: float) -> bool:
    """Whether the task is traced, by the rule of OpenTelemetry's TraceIdRatioBased."""
    return (trace & ((1 << 64) - 1)) < round(ratio * (1 << 64))


def span_times(
    what: str, begun: float, at: float, now: float, before: float | None, seconds: float
) -> list[SpanTimes]:
    """The spans that end with a step, the root last.

    ``begun``: creation of the task; ``at``: decision on the step; ``before``: the service's
    previous step, if any; ``seconds``: duration of the device's training.
    """
    whole = SpanTimes(ROOT, begun, now)
    match what:
        case "triggered":
            return [SpanTimes("trigger", begun, max(now, begun))]
        case "dispatched":
            return [SpanTimes("dispatch", at, now)]
        case "uploaded" | "gave up":
            start = max(at - seconds, at if before is None else before)
            fetch = [] if before is None else [SpanTimes("fetch", before, start)]
            return [*fetch, SpanTimes("train", start, at), SpanTimes("upload", at, now)]
        case "admitted":
            return [SpanTimes("admit", at, now)]
        case "applied" | "buffered":
            return [SpanTimes("mix", at if before is None else before, now)]
        case "published":
            return [SpanTimes("publish", at if before is None else before, now), whole]
        case "given up":
            return [SpanTimes("give up", at, now), whole]
        case _:
            return []


class Spans:
    """The spans of one process. Raises ConfigError if OpenTelemetry is not installed."""

    def __init__(self, settings: TracingSettings, *, run: str, role: str, name: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "tracing.endpoint: OpenTelemetry is not installed: pip install 'fedstream[otel]' "
                "adds it"
            ) from error

        self._run, self._ratio = run, settings.ratio
        self._resource = Resource(
            {
                "service.name": f"fedstream-{role}",
                "service.instance.id": name,
                "fedstream.run": run,
            }
        )
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=_SEND_S)
        self._processor = BatchSpanProcessor(
            self._exporter, max_queue_size=_QUEUE, schedule_delay_millis=_EVERY_MS
        )
        self._marks: OrderedDict[str, float] = OrderedDict()

    def step(
        self, what: str, *, at: float | None, since: float | None, about: Mapping[str, object]
    ) -> None:
        """Report the spans that end with a step of a task."""
        about = {**structlog.contextvars.get_contextvars(), **about}
        task, now = str(about["task"]), time.time()
        trace = trace_id(self._run, task)
        if not is_sampled(trace, self._ratio):
            return
        before = self._marks.pop(task, None) if since is None else since
        if what in ("taken", "applied", "buffered"):
            self._marks[task] = now
            if len(self._marks) > _MARKS:
                self._marks.popitem(last=False)
        seconds = about.get("seconds")
        took = seconds if isinstance(seconds, float) else 0.0
        begun = time_of(task) or at or now
        for one in span_times(what, begun, at or now, now, before, took):
            self._processor.on_end(self._span(trace, one, about))

    def _span(self, trace: int, one: SpanTimes, about: Mapping[str, object]) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, TraceFlags

        def context(span: int) -> SpanContext:
            flags = TraceFlags(TraceFlags.SAMPLED)
            return SpanContext(trace, span, is_remote=True, trace_flags=flags)

        root = one.name == ROOT
        told = {key: value for key, value in about.items() if isinstance(value, str | int | float)}
        return ReadableSpan(
            one.name,
            context=context(span_id(trace, one.name, "" if root else about.get("attempt", ""))),
            parent=None if root else context(span_id(trace, ROOT)),
            resource=self._resource,
            attributes={f"fedstream.{key}": value for key, value in told.items()},
            start_time=round(one.begin * 1e9),
            end_time=round(max(one.begin, one.end) * 1e9),
        )

    def close(self) -> None:
        """Send the remaining spans, for three seconds at most, and end the sending thread."""
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():  # else its thread would keep retrying
            self._exporter.shutdown()
            closing.join(_SEND_S)
