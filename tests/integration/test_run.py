"""Everything together: `fedstream run` with real processes, from the first line to the last file.

Starting costs most of the time (each service loads torch), so tests share runs where they can.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fedstream.local.redis_server import RedisServer
from fedstream.settings.config import Settings, read
from fedstream.settings.recording import TRUST
from tests.integration.command import (
    BLOBS,
    GUARD_S,
    ROLES,
    SCRIPT,
    TEST_GUARD_S,
    Command,
    adds_up,
    held,
    is_alive,
    wait_until,
)

FILES = [
    "curves.png", "journal", "logs", "metrics.csv", "model.safetensors", "run.toml", "summary.json"
]  # fmt: skip

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
    command = Command(tmp_path_factory.mktemp("digits"), "--versions", "60")
    folders.append(command)
    command.reaches(1)
    processes = command.children()
    assert command.ended() == 0, command.stdout + command.stderr
    return command, processes


Digits = tuple[Command, list[psutil.Process]]


def test_a_run_ends_by_itself_and_its_counts_add_up(digits: Digits) -> None:
    command, _ = digits
    summary = command.summary
    assert adds_up(summary)
    assert summary["versions"] == summary["tasks"]["applied"] == 60
    assert summary["state"] == "finished"
    assert summary["why"] == "version 60 reached"
    assert summary["measured_version"] == 60
    assert summary["accuracy"] > 0.6
    assert set(summary["restarts"].values()) == {0}


def test_a_run_leaves_every_file(digits: Digits) -> None:
    command, _ = digits
    assert sorted(file.name for file in command.out.iterdir()) == FILES
    assert [int(row["version"]) for row in command.rows] == list(range(61))
    assert float(command.rows[60]["accuracy"]) == pytest.approx(
        command.summary["accuracy"], abs=1e-5
    )
    assert all(row["task"] and row["loss"] for row in command.rows[1:])
    assert (command.out / "curves.png").read_bytes().startswith(b"\x89PNG")
    for name in (*ROLES, "trainer-2"):
        lines = (command.out / "logs" / f"{name}.log").read_text().splitlines()
        assert json.loads(lines[-1])["event"] == "stopped"


def test_the_final_model_is_the_one_that_was_measured(digits: Digits) -> None:
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


def test_the_configuration_left_behind_can_be_run_again(digits: Digits) -> None:
    command, _ = digits
    settings = read(command.out / "run.toml")
    assert settings.run.versions == 60
    assert "url" not in settings.redis.model_fields_set  # its own Redis is gone


def test_no_process_is_left(digits: Digits) -> None:
    command, processes = digits
    assert len(processes) == 7  # six services and Redis
    assert not [process for process in processes if is_alive(process)]
    assert command.stderr == ""


@pytest.fixture(scope="module")
def battered(tmp_path_factory: pytest.TempPathFactory, folders: list[Command]) -> Command:
    """A run in which every service is killed once, each a few versions after the other."""
    folder = tmp_path_factory.mktemp("battered")
    (folder / "blobs.py").write_text(held(BLOBS, 40))
    command = Command(
        folder, "--task", "blobs.py:task", "--versions", "90",
        "--set", "devices.latency={kind='fixed', mean_s=0.15}",
    )  # fmt: skip
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


@pytest.mark.parametrize("service", ROLES)
def test_a_service_that_is_killed_comes_back(battered: Command, service: str) -> None:
    assert battered.summary["restarts"][service] == 1
    assert f"{service} was killed by SIGKILL; restarting it in 0.5 s" in battered.stdout


def test_no_update_counts_twice_whatever_is_killed(battered: Command) -> None:
    summary = battered.summary
    assert adds_up(summary)
    assert summary["versions"] == summary["tasks"]["applied"] == 90
    tasks = [row["task"] for row in battered.rows[1:]]
    assert len(set(tasks)) == len(tasks) == 90
    assert [int(row["version"]) for row in battered.rows] == list(range(91))


def test_a_users_file_by_fedavg_for_a_program(tmp_path: Path, folders: list[Command]) -> None:
    assert len(BLOBS.strip().splitlines()) <= 15
    (tmp_path / "blobs.py").write_text(BLOBS + "print('this is not the summary')\n")
    (tmp_path / "trainer.py").write_text("raise ImportError('not the package')\n")
    command = Command(
        tmp_path, "--task", "blobs.py:task", "--strategy", "fedavg", "--versions", "6",
        "--trainers", "1", "--set", "strategy.clients_per_round=3", "--json",
    )  # fmt: skip
    folders.append(command)
    assert command.ended() == 0, command.stderr
    summary = json.loads(command.stdout)
    assert summary == command.summary
    assert adds_up(summary)
    assert (summary["strategy"], summary["versions"]) == ("fedavg", 6)
    assert (summary["tasks"]["applied"], summary["tasks"]["buffered"]) == (6, 12)
    assert [row["updates"] for row in command.rows] == ["0", *["3"] * 6]


def test_a_users_mistake_is_shown_once_ends_the_run_and_can_be_mended(
    tmp_path: Path, folders: list[Command]
) -> None:
    mistake = "\n    def loss(self, model, batch):\n        raise ValueError('a mistake')\n"
    (tmp_path / "wrong.py").write_text(BLOBS.replace("\ntask =", f"{mistake}task ="))
    with RedisServer() as server:
        command = Command(
            tmp_path, "--task", "wrong.py:task", "--trainers", "1", "--versions", "20",
            "--redis", server.url,
        )  # fmt: skip
        folders.append(command)
        assert command.ended() == 1
        assert command.stdout.count("Traceback") == 1
        assert "at version 0 (trainer-1):" in command.stdout
        assert "10 tasks in a row failed" in command.summary["why"]
        assert command.summary["why"].endswith("ValueError: a mistake")
        assert adds_up(command.summary)
        assert not (command.out / "model.safetensors").exists()  # nothing was trained
        (tmp_path / "wrong.py").write_text(BLOBS)
        again = Command(tmp_path, "--resume", TRUST, "--trainers", "1")
        folders.append(again)
        assert again.ended() == 0, again.stdout + again.stderr
    assert again.stdout.count("Traceback") == 1  # the one of before
    assert again.summary["versions"] == 20


POISON = """
    def train(self, model, data, work):
        import os, pathlib
        mark = pathlib.Path("poison")
        if work.version > 2 and not mark.exists():
            mark.write_text(work.task)
        if mark.exists() and mark.read_text() == work.task:
            os._exit(9)
        return super().train(model, data, work)
