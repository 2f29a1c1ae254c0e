"""A service process: its start, loops that survive outages of Redis, leadership, and stop."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar

import structlog
import uvloop
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from fedstream.broker.lease import Lease
from fedstream.core.errors import ConfigError, FedstreamError, Fenced
from fedstream.runtime.backoff import Backoff, pause
from fedstream.runtime.health import Health, routes
from fedstream.runtime.http import REFUSED, HttpSettings, serving
from fedstream.runtime.logging import LogSettings, configure, stamp
from fedstream.runtime.process import Stop
from fedstream.runtime.tls import CurrentTls
from fedstream.runtime.tracing import Spans, TracingSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping, Sequence

    from aiohttp import web
    from prometheus_client.metrics_core import Metric
    from structlog.typing import FilteringBoundLogger

    from fedstream.broker.client import Client

P = ParamSpec("P")
T = TypeVar("T")


class Worker:
    """A thread for the duration of a ``with`` block, or until :meth:`close`.

    Cheaper than an executor of one thread, which passes results through a second, locked future.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name).start()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Queue a call for the thread; return a future of the result.

        Cancelling the future doesn't stop the call.
        """
        asked = _Call(partial(call, *args, **kwargs), asyncio.get_running_loop())
        self._calls.put(asked)
        return asked.result

    def close(self) -> None:
        """End the thread after the queued calls, without waiting."""
        self._calls.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            asked.make()
            del asked  # frees the call's arguments before the next call


class _Call(Generic[T]):
    """A call in a thread, and its result."""

    __slots__ = ("_call", "_loop", "result")

    def __init__(self, call: Callable[[], T], loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self.result: asyncio.Future[T] = loop.create_future()

    def make(self) -> None:
        """Make the call, and schedule its result on the loop."""
        try:
            tell = partial(self._returned, self._call())
        except BaseException as error:  # raised where the result is awaited
            tell = partial(self._raised, error)
        with suppress(RuntimeError):  # the loop was closed, so nothing awaits the result
            self._loop.call_soon_threadsafe(tell)

    def _returned(self, value: T) -> None:
        if not self.result.cancelled():
            self.result.set_result(value)

    def _raised(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):  # no future takes one
            error = RuntimeError(f"{type(error).__name__}: {error}")
        if not self.result.cancelled():
            self.result.set_exception(error)


_CANCELLED_S = 2.0  # for a cancelled service to end


@dataclass
class Context:
    """The runtime's objects for a service; one per process."""

    stop: asyncio.Event  # set: take no new work
    health: Health
    registry: CollectorRegistry
    log: FilteringBoundLogger
    traces: bool = False  # whether to log each step of each task
    spans: Spans | None = None  # to which each step is reported
    tls: CurrentTls | None = None  # for the service's own routes
    retries: Counter = field(init=False)
    refused: Counter = field(init=False)  # requests, before any route
    # Functions that return the expiry of each certificate, in seconds since 1970, by name.
    certificates: list[Callable[[], Mapping[str, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retries = Counter(
            "fedstream_retries",
            "Loop steps that failed for a reason that may pass, and were retried.",
            ["loop"],
            registry=self.registry,
        )
        self.refused = Counter(
            "fedstream_http_refused",
            "Requests that no route took.",
            ["reason"],
            registry=self.registry,
        )
        for reason in REFUSED:
            self.refused.labels(reason)
        self.registry.register(_Certificates(self.certificates))

    def until(self, stop: asyncio.Event) -> Context:
        """A copy with another ``stop``, for work that continues while the service drains."""
        lasting = copy.copy(self)
        lasting.stop = stop
        return lasting

    def watch(self, client: Client) -> None:
        """Export the client's number of reconnections as a metric, and log its warnings."""
        client.warn = self.log.warning
        self.registry.register(_Reconnects(client))

    def trace(
        self, what: str, *, at: float | None = None, since: float | None = None, **about: object
    ) -> None:
        """Log a step of one task (``task`` is its id), if ``traces`` is on, and report its spans.

        ``at``: time of the step, in seconds since 1970; None: now. ``since``: the beginning of the
        step's span, unless that is this service's previous step.
        """
        if self.spans is not None:
            self.spans.step(what, at=at, since=since, about=about)
        if self.traces:
            when = {} if at is None else {"timestamp": stamp(at)}
            self.log.info(what, **about, **when)


class _Reconnects:
    """A collector that reads the client's counter at each scrape."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "fedstream_redis_reconnects",
            "Reconnections to Redis after a connection was lost.",
            value=self._client.reconnects,
        )


class _Certificates:
    """A collector that reads the expiry of certificates at each scrape."""

    def __init__(self, sources: Sequence[Callable[[], Mapping[str, float]]]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "fedstream_certificate_ends_timestamp_seconds",
            "When a certificate ends.",
            labels=("certificate",),
        )
        for source in self._sources:
            for name, ends in source().items():
                family.add_metric((name,), ends)
        yield family


def _ends_of(files: Sequence[str]) -> dict[str, float]:
    """The expiry of each file's first certificate; 0: unreadable. Missing files are left out."""
    from cryptography import x509

    found = {}
    for file in files:
        try:
            chain = x509.load_pem_x509_certificates(Path(file).read_bytes())
            found[file] = min(one.not_valid_after_utc.timestamp() for one in chain)
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            found[file] = 0.0
    return found


class Service(Protocol):
    """One role of the pipeline."""

    @property
    def role(self) -> str:
        """The service's name in logs, such as ``updater``."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The service's own HTTP routes, on another port than health and metrics."""

    async def run(self, context: Context) -> None:
        """Work until ``context.stop`` is set, then drain and return.

        Register readiness checks before the first await: HTTP is already being served.
        """


async def repeat(
    context: Context,
    name: str,
    step: Callable[[], Awaitable[bool | None]],
    *,
    within_s: float = 30.0,
) -> None:
    """Call ``step`` until stop, or until it returns true, and retry transient failures.

    A retriable FedstreamError is retried with jittered back-off; every other exception propagates.
    The loop beats before every step; liveness expects a beat every ``within_s`` seconds, so a step
    that may take longer must beat by itself. The loop is ready while its last step succeeded.
    """
    log = context.log.bind(loop=name)
    retries = context.retries.labels(name)
    # Wait at most half of within_s, so that the loop also beats in time while it backs off.
    backoff = Backoff(most_s=min(5.0, within_s / 2), rng=random.Random())
    trouble_since: float | None = None
    works = False
    context.health.expect(name, within_s)
    context.health.ready_when(name, lambda: works)
    try:
        while not context.stop.is_set():
            context.health.beat(name)
            try:
                finished = await step()
            except FedstreamError as error:
                if not error.retriable:
                    raise
                context.health.beat(name)
                works = False
                retries.inc()
                if trouble_since is None:
                    trouble_since = time.monotonic()
                    log.warning("retrying", error=type(error).__name__, reason=str(error))
                await pause(context.stop, backoff.next())
            else:
                works = True
                if trouble_since is not None:
                    log.info("recovered", lost_s=round(time.monotonic() - trouble_since, 3))
                    trouble_since = None
                    backoff.reset()
                if finished:
                    return
    finally:
        context.health.release(name)


class ServiceLoop(uvloop.Loop):
    """uvloop with a ``create_connection`` that awaits the look-up of a name.

    uvloop's own abandons the look-up when it is cancelled, and asyncio then logs a failure: 'Future
    exception was never retrieved'.
    """

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        connect = partial(super().create_connection, protocol_factory)
        if host is None:
            return await connect(**options)
        if options.get("ssl"):
            options.setdefault("server_hostname", host)
        asked = {name: options.get(name, 0) for name in ("family", "proto", "flags")}
        found = await self.getaddrinfo(host, port, type=socket.SOCK_STREAM, **asked)
        *others, last = (place[:2] for *_, place in found)
        for place in others:
            try:
                return await connect(*place, **options)
            except ssl.SSLError:
                raise
            except OSError:
                continue  # the name's next address may answer
        return await connect(*last, **options)


def serve(
    service: Service,
    *,
    http: HttpSettings,
    log: LogSettings,
    run: str,
    name: str,
    drain_s: float,
    tracing: TracingSettings | None = None,
    tls: ssl.SSLContext | None = None,
) -> int:
    """Run a service as this process and return the exit code. ``tls``: for its own routes.

    Stop order, on SIGTERM, SIGINT or when the service returns:

    1. ``stop`` is set: the process is no longer ready, and its loops take no new work.
    2. The service drains and returns. A service that has not returned after ``drain_s`` seconds is
       cancelled, and the process ends by ``os._exit``: a hanging thread would block a normal exit
       for ever.
    3. HTTP closes last, so that probes and metrics see the drain.

    Kubernetes' grace period must exceed ``drain_s`` by 5 s. A second signal ends the process at
    once, with exit code 128 + its number.

    Exit codes: 0 stopped cleanly; 1 a FedstreamError, or a drain that took too long; 2 a
    ConfigError; 70 any other exception.
    """
    configure(log, run=run, service=service.role, name=name)
    logger: FilteringBoundLogger = structlog.get_logger()
    spans: Spans | None = None
    gc.freeze()  # exempt modules: searching them took a sixth of the scheduler's time
    try:
        if tracing is not None and tracing.endpoint is not None:
            spans = Spans(tracing, run=run, role=service.role, name=name)
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            runner.run(
                _live(service, http, logger, drain_s, traces=log.traces, spans=spans, tls=tls)
            )
    except (Exception, asyncio.CancelledError) as error:
        return _report(error, logger)
    finally:
        if spans is not None:
            spans.close()
    logger.info("stopped")
    return 0


def _report(error: BaseException, log: FilteringBoundLogger) -> int:
    """Log the error that ended the service and return its exit code."""
    causes = list(_causes(error))
    ours = [cause for cause in causes if isinstance(cause, FedstreamError)]
    if len(ours) < len(causes):
        for cause in causes:
            log.error("crashed", exc_info=cause)
        return 70
    for cause in ours:
        trace = {"exception": cause.trace} if cause.trace else {}
        log.error("failed", error=type(cause).__name__, reason=str(cause), **trace)
    return 2 if any(isinstance(cause, ConfigError) for cause in ours) else 1


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exceptions inside the groups that task groups raise."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


async def _live(
    service: Service,
    http: HttpSettings,
    log: FilteringBoundLogger,
    drain_s: float,
    *,
    traces: bool,
    spans: Spans | None,
    tls: ssl.SSLContext | None,
) -> None:
    stop, current = asyncio.Event(), None if tls is None else CurrentTls(tls)
    context = Context(stop, Health(), CollectorRegistry(), log, traces, spans, current)
    context.health.ready_when("running", lambda: not stop.is_set())
    if http.certificates:
        if find_spec("cryptography") is None:
            raise ConfigError(
                "http.certificates needs cryptography: pip install 'fedstream[gateway]'"
            )
        context.certificates.append(lambda: _ends_of(http.certificates))
    loop = asyncio.get_running_loop()

    def begin_stop(name: str) -> None:
        log.info("stopping", signal=name)
        stop.set()

    with Stop() as signals:
        # Not in the handler itself: it may interrupt a log call.
        signals.listen(lambda name: loop.call_soon_threadsafe(begin_stop, name))
        own, health = service.routes(), routes(context.health, context.registry)
        async with serving(own, health, http, stop.is_set, log, current, context.refused):
            clean = await _drained(service, context, drain_s)
    if not clean:
        # A normal exit would wait for threads, and a hanging thread may be the reason.
        os._exit(1)


async def _drained(service: Service, context: Context, drain_s: float) -> bool:
    """Run the service to its end; return whether it ended within ``drain_s`` seconds of stop."""
    work = asyncio.create_task(service.run(context), name=service.role)
    stopping = asyncio.create_task(context.stop.wait(), name="stop")
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    context.stop.set()
    await asyncio.wait((work, stopping), timeout=drain_s)
    if work.done():
        await work  # raises its exception
        return True
    context.log.error("cancelled: the drain took too long", drain_s=drain_s)
    work.cancel()
    await asyncio.wait((work,), timeout=_CANCELLED_S)
    if work.done() and not work.cancelled() and (error := work.exception()):
        context.log.error("failed while being cancelled", exc_info=error)
    return False


_PAUSE_S = 10.0  # at most, between checks of a lease: a loop must beat within 30 s


async def lead(
    context: Context, lease: Lease, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Wait for the role, then work and renew the lease until stop.

    Releases the lease at the end, so that a successor need not wait for it to expire. A waiting
    process is ready: it could take over. Raises Fenced if the role is taken away.
    """
    pause_s = min(lease.seconds / 4, _PAUSE_S)
    leading = Gauge(
        "fedstream_leading", "1: this process holds the role.", ["role"], registry=context.registry
    ).labels(lease.role)

    async def take() -> bool:
        if not await lease.acquire():
            await pause(context.stop, pause_s)
        return lease.number > 0

    async def hold() -> None:
        # If the lease is not held, Redis lost it: acquire it again unless another process did.
        if not await lease.hold() and not await lease.acquire(at_least=lease.number):
            raise Fenced(f"another {lease.role} took over while Redis was away")
        await pause(context.stop, pause_s)

    await repeat(context, "standby", take)
    if not lease.number:
        return  # stopped while waiting
    context.log.info("leading", epoch=lease.number)
    leading.set(1)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat(context, "lease", hold))
            group.create_task(work())
    finally:
        leading.set(0)
        try:
            await lease.release()
        except FedstreamError as error:
            context.log.warning("lease not released: it will expire", reason=str(error))
