"""A clean stop at any moment: real processes and real signals, from the first import to the end.

Clean: the exit code that is documented, no traceback, no process and no folder left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedstream.__main__ import SERVICES
from fedstream.runtime.process import Stop
from fedstream.settings.services import ROLES
from tests.integration.command import GUARD_S, TEST_GUARD_S, is_alive, wait_until

AT = Path(__file__).with_name("at_moment.py")
ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def environ(tmp_path: Path) -> dict[str, str]:
    """Temporary files go to a folder in which nothing may be left."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    ours = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
    return ours | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(ROOT)}


def left(tmp_path: Path) -> list[str]:
    """What is left in that folder."""
    return [file.name for file in (tmp_path / "tmp").iterdir() if "fedstream" in file.name]


def at(
    tmp_path: Path,
    number: str,
    event: str,
    about: str,
    *arguments: str,
    python: Path | str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """`fedstream` with a signal at a moment, to its end.

    ``python``: one that forks (tests/preloaded), for moments after the imports.
    """
    command = [python, str(AT), number, event, about, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ(tmp_path),
        timeout=GUARD_S,
        check=False,
    )


def test_entry_point_knows_the_services() -> None:
    assert SERVICES == ROLES
    assert PYPROJECT["project"]["scripts"]["fedstream"] == "fedstream.__main__:main"


@pytest.mark.parametrize(
    ("number", "role", "event", "about"),
    [
        ("SIGTERM", "scheduler", "import", "fedstream.cli.app"),
        ("SIGTERM", "coordinator", "import", "uvloop"),
        ("SIGINT", "trainer", "open", "run.toml"),
    ],
)
def test_service_stopped_during_startup_exits_cleanly(
    tmp_path: Path, number: str, role: str, event: str, about: str
) -> None:
    (tmp_path / "run.toml").write_text("")
    done = at(tmp_path, number, event, about, role, "--config", "run.toml")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"fedstream: {number} during start-up\n"


def test_service_stopped_while_loading_its_task_logs_it(tmp_path: Path) -> None:
    where = ("--set", "redis.url=redis://127.0.0.1:1")
    done = at(tmp_path, "SIGTERM", "import", "torch._", "evaluator", *where)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1])["event"] == "stopped"


COMMANDS = {
    "run": ["run", "--out", "out"],
    "simulate": ["simulate", "--out", "out"],
    "status": ["status"],
}


@pytest.mark.parametrize(
    ("number", "command", "about"),
    [
        ("SIGTERM", "run", "fedstream.cli.app"),
        ("SIGINT", "run", "torch._"),
        ("SIGTERM", "simulate", "torch._"),
        ("SIGINT", "status", "fedstream.broker.client"),
    ],
)
def test_command_interrupted_while_loading_leaves_nothing(
    tmp_path: Path, number: str, command: str, about: str
) -> None:
    done = at(tmp_path, number, "import", about, *COMMANDS[command])
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert left(tmp_path) == []


# from where there is something to undo


@pytest.mark.parametrize(
    ("event", "about"),
    [
        ("tempfile.mkdtemp", "fedstream-redis-"),  # its own Redis's folder
        ("subprocess.Popen", ", '-']"),  # its own Redis
        ("socket.connect", "redis.sock"),  # which is asked whether it answers
    ],
)
def test_run_interrupted_before_writing_leaves_nothing(
    tmp_path: Path, event: str, about: str, python: Path
) -> None:
    done = at(tmp_path, "SIGTERM", event, about, *COMMANDS["run"], python=python)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not (tmp_path / "out").exists()
    assert left(tmp_path) == []


@pytest.mark.parametrize(("event", "about"), [("open", ".run.toml"), ("open", "evaluator.log")])
def test_run_interrupted_while_starting_services_stops_them(
    tmp_path: Path, event: str, about: str, python: Path
) -> None:
    done = at(tmp_path, "SIGTERM", event, about, *COMMANDS["run"], python=python)
    assert done.returncode == 130, done.stderr
    assert done.stderr == ""
    assert "SIGTERM: stopping the services" in done.stdout
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["state"] == "interrupted"
    assert "unix://" not in (tmp_path / "out" / "run.toml").read_text()
    assert left(tmp_path) == []


