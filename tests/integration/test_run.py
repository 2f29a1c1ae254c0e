"""Everything together: `fedstream run` with real processes, from the first line to the last file.

Starting costs most of the time (each service loads torch), so tests share runs where they can.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fedstream.settings.config import Settings
from tests.integration.command import (
    BLOBS,
    FILES,
    ROLES,
    TEST_GUARD_S,
    Command,
    adds_up,
    held,
    is_alive,
    wait_until,
)

STEPS = [
    ("scheduler", "triggered"),
    ("trainer", "taken"),
    ("trainer", "uploaded"),
    ("coordinator", "admitted"),
    ("updater", "applied"),
    ("updater", "published"),
]

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Command]]:
    """Runs that were started: none is left running."""
    started: list[Command] = []
    yield started
    for command in started:
        command.clean_up()


@pytest.fixture(scope="module")
def digits(
    tmp_path_factory: pytest.TempPathFactory, folders: list[Command]
) -> tuple[Command, list[psutil.Process]]:
    """A short run of the defaults, to its end; and the processes it had."""
    folder = tmp_path_factory.mktemp("digits")
    command = Command(folder, "--versions 40", sets=("log.tasks=true",))
    folders.append(command)
    command.reaches(1)
    processes = command.children()
    assert command.ended() == 0, command.stdout + command.stderr
    return command, processes


Digits = tuple[Command, list[psutil.Process]]


def test_run_ends_by_itself_and_its_counts_add_up(digits: Digits) -> None:
    command, _ = digits
    summary = command.summary
    assert adds_up(summary)
    assert summary["versions"] == summary["tasks"]["applied"] == 40
    assert summary["state"] == "finished"
    assert summary["why"] == "version 40 reached"
    assert summary["measured_version"] == 40
    assert summary["accuracy"] > 0.5
    assert set(summary["restarts"].values()) == {0}


def test_run_writes_every_file(digits: Digits) -> None:
    command, _ = digits
    assert sorted(file.name for file in command.out.iterdir()) == FILES
    assert [int(row["version"]) for row in command.rows] == list(range(41))
    assert float(command.rows[40]["accuracy"]) == pytest.approx(
        command.summary["accuracy"], abs=1e-5
    )
    assert all(row["task"] and row["loss"] for row in command.rows[1:])
    assert (command.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in (*ROLES, "trainer-2"):
        lines = (command.out / "logs" / f"{name}.log").read_text().splitlines()
        assert json.loads(lines[-1])["event"] == "stopped"


def test_final_model_is_the_measured_one(digits: Digits) -> None:
    from safetensors.torch import load_file

    from fedstream.settings.services import task_of

    command, _ = digits
    task = task_of(Settings())
    module = task.model()
    module.load_state_dict(load_file(command.out / "model.safetensors"))
    data = task.test_data()
    assert data is not None
    metrics = task.metrics(module, data)
    assert metrics["accuracy"] == pytest.approx(command.summary["accuracy"])


def test_every_step_of_a_task_is_logged(digits: Digits) -> None:
    """One task can be followed through all services by its id."""
    command, _ = digits
    said = [
        json.loads(line)
        for path in (command.out / "logs").glob("*.log")
        for line in path.read_text().splitlines()
    ]
    said.sort(key=lambda line: line["timestamp"])
    for row in command.rows[1:]:
        of_task = [line for line in said if line.get("task") == row["task"]]
        assert [(line["service"], line["event"]) for line in of_task] == STEPS
        assert {line["device"] for line in of_task} == {int(row["device"])}
        _, taken, uploaded, _, applied, published = of_task
        assert applied["version"] == published["version"] == int(row["version"])
        assert applied["staleness"] == int(row["version"]) - 1 - uploaded["tau"]
        assert uploaded["attempt"] == taken["attempt"]


def test_no_process_is_left_behind(digits: Digits) -> None:
    command, processes = digits
    assert len(processes) == 8  # six services, what forks them, and Redis
    assert not [process for process in processes if is_alive(process)]
    assert command.stderr == ""


@pytest.fixture(scope="module")
def battered(
    tmp_path_factory: pytest.TempPathFactory, folders: list[Command], quick_programs: Path
) -> Command:
    """A run in which every service is killed once, each a few versions after the other."""
    folder = tmp_path_factory.mktemp("battered")
    (folder / "blobs.py").write_text(held(BLOBS, 40))
    command = Command(
        folder,
        "--task blobs.py:task --versions 90",
        sets=("devices.latency={kind='fixed', mean_s=0.15}",),
        programs=quick_programs,
    )
    folders.append(command)
    reached = 5
    for name in ROLES:
        command.reaches(reached)
        pid = command.pid(name)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        reached = min(command.version() + 5, 40)
    command.go()
    assert command.ended() == 0, command.stdout + command.stderr
    return command


def test_killed_services_are_restarted_and_no_update_counts_twice(battered: Command) -> None:
    for service in ROLES:
        assert battered.summary["restarts"][service] == 1
        assert f"{service} was killed by SIGKILL; restarting it in 0.5 s" in battered.stdout
    summary = battered.summary
    assert adds_up(summary)
    assert summary["versions"] == summary["tasks"]["applied"] == 90
    tasks = [row["task"] for row in battered.rows[1:]]
    assert len(set(tasks)) == len(tasks) == 90
    assert [int(row["version"]) for row in battered.rows] == list(range(91))


def test_services_exit_with_their_run(tmp_path: Path, folders: list[Command]) -> None:
    command = Command(tmp_path)
    folders.append(command)
    processes = wait_until(
        lambda: found if len(found := command.children()) == 8 else None, "eight processes"
    )
    command.process.kill()
    wait_until(
        lambda: not [process for process in processes if is_alive(process)],
        "the end of all of them",
    )
