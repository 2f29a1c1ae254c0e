"""Runs that stop before their end and go on: after a mistake, Ctrl-C, a crash of everything."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedstream.local.redis_server import RedisServer
from fedstream.settings.recording import TRUST
from tests.integration.command import (
    BLOBS,
    FILES,
    GUARD_S,
    TEST_GUARD_S,
    Command,
    adds_up,
    held,
    is_alive,
    wait_until,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

MISTAKE = """
    def loss(self, model, batch):
        raise ValueError('a mistake')
"""
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


@dataclass(frozen=True)
class EndedTasks:
    """What a run said and left when it ended, before it was resumed."""

    folder: Path
    said: str
    summary: dict[str, Any]
    files: list[str]


def left_by(command: Command) -> EndedTasks:
    """What there is of it now."""
    files = sorted(file.name for file in command.out.iterdir())
    return EndedTasks(command.folder, command.stdout, command.summary, files)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis that outlives the runs in it."""
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def mistaken(
    tmp_path_factory: pytest.TempPathFactory, server: RedisServer, quick_programs: Path
) -> EndedTasks:
    """A run that ended because the user's task raises."""
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "own.py").write_text(BLOBS.replace("\ntask =", f"{MISTAKE}task ="))
    command = Command(
        folder,
        f"--task own.py:task --redis {server.url} --versions 4000 --trainers 1",
        sets=(
            "lease.attempts=2",
            "lease.seconds=4",
            "trainer.threads=1",
            "devices.latency={kind='fixed', mean_s=0.1}",
            "run.dry_step=false",
        ),
        programs=quick_programs,
    )
    try:
        assert command.ended() == 1, command.stdout + command.stderr
        return left_by(command)
    finally:
        command.clean_up()


def test_users_mistake_is_shown_once_and_ends_the_run(mistaken: EndedTasks) -> None:
    assert mistaken.said.count("Traceback") == 1
    assert "at version 0 (trainer-1):" in mistaken.said
    assert mistaken.summary["versions"] == 0
    assert "no device works: " in mistaken.summary["why"]
    assert mistaken.summary["why"].endswith("ValueError: a mistake")
    assert adds_up(mistaken.summary)
    assert "model.safetensors" not in mistaken.files  # nothing was trained


@pytest.fixture(scope="module")
def poisoned(mistaken: EndedTasks, quick_programs: Path) -> EndedTasks:
    """The same run with another mistake, a task that kills every trainer; interrupted later on."""
    poison = BLOBS.replace("\ntask =", f"{POISON}task =")
    (mistaken.folder / "own.py").write_text(poison)
    command = Command(mistaken.folder, "--resume", TRUST, programs=quick_programs)
    try:
        wait_until(lambda: (view := command.view()) and view.outcomes["dead"], "a dead task")
        command.reaches(command.version() + 5)
        processes = command.children()
        command.interrupt()
        assert command.ended() == 130, command.stdout + command.stderr
        assert not [process for process in processes if is_alive(process)]
        return left_by(command)
    finally:
        command.clean_up()


def test_task_that_kills_its_trainers_becomes_a_dead_letter(poisoned: EndedTasks) -> None:
    summary = poisoned.summary
    assert summary["dead"] == {"crashed its trainers": 1}
    assert summary["restarts"]["trainer-1"] + summary["restarts"]["trainer-2"] == 2
    assert "exited with 9; restarting it" in poisoned.said


def test_ctrl_c_still_writes_the_outputs(mistaken: EndedTasks, poisoned: EndedTasks) -> None:
    assert poisoned.files == FILES
    assert poisoned.summary["state"] == "interrupted"
    assert 5 < poisoned.summary["versions"] < 4000
    assert adds_up(poisoned.summary)
    assert poisoned.summary["created"] == mistaken.summary["created"]
    assert poisoned.said.count("Traceback") == 0  # the mistake was mended


def test_interrupted_run_can_be_resumed(
    poisoned: EndedTasks, server: RedisServer, quick_programs: Path
) -> None:
    before = poisoned.summary
    said = fedstream(
        quick_programs, poisoned.folder, "run", "--redis", server.url, "--out", "elsewhere"
    )
    assert said.returncode == 1
    assert "--resume" in said.stderr
    assert said.stderr.count("\n") == 1
    command = Command(poisoned.folder, f"--resume {TRUST} --trainers 1", programs=quick_programs)
    try:
        command.reaches(before["versions"] + 5)
        command.process.terminate()
        assert command.ended() == 130
    finally:
        command.clean_up()
    assert adds_up(command.summary)
    assert command.summary["versions"] > before["versions"]
    assert command.summary["versions_before"] == before["versions"]
    assert 0 < command.summary["seconds"] < command.summary["wall_seconds"]
    assert command.summary["created"] == before["created"]
    versions = [int(row["version"]) for row in command.rows]
    assert versions == list(range(command.summary["versions"] + 1))


