"""`fedstream run --private`: sums alone reach the server, and no fault opens an update twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from fedstream.operate.agreement import STORE, Agreement
from tests.integration.command import (
    BLOBS,
    FILES,
    TEST_GUARD_S,
    Command,
    adds_up,
    held,
)

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]
PRIVATE = (
    "strategy.buffer_size=2",
    "private.terms.clip=10",
    "private.terms.sigma=0.01",
    "private.terms.participations=1000",
    "devices.latency={kind='fixed', mean_s=0.05}",
    "trainer.threads=1",
)


def test_run_goes_on_with_its_policy_and_store_through_a_killed_helper_and_ctrl_c(
    tmp_path: Path, quick_programs: Path
) -> None:
    (tmp_path / "own.py").write_text(held(BLOBS, 5))
    begin = "--task own.py:task --private --strategy fedbuff --versions 8 --trainers 1"
    command = Command(tmp_path, begin, sets=PRIVATE, programs=quick_programs)
    try:
        command.reaches(3)
        folder = command.out / "private"
        before = Agreement.read(folder)
        helper = command.pid("helper")
        assert helper is not None
        os.kill(helper, signal.SIGKILL)
        command.reaches(5)
        command.interrupt()
        assert command.ended() == 130
        command.go()
        command = Command(
            tmp_path,
            "--resume --trust-recorded-code --trainers 1",
            programs=quick_programs,
        )
        assert command.ended() == 0, command.stdout + command.stderr
    finally:
        command.clean_up()

    assert sorted(one.name for one in command.out.iterdir()) == sorted([*FILES, "private"])
    for file in (folder / "owner.pem", folder / "helper.pem", folder / "keys" / "0.pem"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Agreement.read(folder) == before
    summary = command.summary
    assert adds_up(summary)
    assert summary["tasks"]["applied"] == 0, "no single update makes a version"
    assert summary["privacy"]["policy"] == before.policy.digest
    assert summary["privacy"]["sigma"] == 0.01
    with closing(sqlite3.connect(folder / STORE)) as store:
        told = {task for (task,) in store.execute("SELECT task FROM opened")}
    used = {task for row in command.rows[1:] for task in row["task"].split()}
    assert told == used, "those of the versions, and no others"
    assert len(used) == summary["updates"] == 16
    fedstream = quick_programs / "fedstream"
    verified = subprocess.run([fedstream, "journal", "verify", command.out], check=False)
    assert verified.returncode == 0, "and that without the helper"
