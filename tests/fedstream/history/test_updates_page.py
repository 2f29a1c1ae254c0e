"""The page of updates and its filter."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.server import PageServer


@pytest.fixture
async def client(recorded: Path) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    app = PageServer(RecordedRun(recorded)).application()
    async with TestClient(TestServer(app)) as client:
        yield client


@pytest.mark.parametrize(
    ("query", "name", "typed"),
    [
        ("device=abc", "device", "abc"),
        ("device=-1", "device", "-1"),
        ("device=3&from=x%22%3Ey", "from", "x&#34;&gt;y"),
        ("until=1e3&outcome=refused", "until", "1e3"),
    ],
)
async def test_a_field_that_cant_be_read_is_told_beside_it(
    client: TestClient[web.Request, web.Application], query: str, name: str, typed: str
) -> None:
    async with client.get(f"/updates?{query}") as answer:
        text = await answer.text()
    assert (answer.status, "the filter can't be read" in text) == (422, True)
    field = f'value="{typed}" aria-invalid="true" aria-describedby="{name}-problem"'
    assert field in text
    assert re.search(f'id="{name}-problem" role="alert">[^<]* is not a', text)
    assert text.count("aria-invalid") == 1
    assert "In the order in which they were decided" not in text


async def test_what_was_typed_stays_in_the_form(
    client: TestClient[web.Request, web.Application],
) -> None:
    async with client.get("/updates?device=3&from=2&until=40&outcome=refused") as answer:
        text = await answer.text()
    assert answer.status == 200
    for name, value in (("device", 3), ("from", 2), ("until", 40)):
        assert f'name="{name}" inputmode="numeric"' in text
        assert f'value="{value}"' in text
    assert "aria-invalid" not in text


async def test_other_addresses_that_lead_nowhere_have_a_page(
    client: TestClient[web.Request, web.Application],
) -> None:
    for path in ("/updates?outcome=none", "/updates?page=x", "/devices/abc"):
        async with client.get(path) as answer:
            assert (answer.status, "<h1>Not found</h1>" in await answer.text()) == (404, True)
