"""A coordinator's live page over a run that is played by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.access import tokens_of
from fedstream.history.live import broadcast, service
from fedstream.history.live.service import LiveService
from fedstream.runtime.config import load
from fedstream.runtime.http import application
from fedstream.runtime.service import Context
from fedstream.settings.config import Settings
from tests.support import context

Browser: TypeAlias = TestClient[web.Request, web.Application]
Serve: TypeAlias = Callable[..., AbstractAsyncContextManager["Served"]]


class Served:
    """The page while it is served."""

    def __init__(self, http: Browser, service: LiveService, context: Context) -> None:
        self.http = http
        self.service = service
        self.context = context

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[Stream]:
        """The stream of changes, as a browser reads it."""
        async with self.http.get("/live/stream") as answer:
            assert answer.status == 200, await answer.text()
            yield Stream(answer)


class Stream:
    """Server-sent events, one after the other."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def next(self) -> tuple[str, Any]:
        """The next event: its name and its data."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(60):
            while True:
                line = (await self.answer.content.readline()).decode()
                if not line:
                    return "end", None
                if line == "\n":
                    if "event" in fields:
                        break
                    fields.clear()
                    continue
                name, _, value = line.rstrip("\n").partition(": ")
                fields[name] = value
        return fields["event"], json.loads(fields["data"])

    async def until(self, name: str) -> Any:
        """The data of the next event of this name."""
        while True:
            found, data = await self.next()
            if found == name:
                return data
            assert found != "end"


@pytest.fixture
def serve(redis: RedisSettings, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serves the page of a configuration; it looks every 20 ms."""
    monkeypatch.setattr(broadcast, "_LEAST_S", 0.02)
    monkeypatch.setattr(broadcast, "_MOST_S", 0.02)
    monkeypatch.setattr(service, "_NICENESS", 0)  # else a question waits for other tests' processes

    @asynccontextmanager
    async def serve(*sets: str, as_user: RedisSettings = redis) -> AsyncIterator[Served]:
        settings = load(Settings, path=None, environ={}, sets=[f"run.name={keys.name}", *sets])
        settings = settings.model_copy(update={"redis": as_user})
        client, live = Client(as_user, "coordinator"), context()
        served = LiveService(settings, client, tokens_of(settings.http))
        app = application(served.routes(), live.stop.is_set)
        working = asyncio.create_task(served.run(live))
        async with TestClient(TestServer(app)) as http:
            yield Served(http, served, live)
            live.stop.set()
            await working
        await client.close()

    return serve