def test_run_resumes_from_its_journal_when_its_own_redis_is_gone(
    tmp_path: Path, quick_programs: Path
) -> None:
    """At first everything is killed, then the run is interrupted, then it comes to its end."""
    (tmp_path / "blobs.py").write_text(held(BLOBS, 25))
    command = Command(
        tmp_path,
        "--task blobs.py:task --versions 60 --trainers 1",
        sets=("devices.latency={kind='fixed', mean_s=0.05}", "journal.sync=always"),
        programs=quick_programs,
    )
    try:
        command.reaches(12)
        processes = command.children()
        for process in [psutil.Process(command.process.pid), *processes]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        command.ended()
        psutil.wait_procs(processes, timeout=10)
    finally:
        command.clean_up()
    elsewhere = tmp_path / "elsewhere"  # the task's file is found from there too
    elsewhere.mkdir()
    resumed = ("--resume", TRUST, "--trainers", "1")
    interrupted = Command(elsewhere, *resumed, out=command.out, programs=quick_programs)
    try:
        interrupted.reaches(20)
        interrupted.interrupt()
        assert interrupted.ended() == 130, interrupted.stdout + interrupted.stderr
    finally:
        interrupted.clean_up()
    assert 12 <= interrupted.summary["versions_before"] < interrupted.summary["versions"] < 60
    command.go()
    again = Command(elsewhere, *resumed, out=command.out, programs=quick_programs)
    try:
        assert again.ended() == 0, again.stdout + again.stderr
    finally:
        again.clean_up()
    summary = again.summary
    assert adds_up(summary)
    assert (summary["state"], summary["versions"]) == ("finished", 60)
    assert summary["tasks"]["applied"] == 60
    assert summary["versions_before"] == interrupted.summary["versions"]
    assert 0 < summary["seconds"] < summary["wall_seconds"]
    assert summary["updates_per_s"] < 25  # of what came since
    assert [int(row["version"]) for row in again.rows] == list(range(61))
    tasks = [row["task"] for row in again.rows[1:]]
    assert len(set(tasks)) == 60
    assert [row for row in again.rows[1:20] if row["accuracy"]]  # known from the table
    replay = ("replay", command.out, "--evaluate-every", "60", TRUST)
    replayed = fedstream(quick_programs, elsewhere, *replay)
    assert replayed.returncode == 0, replayed.stderr
    assert "60 of 60 versions identical" in replayed.stdout
    assert "accuracy" in replayed.stdout
    resume = ("run", "--resume", "--out", command.out, TRUST)
    finished = fedstream(quick_programs, elsewhere, *resume)
    assert finished.returncode == 1
    assert finished.stderr == (
        f"fedstream: --resume: the run in {command.out} is finished (version 60 reached): to "
        "extend it, give --versions above 60\n"
    )


def test_joined_trainer_exits_when_the_run_is_finished(
    tmp_path: Path, quick_programs: Path
) -> None:
    """And devices take part as their groups say: here only device 2 ever comes."""
    (tmp_path / "blobs.py").write_text(held(BLOBS, 3))
    command = Command(
        tmp_path,
        "--task blobs.py:task --versions 20 --trainers 1",
        sets=(
            "scheduler.policy={kind='in_flight', n=1}",
            "participation=[{devices=[2], rate=1e12, steps={kind='epochs', n=1}}]",
        ),
        programs=quick_programs,
    )
    guest: subprocess.Popen[str] | None = None
    try:
        command.reaches(1)
        config = command.out / "run.toml"
        assert stat.S_IMODE(config.stat().st_mode) == 0o600  # it has the password of its Redis
        guest = subprocess.Popen(
            [quick_programs / "fedstream", "trainer", "--config", config, "--name", "guest"],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
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
        command.clean_up()
        if guest is not None:
            guest.kill()
            guest.communicate()
    assert [row["device"] for row in command.rows[1:]] == ["2"] * 20  # version 0 is nobody's


def fedstream(programs: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    command = [str(programs / "fedstream"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
