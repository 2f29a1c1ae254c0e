"""Supervision: restarts, why a process died, programs, waits in Redis, and held ports."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.local.launcher import Interpreters
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import (
    Child,
    HeldPort,
    Program,
    Restarts,
    Supervisor,
    end_waits,
    environment,
    how_it_ended,
    last_words,
    programs,
)
from fedstream.settings.config import Settings
from tests.support import wait_until


def test_wait_doubles_until_giving_up() -> None:
    policy = Restarts()
    assert [policy.died(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, None]


def test_long_life_resets_the_count() -> None:
    policy = Restarts()
    for _ in range(4):
        policy.died(1.0)
    assert policy.died(31.0) == 0.5
    assert policy.died(1.0) == 1.0


def test_service_killed_by_its_work_is_always_restarted() -> None:
    policy = Restarts()
    assert {policy.died(1.0, worked=True) for _ in range(50)} == {0.5}
    assert policy.died(1.0) == 0.5


def test_end_of_a_process_in_words() -> None:
    codes = {1: "exited with 1", -9: "was killed by SIGKILL", -250: "was killed by signal 250"}
    assert {code: how_it_ended(code) for code in codes} == codes
    lines = [
        json.dumps({"level": "error", "event": "failed", "reason": "the first"}),
        json.dumps({"level": "error", "event": "failed", "reason": "the second"}),
        json.dumps({"level": "info", "event": "stopped"}),
    ]
    assert last_words("\n".join(lines)) == "the second"
    trace = "Traceback (most recent call last):\n  File ...\nKeyError: 'x'"
    crashed = json.dumps({"level": "error", "event": "crashed", "exception": trace})
    assert last_words(crashed) == last_words(trace) == "KeyError: 'x'"
    assert last_words("") == ""


class Told(Supervisor):
    """A supervisor of services that are none, and what it said."""

    def __init__(self, logs: Path, *programs: Program) -> None:
        self.said: list[str] = []
        self.over = asyncio.Event()
        self.why = ""
        super().__init__(
            programs,
            launcher=Interpreters(),
            logs=logs,
            environment=os.environ,
            say=self._say,
            failed=self._failed,
            worked=self._worked,
            first_delay_s=0.001,
        )

    def _say(self, line: str) -> None:
        self.said.append(line)

    def _failed(self, why: str) -> None:
        self.why = why
        self.over.set()

    async def _worked(self, program: Program, pid: int) -> bool:
        raise LookupError(f"nobody knows {program.name}")


async def test_failure_to_start_counts_as_a_death(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    told.start()
    await asyncio.wait_for(told.over.wait(), 10)
    assert told.said[0].startswith("one cannot be started: [Errno 2] No such file")
    assert told.said[0].endswith("; restarting it in 0.001 s")
    assert told.why.startswith("one died 5 times in a row; the last time it cannot be started: ")
    assert told.restarts == {"one": 4}
    await told.stop()


async def test_run_goes_on_without_a_service_it_can_do_without(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("sinks", "sinks", (), 1.0, vital=False))
    told.start()
    await wait_until(lambda: told.said and "goes on without it" in told.said[-1])
    assert told.said[-1].startswith("sinks died 5 times in a row")
    assert not told.over.is_set()
    await told.stop()


class EndedTasks:
    """A process that has ended."""

    pid = 1

    def __init__(self, code: int) -> None:
        self.returncode = code

    async def wait(self) -> int:
        return self.returncode

    def terminate(self) -> None:
        raise ProcessLookupError

    kill = terminate


class Endings:
    """A launcher of processes that end at once, with these codes, and what it was asked for."""

    def __init__(self, *codes: int) -> None:
        self.codes = [*codes]
        self.asked: list[tuple[list[str], Mapping[str, str]]] = []

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> EndedTasks:
        self.asked.append(([*words], environment))
        return EndedTasks(self.codes.pop(0))


async def test_program_that_may_end_is_restarted_only_after_a_failure(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.launcher = launcher = Endings(-9, 0)
    told.worked = nobody
    told.start()
    told.add([Program("device-1", "device", ("--x",), 1.0, ends=True, environment={"SECRET": "y"})])
    [child] = told.children
    assert child._keeper is not None
    await asyncio.wait_for(child._keeper, 60)
    assert told.said == ["device-1 was killed by SIGKILL; restarting it in 0.001 s"]
    assert (told.restarts, told.why) == ({"device-1": 1}, "")
    words, environment = launcher.asked[1]
    assert words == ["device", "--x"]
    assert environment == {**os.environ, "SECRET": "y"}
    await told.stop()


async def nobody(_program: Program, _pid: int) -> bool:
    """Nobody had begun to work."""
    return False


@pytest.mark.process
async def test_service_that_failed_to_start_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(tmp_path / "logs", Program("one", "no-such-role", (), 1.0))
    monkeypatch.setattr(told, "say", lambda _: (tmp_path / "logs").mkdir())
    told.start()
    await asyncio.wait_for(told.over.wait(), 100)  # Python starts, beside others' work
    assert told.why.startswith("one exited with 2")
    assert told.restarts == {"one": 1}
    await told.stop()


async def test_unreadable_log_is_reported(tmp_path: Path) -> None:
    told = Told(tmp_path / "not there", Program("one", "updater", (), 1.0))
    assert told.children[0]._last_words(0).startswith("its log cannot be read: [Errno 2]")


async def test_failed_supervision_ends_the_run_and_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told(
        tmp_path, Program("one", "scheduler", (), 1.0), Program("other", "evaluator", (), 1.0)
    )
    one, other = told.children
    stopped: list[str] = []

    async def ended() -> tuple[int, int, int]:
        return 1, 0, 0

    async def stop() -> None:
        stopped.append("other")

    monkeypatch.setattr(one, "_one_life", ended)
    monkeypatch.setattr(other, "stop", stop)
    one.start()
    await asyncio.wait_for(told.over.wait(), 10)
    assert told.why == "one is no longer supervised: LookupError('nobody knows one')"
    with pytest.raises(ExceptionGroup, match="supervision failed") as raised:
        await told.stop()
    assert [str(error) for error in raised.value.exceptions] == ["nobody knows one"]
    assert stopped == ["other"]


async def test_waits_of_those_that_stop_are_ended_until_they_have_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = [Program(name, name, (), 1.0) for name in ("trainer", "scheduler", "updater")]
    told = Told(tmp_path, *programs)
    ended: list[str] = []

    async def end_waits(names: Collection[str]) -> None:
        ended.extend(names)
        if ended.count(*names) == 2:
            stopped[next(iter(names))].set()

    stopped = {program.name: asyncio.Event() for program in programs}

    async def stop(child: Child) -> None:
        await stopped[child.program.name].wait()

    monkeypatch.setattr(Child, "stop", stop)
    told._end_waits = end_waits
    await told.stop()
    assert ended == ["scheduler"] * 2 + ["trainer"] * 2 + ["updater"] * 2


# programs, waits in Redis, and held ports


def test_services_inherit_no_override_twice() -> None:
    environ = {
        "PATH": "/bin",
        "FEDSTREAM_DATA": "/data",
        "FEDSTREAM_RUN__VERSIONS": "7",
        "FEDSTREAM_CONFIG": "other.toml",
        "FEDSTREAM_NAME": "me",
    }
    assert environment(environ, Settings(), "redis://h:1/0") == {
        "PATH": "/bin",
        "FEDSTREAM_DATA": "/data",
        "FEDSTREAM_REDIS__URL": "redis://h:1/0",
    }


def test_every_service_is_started_and_the_coordinator_gets_its_port() -> None:
    services = {one.name: one for one in programs(Settings(), 2, Path("run.toml"), 8080)}
    assert sorted(services) == [
        "coordinator",
        "evaluator",
        "scheduler",
        "trainer-1",
        "trainer-2",
        "updater",
    ]
    assert "http.port=8080" in services["coordinator"].arguments
    assert services["trainer-2"].role == "trainer"
    assert services["trainer-2"].arguments[:4] == ("--name", "trainer-2", "--config", "run.toml")
    assert services["trainer-2"].drain_s == Settings().trainer.drain_s


@pytest.mark.process
async def test_waits_of_the_named_alone_end_with_nothing() -> None:
    with RedisServer() as server:
        url = RedisSettings(url=server.url)
        clients = {name: Client(url, name) for name in ("trainer-1", "trainer-2", "run")}
        began = time.monotonic()
        waits = {
            name: asyncio.create_task(
                clients[name].call("XREAD", "BLOCK", 20_000, "STREAMS", "s", "0", wait_s=20)
            )
            for name in ("trainer-1", "trainer-2")
        }

        async def both_wait() -> bool:
            listing = await clients["run"].call("CLIENT", "LIST")
            return bool(listing.count(b" cmd=xread ") == 2)

        await wait_until(both_wait)
        await end_waits(clients["run"], ["trainer-1", "updater"])
        assert await waits["trainer-1"] is None
        assert time.monotonic() - began < 10
        assert not waits["trainer-2"].done()
        await clients["run"].call("XADD", "s", "1-0", "m", "news")
        assert await waits["trainer-2"] == [[b"s", [[b"1-0", [b"m", b"news"]]]]]
        await end_waits(clients["run"], ["trainer-1", "trainer-2"])  # nobody waits
        for client in clients.values():
            await client.close()


_IP_LOCAL_PORT_RANGE = 51  # linux/in.h, since 6.3: the ports that the kernel chooses from

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="held on Linux alone")


def only(port: int) -> socket.socket:
    """A socket for which the kernel has to choose this port, or fail."""
    choosing = socket.socket()
    try:
        choosing.setsockopt(
            socket.IPPROTO_IP, _IP_LOCAL_PORT_RANGE, (port | port << 16).to_bytes(4, sys.byteorder)
        )
    except OSError:
        choosing.close()
        pytest.skip("this kernel lets nobody narrow the choice of ports")
    return choosing


@on_linux
def test_held_port_is_not_given_away_until_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with HeldPort() as held:
            with only(held.number) as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", 0))
            with only(held.number) as client, pytest.raises(OSError, match="Cannot assign"):
                client.connect(server.getsockname())
        with only(held.number) as client:
            client.connect(server.getsockname())
            assert client.getsockname()[1] == held.number


@on_linux
def test_our_process_can_listen_on_a_held_port_repeatedly() -> None:
    with HeldPort() as held:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", held.number)) as ours:
                socket.create_connection(ours.getsockname()).close()
                with pytest.raises(OSError, match="in use"):
                    HeldPort(("127.0.0.1", held.number))
