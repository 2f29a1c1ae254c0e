"""Models over HTTP for many readers at once: one copy in memory, and a limit to readers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import aiohttp
import msgpack
import psutil
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.app import _PAGE_BYTES, page
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.runtime.task_settings import LeaseSettings
from tests.support import Hand, layout_of, model_of, wait_until, written_in

MODEL = 40 << 20  # bytes: so many that no kernel takes them for a reader that doesn't


@asynccontextmanager
async def serving(
    hand: Hand, redis: RedisSettings, coordinators: list[Coordinator] | None = None, **limits: Any
) -> AsyncIterator[str]:
    """A coordinator's routes on a real port, with limits."""
    http = HttpSettings(**{k: v for k, v in limits.items() if k in HttpSettings.model_fields})
    own = CoordinatorSettings(**{k: v for k, v in limits.items() if k == "downloads"})
    coordinator = Coordinator(own, LeaseSettings(), keys=hand.keys, redis=redis, name="c")
    if coordinators is not None:
        coordinators.append(coordinator)
    app = application(coordinator.routes(), lambda: False)
    try:
        async with listening(app, http, 0, ConnectionLimit(100), structlog.get_logger()) as port:
            yield f"http://127.0.0.1:{port}"
    finally:
        await coordinator._client.close()


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The versions that were turned into safetensors."""
    made: list[int] = []

    def save(tensors: Any, about: dict[str, str]) -> bytes:
        made.append(int(about["version"]))
        return original(tensors, about)

    original = safetensors.save
    monkeypatch.setattr(safetensors, "save", save)
    return made


def idle_reader(stack: ExitStack, url: str, path: str) -> socket.socket:
    """A client that asks, and takes nothing."""
    host, _, port = url.removeprefix("http://").partition(":")
    slow = stack.enter_context(socket.socket())
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((host, int(port)))
    slow.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return slow


async def test_concurrent_downloads_share_one_copy(
    redis: RedisSettings, hand: Hand, saved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(1000)
    await hand.create()
    made: list[Coordinator] = []
    arrived = threading.Event()
    at_once = safetensors.save

    def held(*arguments: Any) -> bytes:
        assert arrived.wait(60)
        return at_once(*arguments)

    monkeypatch.setattr(safetensors, "save", held)
    async with serving(hand, redis, made) as url, aiohttp.ClientSession(url) as session:

        async def fetched() -> bytes:
            async with session.get("/v1/models/latest") as answer:
                assert answer.status == 200
                return await answer.read()

        fetching = asyncio.gather(*(fetched() for _ in range(12)))
        await wait_until(lambda: made[0]._app._downloads._now == 12)
        arrived.set()
        bodies = await fetching
        assert len(set(bodies)) == 1
        assert safetensors.load(bodies[0])["weight"].shape == (1000,)
        assert saved == [0]
        assert made[0]._app._downloads._now == 0
        assert not made[0]._app._downloads._bodies  # nothing is kept that nobody reads


async def test_excess_download_is_told_to_retry_later(
    redis: RedisSettings, hand: Hand, saved: list[int]
) -> None:
    hand.layout = layout_of(MODEL // 4)
    version = await hand.create()
    made: list[Coordinator] = []
    async with (
        serving(hand, redis, made, downloads=2, write_s=60) as url,
        aiohttp.ClientSession(url) as session,
    ):
        with ExitStack() as stack:
            readers = [idle_reader(stack, url, "/v1/models/latest") for _ in range(2)]

            async def said(**headers: str) -> tuple[int, str | None]:
                async with session.get("/v1/models/0", headers=headers) as answer:
                    return answer.status, answer.headers.get("Retry-After")

            await wait_until(lambda: made[0]._app._downloads._now == 2)
            assert await said() == (503, "2")
            assert (await said(**{"If-None-Match": f'"{version.digest}"'}))[0] == 304
            readers[0].close()

            async def is_free() -> bool:
                return (await said())[0] == 200

            await wait_until(is_free)
            assert saved == [0]


async def test_at_most_two_models_are_in_memory(
    redis: RedisSettings, hand: Hand, saved: list[int]
) -> None:
    hand.layout = layout_of(MODEL // 4)
    await hand.create()
    for number in (1, 2):
        await hand.commit(number)
    async with serving(hand, redis, write_s=60) as url, aiohttp.ClientSession(url) as session:
        with ExitStack() as stack:
            for number in (0, 1):
                idle_reader(stack, url, f"/v1/models/{number}")
            await wait_until(lambda: sorted(saved) == [0, 1])
            async with session.get("/v1/models/2") as answer:
                assert answer.status == 503
                assert "2 other versions are being read" in (await answer.json())["error"]
            async with session.get("/v1/models/1") as answer:
                assert answer.status == 200
                assert len(await answer.read()) > MODEL
            assert sorted(saved) == [0, 1]


async def test_slow_but_steady_reader_is_served(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(MODEL // 4)
    await hand.create()
    async with (
        serving(hand, redis, write_s=0.5) as url,
        aiohttp.ClientSession(url, read_bufsize=1 << 16) as session,
        session.get("/v1/models/latest") as answer,
    ):
        taken = 0
        begun = time.monotonic()
        async for part in answer.content.iter_chunked(1 << 16):
            taken += len(part)
            await asyncio.sleep(max(0.0, begun + 1.5 * taken / MODEL - time.monotonic()))
        assert taken == answer.content_length
        assert time.monotonic() - begun > 1.4  # longer than it may take nothing


async def test_head_request_gives_the_length_without_a_body(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    async with serving(hand, redis) as url, aiohttp.ClientSession(url) as session:
        async with session.get("/v1/models/0") as answer:
            length = len(await answer.read())
        async with session.head("/v1/models/0") as answer:
            assert (answer.status, await answer.read()) == (200, b"")
            assert int(answer.headers["Content-Length"]) == length


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's memory")
async def test_stalled_readers_use_no_memory(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(MODEL // 4)
    await hand.create()
    arguments = ("coordinator", "--set", f"run.name={hand.keys.name}", "--set", "log.format=json")
    coordinator = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-m", "fedstream", *arguments, "--set", "coordinator.downloads=64"],
        env=os.environ | {"FEDSTREAM_REDIS__URL": redis.url},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert coordinator.stderr
        line: dict[str, Any] = {}
        while line.get("event") != "serving":
            line = json.loads(await asyncio.to_thread(coordinator.stderr.readline))
        url = f"http://127.0.0.1:{line['port']}"
        process = psutil.Process(coordinator.pid)
        with ExitStack() as stack:
            async with aiohttp.ClientSession(url) as session:

                async def fetched() -> int:
                    async with session.get("/v1/models/latest") as answer:
                        await answer.read()
                        return answer.status

                assert await fetched() == 200  # what one download takes is known from now on
                before = process.memory_info().rss
                idle = [idle_reader(stack, url, "/v1/models/latest") for _ in range(25)]
                for one in idle:  # each is being answered
                    assert await asyncio.to_thread(one.recv, 12) == b"HTTP/1.1 200"
                assert await fetched() == 200
            grown = process.memory_info().rss - before
        assert grown < 3 * MODEL, f"{grown >> 20} MiB for 25 readers of {MODEL >> 20} MiB"
    finally:
        coordinator.kill()
        coordinator.wait()
        if coordinator.stderr:
            coordinator.stderr.close()


# the register, in pages

REGISTERS = st.dictionaries(
    st.text(max_size=30),
    st.fixed_dictionaries({"owns": st.just([]), "host": st.integers(0, 70_000).map("x".__mul__)}),
    max_size=12,
)


@settings(max_examples=30)  # of up to 800 KB each
@given(REGISTERS, st.integers(1, 5))
def test_pages_list_every_trainer_once_and_stay_short(
    register: dict[str, dict[str, Any]], most: int
) -> None:
    seen: list[str] = []
    after, more = "", 1
    while more:
        found, more = page(register, after, most)
        assert len(found) <= most
        assert len(json.dumps(found)) < (1 << 16) + 1000
        assert found or not more  # every page gets on
        seen += found
        after = seen[-1] if seen else ""
    assert seen == sorted(name for name in register if name)


def test_trainer_that_just_fills_a_page_is_not_split() -> None:
    room = _PAGE_BYTES - len(json.dumps({"t": {"host": ""}}))
    about = {"host": "h" * room}
    assert page({"t": about}) == ({"t": about}, 0)
    [(_, more)] = page({"t": {"host": "h" * (room + 1)}})[0].items()
    assert more == {"owns": [], "left_out": f"{_PAGE_BYTES + 1} bytes"}


async def test_register_is_paginated(redis: RedisSettings, hand: Hand) -> None:
    await hand.create()
    for n in range(120):
        await hand.announce(f"t{n:03}")
    await hand.announce("t999")
    told = msgpack.packb({"owns": [], "host": "h" * 100_000})
    await hand.client.call("HSET", hand.keys.trainers, "t999", told)
    async with serving(hand, redis) as url, aiohttp.ClientSession(url) as session:

        async def asked(query: str) -> tuple[int, Any]:
            async with session.get(f"/v1/runs/{hand.keys.name}{query}") as answer:
                return answer.status, await answer.json()

        status, about = await asked("")
        assert (status, len(about["register"]), about["register_more"]) == (200, 100, 21)
        assert about["trainers"] == 121
        _, about = await asked("?after=t099")
        assert (len(about["register"]), about["register_more"]) == (21, 0)
        assert about["register"]["t999"]["left_out"].endswith(" bytes")
        assert len((await asked("?limit=7"))[1]["register"]) == 7
        for query in ("?limit=x", "?limit=-1", "?limit=101", "?limit=" + "9" * 5000, "?limt=3"):
            status, about = await asked(query)
            assert status == 400, query
            assert "limit" in about["error"]


async def test_oversized_register_is_not_loaded(redis: RedisSettings, hand: Hand) -> None:
    """Each of a site's trainers may name 100,000 devices; who asks hears that it is too much."""
    await hand.create()
    told = msgpack.packb({"owns": list(range(1 << 18, (1 << 18) + 100_000))})
    for n in range(150):
        await hand.client.call("HSET", hand.keys.trainers, f"north/{n}", told)
    async with serving(hand, redis) as url, aiohttp.ClientSession(url) as session:
        async with session.get(f"/v1/runs/{hand.keys.name}") as answer:
            assert answer.status == 503
            assert "more than 67108864 bytes" in (await answer.json())["error"]
        async with session.get(f"/v1/runs/{hand.keys.name}/scaling") as answer:
            assert answer.status == 200


async def test_model_written_by_another_release_is_served(hand: Hand, redis: RedisSettings) -> None:
    """Its chunks are of another size; the register of the models that are kept says only names."""
    hand.layout = layout_of(blobs.CHUNK)
    await hand.create()
    version = await hand.publish(1, 3.0, write=False)
    key, model = hand.keys.model(version.blob), model_of(hand.layout, 3.0)
    chunks = await written_in(hand.client, key, model, 1 << 17)
    version = version.model_copy(update={"chunks": chunks})
    assert await hand.commit(1, write=False, versions=[version]) == "done"
    assert await hand.commit(2) == "done"
    async with (
        serving(hand, redis) as url,
        aiohttp.ClientSession(url) as session,
        session.get("/v1/models/1") as answer,
    ):
        assert answer.status == 200
        sent = safetensors.load(await answer.read())
    assert set(sent["weight"].tolist()) == {3.0}
