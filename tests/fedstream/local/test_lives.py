"""Services come to life by forking or as interpreters; either way they are processes alike."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from fedstream import __version__
from fedstream.local.launcher import ForkServer, Interpreters, Launcher, ServiceProcess
from tests.support import wait_until

pytestmark = pytest.mark.process

# Until it is told to stop: there is no Redis at this address.
SERVICE = ("coordinator", "--set", "http.port=0", "--set", "http.health_port=0")
NOWHERE = {"FEDSTREAM_REDIS__URL": "redis://127.0.0.1:1/0", "LANG": "C.UTF-8"}


@pytest.fixture(params=["forked", "interpreters"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    if request.param == "forked" and sys.platform != "linux":
        pytest.skip("forking is safe on Linux alone")
    with ForkServer() if request.param == "forked" else nullcontext(Interpreters()) as launcher:
        yield launcher


async def begun(life: ServiceProcess, log: Path) -> psutil.Process:
    """Waits until a service has begun."""
    await wait_until(lambda: life.returncode is not None or (log.exists() and log.stat().st_size))
    assert life.returncode is None
    return psutil.Process(life.pid)


def has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def test_a_service_is_its_own_process_whose_exit_code_and_output_are_told(
    launcher: Launcher, tmp_path: Path
) -> None:
    log = tmp_path / "one.log"
    log.write_text("before\n")
    life = await launcher.start(["--version"], NOWHERE, log)
    assert await life.wait() == life.returncode == 0
    assert log.read_text() == f"before\nfedstream {__version__}\n"
    life = await launcher.start(["no-such-command"], NOWHERE, log)
    assert await life.wait() == life.returncode == 2
    for late in (life.terminate, life.kill):
        with suppress(ProcessLookupError):
            late()
    life = await launcher.start(SERVICE, NOWHERE, log := tmp_path / "two.log")
    process = await begun(life, log)
    assert SERVICE[0] in " ".join(process.cmdline())
    assert os.getsid(life.pid) == life.pid
    assert process.ppid() in (os.getpid(), *(one.pid for one in psutil.Process().children()))
    assert life.returncode is None
    life.terminate()
    assert await life.wait() == 0
    life = await launcher.start(SERVICE, NOWHERE, tmp_path / "three.log")
    life.kill()
    assert await life.wait() == life.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe on Linux alone")
async def test_many_start_before_the_fork_server_can_and_they_end_with_it(tmp_path: Path) -> None:
    """More than a socket holds while the fork server imports: an environment may be large."""
    large = NOWHERE | {"LARGE": "x" * 50_000}
    logs = [tmp_path / f"{n}.log" for n in range(12)]
    async with asyncio.timeout(120):
        with ForkServer() as launcher:
            starts = (
                launcher.start(SERVICE if n == 0 else ["--version"], large, log)
                for n, log in enumerate(logs)
            )
            first, *others = await asyncio.gather(*starts)
            assert [await life.wait() for life in others] == [0] * 11
            server = (await begun(first, logs[0])).parent()
            assert server is not None
            assert server.ppid() == os.getpid()
            server.kill()
            assert await first.wait() == -signal.SIGKILL
            await wait_until(lambda: has_ended(first.pid))
    assert len({life.pid for life in (first, *others)}) == 12
    for log in logs[1:]:
        assert log.read_text() == f"fedstream {__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe on Linux alone")
async def test_fork_server_that_cannot_start_is_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.local.launcher._SERVER", "fedstream.no_such_module")
    with ForkServer() as launcher:
        for _ in range(2):
            with pytest.raises(OSError, match="the process that forks services has ended"):
                await launcher.start(["--version"], NOWHERE, tmp_path / "log")


FORKS_ITSELF = """
import asyncio, os, pathlib, sys
from fedstream.local.launcher import ForkServer
from fedstream.runtime import process

async def main():
    with ForkServer() as launcher:
        server, log = launcher._server._process._pid, pathlib.Path("log")
        life = await launcher.start(["--version"], dict(os.environ), log)
        assert await life.wait() == 0, log.read_text()
        assert os.getsid(server) == server != os.getsid(0)
        open_files = [os.readlink(file) for file in pathlib.Path(f"/proc/{server}/fd").iterdir()]
        assert str(pathlib.Path(held.name).resolve()) not in open_files, open_files
        our_end = os.readlink(f"/proc/self/fd/{launcher._server._channel.fileno()}")
        assert our_end not in open_files, open_files
        os.kill(server, 9)
        while not launcher._server.ended:
            await asyncio.sleep(0.01)
        life = await launcher.start(["--version"], dict(os.environ), log)
        assert await life.wait() == 0, log.read_text()
        assert launcher._server._process.args[0] == sys.executable  # not a fork of this, by now

def unlimited(name, sysconf=os.sysconf):
    return -1 if name == "SC_OPEN_MAX" else sysconf(name)

def one_by_one(low, high):  # what os.closerange does where the system cannot
    for number in range(low, high):
        try:
            os.close(number)
        except OSError:
            pass

os.sysconf, os.closerange = unlimited, one_by_one
process.take()
held = open("held", "w")
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe on Linux alone")
def test_command_becomes_the_fork_server_itself(tmp_path: Path) -> None:
    """It has imported most already. Nothing of what it has opened is left to the services, also
    where the number of open files has no limit."""
    ended = subprocess.run(
        [sys.executable, "-c", FORKS_ITSELF], cwd=tmp_path, stderr=subprocess.PIPE, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
    assert (tmp_path / "log").read_text() == 2 * f"fedstream {__version__}\n"


MAY_FORK = """
import threading
from fedstream.local.fork_server import may_fork
from fedstream.runtime import plugins, process

assert not may_fork()  # this may be anybody's process
process.take()
assert may_fork()
go_on = threading.Event()
thread = threading.Thread(target=go_on.wait)
thread.start()
assert not may_fork()
go_on.set()
thread.join()
assert may_fork()
plugins.import_attribute("their.py:x", what="task")
assert not may_fork()
"""


def test_only_an_own_process_with_one_thread_and_no_other_program_may_fork(tmp_path: Path) -> None:
    (tmp_path / "their.py").write_text("x = 1\n")
    ended = subprocess.run(
        [sys.executable, "-c", MAY_FORK], cwd=tmp_path, stderr=subprocess.PIPE, check=False
    )
    assert ended.returncode == 0, ended.stderr.decode()
