"""Weights & Biases: files that are read back, and the process that writes them."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fedstream.sinks import Reached, TrackedPoint, TrackedRun
from fedstream.sinks.wandb import WandbSettings, _ends, _found, _records


@pytest.mark.process
def test_what_a_kill_lost_is_written_again(tmp_path: Path) -> None:
    """Files as a kill leaves them: cut in the middle of a record."""
    run = TrackedRun("abc", "demo", 0.0, {"strategy.alpha": 0.6})
    points = [TrackedPoint("version", n, float(n), {"updates": 1.0}) for n in range(300)]
    settings = WandbSettings(dir=str(tmp_path))
    sink = settings.build()
    assert sink.begin(run) == Reached()
    sink.write(points)
    sink.write([TrackedPoint("evaluation", 290, 1.0, {"test/accuracy": 0.5})])
    sink.close()
    [file] = tmp_path.glob("wandb/offline-run-*/run-abc.wandb")
    assert _ends(file)
    assert _found(tmp_path, "abc") == (Reached(299, 290), 301)
    with file.open("r+b") as cut:
        cut.truncate(32768)
    assert not _ends(file)
    reached, rows = _found(tmp_path, "abc")
    assert 0 < reached.version < 299
    assert rows == reached.version + 1
    folder = file.parent
    folder.rename(folder.with_name(f"{folder.name}-1"))  # wandb's name for a second's later start
    again = settings.build()
    assert again.begin(run) == reached
    again.write(points[reached.version + 1 :])
    again.end({"versions": 299}, None)
    assert _found(tmp_path, "abc") == (Reached(299, -1), 300)
    assert not [*tmp_path.glob("wandb/*/files/requirements.txt")]  # nothing about this machine


ITS_PROCESS_IS_KILLED = """
import sys
import psutil
from fedstream.sinks import TrackedPoint, TrackedRun
from fedstream.sinks.wandb import WandbSettings

run, sink = TrackedRun("abc", "demo", 0.0, {}), WandbSettings(dir=sys.argv[1]).build()
sink.begin(run)
children = psutil.Process().children(recursive=True)
[core] = [child for child in children if child.name() == "wandb-core"]
core.kill()
core.wait(10)
try:
    sink.close()
except ConnectionError:
    print("lost")
sink.begin(run)
sink.write([TrackedPoint("version", 0, 1.0, {"updates": 1.0})])
sink.close()
"""


@pytest.mark.process
def test_it_goes_on_in_a_new_process_if_the_one_it_had_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ITS_PROCESS_IS_KILLED, str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "lost\n"), done.stderr
    assert _found(tmp_path, "abc") == (Reached(0), 1)


@pytest.mark.process
def test_it_leaves_the_users_own_run_alone(tmp_path: Path) -> None:
    """As in a notebook that tracks more than a simulation."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off")
    own = wandb.init(project="own", mode="offline", dir=tmp_path, settings=quiet)
    sink = WandbSettings(dir=str(tmp_path)).build()
    sink.begin(TrackedRun("abc", "demo", 0.0, {}))
    sink.write([TrackedPoint("version", 0, 1.0, {"updates": 1.0})])
    sink.close()
    own.log({"loss": 0.5}, commit=True)
    own.finish()
    assert _found(tmp_path, own.id)[1] == 1
    assert _found(tmp_path, "abc") == (Reached(0), 1)


def test_end_of_a_file_is_found_without_its_beginning() -> None:
    """A block may begin within a record, and the first part of a record may be empty."""
    block, head = 1 << 15, struct.Struct("<IHB")  # of a part: checksum, length, type

    def part(kind: int, data: bytes) -> bytes:
        return head.pack(0, len(data), kind) + data

    begun, ended = b"a" * (block - 7 - head.size), b"b" * 5000
    fills = b"c" * (block - len(part(4, ended)) - 2 * head.size)
    data = b"magic.." + part(2, begun) + part(4, ended) + part(1, fills) + part(2, b"")
    assert len(data) == 2 * block
    data += part(4, b"end")
    assert [*_records(data, 7)] == [begun + ended, fills, b"end"]
    assert [*_records(data[block:], 0)] == [fills, b"end"]
