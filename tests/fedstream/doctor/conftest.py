"""A configuration without a fault, what the doctor finds in it, and changes to Redis."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.doctor import checkup as doctor
from fedstream.doctor import server, task
from fedstream.doctor.findings import Finding
from fedstream.settings.config import read

Look = Callable[..., Awaitable[list[Finding]]]
Change = Callable[..., Awaitable[None]]


@pytest.fixture
def sets(redis: RedisSettings, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration with nothing to find fault with, however slow and small this machine is."""
    monkeypatch.delenv("FEDSTREAM_DATA", raising=False)
    monkeypatch.setattr(server, "_SLOW", math.inf)
    monkeypatch.setattr(task, "_cores", lambda: 4.0)
    return [
        f"redis.url={redis.url}",
        f"run.name={keys.name}",
        f"journal.dir={tmp_path / 'journal'}",
        "journal.keep_bytes=1000",
        "journal.segment_bytes=1000",
        "journal.sync_s=3600",
    ]


@pytest.fixture
def look(sets: list[str]) -> Look:
    """What the doctor finds, with these keys set on top."""

    async def found(*more: str, **how: Any) -> list[Finding]:
        return await doctor.examine(read(None, [*sets, *more]), **how)

    return found


@pytest.fixture
async def change(client: Client) -> AsyncIterator[Change]:
    """Changes Redis's configuration until the end of the test. At first it is as it should be."""
    before: dict[str, bytes] = {}

    async def changed(**values: object) -> None:
        for name, value in values.items():
            key = name.replace("_", "-")
            before.setdefault(key, (await client.call("CONFIG", "GET", key))[1])
            await client.call("CONFIG", "SET", key, str(value))

    await changed(maxmemory=200_000_000, maxmemory_policy="noeviction", save="", appendonly="no")
    yield changed
    for key, value in before.items():
        await client.call("CONFIG", "SET", key, value)


def wrong(findings: list[Finding], about: str) -> list[tuple[str, str]]:
    """What is not ok about a matter: its level, and its line."""
    return [(one.level, str(one)) for one in findings if one.about == about and one.level != "ok"]
