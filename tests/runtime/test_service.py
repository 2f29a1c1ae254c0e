"""The life of a service: loops that recover, exit codes, and real signals to real processes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trustme
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from fedstream.core.errors import ConfigError, DataError, Fenced, OutOfMemory, Unavailable
from fedstream.runtime.backoff import Backoff, pause
from fedstream.runtime.health import Health
from fedstream.runtime.http import HttpSettings
from fedstream.runtime.logging import LogSettings
from fedstream.runtime.service import Context, ServiceLoop, repeat, serve

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from aiohttp import web

HERE = Path(__file__).parent


@pytest.fixture
def context() -> Context:
    return Context(asyncio.Event(), Health(), CollectorRegistry(), structlog.get_logger())


# repeat


async def test_loop_steps_and_beats_until_stop(context: Context) -> None:
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1
        context.health.beat("claim")  # known while the loop runs
        if steps == 3:
            context.stop.set()

    await repeat(context, "claim", step)
    assert steps == 3
    with pytest.raises(KeyError):
        context.health.beat("claim")  # released: a drain may take long


async def test_step_returning_true_ends_its_loop(context: Context) -> None:
    answers = [False, False, True]

    async def step() -> bool:
        return answers.pop(0)

    await repeat(context, "standby", step)
    assert answers == []
    assert not context.stop.is_set()


async def test_temporary_trouble_is_waited_out_and_logged_once(context: Context) -> None:
    failures = [Unavailable("redis is loading"), OutOfMemory("full"), Unavailable("gone")]

    async def step() -> None:
        if failures:
            raise failures.pop(0)
        context.stop.set()

    with capture_logs() as events:
        await repeat(context, "claim", step, within_s=0.02)
    trouble, over = events
    assert trouble == {
        "log_level": "warning",
        "event": "retrying",
        "loop": "claim",
        "error": "Unavailable",
        "reason": "redis is loading",
    }
    assert (over["log_level"], over["event"], over["loop"]) == ("info", "recovered", "claim")
    assert over["lost_s"] >= 0
    labels = {"loop": "claim"}
    assert context.registry.get_sample_value("fedstream_retries_total", labels) == 3


async def test_new_trouble_is_logged_again(context: Context) -> None:
    outcomes: list[Exception | None] = [Unavailable("a"), None, Unavailable("b"), None]

    async def step() -> None:
        outcome = outcomes.pop(0)
        if not outcomes:
            context.stop.set()
        if outcome:
            raise outcome

    with capture_logs() as events:
        await repeat(context, "claim", step, within_s=0.02)
    names = [event["event"] for event in events]
    assert names == ["retrying", "recovered", "retrying", "recovered"]


async def test_retrying_loop_keeps_beating_and_ends_on_stop(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def pause(stop: asyncio.Event, seconds: float) -> bool:
        waits.append(seconds)
        if len(waits) == 100:
            stop.set()
        return stop.is_set()

    async def step() -> None:
        raise Unavailable("redis is down")

    monkeypatch.setattr("fedstream.runtime.service.pause", pause)
    await repeat(context, "claim", step, within_s=2.0)
    assert len(waits) == 100
    assert 0.5 < max(waits) <= 1.0


@pytest.mark.parametrize("error", [Fenced("another updater"), ValueError("a bug")])
async def test_other_exceptions_end_the_loop(context: Context, error: Exception) -> None:
    async def step() -> None:
        raise error

    with pytest.raises(type(error)):
        await repeat(context, "claim", step)


# serve: exit codes, in this process


@pytest.fixture
def logging_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Scripted:
    """A service whose run is given."""

    role = "scripted"

    def __init__(self, run: Callable[[Context], Awaitable[None]]) -> None:
        self._run = run

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        return []

    async def run(self, context: Context) -> None:
        await self._run(context)


def live(
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Context], Awaitable[None]],
    port: int = 0,
    host: str = "127.0.0.1",
    certificates: tuple[str, ...] = (),
) -> tuple[int, list[dict[str, Any]]]:
    """The exit code of a service, and what it logged."""
    code = serve(
        Scripted(run),
        http=HttpSettings(host=host, health_port=port, certificates=certificates),
        log=LogSettings(format="json"),
        run="r1",
        name="scripted-0",
        drain_s=5.0,
    )
    return code, [json.loads(line) for line in capsys.readouterr().err.splitlines()]


async def returns(context: Context) -> None:
    context.log.info("working")


async def loses_its_role(context: Context) -> None:
    async def step() -> None:
        raise Fenced("another updater took over")

    async with asyncio.TaskGroup() as group:  # as services with several loops do
        group.create_task(repeat(context, "apply", step))
        group.create_task(context.stop.wait())


async def misses_its_data(_context: Context) -> None:
    raise DataError("no data at /data")


async def is_misconfigured(_context: Context) -> None:
    raise ConfigError("run.seed: wrong\nrun.name: wrong")


async def has_a_bug(_context: Context) -> None:
    raise ZeroDivisionError("a bug")


async def has_a_bug_in_a_loop(_context: Context) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(has_a_bug(_context))


async def cancels_itself(_context: Context) -> None:
    raise asyncio.CancelledError


@pytest.mark.usefixtures("logging_restored")
def test_metrics_say_when_certificates_of_a_proxy_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of what is in the files at that moment: a Secret that is there or not, and is renewed."""
    ended = datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    renewed, authority = ended + timedelta(days=90), trustme.CA()
    secret, damaged, missing = (tmp_path / name for name in ("tls.crt", "damaged", "missing"))
    damaged.write_text("-----BEGIN CERTIFICATE-----")
    seen = []

    async def run(context: Context) -> None:
        for ends in (ended, renewed):
            issued = authority.issue_cert("runs.example.org", not_after=ends)
            secret.write_bytes(issued.cert_chain_pems[0].bytes() + authority.cert_pem.bytes())
            [family] = [one for one in context.registry.collect() if "certificate" in one.name]
            seen.append({one.labels["certificate"]: one.value for one in family.samples})

    files = (str(secret), str(damaged), str(missing))
    assert live(capsys, run, certificates=files)[0] == 0
    assert seen == [{str(secret): ends.timestamp(), str(damaged): 0} for ends in (ended, renewed)]


