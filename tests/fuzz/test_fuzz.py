"""No input crashes, hangs or fills the memory; a short run here, `make fuzz` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from fedstream.core.errors import BadMessage
from tests.fuzz.harness import Target, attempt, fuzz, kept
from tests.fuzz.mutation import mutated_bytes, mutated_value
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


@pytest.mark.process
def test_short_run_finds_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    inputs = 100 * len(targets())
    command = [sys.executable, "-m", "tests.fuzz", "--inputs", str(inputs), "--jobs", "1"]
    done = subprocess.run(
        [*command, "--json", str(table)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(table.read_text())
    assert sum(row["inputs"] for row in rows) == inputs
    for row in rows:
        assert row["accepted"], row["target"]
        assert row["refused"], row["target"]


def _crashes(data: bytes) -> None:
    if b"x" in data:
        raise KeyError("x")


def _hangs(data: bytes) -> None:
    while b"x" in data:
        time.sleep(0.01)


def _says_nothing(data: bytes) -> None:
    if b"x" in data:
        raise BadMessage("")


@pytest.mark.parametrize("read", [_crashes, _hangs, _says_nothing])
def test_fault_is_found_and_its_input_kept(
    read: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzz.harness.LIMIT_S", 0.2)
    target = Target("faulty", read, texts=[b"ok", b"x"])  # type: ignore[arg-type]
    found = fuzz(target, 2, seed=1)
    assert (found.inputs, found.accepted, found.crashes) == (2, 1, 1)
    assert found.hangs == (read is _hangs)
    assert not found.is_clean
    assert [path.read_bytes() for path in kept(found, tmp_path)] == [b"x"]


@pytest.mark.process
def test_exceeding_the_memory_limit_is_a_crash() -> None:
    script = """
from tests.fuzz.harness import MEMORY, Target, fuzz, limit_memory
limit_memory()
target = Target("greedy", lambda data: bytearray(2 * MEMORY), texts=[b"x"])
print(list(fuzz(target, 1, 1).crashed)[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.stdout.startswith("MemoryError"), done.stderr


def test_same_seed_gives_the_same_mostly_distinct_inputs() -> None:
    target = targets()["message"]
    inputs = list(target.inputs(400, seed=3))
    assert inputs == list(target.inputs(400, seed=3))
    assert inputs[50:] != list(target.inputs(400, seed=4))[50:]
    assert len(set(inputs)) > 350


def test_mutations_work_on_copies_and_on_bytes_of_any_length() -> None:
    value = {"a": [1, {"b": "text"}], "c": 2.0}
    rng = Random(1)
    assert sum(mutated_value(value, rng) != value for _ in range(200)) > 180
    assert value == {"a": [1, {"b": "text"}], "c": 2.0}
    assert {len(mutated_bytes(b"", rng)) for _ in range(50)} > {0}
