"""Requests whose bodies never end: what a process takes for them, whichever route they name.

Each route of each port that takes bodies, in a process of its own, with as much of a body as it
takes. Where it matters they are sent by somebody who is known, too.
"""

from __future__ import annotations

import asyncio
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.service import Coordinator
from fedstream.history.live.service import LiveService
from fedstream.history.recorded_run import RecordedRun
from fedstream.settings.config import read
from tests.coordinator.gateway.places import Place, coordinating, owned_by
from tests.coordinator.gateway.supernodes import DEVICE, Node, changed, content, files, pushed
from tests.fedstream.history.conftest import pages_of
from tests.journals import Scribe
from tests.support import Hand, wait_until

pytestmark = pytest.mark.process
CONNECTIONS = 30
BODY = 3 << 20  # bytes that each says it will send, and never quite does
MOST = 45 << 20  # bytes for all of them: a read and aiohttp's buffer each, and some long bodies
_BODIES = ("POST", "PATCH", "PUT", "*")


def paths(routes: Iterable[web.AbstractRouteDef]) -> Iterator[tuple[str, str]]:
    """The routes that may have a body, with something in place of names."""
    for route in routes:
        if isinstance(route, web.RouteDef) and route.method in _BODIES:
            method = "POST" if route.method == "*" else route.method
            yield method, re.sub(r"\{\w+(:[^}]*)?\}", "1", route.path)