@pytest.mark.usefixtures("logging_restored")
def test_certificates_of_a_proxy_need_a_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    code, [line] = live(capsys, returns, certificates=("tls.crt",))
    assert code == 2
    assert line["reason"].startswith("http.certificates needs cryptography: pip install")


@pytest.mark.usefixtures("logging_restored")
def test_a_cancelled_connection_leaves_no_look_up_behind() -> None:
    name = "a b"  # no host's: a thread of the look-ups says so, without DNS
    said: list[dict[str, Any]] = []

    async def connect() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: said.append(what))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await asyncio.open_connection(name, 1)
        for _ in range(9):  # behind it
            with pytest.raises(socket.gaierror):
                await asyncio.open_connection(name, 1)
        gc.collect()

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(connect())
    assert said == []


def test_all_addresses_of_a_name_are_tried_and_the_name_is_what_a_certificate_must_have() -> None:
    ours, trusts = trustme.CA(), ssl.create_default_context()
    ours.configure_trust(trusts)
    serves = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.issue_cert("redis").configure_cert(serves)
    addresses, here = list[str](), "127.0.0.1"

    class Loop(ServiceLoop):
        async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
            assert host in ("redis", "other")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    async def connect() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), here, 0, ssl=serves)
        port = server.sockets[0].getsockname()[1]
        addresses[:] = ["127.0.0.9", here]  # the first refuses
        _, writer = await asyncio.open_connection("redis", port, ssl=trusts)
        writer.close()
        addresses.reverse()
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            await asyncio.open_connection("other", port, ssl=trusts)
        addresses.remove(here)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("redis", port, ssl=trusts)
        server.close()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(connect())


def test_service_that_returns_stops_cleanly(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    code, lines = live(capsys, returns)
    assert code == 0
    assert [line["event"] for line in lines] == ["serving", "working", "stopped"]
    bound = {"run": "r1", "service": "scripted", "name": "scripted-0"}
    assert all(bound.items() <= line.items() for line in lines)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(
    ("run", "code", "error", "reason"),
    [
        (loses_its_role, 1, "Fenced", "another updater took over"),
        (misses_its_data, 1, "DataError", "no data at /data"),
        (is_misconfigured, 2, "ConfigError", "run.seed: wrong\nrun.name: wrong"),
    ],
)
def test_fedstream_error_is_one_line(
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Context], Awaitable[None]],
    code: int,
    error: str,
    reason: str,
) -> None:
    exit_code, [serving, failed] = live(capsys, run)
    assert (exit_code, serving["event"]) == (code, "serving")
    assert (failed["event"], failed["error"], failed["reason"]) == ("failed", error, reason)
    assert "exception" not in failed


@pytest.mark.usefixtures("logging_restored")
@pytest.mark.parametrize(
    ("run", "last"),
    [
        (has_a_bug, "ZeroDivisionError: a bug"),
        (has_a_bug_in_a_loop, "ZeroDivisionError: a bug"),
        (cancels_itself, "asyncio.exceptions.CancelledError"),
    ],
)
def test_unexpected_exception_logs_its_traceback(
    capsys: pytest.CaptureFixture[str],
    run: Callable[[Context], Awaitable[None]],
    last: str,
) -> None:
    code, [_, crashed] = live(capsys, run)
    assert (code, crashed["event"]) == (70, "crashed")
    assert crashed["exception"].startswith("Traceback")
    assert crashed["exception"].endswith(last)


@pytest.mark.usefixtures("logging_restored")
def test_port_in_use_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, [failed] = live(capsys, returns, port)
    assert code == 1
    assert failed["reason"].startswith(f"cannot listen on host '127.0.0.1', port {port}: ")
    assert "address already in use" in failed["reason"]


