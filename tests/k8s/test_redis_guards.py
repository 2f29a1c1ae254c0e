"""The manifests' Redis, and what could keep it busy: a script, its file, connections of nobody."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.settings import RedisSettings
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.runtime.task_settings import LeaseSettings
from tests.broker.servers import Redis, redis, redis_7, said, until
from tests.k8s.manifests import K8S
from tests.support import EveryRole, Hand, context, running, wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="the users' rights need Redis 7"),
    pytest.mark.skipif(shutil.which("redis-cli") is None, reason="the probes need redis-cli"),
]


def probe(server: Redis, what: str) -> bool:
    """As the kubelet asks it. TimeoutExpired: later than the kubelet would wait."""
    done = subprocess.run(
        ["sh", K8S / "base" / "probe.sh", what],
        check=False,
        timeout=60,
        env={**os.environ, "POD_IP": "127.0.0.1", "PORT": str(server.port)},
    )
    assert done.returncode in (0, 1)
    return done.returncode == 0


def send(server: Redis, *command: str) -> socket.socket:
    """A connection on which a command was sent; nobody reads the answer."""
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=5)
    parts = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in command)
    connection.sendall(f"*{len(command)}\r\n{parts}".encode())
    return connection


def health(server: Redis) -> None:
    """The probes' user, as `fedstream acl` writes it."""
    assert said(server.port, "ACL", "SETUSER", "health", "on", "nopass", "+ping") == b"+OK\r\n"


def test_endless_script_fails_liveness(tmp_path: Path) -> None:
    """It takes connections, which is all that a probe by TCP would see."""
    with redis(tmp_path, "--busy-reply-threshold", "50") as server:
        health(server)
        assert probe(server, "alive")
        assert probe(server, "ready")
        with send(server, "EVAL", "while true do end", "0"):
            until(lambda: not probe(server, "alive"), "the script is noticed")
            assert not probe(server, "ready")
            server.listens()
            assert said(server.port, "SCRIPT", "KILL") == b"+OK\r\n"
        until(lambda: probe(server, "alive"), "it is over")


def test_redis_loading_its_file_is_alive_but_not_ready(tmp_path: Path) -> None:
    """Else a Redis with much to read would be started again and again."""
    with redis(tmp_path, "--enable-debug-command", "yes") as server:
        health(server)
        assert said(server.port, "DEBUG", "POPULATE", "10000") == b"+OK\r\n"
        for key, value in (
            ("loading-process-events-interval-bytes", "1024"),
            ("key-load-delay", "2000"),
        ):
            assert said(server.port, "CONFIG", "SET", key, value) == b"+OK\r\n"
        with send(server, "DEBUG", "RELOAD"):
            until(lambda: not probe(server, "ready"), "it reads")
            assert said(server.port, "PING").startswith(b"-LOADING")
            assert probe(server, "alive")


async def test_dead_connections_are_closed_and_ours_reopened(tmp_path: Path) -> None:
    """By what redis.conf has: here with a shorter time."""
    lines = [line.split() for line in (K8S / "base" / "redis.conf").read_text().splitlines()]
    conf = {line[0]: line[1] for line in lines if len(line) == 2}
    assert int(conf["timeout"]) > 60, "longer than any of our connections rests on a good day"
    options = ("--timeout", "1", "--maxclients", "40", "--tcp-keepalive", conf["tcp-keepalive"])
    with redis(tmp_path, *options) as server:
        ours = Client(RedisSettings(url=f"redis://127.0.0.1:{server.port}"))
        assert await ours.call("PING") == b"PONG"
        idle = [send(server, "AUTH", "nobody") for _ in range(30)]
        for one in idle:
            assert one.recv(1000).startswith(b"-")
        for one in idle:  # the end of the connection
            assert await asyncio.to_thread(one.recv, 1000) == b""
            one.close()
        assert await ours.call("PING") == b"PONG"
        await ours.close()


async def test_burst_of_a_site_fits_the_output_buffer_limits(tmp_path: Path) -> None:
    """By what redis.conf has: here with a smaller limit. The coordinator goes on all the same."""
    lines = (K8S / "base" / "redis.conf").read_text().splitlines()
    [limit] = [line for line in lines if line.startswith("client-output-buffer-limit normal")]
    option = limit.replace("256mb", "8mb").split()
    keys = Keys("large")
    with redis(tmp_path, f"--{option[0]}", *option[1:]) as server:
        settings = RedisSettings(url=f"redis://127.0.0.1:{server.port}")
        ours = Client(settings)
        hand = Hand(ours, keys, EveryRole(ours, keys, "test"))
        await hand.create()
        for _ in range(20):
            await ours.call("XADD", keys.inbox("pool"), "*", "m", memoryview(bytes(8 << 20)))
        await Outbox(ours, keys, "pool").announce("last")

        async def peak() -> int:
            info = (await ours.call("INFO", "memory")).decode()
            return int(info.partition("used_memory_peak:")[2].split()[0])

        async def heard() -> bool:
            return list(await hand.ledger.trainers()) == ["last"]

        before = await peak()
        made = Coordinator(
            CoordinatorSettings(), LeaseSettings(), keys=keys, redis=settings, name="c"
        )
        async with running(made, context()):
            await wait_until(heard)
        grown = await peak() - before
        assert (await hand.ledger.look()).reasons("stray") == {"message too long": 20}
        await ours.close()
    assert grown < 64 << 20, f"{grown >> 20} MiB more for 160 MiB"