@contextmanager
def process(*arguments: object, **environ: str) -> Iterator[tuple[int, int]]:
    """A command of ours that serves HTTP: its id, and the port."""
    running = subprocess.Popen(
        [sys.executable, "-m", "fedstream", *map(str, arguments)],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert running.stdout
        for line in running.stdout:
            if found := re.search(r' port=(\d+)|"port": ?(\d+)|127\.0\.0\.1:(\d+)/ ', line):
                break
        else:
            pytest.fail("it ended")
        yield running.pid, int(next(filter(None, found.groups())))
    finally:
        running.kill()
        running.wait()
        if running.stdout:
            running.stdout.close()


def memory(pid: int, what: str) -> int:
    """Bytes of a process: VmRSS now, VmHWM at most since the last look at VmRSS."""
    found = re.search(rf"{what}:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    if what == "VmRSS":
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(found[1]) << 10


def taken(pid: int, port: int, method: str, path: str, headers: Mapping[str, str]) -> int:
    """Bytes that a process takes for many unfinished requests, at most."""
    before = memory(pid, "VmRSS")
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Length: {BODY}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head, block = "\r\n".join([*lines, "", ""]).encode(), bytes(1 << 16)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        left: dict[socket.socket, int] = {}
        for _ in range(CONNECTIONS):
            wire = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            wire.sendall(head)
            wire.setblocking(False)
            selector.register(wire, selectors.EVENT_READ | selectors.EVENT_WRITE, wire)
            left[wire] = BODY - 1
        moved = time.monotonic()  # at last
        while left and time.monotonic() - moved < 0.3:
            for key, events in selector.select(0.1):
                wire = key.data
                moved = time.monotonic()
                is_answered = bool(events & selectors.EVENT_READ)
                if not is_answered:
                    try:
                        left[wire] -= wire.send(block[: left[wire]])
                    except ConnectionError:
                        is_answered = True
                if is_answered or not left[wire]:
                    selector.unregister(wire)
                    del left[wire]
        return memory(pid, "VmHWM") - before


def wasteful(
    pid: int, port: int, routes: Iterable[tuple[str, str]], **headers: str
) -> dict[str, str]:
    """The routes that take too much, and how much."""
    # The first ones have code loaded.
    taken(pid, port, "POST", "/v1/check-in", headers)
    found = {f"{how} {path}": taken(pid, port, how, path, headers) for how, path in routes}
    assert found
    return {name: f"{took >> 20} MiB" for name, took in found.items() if took > MOST}


@asynccontextmanager
async def supernode(
    hand: Hand, redis: RedisSettings, folder: Path
) -> AsyncIterator[tuple[Node, int, list[tuple[str, str]]]]:
    """A gateway as a process, a supernode in a session there, and the gateway's routes."""
    key = ec.generate_private_key(ec.SECP384R1())
    # The rates are none of the matter here.
    about = {**files(folder, key), "address_rate": 1e5, "device_rate": 1e5, "poll_s": 0.0}
    sets = [f"gateway.{name}={value}" for name, value in about.items()]
    settings = read(None, [f"run.name={hand.keys.name}", *sets])
    gateway = Gateway(
        settings.gateway,
        settings.lease,
        keys=hand.keys,
        redis=redis,
        name="gw-0",
        update=settings.wire.of_updates,
    )
    flags = [part for one in (*settings_of(hand.keys, redis), *sets) for part in ("--set", one)]
    async with coordinating(hand, redis), aiohttp.ClientSession() as session:
        with process("gateway", "--name", "gw-0", *flags) as (pid, port):
            place = Place(f"http://127.0.0.1:{port}", gateway, None, None, session, None)  # type: ignore[arg-type]
            yield Node(place, DEVICE, key), pid, list(paths(gateway.routes()))


def settings_of(keys: Keys, redis: RedisSettings) -> tuple[str, ...]:
    return f"run.name={keys.name}", f"redis.url={redis.url}"


async def test_a_gateway_takes_little_for_unfinished_bodies(
    redis: RedisSettings, hand: Hand, tmp_path: Path
) -> None:
    await hand.create()
    async with supernode(hand, redis, tmp_path) as (node, pid, routes):
        port = int(node.place.url.rpartition(":")[2])
        assert len(routes) > 18

        async def pulled() -> Any:
            said = await node.ask(
                "/v1/fleet/pull-messages", "PullMessagesRequest", "PullMessagesResponse"
            )
            return said.messages_list

        async def is_open() -> bool:
            beat = "/v1/fleet/send-node-heartbeat", "HeartbeatRequest"
            return await node.status(*beat, node={"node_id": node.id}) == 200

        assert await asyncio.to_thread(wasteful, pid, port, routes) == {}
        await wait_until(is_open)
        assert not await pulled()
        await owned_by(hand, DEVICE, "gw-0")
        await hand.open(device=DEVICE)
        messages: list[Any] = []

        async def is_asked() -> bool:
            messages[:] = await pulled()
            return bool(messages)

        await wait_until(is_asked)
        push = [("POST", f"/v1/fleet/push-{what}") for what in ("object", "messages")]
        known = node.headers()
        assert await asyncio.to_thread(wasteful, pid, port, push, **known) == {}
        reply = content(changed(hand, 1.0), {"num-examples": 1})
        said = {"node": {"node_id": node.id}, **pushed(messages[0], reply)}

        async def is_announced() -> bool:  # once those who wait to be read have gone
            path = "/v1/fleet/push-messages"
            return await node.status(path, "PushMessagesRequest", **said) == 200

        await wait_until(is_announced)
        known = node.headers()
        assert await asyncio.to_thread(wasteful, pid, port, push, **known) == {}


async def test_a_coordinator_and_its_page_take_little_for_unfinished_bodies(
    redis: RedisSettings, hand: Hand
) -> None:
    await hand.create()
    sets = settings_of(hand.keys, redis)
    settings = read(None, sets)
    coordinator = Coordinator(
        settings.coordinator,
        settings.lease,
        keys=hand.keys,
        redis=redis,
        name="c-0",
        page=lambda client, tokens: LiveService(settings, client, tokens),
    )
    flags = [part for one in sets for part in ("--set", one)]
    with process("coordinator", *flags) as (pid, port):
        routes = list(paths(coordinator.routes()))
        assert ("POST", "/login") in routes
        assert await asyncio.to_thread(wasteful, pid, port, routes) == {}


async def test_pages_of_a_recorded_run_take_little_for_unfinished_bodies(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "journal")
    scribe.update()
    scribe.close()
    routes = list(paths(pages_of(RecordedRun(tmp_path)).routes()))
    with process("ui", tmp_path) as (pid, port):
        assert await asyncio.to_thread(wasteful, pid, port, routes) == {}