@pytest.mark.usefixtures("logging_restored")
def test_invalid_host_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, [failed] = live(capsys, returns, host="no..host")
    assert code == 1
    assert failed["reason"].startswith("cannot listen on host 'no..host', port 0: ")


# serve: signals, in processes of its own


class Child:
    """A sample service as a process; ``until`` reads its log."""

    def __init__(self, kind: str, drain_s: float) -> None:
        path = os.environ.get("PYTHONPATH", "")
        self.process = subprocess.Popen(
            [sys.executable, HERE / "sample_services.py", kind, str(drain_s)],
            env=os.environ | {"PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{path}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.seen: list[str] = []
        serving = self.until("serving")
        self.url = f"http://{serving['host']}:{serving['port']}"
        self.health = f"http://{serving['host']}:{serving['health_port']}"

    def until(self, event: str) -> dict[str, Any]:
        assert self.process.stderr
        for text in self.process.stderr:
            line: dict[str, Any] = json.loads(text)
            self.seen.append(line["event"])
            if line["event"] == event:
                return line
        raise AssertionError(f"ended without {event!r}; said {self.seen}")

    def get(self, path: str, data: bytes | None = None) -> tuple[int, str]:
        url = self.health if path in ("/livez", "/readyz", "/metrics") else self.url
        try:
            with urllib.request.urlopen(url + path, data, timeout=10) as reply:  # noqa: S310
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        return self.process.wait(timeout=30)


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(kind: str, drain_s: float = 30.0) -> Child:
        children.append(Child(kind, drain_s))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.wait()
        assert child.process.stderr
        child.process.stderr.close()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)


@pytest.mark.process
def test_http_is_served_while_draining(start: Callable[..., Child]) -> None:
    child = start("Drains")
    assert child.get("/readyz")[0] == 200
    child.signal(signal.SIGTERM)
    child.until("draining")
    assert child.seen[-2:] == ["stopping", "draining"]
    assert child.get("/readyz") == (503, '{"ready": false, "missing": ["running"]}')
    assert child.get("/livez")[0] == 200
    assert child.get("/finish", b"")[0] == 200
    child.until("drained")
    child.until("stopped")
    assert child.exit_code() == 0


@pytest.mark.process
def test_second_signal_exits_immediately(start: Callable[..., Child]) -> None:
    child = start("Drains")
    child.signal(signal.SIGTERM)
    child.until("draining")
    child.signal(signal.SIGINT)
    assert child.exit_code() == 128 + signal.SIGINT


@pytest.mark.process
def test_second_signal_ends_a_stuck_event_loop(start: Callable[..., Child]) -> None:
    child = start("BlocksLoop")
    child.signal(signal.SIGTERM)
    child.until("blocking")
    child.signal(signal.SIGTERM)
    assert child.exit_code() == 128 + signal.SIGTERM


@pytest.mark.process
@pytest.mark.parametrize("kind", ["Hangs", "HangsInThread"])
def test_slow_drain_is_cancelled(start: Callable[..., Child], kind: str) -> None:
    child = start(kind, drain_s=0.1)
    assert child.get("/hello")[0] == 200  # what answers after `run` has begun
    child.signal(signal.SIGTERM)
    assert child.until("cancelled: the drain took too long")["drain_s"] == 0.1
    assert child.exit_code() == 1


@pytest.mark.process
def test_error_during_cancellation_is_logged(start: Callable[..., Child]) -> None:
    child = start("FailsWhenCancelled", drain_s=0.1)
    child.signal(signal.SIGTERM)
    line = child.until("failed while being cancelled")
    assert line["exception"].endswith("OSError: disk full")
    assert child.exit_code() == 1


@pytest.mark.process
def test_hanging_loop_fails_livez(start: Callable[..., Child]) -> None:
    child = start("Hangs")
    wait_until(lambda: child.get("/livez")[0] == 503)
    [overdue] = json.loads(child.get("/livez")[1])["overdue"]
    assert overdue.startswith("claim: ")


# back-off and pauses


class Highest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_ceiling_doubles_up_to_the_maximum_and_resets() -> None:
    backoff = Backoff(0.1, 0.5, rng=Highest())
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next() == 0.1


def test_full_jitter_stays_within_bounds_and_is_seeded() -> None:
    one, other = (Backoff(rng=random.Random(7)) for _ in range(2))
    waits = [one.next() for _ in range(2000)]
    assert waits == [other.next() for _ in range(2000)]
    assert min(waits) >= 0
    assert max(waits) <= 5.0
    assert min(waits[10:]) < 0.5 < 4.5 < max(waits)


async def test_pause_lasts_as_long_as_asked() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert not await pause(asyncio.Event(), 0.02)
    assert loop.time() - began >= 0.02


async def test_stop_interrupts_a_pause() -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(pause(stop, 3600))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting
    assert await pause(stop, 3600)
