"""A folder of runs is no run: the message names those inside."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.fedstream.conftest import Command


@pytest.mark.parametrize("runs", [1, 5, 7])
def test_a_folder_of_runs_names_the_newest(
    recorded: Path, tmp_path: Path, command: Command, runs: int
) -> None:
    for n in range(runs):
        shutil.copytree(recorded, tmp_path / f"run-{n}")
        os.utime(tmp_path / f"run-{n}", (n, n))
    (tmp_path / "sweep" / "journal").mkdir(parents=True)  # empty
    code, out, err = command("ui", tmp_path)
    assert (code, out, err.count("\n")) == (1, "", 1)
    newest = [str(tmp_path / f"run-{n}") for n in range(runs)][::-1][:5]
    assert f"not a run, but there are runs in it: name one of {', '.join(newest)}" in err
    assert ("and 2 older ones" in err) == (runs == 7)


def test_a_folder_without_any_says_what_to_name(tmp_path: Path, command: Command) -> None:
    code, _, err = command("ui", tmp_path)
    assert (code, "no run with a journal there: name a run's folder" in err) == (1, True)
