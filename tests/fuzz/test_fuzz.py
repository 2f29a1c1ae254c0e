"""No input crashes, hangs or fills the memory; a short run here, `make fuzz` is the long one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.fuzz.harness import attempt
from tests.fuzz.targets import targets

FINDS = sorted((Path(__file__).parent / "finds").glob("*/*.bin"))


@pytest.mark.parametrize("name", targets())
def test_seed_inputs_are_accepted(name: str) -> None:
    target = targets()[name]
    assert target.valid()
    assert {attempt(target, data) for data in target.valid()} == {"accepted"}


@pytest.mark.parametrize("find", FINDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_earlier_finds_are_refused(find: Path) -> None:
    assert attempt(targets()[find.parent.name], find.read_bytes()) == "refused"


PROGRAM = f"""
import sys

sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.fuzz.__main__ import main

sys.exit(main())
"""


def test_short_run_finds_nothing(tmp_path: Path, python: Path) -> None:
    table = tmp_path / "table.json"
    (tmp_path / "fuzz.py").write_text(PROGRAM)
    inputs = 75 * len(targets())  # a target's recorded values come first, 51 messages among them
    command: list[str | Path] = [python, tmp_path / "fuzz.py", "--inputs", str(inputs)]
    done = subprocess.run(
        [*command, "--jobs", "1", "--json", table],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(table.read_text())
    assert sum(row["inputs"] for row in rows) == inputs
    for row in rows:
        assert row["accepted"], row["target"]
        assert row["refused"], row["target"]
