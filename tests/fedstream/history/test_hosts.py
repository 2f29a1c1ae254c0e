"""A web page elsewhere reads nothing from our ports under a name of its own (DNS rebinding)."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
import structlog
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry

from fedstream.broker.keys import Keys
from fedstream.coordinator.service import Coordinator
from fedstream.core.errors import ConfigError
from fedstream.history.live.service import LiveService
from fedstream.history.recorded_run import RecordedRun
from fedstream.runtime.config import load
from fedstream.runtime.health import Health
from fedstream.runtime.health import routes as health_routes
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.settings.config import Settings
from fedstream.settings.services import http_of
from tests.fedstream.history.conftest import pages_of
from tests.support import context


def configured(*sets: str) -> Settings:
    nowhere = "redis.url=redis://127.0.0.1:1/0"
    return load(Settings, path=None, environ={}, sets=[nowhere, *sets])


def of_coordinator(_recorded: Path) -> web.Application:
    """With the live page, which listens on the same port."""
    settings = configured()
    coordinator = Coordinator(
        settings.coordinator,
        settings.lease,
        keys=Keys("demo"),
        redis=settings.redis,
        name="c",
        page=lambda client, tokens: LiveService(settings, client, tokens),
    )
    return application(coordinator.routes(), lambda: False)


def of_health(_recorded: Path) -> web.Application:
    return application(health_routes(Health(), CollectorRegistry()), lambda: False)


def of_ui(recorded: Path) -> web.Application:
    return pages_of(RecordedRun(recorded)).application()


@pytest.mark.parametrize("make", [of_coordinator, of_health, of_ui])
async def test_no_route_answers_to_another_servers_name(
    make: Callable[[Path], web.Application], recorded: Path
) -> None:
    app, counter = make(recorded), context().refused
    http = HttpSettings()
    routes = [
        ("GET" if route.method == hdrs.METH_ANY else route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    ]
    assert len(routes) > 3
    log = structlog.get_logger()
    async with (
        listening(app, http, 0, ConnectionLimit(9), log, refused=counter) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
    ):
        for method, path in [*routes, ("GET", "/nowhere/to/be/found")]:
            named = re.sub(r"\{\w+\}", "1", path)
            body = b"x" if method == "POST" else None
            foreign = {"Host": "evil.example"}
            async with session.request(method, named, data=body, headers=foreign) as answer:
                assert answer.status == 421, (method, path)
        async with session.get("/nowhere/to/be/found") as answer:
            assert answer.status == 404
    assert counter.labels("host")._value.get() == len(routes) + 1


CLUSTER = ("coordinator", "coordinator.fedstream.svc", "c.fedstream.svc.cluster.local", "10.0.0.7")


@pytest.mark.parametrize("role", ["coordinator", "trainer"])
def test_names_of_a_server(role: str) -> None:
    """On a loopback address only this machine's; elsewhere also those that public DNS lacks."""
    own = ("localhost:1234", "LOCALHOST", "127.0.0.1", "127.0.0.1:80", "[::1]:8")
    foreign = ("evil.example", "127.0.0.1.evil.example:80", "evil.svc.example", "")
    for host, more, never in (
        ("127.0.0.1", (), (*foreign, *CLUSTER)),
        ("0.0.0.0", (*CLUSTER, "[fd00::7]:8080", "0.0.0.0"), foreign),  # noqa: S104
        ("runs.example", ("runs.example:80", *CLUSTER), foreign),
    ):
        http = http_of(role, configured(f"http.host={host}"))
        assert [name for name in (*own, *more) if not http.is_named(name)] == [], host
        assert [name for name in never if http.is_named(name)] == [], host


def test_configured_names_and_those_who_need_none() -> None:
    """A page elsewhere has neither the token nor a device's key."""
    token, name = "http.token=sixteen-or-more-characters", "runs.example:80"
    for role, sets, is_named in (
        ("coordinator", (), False),
        ("coordinator", ('http.hosts=["others.example", "Runs.Example"]',), True),
        ("coordinator", ('http.hosts=["others.example"]', token), False),
        ("coordinator", (token,), True),
        ("trainer", (token,), False),
        ("trainer", ('http.hosts=["runs.example"]',), True),
        ("gateway", (), True),
    ):
        assert http_of(role, configured(*sets)).is_named(name) == is_named, (role, sets)


@pytest.mark.parametrize(
    "name", ["runs.example:8443", "https://runs.example", "runs.example/ui", "[::1", "fd00::7", ""]
)
def test_only_names_can_be_configured(name: str) -> None:
    """Others would match no request."""
    with pytest.raises(ConfigError, match=r"http\.hosts\[1\].*: expected .*'runs\.example\.org'"):
        configured(f'http.hosts=["[fd00::7]", "{name}"]')
