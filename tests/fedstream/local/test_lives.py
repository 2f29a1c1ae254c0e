"""Services come to life by forking or as interpreters; either way they are processes alike."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import psutil
import pytest

from fedstream import __version__
from fedstream.local.lives import ForkServer, Interpreters, Launcher, Life
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


async def begun(life: Life, log: Path) -> psutil.Process:
    """Waits until a service has begun."""
    await wait_until(lambda: life.returncode is not None or (log.exists() and log.stat().st_size))
    assert life.returncode is None
    return psutil.Process(life.pid)


def has_ended(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


async def test_output_is_appended_to_the_log_and_the_exit_code_told(
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


async def test_a_service_is_its_own_process_with_its_own_environment(
    launcher: Launcher, tmp_path: Path
) -> None:
    life = await launcher.start(SERVICE, NOWHERE, log := tmp_path / "one.log")
    process = await begun(life, log)
    assert SERVICE[0] in " ".join(process.cmdline())
    assert os.getsid(life.pid) == life.pid
    assert process.ppid() in (os.getpid(), *(one.pid for one in psutil.Process().children()))
    assert life.returncode is None
    life.terminate()
    assert await life.wait() == 0
    life = await launcher.start(SERVICE, NOWHERE, tmp_path / "two.log")
    life.kill()
    assert await life.wait() == life.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe on Linux alone")
async def test_services_end_with_their_fork_server_and_the_next_has_a_new_one(
    tmp_path: Path,
) -> None:
    with ForkServer() as launcher:
        first = await launcher.start(SERVICE, NOWHERE, log := tmp_path / "one.log")
        server = (await begun(first, log)).parent()
        assert server is not None
        assert server.ppid() == os.getpid()
        server.kill()
        assert await first.wait() == -signal.SIGKILL
        await wait_until(lambda: has_ended(first.pid))
        second = await launcher.start(["--version"], NOWHERE, log := tmp_path / "two.log")
        assert await second.wait() == 0
        assert log.read_text() == f"fedstream {__version__}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="forking is safe on Linux alone")
async def test_fork_server_that_cannot_start_is_an_error_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.local.lives._SERVER", "fedstream.no_such_module")
    with ForkServer() as launcher:
        for _ in range(2):
            with pytest.raises(OSError, match="the process that forks services has ended"):
                await launcher.start(["--version"], NOWHERE, tmp_path / "log")


async def test_many_are_started_at_once_also_before_the_first_can_be(
    launcher: Launcher, tmp_path: Path
) -> None:
    """More than a socket holds while the fork server imports: an environment may be large."""
    large = NOWHERE | {"LARGE": "x" * 50_000}
    starts = (launcher.start(["--version"], large, tmp_path / f"{n}.log") for n in range(12))
    async with asyncio.timeout(25):
        lives = await asyncio.gather(*starts)
        assert [await life.wait() for life in lives] == [0] * 12
    assert len({life.pid for life in lives}) == 12
    for n in range(12):
        assert (tmp_path / f"{n}.log").read_text() == f"fedstream {__version__}\n"