def test_second_signal_ends_a_run_and_its_redis_at_once(tmp_path: Path) -> None:
    process = begun(tmp_path, "run", "--out", "out")
    redis = wait_until(lambda: server_of(process), "its Redis")
    process.send_signal(signal.SIGSTOP)  # so that both are there when it goes on, the lower first
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert process.wait(GUARD_S) == 128 + signal.SIGTERM
    wait_until(lambda: not is_alive(redis), "the end of its Redis")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("sys.exit(3)", (3, "")),
        ("sys.exit('no data: set DATA')", (1, "no data: set DATA\n")),  # as in Python
        ("signal.default_int_handler(2, None)", (130, "")),
    ],
)
def test_exit_of_the_command_line_is_that_of_the_process(
    tmp_path: Path, ends: str, expected: tuple[int, str]
) -> None:
    script = f"""
import signal, sys
import fedstream.cli.app
from fedstream.__main__ import main

fedstream.cli.app.main = lambda: {ends}
sys.argv = ["fedstream", "run"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env=environ(tmp_path),
        timeout=GUARD_S,
    )
    assert (done.returncode, done.stderr) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process catches in /proc")
def test_run_interrupted_at_any_time_ends_cleanly(tmp_path: Path) -> None:
    rng = random.Random(1)
    endless = ["--set", "run.versions=1000000"]  # not over before the signal
    process = begun(tmp_path, "run", "--out", "out", "--trainers", "1", *endless)
    wait_until(lambda: catches(process.pid, signal.SIGTERM), "a handler")
    time.sleep(rng.uniform(0, 6))
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(rng.choice([signal.SIGTERM, signal.SIGINT]))
    assert process.wait(GUARD_S) == 130
    wait_until(lambda: not any(map(is_alive, children)), "the end of all of its processes")
    said = (tmp_path / "said").read_text()
    assert "Traceback" not in said
    assert left(tmp_path) == []


def begun(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`fedstream`, which says what it says in a file."""
    with (tmp_path / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "fedstream", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=tmp_path,
            env=environ(tmp_path),
        )


def server_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    """Its Redis, once it runs."""
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):  # one that only said its version, and has ended
            if "redis-server" in child.name() and "unixsocket" in " ".join(child.cmdline()):
                return child
    return None


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    text = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in text.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_interrupted_simulation_writes_what_it_has(tmp_path: Path, python: Path) -> None:
    """Also where the signal comes while the files are written."""
    for event, about, state in (
        ("open", "run.toml", "interrupted"),
        ("open", "summary.json", "finished"),
    ):
        out = tmp_path / state
        command = ("simulate", "--out", str(out), "--versions", "5")
        done = at(tmp_path, "SIGTERM", event, about, *command, python=python)
        assert done.returncode == {"interrupted": 130, "finished": 0}[state], done.stderr
        assert "Traceback" not in done.stderr
        assert json.loads((out / "summary.json").read_text())["state"] == state
        assert (out / "model.safetensors").exists()


# the pieces, in this process


def test_late_listener_gets_an_earlier_signal_and_a_removed_one_none() -> None:
    told: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.name == "SIGINT"
        stop.listen(told.append)
        assert told == ["SIGINT"]
    with Stop() as stop:
        stop.listen(told.append)
        signal.raise_signal(signal.SIGTERM)
    assert told == ["SIGINT", "SIGTERM"]
    with Stop() as stop:
        stop.listen(told.append)
        stop.listen(None)
        signal.raise_signal(signal.SIGTERM)
    assert (told, stop.name) == (["SIGINT", "SIGTERM"], "SIGTERM")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_swallowed_signal_is_known_to_the_stop_that_follows() -> None:
    """As when it comes in a callback of Python's import locks: the exception gets nowhere."""
    script = """
import signal, sys, weakref
from fedstream.runtime.process import Stop, interrupt

class Module: ...

sys.unraisablehook = lambda about: print("swallowed", about.exc_type.__name__)
interrupt()
imported = Module()
lock = weakref.ref(imported, lambda _: signal.raise_signal(signal.SIGINT))
del imported
with Stop() as stop:
    print(stop.name)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=GUARD_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "swallowed KeyboardInterrupt\nSIGINT\n"


def test_second_signal_ends_a_command_that_swallowed_the_first() -> None:
    script = """
import signal
from fedstream.runtime.process import interrupt

interrupt()
try:
    signal.raise_signal(signal.SIGINT)
except BaseException as error:
    print(type(error).__name__, flush=True)
signal.raise_signal(signal.SIGTERM)
print("it goes on")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=GUARD_S,
    )
    said = (done.returncode, done.stdout, done.stderr)
    assert said == (128 + signal.SIGTERM, "KeyboardInterrupt\n", "")