"""


@pytest.fixture(scope="module")
def poisoned(
    tmp_path_factory: pytest.TempPathFactory, folders: list[Command]
) -> Iterator[tuple[Command, str]]:
    """A run in a Redis of ours with one task that kills every trainer, interrupted later on."""
    folder = tmp_path_factory.mktemp("poisoned")
    (folder / "poison.py").write_text(BLOBS.replace("\ntask =", f"{POISON}task ="))
    with RedisServer() as server:
        command = Command(
            folder, "--task", "poison.py:task", "--redis", server.url, "--versions", "4000",
            "--set", "lease.attempts=2", "--set", "lease.seconds=4", "--set", "trainer.threads=1",
            "--set", "devices.latency={kind='fixed', mean_s=0.1}",
        )  # fmt: skip
        folders.append(command)
        wait_until(lambda: (view := command.view()) and view.outcomes["dead"], "a dead task")
        command.reaches(command.version() + 5)
        processes = command.children()
        command.interrupt()
        assert command.ended() == 130, command.stdout + command.stderr
        assert not [process for process in processes if is_alive(process)]
        yield command, server.url


def test_a_task_that_kills_its_trainers_goes_to_dead(poisoned: tuple[Command, str]) -> None:
    summary = poisoned[0].summary
    assert summary["dead"] == {"crashed its trainers": 1}
    assert summary["restarts"]["trainer-1"] + summary["restarts"]["trainer-2"] == 2
    assert "exited with 9; restarting it" in poisoned[0].stdout


def test_ctrl_c_leaves_the_outputs(poisoned: tuple[Command, str]) -> None:
    command, _ = poisoned
    assert sorted(file.name for file in command.out.iterdir()) == FILES
    assert command.summary["state"] == "interrupted"
    assert 5 < command.summary["versions"] < 4000
    assert adds_up(command.summary)


def test_a_run_that_was_interrupted_can_be_gone_on_with(
    poisoned: tuple[Command, str], folders: list[Command]
) -> None:
    before, url = poisoned
    again = [str(SCRIPT), "run", "--redis", url, "--out", "elsewhere"]
    said = subprocess.run(again, capture_output=True, text=True, cwd=before.folder, check=False)
    assert said.returncode == 1
    assert "--resume" in said.stderr
    assert said.stderr.count("\n") == 1
    command = Command(before.folder, "--resume", TRUST, "--trainers", "1")
    folders.append(command)
    command.reaches(before.summary["versions"] + 5)
    command.process.terminate()
    assert command.ended() == 130
    assert adds_up(command.summary)
    assert command.summary["versions"] > before.summary["versions"]
    assert command.summary["versions_before"] == before.summary["versions"]
    assert 0 < command.summary["seconds"] < command.summary["wall_seconds"]
    assert command.summary["created"] == before.summary["created"]
    versions = [int(row["version"]) for row in command.rows]
    assert versions == list(range(command.summary["versions"] + 1))


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_run_goes_on_from_its_journal_when_its_own_redis_is_gone(
    how: str, tmp_path: Path, folders: list[Command]
) -> None:
    (tmp_path / "blobs.py").write_text(held(BLOBS, 20))
    command = Command(
        tmp_path, "--task", "blobs.py:task", "--versions", "60", "--trainers", "1",
        "--set", "devices.latency={kind='fixed', mean_s=0.05}", "--set", "journal.sync=always",
    )  # fmt: skip
    folders.append(command)
    command.reaches(15)
    processes = command.children()
    if how == "killed":
        for process in [psutil.Process(command.process.pid), *processes]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    else:
        command.interrupt()
    command.ended()
    psutil.wait_procs(processes, timeout=10)
    elsewhere = tmp_path / "elsewhere"  # the task's file is found from there too
    elsewhere.mkdir()
    command.go()
    again = Command(elsewhere, "--resume", TRUST, "--trainers", "1", "--out", str(command.out))
    again.out = command.out
    folders.append(again)
    assert again.ended() == 0, again.stdout + again.stderr
    summary = again.summary
    assert adds_up(summary)
    assert (summary["state"], summary["versions"]) == ("finished", 60)
    assert summary["tasks"]["applied"] == 60
    assert 15 <= summary["versions_before"] < 60
    assert 0 < summary["seconds"] < summary["wall_seconds"]
    assert summary["updates_per_s"] < 25  # of what came since
    assert [int(row["version"]) for row in again.rows] == list(range(61))
    tasks = [row["task"] for row in again.rows[1:]]
    assert len(set(tasks)) == 60
    if how == "interrupted":  # what was measured before is known from the table
        assert [row for row in again.rows[:15] if row["accuracy"]]
    replayed = fedstream(elsewhere, "replay", command.out, "--evaluate-every", "60", TRUST)
    assert replayed.returncode == 0, replayed.stderr
    assert "60 of 60 versions identical" in replayed.stdout
    assert "accuracy" in replayed.stdout
    finished = fedstream(elsewhere, "run", "--resume", "--out", command.out, TRUST)
    assert finished.returncode == 1
    assert finished.stderr == (
        f"fedstream: --resume: the run in {command.out} is finished (version 60 reached)\n"
    )


def test_a_trainer_that_joined_leaves_with_the_run_that_is_finished(
    tmp_path: Path, folders: list[Command]
) -> None:
    (tmp_path / "blobs.py").write_text(held(BLOBS, 3))
    command = Command(tmp_path, "--task", "blobs.py:task", "--versions", "20", "--trainers", "1")
    folders.append(command)
    command.reaches(1)
    config = command.out / "run.toml"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600  # it has the password of its Redis
    guest = subprocess.Popen(
        [SCRIPT, "trainer", "--config", config, "--name", "guest"], cwd=tmp_path,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: (view := command.view()) and view.trainers == 2, "both trainers")
        command.go()
        assert command.ended() == 0, command.stdout + command.stderr
        assert guest.wait(GUARD_S) == 0
        assert guest.stderr
        told = [json.loads(line)["event"] for line in guest.stderr]
        assert "the run is finished" in told
        assert "retrying" not in told  # its Redis waited for it
        assert told[-1] == "stopped"
    finally:
        guest.kill()
        guest.communicate()


def fedstream(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run(
        [SCRIPT, *map(str, arguments)], capture_output=True, text=True, cwd=folder, check=False
    )


def test_services_end_with_the_run_that_started_them(
    tmp_path: Path, folders: list[Command]
) -> None:
    command = Command(tmp_path)
    folders.append(command)
    processes = wait_until(
        lambda: found if len(found := command.children()) == 7 else None, "seven processes"
    )
    command.process.kill()
    wait_until(
        lambda: not [process for process in processes if is_alive(process)],
        "the end of all of them",
    )
